"""Layouts and tilings, for any mesh and placement."""

import torch
from equipment.random_refits import SIZES, free_needs, mesh_layouts, meshes, shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from nemo_rl_reshard.layout import Region, Replicate, Shard, TensorLayout
from nemo_rl_reshard.layout.placement import chunk
from nemo_rl_reshard.layout.tiling import cut, gaps, overlaps, volume

RANKS = st.integers(1, 8).map(lambda count: list(range(count)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_layout_covers_its_tensor_and_gives_no_rank_an_element_twice(data):
    shape = data.draw(shapes())
    found = data.draw(mesh_layouts(shape, data.draw(RANKS)))
    assert gaps(Region.whole(shape), [region for _, regions in found.held for region in regions]) == ()
    assert all(overlaps(regions) == () for _, regions in found.held)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_cells_partition_the_union_of_any_regions(data):
    shape = data.draw(shapes())
    ranks = data.draw(RANKS)
    needs = [region for _, regions in data.draw(free_needs(shape, ranks)).held for region in regions]
    cells = cut(needs)
    assert overlaps([cell.region for cell in cells]) == ()
    assert sum(cell.region.numel for cell in cells) == volume(needs)
    for cell in cells:
        for index, region in enumerate(needs):
            assert region.contains(cell.region) == (index in cell.inside)
            assert (region.intersect(cell.region) is not None) == (index in cell.inside)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_cuts_as_torch_chunk_does(size, parts):
    pieces = [len(piece) for piece in torch.arange(size).chunk(parts)] if size else []
    pieces += [0] * (parts - len(pieces))
    assert [chunk(size, parts, index)[1] for index in range(parts)] == pieces
    assert [chunk(size, parts, index)[0] for index in range(parts)] == [sum(pieces[:index]) for index in range(parts)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_plain_shards_are_those_that_dtensor_computes(data):
    shape = tuple(data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
    mesh = data.draw(meshes(data.draw(RANKS)))
    dims = [data.draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in mesh.shape]
    ours = TensorLayout.from_mesh(shape, mesh, tuple(Replicate() if d is None else Shard(d) for d in dims))
    theirs = [TorchReplicate() if d is None else TorchShard(d) for d in dims]
    for rank, coordinate in mesh.coordinates():
        extent, offset = _compute_local_shape_and_global_offset(shape, mesh.shape, list(coordinate), theirs)
        expected = () if 0 in extent else (Region(tuple(offset), tuple(extent)),)
        assert ours.regions_of(rank) == expected
