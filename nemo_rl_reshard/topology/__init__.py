"""Where ranks sit and how fast their links are, pure Python."""

from nemo_rl_reshard.topology.topology import Link, Topology

__all__ = ["Link", "Topology"]
