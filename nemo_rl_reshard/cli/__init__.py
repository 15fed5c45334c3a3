"""The nemo-rl-reshard command."""
