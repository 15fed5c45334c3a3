"""Read typed fields out of plain mappings; every fault is noted with the place where it stands, none is raised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeGuard

from nemo_rl_reshard.errors import FaultList


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a word that is not known: the nearest right one, or all of them."""
    names = list(known)
    close = _closest(word, names)
    return f"did you mean {close!r}?" if close else f"known are {', '.join(names)}"


def _closest(word: str, names: list[str]) -> str | None:
    return next(iter(get_close_matches(str(word), names, n=1, cutoff=0.5)), None)


def is_whole(value: object) -> TypeGuard[int]:
    """True for an int that is not a bool: YAML's `true` must not pass for 1."""
    return isinstance(value, int) and not isinstance(value, bool)


_LEAST, _MOST = 1e-12, 1e12


class Fields:
    """One mapping of a spec, `place` being where it stands (`tensor 'w': source`)."""

    def __init__(self, plain: Mapping[str, Any], place: str, faults: FaultList, known: Iterable[str]) -> None:
        self.plain = plain
        self.place = place
        self._faults = faults
        known = list(known)
        unknown = [key for key in plain if key not in known]
        for key in unknown:
            self.fault(f"unknown key {key!r}; {nearest(key, known)}")
        # A key that was only misspelt is one mistake, so it is not reported as missing too.
        self._misspelt = {_closest(key, known) for key in unknown} - set(plain)

    def __contains__(self, key: str) -> bool:
        return key in self.plain

    def lacks(self, key: str, what: str) -> bool:
        """True when `key` is absent, with a fault noted that says to give `what`."""
        if key in self.plain:
            return False
        if key not in self._misspelt:
            self.fault(f"missing; give {what}", key)
        return True

    def fault(self, sentence: str, field: str = "") -> None:
        """Note a fault at this place, or at `field` in it."""
        where = ".".join(part for part in (self.place, field) if part)
        self._faults.add(f"{where}: {sentence}" if where else sentence)

    def inner(self, field: str, plain: Mapping[str, Any], known: Iterable[str]) -> Fields:
        """The mapping that stands at `field` of this one."""
        return Fields(plain, f"{self.place}.{field}" if self.place else field, self._faults, known)

    def whole_numbers(self, key: str, what: str) -> tuple[int, ...] | None:
        """A list of non-negative ints under `key`; None, with a fault noted, when it is missing or is not that."""
        if self.lacks(key, what):
            return None
        value = self.plain[key]
        if not isinstance(value, list) or not all(is_whole(entry) and entry >= 0 for entry in value):
            self.fault(f"{value!r} is not {what}", key)
            return None
        return tuple(value)

    def positive(self, key: str, default: float) -> float:
        """A positive number under `key`, or the default when it is absent or (with a fault noted) wrong.

        Between 1e-12 and 1e12, which no rate or latency leaves, so that nothing made from it overflows.
        """
        value = self.plain.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value <= _MOST:
            self.fault(f"{value!r} is not a positive number between {_LEAST:g} and {_MOST:g}", key)
            return default
        return value

    def flag(self, key: str) -> bool:
        """`true` or `false` under `key`; absent means false."""
        value = self.plain.get(key, False)
        if not isinstance(value, bool):
            self.fault(f"{value!r} is neither true nor false", key)
            return False
        return value
