"""Stand-ins for CUDA, for versions and for what needs either, each listed in docs/nemo-rl-test-tier.md."""
