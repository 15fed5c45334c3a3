"""Bytes from rank to rank; knows no parameter names."""
