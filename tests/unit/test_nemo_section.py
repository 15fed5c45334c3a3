"""The refit section of a NeMo RL configuration: three backends, and every violation in one error. B74."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import BaseModel

from nemo_rl_reshard.config import Backend, RefitConfig
from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.integrations.nemo_rl.section import NemoRlBackend, NemoRlSection, OnFailure, read_section


class MasterConfig(BaseModel, extra="allow"):
    """As NeMo RL's: typed below `policy` at most, and whatever else a YAML holds is kept."""

    policy: dict[str, Any]


def faults_of(config: object) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        read_section(config)
    head, *faults = str(refused.value).split("\n  - ")
    assert head == f"refit configuration: {len(faults)} fault{'s' if len(faults) > 1 else ''}"
    return faults


def test_no_section_and_an_empty_one_mean_the_published_design() -> None:
    for config in ({"policy": {}}, {"policy": {}, "refit": None}, {"policy": {}, "refit": {}}):
        section = read_section(config)
        assert section == NemoRlSection()
        assert (section.backend, section.on_failure, section.host) == (NemoRlBackend.RESHARD, OnFailure.RAISE, None)


WRITTEN = """
policy: {generation: {backend: vllm, colocated: {enabled: false}}}
defaults_s: 7
refit:
  backend: gather_broadcast
  route: all
  bucket_bytes: 8388608
  deadline_s: ${defaults_s}
  verify: off
  on_failure: fall_back
  topology: {domains: [[0, 1], [2, 3]], network_gb_per_s: 25}
"""


@pytest.mark.parametrize("form", ["mapping", "OmegaConf", "pydantic"])
def test_whatever_holds_the_configuration_the_section_reads_the_same(form: str) -> None:
    container = OmegaConf.create(WRITTEN)
    plain = OmegaConf.to_container(container, resolve=True)
    assert isinstance(plain, dict)
    config = {"mapping": plain, "OmegaConf": container, "pydantic": MasterConfig(**plain)}[form]
    section = read_section(config)
    assert (section.backend, section.route, section.verify) == ("gather_broadcast", "all", "off")
    assert (section.bucket_bytes, section.deadline_s, section.on_failure) == (8 << 20, 7.0, OnFailure.FALL_BACK)
    assert section.topology.domains == ((0, 1), (2, 3))


@pytest.mark.parametrize("form", ["mapping", "OmegaConf", "pydantic"])
def test_a_config_with_six_mistakes_gives_one_error_naming_six(form: str) -> None:
    """B74: of the section and of NeMo RL's own keys together, whatever holds them."""
    written: dict[str, Any] = {
        "policy": {
            "generation": {
                "backend": "vllm",
                "refit_transport": "nccl_reshard",
                "colocated": {"enabled": True},
                "vllm_cfg": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "precision": "bfloat16"},
            },
            "dtensor_cfg": {"enabled": True},
        },
        "refit": {"bucket_byte": 1 << 20, "verify": "sampel", "deadline_s": -1},
    }
    config = {"mapping": written, "OmegaConf": OmegaConf.create(written), "pydantic": MasterConfig(**written)}[form]
    faults = faults_of(config)
    assert [fault.split(":")[0] for fault in faults] == [
        "refit.verify",
        "refit.deadline_s",
        "refit.bucket_byte",
        "policy.generation.colocated.enabled",
        "policy.generation.refit_transport",
        "policy.generation.vllm_cfg.pipeline_parallel_size",
    ]
    assert "did you mean 'bucket_bytes'?" in faults[2]


def test_keys_of_the_section_that_contradict_each_other_are_named_with_the_section() -> None:
    faults = faults_of({"refit": {"message_bytes": 2 << 20, "bucket_bytes": 1 << 20, "host": "0.0.0.0"}})
    assert [fault.split(":")[0] for fault in faults] == ["refit.message_bytes", "refit.host"]


def test_an_unknown_key_is_compared_with_the_keys_of_nemo_rls_section_too() -> None:
    (fault,) = faults_of({"refit": {"on_failur": "raise"}})
    assert fault == "refit.on_failur: unknown key; did you mean 'on_failure'?"


def test_leaving_refits_to_nemo_rl_refuses_none_of_its_settings_but_unknown_keys_all_the_same() -> None:
    config: dict[str, Any] = {
        "policy": {
            "generation": {"backend": "sglang", "colocated": {"enabled": True}},
            "megatron_cfg": {"enabled": True},
        },
        "refit": {"backend": "nemo_rl"},
    }
    assert read_section(config).backend is NemoRlBackend.NEMO_RL
    config["refit"]["rout"] = "all"
    assert faults_of(config) == ["refit.rout: unknown key; did you mean 'route'?"]


@pytest.mark.parametrize("section", ["reshard", ["backend"], 3])
def test_a_section_that_is_none_says_what_one_looks_like(section: object) -> None:
    (fault,) = faults_of({"policy": {}, "refit": section})
    assert fault.startswith("refit: must be a section of keys, such as refit: {backend: reshard}")


def test_a_misspelt_section_is_not_taken_for_a_missing_one() -> None:
    """NeMo RL keeps unknown keys silently: without this, `refti` would mean the defaults."""
    assert faults_of(MasterConfig(policy={}, refti={"backend": "nemo_rl"})) == [
        "refti: unknown key; did you mean 'refit'?"
    ]


def test_the_section_given_alone_is_refused_since_other_keys_were_not_seen() -> None:
    (fault,) = faults_of({"backend": "reshard", "verify": "full"})
    assert "give the whole configuration" in fault


@pytest.mark.parametrize("config", [None, 3, "refit", []])
def test_what_is_no_configuration_is_refused(config: object) -> None:
    with pytest.raises(ConfigError, match="a configuration of NeMo RL is needed"):
        read_section(config)


def test_the_refits_get_what_they_can_use_and_the_drivers_address_where_none_is_given() -> None:
    section = NemoRlSection.read({"backend": "gather_broadcast", "in_flight": 3, "on_failure": "fall_back"})
    expected = RefitConfig(backend=Backend.GATHER_BROADCAST, in_flight=3, host="10.0.0.7")
    assert section.refit_config("10.0.0.7") == expected
    assert section.model_copy(update={"host": "10.0.0.8"}).refit_config("10.0.0.7").host == "10.0.0.8"
    with pytest.raises(ConfigError, match="listens everywhere"):
        section.refit_config("0.0.0.0")


def test_nothing_is_configured_for_refits_left_to_nemo_rl() -> None:
    with pytest.raises(ConfigError, match="leaves refits to NeMo RL"):
        NemoRlSection.read({"backend": "nemo_rl"}).refit_config("10.0.0.7")
