"""Links whose times can be worked out in the head."""

from nemo_rl_reshard.topology import Topology

GB = 10**9
PLAIN = Topology(
    network_bytes_per_s=1 * GB,
    fast_bytes_per_s=10 * GB,
    network_latency_s=0.0,
    fast_latency_s=0.0,
    memory_bytes_per_s=1e30,
    wire_efficiency=1.0,
)
"""1 GB/s between domains, 10 GB/s inside; memory costs nothing."""
