"""The run's configuration: YAML with a `defaults:` chain, Hydra-style overrides, and every mistake in one error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_rl_reshard.config import RefitConfig
from nemo_rl_reshard.errors import ConfigError, FaultList

POSITIVE = (
    "grpo.num_steps",
    "grpo.questions_per_step",
    "grpo.answers_per_question",
    "task.answer_length",
    "model.hidden_size",
    "model.intermediate_size",
    "model.num_layers",
    "model.num_heads",
    "model.num_kv_heads",
    "model.head_dim",
    "model.max_length",
    "policy.dp",
    "policy.tp",
    "policy.learning_rate",
    "policy.minibatches",
    "policy.max_gradient_norm",
    "policy.timeout_s",
    "loss.max_importance_weight",
    "cluster.num_cpus",
    "cluster.start_timeout_s",
    "cluster.step_timeout_s",
)
FRACTIONS = (
    "policy.learning_rate",
    "policy.max_gradient_norm",
    "policy.timeout_s",
    "loss.max_importance_weight",
    "cluster.start_timeout_s",
    "cluster.step_timeout_s",
)
"""Those of POSITIVE that need not be whole."""
NEEDED = (
    *POSITIVE,
    "seed",
    "grpo.stale_steps",
    "policy.compute_dtype",
    "loss.clip_low",
    "loss.clip_high",
    "generation.engines",
    "generation.dtype",
    "generation.kv_cache_gib",
    "generation.live_weights",
    "cluster.show_worker_output",
    "refit.backend",
    "logger.run_dir",
    "logger.tensorboard",
)
DTYPES = ("float32", "bfloat16")


def load_config(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The resolved configuration as plain values; `refit.backend` becomes a list.

    `overrides` are `section.key=value` with YAML values. Keys that the files do not have are refused, so a misspelt
    one cannot pass in silence; the `refit` section may have any key of `RefitConfig`. Raises one ConfigError.
    """
    faults = FaultList("configuration", ConfigError)
    try:
        config = _read_chain(path, ())
    except (OSError, YAMLError, OmegaConfBaseException) as fault:
        raise ConfigError(f"{path}: {' '.join(str(fault).split())}") from fault
    for override in overrides:
        _apply(config, override, faults)
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    missing = sorted(set(NEEDED) - {*_leaves(plain, "")})
    if missing:
        faults.extend(f"{key}: missing; grpo_base.yaml and a recipe's `cluster` have all keys" for key in missing)
        faults.raise_if_any()
    faults.extend(_values(plain))
    _read_refit(plain["refit"], faults)
    faults.raise_if_any()
    return plain


def refit_section(plain: dict[str, Any], backend: str) -> RefitConfig:
    """The `refit:` section of a resolved configuration, for one of its backends."""
    return RefitConfig.read({**plain["refit"], "backend": backend})


def _read_chain(path: Path, seen: tuple[Path, ...]) -> DictConfig:
    """A file merged over the files that its `defaults` names, which are looked for beside it."""
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"defaults go round in a circle: {' -> '.join(p.name for p in (*seen, path))}")
    config = OmegaConf.load(path)
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path}: must be a mapping")
    names = config.pop("defaults", [])
    below = [_read_chain(path.parent / name, (*seen, path)) for name in ([names] if isinstance(names, str) else names)]
    merged = OmegaConf.merge(*below, config)
    assert isinstance(merged, DictConfig)
    return merged


def _apply(config: DictConfig, override: str, faults: FaultList) -> None:
    """Apply one `key=value`, noting a fault when the key is unknown or the value is of another kind."""
    key, separator, _ = override.partition("=")
    if not separator:
        faults.add(f"{override!r} is no override; write section.key=value")
        return
    try:
        parsed = OmegaConf.from_dotlist([override])
    except (YAMLError, OmegaConfBaseException) as fault:
        faults.add(f"{override!r} cannot be read: {' '.join(str(fault).split())}")
        return
    value = OmegaConf.select(parsed, key)
    known = list(_leaves(OmegaConf.to_container(config), ""))
    if not key.startswith("refit.") and key not in known:
        close = get_close_matches(key, known, n=1)
        faults.add(f"{key}: unknown key; " + (f"did you mean {close[0]!r}?" if close else "see the configuration file"))
        return
    present = OmegaConf.select(config, key)
    # The refit section knows the kinds of its fields itself.
    if present is not None and not key.startswith("refit.") and not _same_kind(present, value):
        faults.add(f"{key}: {value!r} is not of the kind of {present!r}")
        return
    OmegaConf.update(config, key, value)


def _leaves(plain: Any, prefix: str) -> Iterator[str]:
    """Dotted names of everything that is not a mapping."""
    for key, value in plain.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}.")
        else:
            yield name


def _same_kind(present: Any, value: Any) -> bool:
    if isinstance(present, float) and not isinstance(value, bool):
        return isinstance(value, int | float)  # a whole number is written without a point
    return type(present) is type(value)


def _values(plain: dict[str, Any]) -> Iterator[str]:
    """Rules about values that this example needs kept; sizes that are not positive are not looked at further."""
    wrong = [key for key in POSITIVE if not _is_positive(plain, key)]
    for key in wrong:
        section, _, name = key.partition(".")
        number = "number" if key in FRACTIONS else "whole number"
        yield f"{key}: {plain[section][name]!r} is not a positive {number}"
    for name in ("clip_low", "clip_high"):
        if not _is_number(plain["loss"][name]) or plain["loss"][name] < 0:
            yield f"loss.{name}: {plain['loss'][name]!r} is no number of 0 or more"
    if not wrong:
        yield from _sizes(plain)
    for section, name in (("policy", "compute_dtype"), ("generation", "dtype")):
        if plain[section][name] not in DTYPES:
            yield f"{section}.{name}: {plain[section][name]!r} is none of {', '.join(DTYPES)}"
    engines = plain["generation"]["engines"]
    if not isinstance(engines, list) or not engines or not all(isinstance(size, int) and size > 0 for size in engines):
        yield f"generation.engines: {engines!r} is not a list of tensor-parallel sizes"
    steps = plain["grpo"]["stale_steps"]
    if not isinstance(steps, list) or not all(isinstance(step, int) and step > 0 for step in steps):
        yield f"grpo.stale_steps: {steps!r} must be steps after step 0, which has no older weights to keep"


def _is_positive(plain: dict[str, Any], key: str) -> bool:
    section, _, name = key.partition(".")
    value = plain[section][name]
    return _is_number(value) and value > 0 and (isinstance(value, int) or key in FRACTIONS)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sizes(plain: dict[str, Any]) -> Iterator[str]:
    """What must divide what."""
    policy = plain["policy"]
    for name in ("num_heads", "num_kv_heads"):
        if plain["model"][name] % policy["tp"]:
            yield f"model.{name}: {plain['model'][name]} heads cannot be cut over policy.tp = {policy['tp']}"
    samples = plain["grpo"]["questions_per_step"] * plain["grpo"]["answers_per_question"]
    if samples % (policy["dp"] * policy["minibatches"]):
        yield (
            f"grpo: {samples} samples a step (questions_per_step x answers_per_question) do not divide into "
            f"policy.dp = {policy['dp']} ranks x policy.minibatches = {policy['minibatches']}"
        )


def _read_refit(section: dict[str, Any], faults: FaultList) -> None:
    """Check the section for each backend, and leave `backend` as a list."""
    # YAML reads an unquoted off as false.
    if section.get("verify") is False:
        section["verify"] = "off"
    backends = section["backend"] if isinstance(section["backend"], list) else [section["backend"]]
    found: dict[str, None] = {}
    for backend in backends or [None]:
        try:
            RefitConfig.read({**section, "backend": backend})
        except ConfigError as fault:
            found |= dict.fromkeys(f"refit.{line}" for line in str(fault).split("\n  - ")[1:])
    faults.extend(found)
    if len(set(backends)) != len(backends):
        faults.add(f"refit.backend: {backends} names one twice")
    section["backend"] = backends
