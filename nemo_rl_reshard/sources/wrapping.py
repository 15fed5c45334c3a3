"""What training wrappers add to a tensor's name, and which names belong to an adapter and not to the model."""

from __future__ import annotations

# Path components that wrappers insert: torch.compile, FSDP1, activation checkpointing, and a LoRA layer's own base.
_INSERTED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"})
# Leading paths of whole-model wrappers: DDP, and PEFT around the model.
_LEADING = ("module.", "base_model.model.")
# Path components of tensors that an adapter owns; `original_module` is the frozen copy of a module trained in full.
_ADAPTER = ("prompt_encoder", "original_module")
_ADAPTER_PREFIX = "lora_"
_TRAINED_COPY = "modules_to_save"


def is_adapter(name: str) -> bool:
    """True for a tensor that is no weight of the model itself: it is counted, and never sent."""
    return any(part in _ADAPTER or part.startswith(_ADAPTER_PREFIX) for part in name.split("."))


def plain_name(name: str) -> str:
    """`name` as the unwrapped model has it. `modules_to_save.<adapter>` stands for the module it replaces."""
    parts = [part for part in name.split(".") if part not in _INSERTED]
    if _TRAINED_COPY in parts:
        at = parts.index(_TRAINED_COPY)
        del parts[at : at + 2]
    plain = ".".join(parts)
    while prefix := next((leading for leading in _LEADING if plain.startswith(leading)), None):
        plain = plain.removeprefix(prefix)
    return plain
