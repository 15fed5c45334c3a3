"""B73: variables that NCCL and gloo read for themselves, compared across sides before any group is made."""

from __future__ import annotations

import json
import logging

import pytest

from nemo_rl_reshard.config import RefitConfig
from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.orchestration.controller import RefitController
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.orchestration.outcome import Outcome
from nemo_rl_reshard.orchestration.rank_environment import (
    MAY_DIFFER,
    MUST_BE_EQUAL,
    compare_environments,
    rank_environment,
)
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.transport.devices import DeviceReport

TRAINERS, RANKS = 3, 7


def environments(**engines: str) -> dict[int, dict[str, str]]:
    """Trainers and engines of a job set up alike, but for what the engines set themselves."""
    common = {"NCCL_CUMEM_ENABLE": "1", "NCCL_SOCKET_IFNAME": "eth0"}
    return {rank: common if rank < TRAINERS else {**common, **engines} for rank in range(RANKS)}


def test_b73_a_rank_reports_what_it_has_set_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*MUST_BE_EQUAL, *MAY_DIFFER):
        monkeypatch.delenv(name, raising=False)
    assert rank_environment() == {}
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    found = rank_environment()
    assert found == {"NCCL_CUMEM_ENABLE": "0", "GLOO_SOCKET_IFNAME": "ib0"}
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("is_nccl", [True, False])
def test_equal_environments_are_no_news(is_nccl: bool) -> None:
    assert compare_environments(environments(), TRAINERS, is_nccl=is_nccl) == ()
    assert compare_environments({0: {}, 1: {}}, 1, is_nccl=is_nccl) == ()


def test_b73_every_difference_that_nccl_cannot_bear_is_in_one_error() -> None:
    found = environments(NCCL_CUMEM_ENABLE="0", NCCL_P2P_LEVEL="NVL", NCCL_IB_DISABLE="1")
    found[1] = {"NCCL_SOCKET_IFNAME": "eth0"}
    with pytest.raises(ConfigError) as refused:
        compare_environments(found, TRAINERS, is_nccl=True)
    assert str(refused.value).splitlines() == [
        "the ranks' environments do not fit NCCL; set each of these alike on both sides: 3 faults",
        "  - NCCL_CUMEM_ENABLE is '1' on trainer ranks 0, 2; unset on trainer ranks 1; '0' on inference ranks 3-6",
        "  - NCCL_IB_DISABLE is '0' on trainer ranks 0-2; '1' on inference ranks 3-6",
        "  - NCCL_P2P_LEVEL is unset on trainer ranks 0-2; 'NVL' on inference ranks 3-6",
    ]


def test_b73_over_gloo_the_same_differences_are_warnings() -> None:
    found = environments(NCCL_CUMEM_ENABLE="0", GLOO_SOCKET_IFNAME="ib0")
    assert compare_environments(found, TRAINERS, is_nccl=False) == (
        "NCCL_CUMEM_ENABLE is '1' on trainer ranks 0-2; '0' on inference ranks 3-6",
        "GLOO_SOCKET_IFNAME is unset on trainer ranks 0-2; 'ib0' on inference ranks 3-6",
    )


def test_b73_what_belongs_to_a_host_only_warns() -> None:
    """Two hosts, whose trainers and engines differ by host; and NeMo RL's own choice for engines that span hosts."""
    found = environments(NCCL_NVLS_ENABLE="0")
    found[2] = {**found[2], "NCCL_SOCKET_IFNAME": "eth1"}
    found[6] = {**found[6], "NCCL_SOCKET_IFNAME": "eth1"}
    assert compare_environments(found, TRAINERS, is_nccl=True) == (
        "NCCL_NVLS_ENABLE is unset on trainer ranks 0-2; '0' on inference ranks 3-6",
        "NCCL_SOCKET_IFNAME is 'eth0' on trainer ranks 0-1; 'eth1' on trainer ranks 2; "
        "'eth0' on inference ranks 3-5; 'eth1' on inference ranks 6",
    )


@pytest.mark.parametrize("name", [name for name, unset in MUST_BE_EQUAL.items() if unset is not None])
def test_unset_is_the_value_it_stands_for(name: str) -> None:
    assert compare_environments({0: {}, 1: {name: "0"}}, 1, is_nccl=True) == ()
    with pytest.raises(ConfigError, match=f"{name} is '0' on trainer ranks 0; '1' on inference ranks 1"):
        compare_environments({0: {}, 1: {name: "1"}}, 1, is_nccl=True)


def test_b73_the_controller_refuses_before_it_makes_a_world(caplog: pytest.LogCaptureFixture) -> None:
    members = [Member(side, side, 1, handle=None) for side in (Side.TRAINER, Side.INFERENCE)]
    on_gpu = [DeviceReport("cuda", "cuda:0", f"GPU-{rank}", nccl="2.28.9").to_plain() for rank in range(2)]
    declared = [
        Outcome(rank, {"devices": on_gpu[rank], "environment": {"NCCL_CUMEM_ENABLE": value}})
        for rank, value in enumerate("01")
    ]
    hosts = {0: "one", 1: "one"}
    over_gloo = RefitController(members[:1], members[1:], RefitConfig.read({"transport": "gloo"}))
    with caplog.at_level(logging.WARNING, logger="nemo_rl_reshard"):
        over_gloo._choose_transport(declared, hosts)
    assert caplog.messages == [
        "refit environment: NCCL_CUMEM_ENABLE is '0' on trainer ranks 0; '1' on inference ranks 1"
    ]
    over_nccl = RefitController(members[:1], members[1:], RefitConfig.read({"transport": "nccl"}))
    with pytest.raises(ConfigError, match="NCCL_CUMEM_ENABLE is '0' on trainer ranks 0; '1' on inference ranks 1"):
        over_nccl._choose_transport(declared, hosts)
