"""NeMo RL's own GRPO with this package's refits: what `grpo_qwen.py` does with a NeMo RL recipe."""
