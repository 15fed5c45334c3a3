"""Seating both sides in one world, and the rendezvous of each generation. B13 B14 B72."""

import threading
from typing import Any

import pytest

from nemo_rl_reshard.config import RefitConfig
from nemo_rl_reshard.errors import ConfigError, DeclarationError, HandshakeError, RefitAbortedError, TransportError
from nemo_rl_reshard.orchestration.controller import RefitController
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.orchestration.rank_operations import address_towards
from nemo_rl_reshard.orchestration.world import Seating, WorldHost, check_reachable
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.runtime.world import World
from nemo_rl_reshard.transport.abort_watcher import abort_key
from nemo_rl_reshard.transport.rendezvous import RendezvousStore


def trainers(count: int) -> list[Member]:
    return [Member(f"trainer {rank}", Side.TRAINER, 1, handle=None) for rank in range(count)]


def engines(*sizes: int) -> list[Member]:
    return [Member(f"engine {index}", Side.INFERENCE, size, handle=None) for index, size in enumerate(sizes)]


def test_b13_trainers_come_first_then_engines_by_worker():
    seating = Seating.of(trainers(2), engines(2, 2))
    assert {first: member.name for first, member in seating.members.items()} == {
        0: "trainer 0",
        1: "trainer 1",
        2: "engine 0",
        4: "engine 1",
    }
    assert (seating.num_trainers, seating.size) == (2, 6)


def test_b14_engines_of_different_sizes_share_no_rank():
    seating = Seating.of(trainers(3), engines(1, 3, 2))
    names = seating.rank_names()
    assert list(names) == list(range(9))
    assert len(set(names.values())) == 9
    assert names[3] == "rank 3 (engine 0)"
    assert names[6] == "rank 6 (engine 1 worker 2)"
    assert list(seating.side(Side.INFERENCE)) == [3, 4, 7]


def test_every_fault_of_a_seating_is_in_one_error():
    twice = [*engines(1), *engines(0)]
    with pytest.raises(DeclarationError) as refused:
        Seating.of([], [*twice, *trainers(1)])
    for fault in (
        "there is no trainer member",
        "trainer 0 is no inference member",
        "two members are called engine 0",
        "engine 0 carries no rank",
    ):
        assert fault in str(refused.value)


class Unreachable(Member):
    """A member of a cluster that was shut down before its controller."""

    def submit(self, operation: str, arguments: Any, shared: Any = None) -> Any:
        del arguments, shared
        raise RuntimeError(f"{operation}: the cluster is gone")


def test_a_controller_whose_cluster_is_gone_leaves_no_rendezvous_behind():
    members = [Unreachable(name, side, 1, handle=None) for name, side in (("t", Side.TRAINER), ("e", Side.INFERENCE))]
    controller = RefitController(members[:1], members[1:], RefitConfig())
    seating = Seating.of(members[:1], members[1:])
    controller._world = host = WorldHost(seating, "127.0.0.1", 1, 5.0)
    controller._joined = seating.members
    with pytest.raises(RuntimeError, match="close: the cluster is gone"):
        controller.close()
    with pytest.raises(TransportError):
        RendezvousStore(host._server.address, host._token, timeout_s=0.2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("refit-rendezvous")]
    controller.close()


def test_b72_a_worlds_text_does_not_show_its_token():
    """Whatever prints it: an assertion, a debugger, a log of arguments."""
    seating = Seating.of(trainers(1), engines(1))
    host = WorldHost(seating, "127.0.0.1", 1, 5.0)
    host.close()
    plain = host.to_plain()
    assert plain["token_hex"] not in repr(World.from_plain({**plain, "rank": 0, "host": "127.0.0.1"}))
    assert plain["token_hex"] not in repr(host)


def test_each_generation_has_its_own_port_and_token():
    seating = Seating.of(trainers(1), engines(1))
    hosts = [WorldHost(seating, "127.0.0.1", generation, 5.0) for generation in range(1, 9)]
    plain = [host.to_plain() for host in hosts]
    for host in hosts:
        host.close()
    assert len({world["address"] for world in plain}) == 8, "B72: eight at once never share a port"
    assert len({world["token_hex"] for world in plain}) == 8
    assert all(len(bytes.fromhex(world["token_hex"])) >= 16 for world in plain)
    assert [world["generation"] for world in plain] == list(range(1, 9))


def test_a_token_of_another_generation_is_refused():
    seating = Seating.of(trainers(1), engines(1))
    old, new = (WorldHost(seating, "127.0.0.1", generation, 5.0) for generation in (1, 2))
    try:
        host, port = new.to_plain()["address"].split(":")
        with pytest.raises(HandshakeError):
            RendezvousStore((host, int(port)), bytes.fromhex(old.to_plain()["token_hex"]), timeout_s=5.0)
    finally:
        old.close()
        new.close()


def test_calling_off_wakes_a_rank_that_is_blocked_and_the_first_reason_wins():
    world = WorldHost(Seating.of(trainers(1), engines(1)), "127.0.0.1", 3, 20.0)
    plain = world.to_plain()
    host, port = plain["address"].split(":")
    store = RendezvousStore((host, int(port)), bytes.fromhex(plain["token_hex"]), timeout_s=20.0)
    store.stop_key = abort_key(3)
    caught: list[Exception] = []

    def wait_for_nothing() -> None:
        try:
            store.wait(["never set"])
        except RefitAbortedError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait_for_nothing)
    waiter.start()
    try:
        world.call_off("rank 1 died")
        world.call_off("another reason")
        waiter.join(timeout=10)
        assert not waiter.is_alive()
        assert "rank 1 died" in str(caught[0])
    finally:
        store.close()
        world.close()
        world.close()


def test_a_ranks_own_address_is_the_one_that_reaches_the_driver():
    assert address_towards("127.0.0.1:4242") == "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_ranks_on_other_hosts_need_an_address_they_can_reach(host):
    check_reachable(host, ["a", "a"])
    check_reachable("192.0.2.1", ["a", "b"])
    with pytest.raises(ConfigError, match=r"the ranks run on a, b"):
        check_reachable(host, ["b", "a", "b"])


def test_a_host_that_is_no_address_of_this_machine_is_a_fault_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"host: cannot listen on '192\.0\.2\.1'"):
        WorldHost(Seating.of(trainers(1), engines(1)), "192.0.2.1", 1, 5.0)
