"""The rendezvous: who may use it, where it listens, what it takes from the wire, and how its keys behave."""

import ast
import os
import pickle
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import nemo_rl_reshard.transport
from nemo_rl_reshard.errors import HandshakeError, RefitAbortedError, TransportError, TransportTimeoutError
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.rendezvous import RendezvousServer, RendezvousStore
from nemo_rl_reshard.transport.wire import MAX_FRAME_BYTES, Wire

TOKEN = bytes(range(32))
OTHER_TOKEN = bytes(range(1, 33))


@pytest.fixture
def server():
    with RendezvousServer("127.0.0.1", TOKEN, handshake_s=5) as running:
        yield running


@pytest.fixture
def store(server):
    opened = RendezvousStore(server.address, TOKEN, timeout_s=10)
    yield opened
    opened.close()


def prefixed(number: int) -> bytes:
    return struct.pack("!I", number)


def closes_on_us(connection: socket.socket) -> bool:
    """Whether the peer ends the connection, whatever it says before that."""
    connection.settimeout(10)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


# Who may use it


def test_a_wrong_token_is_one_clear_error_and_the_right_one_still_works(server, store):
    for _ in range(2):
        with pytest.raises(HandshakeError, match="refused this rank: its token is not this refit's"):
            RendezvousStore(server.address, OTHER_TOKEN, timeout_s=10)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_server_that_does_not_know_the_token_is_refused_by_the_rank():
    """A server that just says welcome, as an impostor on the job's port would."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def impostor():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(prefixed(40) + b"refit/1:" + bytes(32))
                connection.sendall(prefixed(7) + b"welcome" + prefixed(32) + bytes(32))
                closes_on_us(connection)

        serving = pool.submit(impostor)
        with pytest.raises(HandshakeError, match="does not know this refit's token"):
            RendezvousStore(listener.getsockname(), TOKEN, timeout_s=10)
        serving.result(10)


def test_our_own_proof_sent_back_does_not_prove_anything():
    """The role inside a proof keeps an impostor from answering our challenge with our own words."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def mirror():
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as said:
                connection.sendall(prefixed(40) + b"refit/1:" + bytes(32))
                proof = said.read(44 + 36)[-32:]
                connection.sendall(prefixed(7) + b"welcome" + prefixed(32) + proof)
                closes_on_us(connection)

        serving = pool.submit(mirror)
        with pytest.raises(HandshakeError, match="does not know this refit's token"):
            RendezvousStore(listener.getsockname(), TOKEN, timeout_s=10)
        serving.result(10)


def test_strangers_that_say_nothing_delay_nobody(server):
    strangers = [socket.create_connection(server.address) for _ in range(20)]
    try:
        start = time.monotonic()
        opened = RendezvousStore(server.address, TOKEN, timeout_s=10)
        opened.set("key", "value")
        opened.close()
        assert time.monotonic() - start < 2
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_stranger_that_says_nothing_is_dropped_after_the_handshake_time():
    with (
        RendezvousServer("127.0.0.1", TOKEN, handshake_s=0.2) as server,
        socket.create_connection(server.address) as stranger,
    ):
        assert closes_on_us(stranger)


def test_a_short_token_is_refused():
    with pytest.raises(ValueError, match="at least 16 random bytes"):
        RendezvousServer("127.0.0.1", b"secret")


def test_the_token_never_travels(server):
    """What a listener on the network sees of a whole session contains the token in no form."""
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pump(source, sink):
            with suppress(OSError):  # the other direction may have ended first
                while piece := source.recv(4096):
                    seen.extend(piece)
                    sink.sendall(piece)
                sink.shutdown(socket.SHUT_WR)

        def relay():
            inside, _ = listener.accept()
            with inside, socket.create_connection(server.address) as outside, ThreadPoolExecutor(1) as pool:
                pool.submit(pump, outside, inside)
                pump(inside, outside)

        with ThreadPoolExecutor(1) as pool:
            relaying = pool.submit(relay)
            opened = RendezvousStore(listener.getsockname(), TOKEN, timeout_s=10)
            opened.set("key", "value")
            opened.close()
            relaying.result(10)
    assert b"set" in seen
    assert TOKEN not in seen
    assert TOKEN.hex().encode() not in seen


# Where it listens


def test_it_is_bound_to_the_given_address_only(server):
    assert server.address[0] == "127.0.0.1"
    assert listening_addresses(server.address[1]) == {"0100007F"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.address[1]), timeout=5)


def listening_addresses(port: int) -> set[str]:
    """The local addresses, in the kernel's own notation, that listen on `port` over IPv4 or IPv6."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, _, state = line.split()[1:4]
            address, hex_port = local.split(":")
            if int(hex_port, 16) == port and state == "0A":
                found.add(address)
    return found


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_listening_on_every_address_is_refused(host):
    with pytest.raises(ValueError, match="one address of this machine"):
        RendezvousServer(host, TOKEN)


def test_b72_many_servers_at_once_have_distinct_ports_that_stay_bound():
    with ThreadPoolExecutor(16) as pool:
        servers = list(pool.map(lambda _: RendezvousServer("127.0.0.1", TOKEN), range(16)))
    assert len({server.address for server in servers}) == 16
    for server in servers:
        with pytest.raises(OSError, match="in use"):
            socket.create_server(server.address)
        server.close()


# What it takes from the wire


class Bomb:
    """Unpickling this makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("proven", [False, True])
def test_b70_a_pickle_is_refused_and_never_read(server, store, tmp_path, proven):
    bomb = pickle.dumps(Bomb(str(tmp_path / "exploded")))
    pickle.loads(pickle.dumps(Bomb(str(tmp_path / "control"))))
    assert (tmp_path / "control").exists()
    if proven:
        wire = Wire.connect(server.address, TOKEN, Deadline.after(10))
        connection = wire._socket
    else:
        connection = socket.create_connection(server.address)
    connection.sendall(prefixed(len(bomb)) + bomb)
    assert closes_on_us(connection)
    connection.close()
    assert not (tmp_path / "exploded").exists()
    store.set("still", "alive")
    assert store.get("still") == b"alive"


def test_no_module_of_the_transport_can_unpickle():
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing"}
    sources = sorted(Path(nemo_rl_reshard.transport.__file__).parent.glob("*.py"))
    assert len(sources) > 5
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not banned & {name.split(".")[0] for name in names}, source
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "torch.load", "dist.broadcast_object_list"}, source


@pytest.mark.parametrize(
    "frame",
    [
        prefixed(MAX_FRAME_BYTES + 1),
        prefixed(0xFFFFFFFF),
        prefixed(3) + b"{]!",
        prefixed(2) + b"\xff\xfe",
        prefixed(100_000) + b"[" * 100_000,
    ],
    ids=["too long", "absurdly long", "not JSON", "not UTF-8", "too deep"],
)
def test_a_frame_that_is_no_message_ends_that_connection_only(server, store, frame):
    connection = Wire.connect(server.address, TOKEN, Deadline.after(10))._socket
    connection.sendall(frame)
    assert closes_on_us(connection)
    connection.close()
    store.set("still", "alive")


@pytest.mark.parametrize(
    "request_",
    [
        *(["explode"], [], 7, {"op": "set"}, ["set", "key"], ["set", "key", "no base64!"], ["add", "key", "x"]),
        *(["add", "key", float("inf")], ["wait", 3], ["wait", ["key"], 1e18, None]),
    ],
)
def test_a_malformed_request_is_answered_with_a_reason(server, request_):
    wire = Wire.connect(server.address, TOKEN, Deadline.after(10))
    try:
        wire.send(request_, Deadline.after(10))
        ending, reason = wire.receive(Deadline.after(10))
        assert ending == "refused"
        assert reason.startswith("malformed request")
        wire.send(["set", "key", ""], Deadline.after(10))
        assert wire.receive(Deadline.after(10)) == ["done", None]
    finally:
        wire.close()


def test_an_unproven_peer_cannot_make_the_server_read_much(server):
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(prefixed(1 << 20))
        assert closes_on_us(stranger)


def test_any_bytes_survive(store):
    value = bytes(range(256)) * 50
    store.set("key", value)
    assert store.get("key") == value
    store.set("ключ", "ü")
    assert store.get("ключ").decode() == "ü"


# How its keys behave


def test_keys_behave_as_in_a_store_of_torch(store):
    theirs = dist.HashStore()
    for one in (store, theirs):
        one.set("a", "1")
    steps = [
        lambda s: s.get("a"),
        lambda s: s.add("counter", 5),
        lambda s: s.add("counter", -2),
        lambda s: s.get("counter"),
        lambda s: s.add("a", 10),
        lambda s: s.compare_set("new", "", "first"),
        lambda s: s.compare_set("new", "", "second"),
        lambda s: s.compare_set("new", "first", "third"),
        lambda s: s.get("new"),
        lambda s: s.check(["a", "new"]),
        lambda s: s.check(["a", "absent"]),
        lambda s: s.delete_key("a"),
        lambda s: s.delete_key("a"),
        lambda s: s.check(["a"]),
        lambda s: s.num_keys(),
    ]
    assert [step(store) for step in steps] == [step(theirs) for step in steps]


def test_a_torch_prefix_store_works_on_it(store):
    inner = dist.PrefixStore("inner", store)
    inner.set("key", "value")
    assert inner.get("key") == b"value"
    assert store.get("inner/key") == b"value"
    assert inner.add("counter", 2) == 2


def test_many_threads_count_without_losing_one(server):
    stores = [RendezvousStore(server.address, TOKEN, timeout_s=10) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda turn: stores[turn % 4].add("counter", 1), range(200)))
    assert sorted(results) == list(range(1, 201))
    for one in stores:
        one.close()


def test_a_blocked_wait_holds_up_no_other_thread_of_the_same_store(store):
    with ThreadPoolExecutor(4) as pool:
        blocked = [pool.submit(store.get, key) for key in ("late", "late", "later")]
        assert store.add("counter", 1) == 1
        assert not any(one.done() for one in blocked)
        store.set("late", "1")
        assert [one.result(5) for one in blocked[:2]] == [b"1", b"1"]
        store.set("later", "2")
        assert blocked[2].result(5) == b"2"


def test_a_wait_that_expires_names_what_is_missing(store):
    store.set("here", "1")
    with pytest.raises(TransportTimeoutError, match=r"no rank set absent within 0\.05 s"):
        store.wait(["here", "absent"], timedelta(seconds=0.05))
    store.wait(["here"], timedelta(seconds=5))


def test_the_stop_key_ends_waits_with_its_reason(store):
    store.stop_key = "abort"
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(store.wait, ["absent"])
        store.set("abort", "rank 3 said no")
        with pytest.raises(RefitAbortedError, match=r"^rank 3 said no$"):
            blocked.result(5)


def test_closing_the_server_wakes_whoever_waits():
    server = RendezvousServer("127.0.0.1", TOKEN)
    store = RendezvousStore(server.address, TOKEN, timeout_s=30)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(store.get, "absent")
        store.set("here", "1")
        server.close()
        server.close()
        with pytest.raises(TransportError):
            blocked.result(5)
    store.close()
    with pytest.raises(TransportError, match="no rendezvous at"):
        RendezvousStore(server.address, TOKEN, timeout_s=5)


def test_closing_a_store_wakes_its_own_waits_and_refuses_more(server):
    store = RendezvousStore(server.address, TOKEN, timeout_s=30)
    waiting = threading.Event()
    with ThreadPoolExecutor(1) as pool:

        def wait():
            waiting.set()
            store.get("absent")

        blocked = pool.submit(wait)
        waiting.wait(5)
        store.close()
        store.close()
        with pytest.raises(TransportError):
            blocked.result(5)
    with pytest.raises(TransportError, match="is closed"):
        store.set("key", "value")
