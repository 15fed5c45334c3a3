"""Stands in for nccl4py, which needs CUDA: the little of it that NeMo RL's StatelessProcessGroup calls, over gloo."""
