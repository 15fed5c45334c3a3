"""The identifier of a communicator: here the address of a store that its maker serves."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch

SIZE = 128
TIMEOUT = timedelta(seconds=120)


class UniqueId:
    """128 bytes, as NCCL's: "host:port", then zeros. `store` is kept by the maker, who serves it."""

    def __init__(self, as_bytes: bytes, store: torch.distributed.TCPStore | None = None) -> None:
        self.as_bytes = as_bytes
        self.store = store

    @classmethod
    def from_bytes(cls, as_bytes: bytes) -> UniqueId:
        """What another rank published."""
        return cls(bytes(as_bytes))

    def connect(self) -> torch.distributed.TCPStore:
        """The maker's own store, or a client of it."""
        if self.store is not None:
            return self.store
        host, port = self.as_bytes.rstrip(b"\0").decode().rsplit(":", 1)
        return torch.distributed.TCPStore(host, int(port), is_master=False, timeout=TIMEOUT)


def get_unique_id() -> UniqueId:
    """A new store on any free port of this host."""
    host = socket.gethostbyname(socket.gethostname())
    store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    return UniqueId(f"{host}:{store.port}".encode().ljust(SIZE, b"\0"), store)
