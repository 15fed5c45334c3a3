"""What is refused under NeMo RL: each rule on its own, all at once, through every entry point, and in the docs. B74."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.integrations.nemo_rl.attach import attach, attach_single_controller
from nemo_rl_reshard.integrations.nemo_rl.compatibility import RULES, Rule, table
from nemo_rl_reshard.integrations.nemo_rl.section import read_section

DOCS = Path(__file__).resolve().parents[2] / "docs" / "nemo-rl-compatibility.md"

# What NeMo RL ships for trainers and engines on GPUs of their own, and nothing more.
SHIPPED: dict[str, Any] = {
    "policy.precision": "bfloat16",
    "policy.dtensor_cfg.enabled": True,
    "policy.dtensor_cfg._v2": True,
    "policy.dtensor_cfg.tensor_parallel_size": 2,
    "policy.dtensor_cfg.expert_parallel_size": 1,
    "policy.dtensor_cfg.cpu_offload": False,
    "policy.dtensor_cfg.lora_cfg.enabled": False,
    "policy.megatron_cfg.enabled": False,
    "policy.draft.enabled": False,
    "policy.generation.backend": "vllm",
    "policy.generation.colocated.enabled": False,
    "policy.generation.refit_transport": None,
    # The exemplar of NeMo RL carries the settings of a transport that it does not select.
    "policy.generation.refit_cfg.nixl.device": "cuda",
    "policy.generation.real_quant_export_cpu_offload": True,
    "policy.generation.vllm_cfg.async_engine": True,
    "policy.generation.vllm_cfg.precision": "bfloat16",
    "policy.generation.vllm_cfg.kv_cache_dtype": "auto",
    "policy.generation.vllm_cfg.tensor_parallel_size": 2,
    "policy.generation.vllm_cfg.pipeline_parallel_size": 1,
    "policy.generation.vllm_cfg.expert_parallel_size": 2,
    "policy.generation.vllm_kwargs.compilation_config.use_inductor": False,
    "data_plane.enabled": True,
    "async_rl.stall_watchdog.stall_timeout_s": 600.0,
    "async_rl.stall_watchdog.stall_action": "abort",
}

_GENERATION = "policy.generation"
_TRAINER = "policy.dtensor_cfg"

REFUSED: list[tuple[str, dict[str, Any]]] = [
    (f"{_GENERATION}.colocated.enabled", {f"{_GENERATION}.colocated.enabled": True}),
    *((f"{_GENERATION}.backend", {f"{_GENERATION}.backend": other}) for other in ("sglang", "megatron", "dynamo")),
    *(
        (f"{_GENERATION}.refit_transport", {f"{_GENERATION}.refit_transport": other})
        for other in ("nccl_reshard", "nixl", "vllm_zmq_sparse", "pkg.engine:Engine")
    ),
    (f"{_GENERATION}.vllm_cfg.precision", {f"{_GENERATION}.vllm_cfg.precision": "fp8"}),
    (f"{_GENERATION}.vllm_cfg.kv_cache_dtype", {f"{_GENERATION}.vllm_cfg.kv_cache_dtype": "fp8_e4m3"}),
    (f"{_GENERATION}.quant_cfg", {f"{_GENERATION}.quant_cfg": "NVFP4_DEFAULT_CFG"}),
    (f"{_GENERATION}.real_quant", {f"{_GENERATION}.real_quant": True}),
    ("policy.quant_cfg", {"policy.quant_cfg": "NVFP4_DEFAULT_CFG"}),
    (f"{_GENERATION}.vllm_kwargs.quantization", {f"{_GENERATION}.vllm_kwargs.quantization": "awq"}),
    (
        f"{_GENERATION}.vllm_kwargs.hf_overrides.quantization_config",
        {f"{_GENERATION}.vllm_kwargs.hf_overrides.quantization_config.quant_method": "fp8"},
    ),
    (f"{_GENERATION}.vllm_kwargs.kv_cache_dtype", {f"{_GENERATION}.vllm_kwargs.kv_cache_dtype": "fp8_e5m2"}),
    (f"{_GENERATION}.vllm_kwargs.enable_eplb", {f"{_GENERATION}.vllm_kwargs.enable_eplb": True}),
    (f"{_GENERATION}.vllm_kwargs.enable_elastic_ep", {f"{_GENERATION}.vllm_kwargs.enable_elastic_ep": True}),
    (
        f"{_GENERATION}.vllm_cfg.pipeline_parallel_size",
        {f"{_GENERATION}.vllm_cfg.pipeline_parallel_size": 2},
    ),
    # Experts over two engines of two ranks, and over half an engine.
    (f"{_GENERATION}.vllm_cfg.expert_parallel_size", {f"{_GENERATION}.vllm_cfg.expert_parallel_size": 4}),
    (
        f"{_GENERATION}.vllm_cfg.expert_parallel_size",
        {f"{_GENERATION}.vllm_cfg.expert_parallel_size": 2, f"{_GENERATION}.vllm_cfg.tensor_parallel_size": 4},
    ),
    (f"{_GENERATION}.vllm_kwargs.data_parallel_size", {f"{_GENERATION}.vllm_kwargs.data_parallel_size": 2}),
    (
        f"{_GENERATION}.vllm_kwargs.worker_extension_cls",
        {f"{_GENERATION}.vllm_kwargs.worker_extension_cls": "pkg.Extension"},
    ),
    (f"{_GENERATION}.vllm_kwargs.enable_lora", {f"{_GENERATION}.vllm_kwargs.enable_lora": True}),
    *(
        (
            f"{_GENERATION}.vllm_kwargs.speculative_config",
            {f"{_GENERATION}.vllm_kwargs.speculative_config": drafter},
        )
        for drafter in (
            {"method": "eagle3", "model": "some/drafter", "num_speculative_tokens": 3},
            {"method": "mtp", "num_speculative_tokens": 1},
            {"model": "some/smaller-model"},
        )
    ),
    ("policy.draft.enabled", {"policy.draft.enabled": True}),
    ("policy.megatron_cfg.enabled", {"policy.megatron_cfg.enabled": True}),
    (f"{_TRAINER}.lora_cfg.enabled", {f"{_TRAINER}.lora_cfg.enabled": True, f"{_TRAINER}._v2": False}),
    (
        f"{_TRAINER}.lora_cfg.target_modules",
        {
            f"{_TRAINER}.lora_cfg.enabled": True,
            f"{_TRAINER}.lora_cfg.target_modules": ["*.q_proj", "*.mlp.experts"],
            f"{_TRAINER}.expert_parallel_size": 2,
        },
    ),
    *(
        (f"{place}.trust_remote_code", {f"{place}.trust_remote_code": False})
        for place in (f"{_GENERATION}.vllm_kwargs", f"{_TRAINER}.automodel_kwargs", "policy.hf_config_overrides")
    ),
    (
        "async_rl.stall_watchdog.stall_timeout_s",
        {"async_rl.stall_watchdog.stall_timeout_s": 120.0, "refit.deadline_s": 110, "refit.grace_s": 10},
    ),
]

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"refit.backend": "gather_broadcast"},
    {f"{_GENERATION}.vllm_cfg.expert_parallel_size": 1, f"{_GENERATION}.vllm_cfg.tensor_parallel_size": 8},
    {f"{_GENERATION}.vllm_cfg.kv_cache_dtype": "bfloat16"},
    {f"{_GENERATION}.vllm_cfg.precision": "float16"},
    # An engine of unquantised weights made from a quantised checkpoint, as NeMo RL starts it.
    {f"{_GENERATION}.vllm_kwargs.hf_overrides.quantization_config": {}},
    {f"{_GENERATION}.vllm_kwargs.worker_cls": "pkg.Worker"},
    {f"{_GENERATION}.vllm_kwargs.speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    {f"{_GENERATION}.vllm_kwargs.speculative_config": {"method": "mtp", "num_speculative_tokens": 0}},
    {f"{_GENERATION}.vllm_kwargs.speculative_config": None},
    {f"{_TRAINER}.lora_cfg.enabled": True, f"{_TRAINER}.lora_cfg.match_all_linear": True},
    {
        f"{_TRAINER}.lora_cfg.enabled": True,
        f"{_TRAINER}.lora_cfg.target_modules": ["*.q_proj"],
        f"{_TRAINER}.expert_parallel_size": 2,
    },
    {f"{_TRAINER}._v2": False},
    {f"{_TRAINER}.expert_parallel_size": 8, f"{_TRAINER}.dp_replicate_size": 2, f"{_TRAINER}.cpu_offload": True},
    {"async_rl.stall_watchdog.stall_action": "warn", "async_rl.stall_watchdog.stall_timeout_s": 1.0},
]


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as the nested mapping that a YAML gives."""
    top: dict[str, Any] = {}
    for key, value in values.items():
        *steps, last = key.split(".")
        inner = top
        for step in steps:
            inner = inner.setdefault(step, {})
        inner[last] = value
    return top


def refusal(config: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        read_section(config)
    return str(refused.value).split("\n  - ")[1:]


@pytest.mark.parametrize("changed", ACCEPTED, ids=str)
def test_what_nemo_rl_ships_and_this_package_refits_is_accepted(changed: dict[str, Any]) -> None:
    read_section(nested(SHIPPED | changed))


@pytest.mark.parametrize(("key", "changed"), REFUSED, ids=str)
def test_one_setting_out_of_range_is_one_fault_that_names_the_key_and_the_way_out(
    key: str, changed: dict[str, Any]
) -> None:
    """B55 (quantised), B56 (drafters), B74 and B75 (code of the checkpoint trusted by one side only)."""
    (fault,) = refusal(nested(SHIPPED | changed))
    rules = [rule for rule in RULES if rule.key == key]
    assert fault.startswith(f"{key}: ")
    assert any(rule.why in fault and fault.endswith(rule.fix) for rule in rules)


def test_every_rule_has_a_case_above() -> None:
    def broken_by(changed: dict[str, Any]) -> set[Rule]:
        fault = refusal(nested(SHIPPED | changed))[0]
        return {rule for rule in RULES if fault.startswith(f"{rule.key}: ") and rule.why in fault}

    assert set(RULES) == set().union(*(broken_by(changed) for _, changed in REFUSED))


def test_all_that_is_out_of_range_is_listed_at_once_in_the_order_of_the_table() -> None:
    changed = {
        f"{_GENERATION}.vllm_cfg.expert_parallel_size": 4,
        f"{_GENERATION}.vllm_cfg.pipeline_parallel_size": 2,
        f"{_GENERATION}.vllm_cfg.precision": "fp8",
        f"{_GENERATION}.colocated.enabled": True,
    }
    keys = [fault.split(": ")[0] for fault in refusal(nested(SHIPPED | changed))]
    assert keys == [rule.key for rule in RULES if rule.key in changed]
    assert len(keys) == 4


def through_attach(config: dict[str, Any]) -> None:
    attach(object(), object(), (), config)


def through_the_single_controller(config: dict[str, Any]) -> None:
    attach_single_controller(object(), config)


@pytest.mark.parametrize("entry", [read_section, through_attach, through_the_single_controller])
def test_b74_every_entry_point_refuses_the_same_before_it_touches_anything(entry: Callable[[Any], object]) -> None:
    """Pipeline stages, experts over several engines, quantised and colocated engines: one error with all of them."""
    changed = {
        f"{_GENERATION}.vllm_cfg.pipeline_parallel_size": 2,
        f"{_GENERATION}.vllm_cfg.expert_parallel_size": 4,
        f"{_GENERATION}.vllm_cfg.precision": "fp8",
        f"{_GENERATION}.colocated.enabled": True,
        "refit.deadlin_s": 3,
    }
    with pytest.raises(ConfigError) as refused:
        entry(nested(SHIPPED | changed))
    with pytest.raises(ConfigError) as expected:
        read_section(nested(SHIPPED | changed))
    assert str(refused.value) == str(expected.value)
    assert str(refused.value).startswith("refit configuration: 5 faults\n")


@pytest.mark.parametrize("entry", [through_attach, through_the_single_controller])
def test_leaving_refits_to_nemo_rl_touches_nothing(entry: Callable[[Any], object]) -> None:
    """Given objects without a single attribute, anything else would raise."""
    entry(nested(SHIPPED | {"refit.backend": "nemo_rl"}))


@pytest.mark.parametrize("changed", [changed for _, changed in REFUSED], ids=str)
def test_nothing_of_it_matters_when_refits_are_left_to_nemo_rl(changed: dict[str, Any]) -> None:
    read_section(nested(SHIPPED | changed | {"refit.backend": "nemo_rl"}))


def test_the_docs_hold_the_table_of_the_rules_and_no_other_row() -> None:
    text = DOCS.read_text(encoding="utf-8")
    written = [line for line in text.splitlines() if line.startswith("|")]
    assert written == table().splitlines(), (
        f"replace the table of docs/{DOCS.name} by what `nemo-rl-reshard doctor --nemo-rl-rules` prints"
    )
