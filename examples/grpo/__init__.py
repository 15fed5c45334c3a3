"""A GRPO example: its model, task, loss, trainers and loop."""
