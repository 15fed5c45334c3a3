"""Trainer adapters: what live training tensors hold."""
