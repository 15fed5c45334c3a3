"""DTensorSource: declares what one trainer rank holds and gives views of it, from its live DTensors only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from nemo_rl_reshard.errors import DeclarationError, FaultList
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.manifest import Manifest, Side
from nemo_rl_reshard.params.shard import LocalShard, StorageView
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.sources.adapter_map import AdapterMap, Unproven
from nemo_rl_reshard.sources.live import LiveTensors, ModuleTensors
from nemo_rl_reshard.sources.low_rank import MERGED, LowRank, Merges, gathered
from nemo_rl_reshard.sources.naming import Naming, Piece
from nemo_rl_reshard.sources.placing import Block, Placed, Placer, layout_key, local_tensor
from nemo_rl_reshard.sources.replicas import RegionDigest, replica_digest
from nemo_rl_reshard.sources.tying import declared_ties, shared_names
from nemo_rl_reshard.sources.whole_exports import WholeExports
from nemo_rl_reshard.sources.wrapping import is_adapter, plain_name


@dataclass(frozen=True, slots=True)
class _Part:
    """One region of a checkpoint tensor, and where its first element is in the local tensor."""

    region: Region
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One checkpoint tensor: the training tensor `storage` that holds it, and this rank's parts."""

    storage: str
    piece: Piece
    parts: tuple[_Part, ...]


class DTensorSource:
    """The trainer side's Source on refit rank `rank`. Reads live storage in place: no copy, no collective, no write.

    Values that are not stored anywhere (LoRA merged into its base weight, what only the model's adapter can make) are
    the exception: `prepare` gathers what they need on all trainers at the start of each refit, `release` drops it.

    Views lie where training keeps the shard at that moment, on CPU or GPU: nothing is moved, and shards may move
    between refits.

    `adapter` is the model's state-dict adapter, which then decides on names instead of `naming`. `ties` maps an alias
    to the tensor it shares (plain names). `ranks` maps a rank of the trainers' own world to its refit rank; without it
    they are the same. `shapes` gives whole shapes known from elsewhere, by checkpoint name.
    Raises one DeclarationError that lists everything that cannot be declared.

    `aliases` (alias -> owner) are the ties that hold: only owners are declared. `excluded` are the adapter tensors.
    """

    def __init__(
        self,
        tensors: LiveTensors,
        rank: int,
        *,
        naming: Naming | None = None,
        adapter: Any = None,
        ties: Mapping[str, str] | None = None,
        ranks: Mapping[int, int] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.rank = rank
        self.aliases: dict[str, str] = {}
        self.excluded: tuple[str, ...] = ()
        self._tied: dict[str, str] = {}
        self._tensors = tensors
        self._naming = naming or Naming()
        self._adapter = AdapterMap(adapter) if adapter is not None else None
        self._exports = WholeExports(rank, self._adapter)
        self._merges = Merges()
        self._placer = Placer(rank, ranks.__getitem__ if ranks is not None else int)
        self._placed: dict[str, Placed] = {}
        self._entries: dict[str, _Entry] = {}
        faults = FaultList(f"trainer declaration of rank {rank}", DeclarationError)
        self._declare(ties or {}, shapes or {}, faults)
        faults.raise_if_any()

    @classmethod
    def from_model(
        cls,
        model: torch.nn.Module,
        rank: int,
        *,
        naming: Naming | None = None,
        ranks: Mapping[int, int] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> DTensorSource:
        """A source for a live model; names, sizes and ties come from its transformers-like `config` if it has one.

        A model with a `state_dict_adapter` (NeMo Automodel's own models) is named by that, unless `naming` is given.
        """
        adapter = getattr(model, "state_dict_adapter", None) if naming is None else None
        if naming is None:
            naming = Naming.from_config(getattr(model, "config", None), architecture=_class_name(model))
        return cls(
            ModuleTensors(model),
            rank,
            naming=naming,
            adapter=adapter,
            ties=declared_ties(model),
            ranks=ranks,
            shapes=shapes,
        )

    def prepare(self) -> None:
        """Gather what the values that are computed need. All trainers call it together, once per refit, before views.

        Collective over the training's own process groups where something is computed, and bounded by their timeouts;
        else it only looks. Raises DeclarationError when training broke a tie since the declaration.
        """
        self._tensors.refresh()
        shared_names(((plain, self._tensors.current(name)) for plain, name in self._tied.items()), self.aliases)
        self._merges.gather(self._gathered)
        self._exports.make(self._whole, self._live)

    def release(self) -> None:
        """Drop what `prepare` gathered. Safe to call at any time."""
        self._merges.release()
        self._exports.release()

    def devices(self) -> set[torch.device]:
        """Where the declared shards lie now."""
        stored = {entry.storage for entry in self._entries.values() if entry.parts}
        stored |= {exported.stored for exported in self._exports}
        return {self._live(name).device for name in stored}

    def manifest(self, rank: int) -> Manifest:
        """This rank's declaration, in the dtype the trainer stores. Raises DeclarationError for another rank."""
        if rank != self.rank:
            raise DeclarationError(f"this source was set up for rank {self.rank}, and is asked to declare rank {rank}")
        specs, shards, indirect = [], [], []
        for name, entry in self._entries.items():
            piece = entry.piece
            tensor = self._live(entry.storage)
            stride = tensor.stride()
            specs.append(TensorSpec(name, piece.shape, _dtype_name(tensor.dtype)))
            if piece.indirect:
                indirect.append((name, piece.indirect))
            for part in entry.parts:
                view = StorageView(
                    entry.storage, _dot(part.start, stride), part.region.extent, _pick(stride, piece.dims)
                )
                shards.append(LocalShard(name, part.region, view))
        for exported in self._exports:
            made = exported.made
            specs.append(TensorSpec(made.name, made.shape, _dtype_name(made.dtype)))
            indirect.append((made.name, made.reason))
            for region in exported.share:
                steps = torch.empty(region.extent, device="meta").stride()
                shards.append(LocalShard(made.name, region, StorageView(made.name, 0, region.extent, steps)))
        return Manifest(rank, Side.TRAINER, tuple(specs), tuple(shards), tuple(indirect))

    def view(self, tensor: str, region: Region) -> torch.Tensor:
        """Strided view of live storage with the region's extent and the stored dtype; no copy.

        It shows the weights of this moment: call it anew for each refit. For a computed tensor (never direct) it is a
        fresh tensor, and where its value takes gathering, StateError is raised outside `prepare` and `release`. Raises
        DeclarationError when `region` is not inside one declared region, or when training changed the tensor's layout
        since the declaration.
        """
        if tensor in self._exports:
            return self._exports.view(tensor, region)
        entry = self._entries.get(tensor)
        if entry is None:
            raise DeclarationError(f"{tensor}: rank {self.rank} declared no tensor of this name")
        part = next((part for part in entry.parts if part.region.contains(region)), None)
        if part is None:
            raise DeclarationError(f"{tensor}: rank {self.rank} holds no {region.offset}+{region.extent} in one piece")
        local = self._live(entry.storage)
        stride = _pick(local.stride(), entry.piece.dims)
        inner = region.relative_to(part.region).offset
        # Offsets count from the local tensor's first element, which need not be the first of its storage.
        first = local.storage_offset() + _dot(part.start, local.stride()) + _dot(inner, stride)
        with torch.no_grad():
            found = local.as_strided(region.extent, stride, first)
            if entry.storage in self._merges:
                box = entry.piece.stored_region(region)
                stored = local.as_strided(box.extent, local.stride(), first)
                found = self._merges.merged(entry.storage, stored, box).permute(entry.piece.dims)
            return found if entry.piece.export is None else _exported(tensor, entry.piece.export, found)

    def replica_digests(self, *, num_trainers: int | None = None) -> tuple[RegionDigest, ...]:
        """Digests for `check_replicas`: of each tensor that no single mesh of all `num_trainers` ranks places.

        Those are plain tensors and DTensors on sub-meshes. Without `num_trainers`, every tensor is hashed.
        """
        digests = []
        for name, placed in self._placed.items():
            if placed.mesh is not None and len(placed.mesh.ranks) == num_trainers:
                continue
            local = self._live(name)
            for block in placed.blocks:
                box = tuple(
                    slice(start, start + size) for start, size in zip(block.start, block.region.extent, strict=True)
                )
                digests.append(RegionDigest(plain_name(name), block.region, replica_digest(local[box])))
        return tuple(digests)

    def _declare(self, ties: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], faults: FaultList) -> None:
        """Place every tensor and cut it into checkpoint tensors; all faults go to `faults`."""
        self._tensors.refresh()
        names = tuple(self._tensors.names())
        self.excluded = tuple(name for name in names if is_adapter(name))
        tensors: dict[str, tuple[str, torch.Tensor]] = {}
        for name in names:
            if is_adapter(name):
                continue
            plain = plain_name(name)
            if plain in tensors:
                faults.add(f"{plain}: rank {self.rank} holds it as {tensors[plain][0]} and as {name}")
                continue
            try:
                tensors[plain] = (name, self._tensors.current(name))
            except DeclarationError as fault:
                faults.add(str(fault))
        try:
            self.aliases = shared_names(((plain, tensor) for plain, (_, tensor) in tensors.items()), ties)
        except DeclarationError as fault:
            faults.add(str(fault))
        self._tied = {
            plain: name
            for plain, (name, _) in tensors.items()
            if plain in self.aliases or plain in self.aliases.values()
        }
        for plain, (name, tensor) in tensors.items():
            if plain in self.aliases:
                continue
            try:
                self._add(plain, name, tensor, shapes)
            except DeclarationError as fault:
                faults.add(str(fault))

    def _add(self, plain: str, name: str, tensor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
        placed = self._placer.place(name, tensor)
        if placed.mesh is not None and self.rank not in placed.mesh.ranks:
            return  # another sub-mesh's tensor: this rank takes no part in it
        self._placed[name] = placed
        shape = tuple(tensor.shape)
        layer = self._tensors.low_rank(name)
        if layer is not None:
            self._add_low_rank(name, shape, layer)
        unproven = []
        for piece in self._cut(plain, name, tensor):
            dtype = piece.dtype if isinstance(piece, Unproven) else tensor.dtype
            TensorSpec(piece.name, piece.shape, _dtype_name(dtype))  # refuses a dtype that cannot travel
            if piece.name in self._entries or piece.name in self._exports:
                holder = self._entries[piece.name].storage if piece.name in self._entries else "another tensor's export"
                raise DeclarationError(f"{piece.name}: rank {self.rank} finds it in {holder} and in {name}")
            expected = shapes.get(piece.name)
            if expected is not None and tuple(expected) != piece.shape:
                raise DeclarationError(
                    f"{piece.name}: rank {self.rank} holds it as a whole tensor of shape {piece.shape}, and it should "
                    f"have shape {tuple(expected)}; a part of a tensor must be a DTensor that says which part"
                )
            if isinstance(piece, Unproven):
                unproven.append(piece)
                continue
            if layer is not None:
                piece = replace(piece, indirect=piece.indirect or MERGED)
            self._entries[piece.name] = _Entry(name, piece, tuple(_parts(piece, placed.blocks)))
        self._exports.add(name, plain, unproven, placed.mesh)

    def _cut(self, plain: str, name: str, tensor: torch.Tensor) -> tuple[Piece | Unproven, ...]:
        """The checkpoint tensors that the training tensor `name` holds."""
        shape, stacked = tuple(tensor.shape), self._tensors.stacked(name)
        if self._adapter is None:
            return self._naming.pieces(plain, shape, stacked)
        return tuple(
            replace(found, indirect=self._naming.taken_whole(found.name, found.shape, stacked))
            if isinstance(found, Piece)
            else found
            for found in self._adapter.learn(plain, shape, tensor.dtype)
        )

    def _add_low_rank(self, name: str, shape: tuple[int, ...], layer: LowRank) -> None:
        """Note a LoRA layer, and place its factors: ranks that hold copies of them must hold the same."""
        down, up = (self._tensors.current(factor) for factor in (layer.down, layer.up))
        self._merges.add(name, layer, shape, tuple(down.shape), tuple(up.shape))
        for factor, tensor in ((layer.down, down), (layer.up, up)):
            self._placed[factor] = self._placer.place(factor, tensor)

    def _gathered(self, name: str) -> torch.Tensor:
        """The whole training tensor `name`, on every rank of its mesh; collective."""
        self._live(name)
        return gathered(self._tensors.current(name))

    def _whole(self, name: str) -> torch.Tensor:
        """The whole value of `name` as a checkpoint would have it, LoRA merged; collective."""
        whole = self._gathered(name)
        return self._merges.merged(name, whole, Region.whole(tuple(whole.shape))) if name in self._merges else whole

    def _live(self, name: str) -> torch.Tensor:
        """The local tensor of `name` now, proven to have the declared layout."""
        tensor, declared = self._tensors.current(name), self._placed[name].key
        if layout_key(tensor) != declared:
            self._tensors.refresh()
            tensor = self._tensors.current(name)
        if layout_key(tensor) != declared:
            raise DeclarationError(
                f"{name}: rank {self.rank} declared (shape, dtype, local shape, mesh, placements) {declared}, and "
                f"training now holds {layout_key(tensor)}; declare again"
            )
        return local_tensor(tensor)


def _parts(piece: Piece, blocks: Iterable[Block]) -> Iterable[_Part]:
    """Cut the blocks of a training tensor with the box of one checkpoint tensor."""
    for block in blocks:
        common = block.region.intersect(piece.box)
        if common is not None:
            inner = common.relative_to(block.region).offset
            yield _Part(piece.region_of(common), tuple(a + b for a, b in zip(block.start, inner, strict=True)))


def _exported(tensor: str, export: Callable[[torch.Tensor], torch.Tensor], stored: torch.Tensor) -> torch.Tensor:
    """A rule's value, computed on a copy so that no export can change the trainer's own weight."""
    value = export(stored.clone())
    if value.shape != stored.shape:
        raise DeclarationError(
            f"{tensor}: its export made shape {tuple(value.shape)} of {tuple(stored.shape)}; an export is elementwise"
        )
    return value


def _class_name(model: torch.nn.Module) -> str:
    """Name of the model's class as it was before FSDP2 put its own class in front."""
    return next(
        (kind.__name__ for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP")), type(model).__name__
    )


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _pick(values: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(values[dim] for dim in dims)


def _dot(index: tuple[int, ...], stride: tuple[int, ...]) -> int:
    return sum(position * step for position, step in zip(index, stride, strict=True))
