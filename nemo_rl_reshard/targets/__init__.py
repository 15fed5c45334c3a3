"""Inference adapters: where an engine's loader puts each tensor, and how to write there."""
