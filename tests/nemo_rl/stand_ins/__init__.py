"""What stands in for CUDA, for versions and for parts of NeMo RL that need either; listed in docs/nemo-rl-test-tier.md."""
