"""The example's tokenizer: one token per byte, and three tokens that are no byte."""

from __future__ import annotations

from collections.abc import Sequence

PAD = 256
BEGIN = 257
END = 258
VOCABULARY = 259
"""Not a multiple of 64 nor of 2, so that the engines' vocabulary padding and uneven trainer shards both occur."""


def encode(text: str) -> list[int]:
    """Token ids of a prompt: BEGIN, then the bytes of `text` in UTF-8."""
    return [BEGIN, *text.encode()]


def decode(tokens: Sequence[int]) -> bytes:
    """The bytes up to END. PAD and BEGIN, which a fresh model may well sample, are dropped."""
    kept = []
    for token in tokens:
        if token == END:
            break
        if token < PAD:
            kept.append(token)
    return bytes(kept)
