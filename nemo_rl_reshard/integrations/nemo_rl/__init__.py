"""The NeMo RL plugin: `attach` is the door. Workers import single modules from here, so this one imports nothing."""
