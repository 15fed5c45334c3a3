"""Reshard refits for NeMo RL: move updated weights from trainer shards to inference shards, and only those."""

__version__ = "0.1.0"
