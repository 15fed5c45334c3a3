"""How long a refit takes, simulated: our plans step by step, and what others do, from the same inputs."""
