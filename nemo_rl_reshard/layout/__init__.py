"""Layout algebra, pure Python: meshes, placements, regions and the layouts they make."""

from nemo_rl_reshard.layout.layout import TensorLayout
from nemo_rl_reshard.layout.mesh import Mesh
from nemo_rl_reshard.layout.placement import Placement, Replicate, Shard, StridedShard, parse_placement
from nemo_rl_reshard.layout.region import Region

__all__ = ["Mesh", "Placement", "Region", "Replicate", "Shard", "StridedShard", "TensorLayout", "parse_placement"]
