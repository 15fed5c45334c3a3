"""The refit section: defaults, and every violation in one error."""

import pytest

from nemo_rl_reshard.config import Backend, RefitConfig, TopologyConfig, domains_of_hosts
from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.runtime.order import VerifyMode
from nemo_rl_reshard.topology import Topology


def test_an_empty_section_means_the_published_design():
    config = RefitConfig.read({})
    assert (config.backend, str(config.route), config.verify) == (Backend.RESHARD, "ffn", VerifyMode.OFF)
    assert (config.bucket_bytes, config.message_bytes) == (64 << 20, 4 << 20)


def test_values_are_read_as_written():
    config = RefitConfig.read(
        {"backend": "gather_broadcast", "route": "all", "verify": "full", "deadline_s": 3, "bucket_bytes": 8 << 20}
    )
    assert (config.backend, str(config.route), config.verify) == (Backend.GATHER_BROADCAST, "all", VerifyMode.FULL)
    assert (config.deadline_s, config.bucket_bytes) == (3.0, 8 << 20)


def test_one_error_lists_every_violation_even_across_fields():
    section = {
        "backend": "rehsard",
        "bucket_byte": 5,
        "deadline_s": -1,
        "bucket_bytes": 1 << 20,
        "message_bytes": 2 << 20,
        "host": "0.0.0.0",
        "topology": {"domains": [[0, 1], [1, 2]]},
    }
    with pytest.raises(ConfigError) as refused:
        RefitConfig.read(section)
    text = str(refused.value)
    assert "6 faults" in text
    for needle in (
        "backend: input should be 'reshard' or 'gather_broadcast', got 'rehsard'",
        "bucket_byte: unknown key; did you mean 'bucket_bytes'?",
        "deadline_s:",
        "message_bytes: 2097152 is more than bucket_bytes 1048576",
        "host: 0.0.0.0 listens everywhere",
        "topology.domains: topology names ranks [1] in more than one domain",
    ):
        assert needle in text


def test_an_unknown_key_inside_topology_is_compared_with_the_topologys_keys():
    with pytest.raises(ConfigError, match=r"topology\.domain: unknown key; did you mean 'domains'\?"):
        RefitConfig.read({"topology": {"domain": [[0]]}})


def test_a_key_like_no_other_gets_the_whole_list():
    with pytest.raises(ConfigError, match=r"zzz: unknown key; known are backend, route, verify"):
        RefitConfig.read({"zzz": 1})


def test_a_rule_about_a_faulty_field_is_not_reported_on_top():
    with pytest.raises(ConfigError) as refused:
        RefitConfig.read({"bucket_bytes": "many", "message_bytes": 1 << 40})
    assert "1 fault" in str(refused.value)


@pytest.mark.parametrize("name", ["deadline_s", "grace_s", "setup_s"])
def test_a_wait_without_end_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}: must be finite"):
        RefitConfig.read({name: float("inf")})


def test_ranks_of_one_host_form_a_domain_unless_domains_are_given():
    hosts = {0: "a", 1: "b", 2: "a", 3: "c", 4: "b"}
    assert domains_of_hosts(hosts) == ((0, 2), (1, 4), (3,))
    assert TopologyConfig().topology(hosts).domains == ((0, 2), (1, 4), (3,))
    given = TopologyConfig(domains=((0,), (1, 2)), network_gb_per_s=25, fast_gb_per_s=300)
    assert given.topology(hosts) == Topology(((0,), (1, 2)), network_bytes_per_s=25e9, fast_bytes_per_s=300e9)


def test_domains_may_be_empty_to_make_every_rank_its_own():
    assert RefitConfig.read({"topology": {"domains": []}}).topology.topology({0: "a", 1: "a"}).domains == ()


def test_what_no_plan_or_wait_could_take_is_refused_here():
    """All of it at once, and not only when the plan is made or the first rank waits."""
    with pytest.raises(ConfigError) as caught:
        RefitConfig.read(
            {
                "bucket_bytes": 1 << 50,
                "message_bytes": 4,
                "deadline_s": 1e18,
                "topology": {"network_gb_per_s": 1e-320, "fast_gb_per_s": float("inf")},
            }
        )
    faults = str(caught.value).split("\n  - ")[1:]
    assert len(faults) == 5
    for name in ("bucket_bytes", "message_bytes", "deadline_s", "topology.network_gb_per_s", "topology.fast_gb_per_s"):
        assert sum(fault.startswith(name) for fault in faults) == 1, name
