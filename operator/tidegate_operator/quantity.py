"""Text of durations and sizes as the cluster API writes them, and the values they stand for.

Owns the two notations, nothing else: ``10m``, ``1h30m``, ``500ms`` for durations and ``800Mi``,
``41Gi`` for sizes. Pure. Called by the API models, and by whoever writes such a text to status.
"""

import re
from datetime import timedelta

DURATION_PATTERN = "^([0-9]+(ms|s|m|h))+$"
SIZE_PATTERN = "^[0-9]+(Ki|Mi|Gi|Ti|Pi)?$"

_DURATION = re.compile(r"(?:[0-9]+(?:ms|s|m|h))+", re.ASCII)
_DURATION_PART = re.compile(r"([0-9]+)(ms|s|m|h)", re.ASCII)
_MILLISECONDS = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
# The API server holds durations as signed 64-bit nanoseconds and refuses what is longer.
_LONGEST = timedelta(microseconds=(2**63 - 1) // 1000)

_SIZE = re.compile(r"([0-9]+)(Ki|Mi|Gi|Ti|Pi)?", re.ASCII)
_BYTES = {"Pi": 2**50, "Ti": 2**40, "Gi": 2**30, "Mi": 2**20, "Ki": 2**10}


def parse_duration(text: str) -> timedelta:
    """Reads a duration such as ``10m``, ``1h30m`` or ``500ms``.

    Args:
        text: Whole numbers, each with the unit ms, s, m or h; the parts add up.

    Returns:
        The duration, zero or longer.

    Raises:
        ValueError: The text is no such duration, or longer than 292 years; the message continues
            a sentence that begins with the field's name.
    """
    if not _DURATION.fullmatch(text):
        raise ValueError(f"must be a duration such as 10m, 1h30m or 500ms, not {text!r}")
    total = sum(int(count) * _MILLISECONDS[unit] for count, unit in _DURATION_PART.findall(text))
    if total > _LONGEST // timedelta(milliseconds=1):
        raise ValueError(f"must be a duration of at most 292 years, not {text!r}")
    return timedelta(milliseconds=total)


def format_duration(value: timedelta) -> str:
    """Writes a duration so that `parse_duration` gives it back, in the largest units that fit.

    Args:
        value: Zero or longer; what is below a millisecond is cut off.

    Returns:
        Text such as ``1h30m``; ``0s`` for zero.

    Raises:
        ValueError: The duration is negative.
    """
    if value < timedelta(0):
        raise ValueError(f"must be a duration of zero or longer, not {value}")
    rest = value // timedelta(milliseconds=1)
    parts = []
    for unit, milliseconds in _MILLISECONDS.items():
        count, rest = divmod(rest, milliseconds)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def parse_size(text: str) -> int:
    """Reads a size such as ``800Mi``; without a unit it counts bytes.

    Args:
        text: A whole number, bare or with the binary unit Ki, Mi, Gi, Ti or Pi.

    Returns:
        Bytes, zero or more.

    Raises:
        ValueError: The text is no such size; the message continues a sentence that begins with
            the field's name.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"must be a size in bytes such as 1073741824, 800Mi or 2Gi, not {text!r}")
    count, unit = found.groups()
    return int(count) * (_BYTES[unit] if unit else 1)


def format_size(size_bytes: int) -> str:
    """Writes a size exactly, in the largest unit that divides it.

    Args:
        size_bytes: Bytes, zero or more.

    Returns:
        Text that `parse_size` reads back as the same number: ``800Mi``, ``1073741825``, ``0``.

    Raises:
        ValueError: The number is negative.
    """
    if size_bytes < 0:
        raise ValueError(f"must be a size of zero or more bytes, not {size_bytes}")
    for unit, unit_bytes in _BYTES.items():
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)
