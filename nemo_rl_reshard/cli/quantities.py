"""Bytes and seconds as people read them."""

from __future__ import annotations

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")


def bytes_text(nbytes: float) -> str:
    """Bytes in powers of 1000, three digits: `128 B`, `4.19 MB`."""
    value = float(nbytes)
    for unit in _BYTES:
        if value < 999.5 or unit == _BYTES[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"


def seconds_text(seconds: float) -> str:
    """Seconds with a unit that keeps three digits readable: `1.2 s`, `34 ms`, `8 us`."""
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 0.9995:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
