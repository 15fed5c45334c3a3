"""What this package does not refit under NeMo RL: one table of rules, checked at start-up and printed in the docs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_reshard.integrations.nemo_rl.settings import Settings


@dataclass(frozen=True, slots=True)
class Rule:
    """One setting of NeMo RL that is refused, and what a reader of the error or of the docs needs to know of it.

    `refuses` gets the value under `key` (None if it is not there) and, for rules across keys, all the settings.
    """

    key: str
    refused: str
    why: str
    fix: str
    refuses: Callable[[Any, Settings], bool]


def _is_on(value: Any, _: Settings) -> bool:
    return bool(value)


def _is_given(value: Any, _: Settings) -> bool:
    return value is not None


def _is_more_than_one(value: Any, _: Settings) -> bool:
    return value not in (None, 1)


def _is_8_bit(value: Any, _: Settings) -> bool:
    return str(value).startswith("fp8")


def _has_a_drafter(value: Any, _: Settings) -> bool:
    """NeMo RL takes zero speculative tokens for "off"; guesses made from the text itself need no weights."""
    if not isinstance(value, Mapping) or value.get("num_speculative_tokens") == 0:
        return False
    return (value.get("method") or value.get("model")) not in ("ngram", "ngram_gpu", "suffix")


def _spans_engines(value: Any, settings: Settings) -> bool:
    return value not in (None, 1, settings.at("policy.generation.vllm_cfg.tensor_parallel_size") or 1)


def _on_the_v1_worker(value: Any, settings: Settings) -> bool:
    return bool(value) and not settings.at("policy.dtensor_cfg._v2")


def _on_grouped_experts(value: Any, settings: Settings) -> bool:
    """Expert parallel means grouped experts, which are no linear layers: only a pattern of their name reaches them."""
    if settings.at("policy.dtensor_cfg.expert_parallel_size") in (None, 1):
        return False
    return bool(settings.at("policy.dtensor_cfg.lora_cfg.enabled")) and "experts" in str(value)


def _ends_the_run_before_the_deadline(value: Any, settings: Settings) -> bool:
    if not isinstance(value, int | float) or settings.at("async_rl.stall_watchdog.stall_action") != "abort":
        return False
    return bool(value <= settings.at("refit.deadline_s") + settings.at("refit.grace_s"))


_ENGINE = "policy.generation"
_TRAINER = "policy.dtensor_cfg"
_LEAVE = "leave it to NeMo RL with refit.backend: nemo_rl"
_QUANTISED = "a quantised engine repacks its weights and keeps scales that the trainers do not hold"

RULES = (
    Rule(
        f"{_ENGINE}.colocated.enabled",
        "true",
        "trainers and engines share GPUs there, and weights change hands in the GPU's memory, not over a network",
        f"give the engines GPUs of their own under {_ENGINE}.colocated.resources and set it to false, or {_LEAVE}",
        _is_on,
    ),
    Rule(
        f"{_ENGINE}.backend",
        "all but vllm",
        "where each weight lands is learned from vLLM's own loader",
        f"set it to vllm, or {_LEAVE}",
        lambda value, _: value not in (None, "vllm"),
    ),
    Rule(
        f"{_ENGINE}.refit_transport",
        "all but null",
        "it hands refits to one of NeMo RL's own transports, and refit.backend to this package",
        f"set it to null, or {_LEAVE}",
        _is_given,
    ),
    Rule(
        f"{_ENGINE}.vllm_cfg.precision",
        "fp8",
        _QUANTISED,
        "set it to bfloat16",
        _is_8_bit,
    ),
    Rule(
        f"{_ENGINE}.vllm_cfg.kv_cache_dtype",
        "fp8, fp8_e4m3",
        "its scales are calibrated by NeMo RL's own refit and travel with it",
        "set it to auto",
        _is_8_bit,
    ),
    Rule(
        f"{_ENGINE}.quant_cfg",
        "all but null",
        f"it starts ModelOpt's engine worker: {_QUANTISED}",
        f"set it to null, or {_LEAVE}",
        _is_given,
    ),
    Rule(
        f"{_ENGINE}.real_quant",
        "true",
        "the engines hold packed NVFP4 weights, which no region of a trainer's weight maps to",
        f"set it to false, or {_LEAVE}",
        _is_on,
    ),
    Rule(
        "policy.quant_cfg",
        "all but null",
        "it starts ModelOpt's policy worker, whose model carries quantisers between its weights",
        f"set it to null, or {_LEAVE}",
        _is_given,
    ),
    Rule(
        f"{_ENGINE}.vllm_kwargs.quantization",
        "all but null",
        _QUANTISED,
        "take it out",
        _is_given,
    ),
    Rule(
        f"{_ENGINE}.vllm_kwargs.hf_overrides.quantization_config",
        "all but null and {}",
        _QUANTISED,
        "take it out; {} drops the one that a checkpoint brings",
        _is_on,
    ),
    Rule(
        f"{_ENGINE}.vllm_kwargs.kv_cache_dtype",
        "fp8 and its kinds",
        "its scales are calibrated by NeMo RL's own refit and travel with it",
        "take it out",
        _is_8_bit,
    ),
    Rule(
        f"{_ENGINE}.vllm_kwargs.enable_eplb",
        "true",
        "the engine moves experts between ranks as it runs, and the plan says which rank holds which",
        "set it to false",
        _is_on,
    ),
    Rule(
        f"{_ENGINE}.vllm_kwargs.enable_elastic_ep",
        "true",
        "the engine changes its number of ranks as it runs, and the plan is made for one number",
        "set it to false",
        _is_on,
    ),
    Rule(
        f"{_ENGINE}.vllm_cfg.pipeline_parallel_size",
        "more than 1",
        "refits into pipeline stages are not proven yet",
        "set it to 1 and raise tensor_parallel_size",
        _is_more_than_one,
    ),
    Rule(
        f"{_ENGINE}.vllm_cfg.expert_parallel_size",
        "all but 1 and tensor_parallel_size",
        "experts then span several engines that run in step, which is not proven yet",
        "set it to 1 or to tensor_parallel_size",
        _spans_engines,
    ),
    Rule(
        f"{_ENGINE}.vllm_kwargs.data_parallel_size",
        "more than 1",
        "one engine would stand for several, and ranks are counted as tensor parallel x pipeline stages per engine",
        "take it out: NeMo RL starts as many engines as the inference GPUs hold",
        _is_more_than_one,
    ),
    Rule(
        f"{_ENGINE}.vllm_kwargs.worker_extension_cls",
        "everything",
        "NeMo RL gives vLLM its own, and a second one ends the engine's start with a TypeError",
        "take it out; a worker class of your own (worker_cls) is fine",
        _is_given,
    ),
    Rule(
        f"{_ENGINE}.vllm_kwargs.enable_lora",
        "true",
        "LoRA layers rename the weights of the engine, and only merged weights are sent",
        "take it out: the trainers' adapters arrive merged into the weights",
        _is_on,
    ),
    Rule(
        f"{_ENGINE}.vllm_kwargs.speculative_config",
        "a method with weights of its own",
        "no refit reaches the drafter: it would guess for the first model ever after",
        "take it out, set num_speculative_tokens to 0, or use the methods ngram or suffix",
        _has_a_drafter,
    ),
    Rule(
        "policy.draft.enabled",
        "true",
        "no refit reaches the drafter of the engines",
        f"set it to false, or {_LEAVE}",
        _is_on,
    ),
    Rule(
        "policy.megatron_cfg.enabled",
        "true",
        "the shards of Megatron trainers are not read yet",
        f"train with {_TRAINER}.enabled: true, or {_LEAVE}",
        _is_on,
    ),
    Rule(
        f"{_TRAINER}.lora_cfg.enabled",
        "true with _v2: false",
        "NeMo RL's first DTensor worker has no LoRA",
        f"set {_TRAINER}._v2 to true",
        _on_the_v1_worker,
    ),
    Rule(
        f"{_TRAINER}.lora_cfg.target_modules",
        "experts, with lora_cfg.enabled: true and expert_parallel_size of more than 1",
        "adapters of grouped experts are not merged, nor does NeMo RL's own refit merge them",
        "leave the experts out",
        _on_grouped_experts,
    ),
    *(
        Rule(
            f"{place}.trust_remote_code",
            "everything",
            "NeMo RL itself passes true to trainers and engines; a second one ends their start or sets the two apart",
            "take it out",
            _is_given,
        )
        for place in (f"{_ENGINE}.vllm_kwargs", f"{_TRAINER}.automodel_kwargs", "policy.hf_config_overrides")
    ),
    Rule(
        "async_rl.stall_watchdog.stall_timeout_s",
        "refit.deadline_s + refit.grace_s or less, with stall_action: abort",
        "the watchdog would end the run before a refit that hangs can say which rank is to blame",
        "raise it, or lower refit.deadline_s",
        _ends_the_run_before_the_deadline,
    ),
)
"""In the order in which they are checked and documented. Keys that are not there read as NeMo RL's defaults."""


def violations(settings: Settings) -> Iterator[str]:
    """One sentence for every rule that `settings` break: the key, what it holds, why that cannot be, and the fix."""
    for rule in RULES:
        value = settings.at(rule.key)
        if rule.refuses(value, settings):
            yield f"{rule.key}: {value!r} is refused, because {rule.why}; {rule.fix}"


def table() -> str:
    """The rules as the table of docs/nemo-rl-compatibility.md."""
    rows = [
        "| Key of NeMo RL | Refused | Why | What to do |",
        "| --- | --- | --- | --- |",
        *(f"| `{rule.key}` | {rule.refused} | {rule.why} | {rule.fix} |" for rule in RULES),
    ]
    return "\n".join(rows)
