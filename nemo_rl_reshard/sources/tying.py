"""Tied weights: what the configuration says, against the tensors that training really shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nemo_rl_reshard.errors import DeclarationError, FaultList
from nemo_rl_reshard.sources.placing import local_tensor
from nemo_rl_reshard.sources.wrapping import plain_name


def declared_ties(model: torch.nn.Module) -> dict[str, str]:
    """Alias -> owner, plain names, as a transformers-like model's configuration declares them; empty if it does not.

    A configuration whose levels contradict each other declares nothing: object identity decides then.
    """
    config: Any = getattr(model, "config", None)
    levels = [level for level in (config, getattr(config, "text_config", None)) if level is not None]
    flags = {bool(level.tie_word_embeddings) for level in levels if hasattr(level, "tie_word_embeddings")}
    if flags != {True}:
        return {}
    names = [plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    pairs: dict[str, str] = {}
    for path, module in model.named_modules():
        keys = getattr(module, "_tied_weights_keys", None)
        prefix = plain_name(f"{path}.") if path else ""
        if isinstance(keys, (list, tuple, set)):  # names of aliases alone: what they share is the embedding
            owner = _embedding_of(module)
            keys = {alias: owner for alias in keys if owner is not None and alias != owner}
        if isinstance(keys, Mapping):
            found = {prefix + alias: prefix + owner for alias, owner in keys.items()}
            pairs |= {alias: owner for alias, owner in found.items() if alias in names and owner in names}
    return pairs


def _embedding_of(model: torch.nn.Module) -> str | None:
    """Plain name of the input embedding's weight inside a transformers-like model."""
    ask = getattr(model, "get_input_embeddings", None)
    embedding = ask() if callable(ask) else None
    path = next((path for path, module in model.named_modules() if module is embedding), None)
    return None if path is None else plain_name(f"{path}.weight")


def shared_names(named: Iterable[tuple[str, torch.Tensor]], ties: Mapping[str, str]) -> dict[str, str]:
    """The ties that hold: alias -> owner. Raises DeclarationError listing every declared tie that does not.

    A checkpoint has one tensor for both names of a tie, so a broken one would be refitted from one copy while the
    other drifts away unseen.
    """
    tensors = dict(named)
    faults = FaultList("tied weights", DeclarationError)
    held: dict[str, str] = {}
    for alias, owner in ties.items():
        if alias not in tensors or owner not in tensors:
            continue
        if _same(tensors[alias], tensors[owner]):
            held[alias] = owner
        else:
            faults.add(
                f"{alias} is tied to {owner} by the configuration, and training holds two separate tensors; tie them "
                "before sharding and put both modules in one fully_shard group, or set tie_word_embeddings to False"
            )
    faults.raise_if_any()
    return held


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """One object, or two handles on the same elements of one storage. Two empty shards share all they have."""
    if one is other:
        return True
    first, second = local_tensor(one), local_tensor(other)
    if one.shape != other.shape or first.shape != second.shape or first.stride() != second.stride():
        return False
    return first.numel() == 0 or first.data_ptr() == second.data_ptr()
