"""What others do, simulated from the same inputs as our plans."""

from nemo_rl_reshard.simulate.baselines.gather_broadcast import simulate_gather_broadcast
from nemo_rl_reshard.simulate.baselines.point_to_point import simulate_point_to_point
from nemo_rl_reshard.simulate.baselines.published import simulate_published

__all__ = ["simulate_gather_broadcast", "simulate_point_to_point", "simulate_published"]
