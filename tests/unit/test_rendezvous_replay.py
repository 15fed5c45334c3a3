"""The rendezvous against somebody who recorded a whole handshake of a rank."""

import hmac
import socket
import struct

from nemo_rl_reshard.transport.rendezvous import RendezvousServer

TOKEN = bytes(range(32))


def prefixed(number: int) -> bytes:
    return struct.pack("!I", number)


def test_a_recorded_handshake_proves_nothing_the_second_time():
    """Every connection is given a challenge of its own, so that an answer fits one connection only."""
    recorded = None
    endings = []
    with RendezvousServer("127.0.0.1", TOKEN) as server:
        for _ in range(2):
            with socket.create_connection(server.address, timeout=10) as connection, connection.makefile("rb") as said:
                challenge = said.read(44)[-32:]
                if recorded is None:
                    proof = hmac.new(TOKEN, b"refit/1:client" + challenge + bytes(32), "sha256").digest()
                    recorded = prefixed(40) + b"refit/1:" + bytes(32) + prefixed(32) + proof
                connection.sendall(recorded)
                endings.append(said.read(11)[4:])
    assert endings == [b"welcome", b"refused"]
