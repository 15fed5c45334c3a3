"""The reductions that NeMo RL names."""

SUM = "sum"
