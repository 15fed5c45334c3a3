"""Where ranks sit and how fast their links are, pure Python."""

from nemo_rl_reshard.topology.presets import MACHINES, Machine, from_preset, in_rank_order
from nemo_rl_reshard.topology.topology import Link, Topology

__all__ = ["MACHINES", "Link", "Machine", "Topology", "from_preset", "in_rank_order"]
