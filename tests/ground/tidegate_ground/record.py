"""What a ground's folder says about it, and whether anybody still wants it.

The record is written before anything else of a ground, so whatever a killed process left behind
is found by it. Pure, but for `load` and `save`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tidegate_ground.options import GroundOptions, options_from_json
from tidegate_ground.paths import GroundPaths
from tidegate_ground.processes import PidRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundRecord:
    """What is known about one ground.

    Attributes:
        boot_id: the boot of the machine it belongs to.
        starter: the process that brought it up.
        owner: the process it must not outlive; None: it stays until it is taken down.
        is_started: whether `up` came to its end.
        options: what was asked for.
        tool_folders: where its programs are; they may be of older sets than today's.
    """

    boot_id: str
    starter: PidRecord
    owner: PidRecord | None
    is_started: bool
    options: GroundOptions
    tool_folders: tuple[Path, ...]


class Abandoned(StrEnum):
    """Why a ground is nobody's any more."""

    NO_RECORD = "its record was never written, or taking it down broke off"
    OTHER_BOOT = "the machine was started anew since"
    START_BROKE_OFF = "what brought it up ended before it was up"
    OWNER_ENDED = "its owner has ended"


def decide_abandoned(
    record: GroundRecord | None, boot_id: str, is_alive: Callable[[PidRecord], bool]
) -> Abandoned | None:
    """Returns why a ground may be removed, or None when it must stay.

    Args:
        record: None when the ground's folder has none.
        boot_id: the machine's present boot.
        is_alive: whether that very process still runs.
    """
    if record is None:
        return Abandoned.NO_RECORD
    if record.boot_id != boot_id:
        return Abandoned.OTHER_BOOT
    if not record.is_started and not is_alive(record.starter):
        return Abandoned.START_BROKE_OFF
    if record.owner is not None and not is_alive(record.owner):
        return Abandoned.OWNER_ENDED
    return None


def observe_boot_id() -> str:
    """Returns the id of the machine's present boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def save(record: GroundRecord, paths: GroundPaths) -> None:
    """Writes the record; a reader sees the old one or the new one whole."""
    stored = {
        "boot_id": record.boot_id,
        "starter": record.starter.to_json(),
        "owner": record.owner.to_json() if record.owner else None,
        "is_started": record.is_started,
        "options": record.options.to_json(),
        "tool_folders": [str(folder) for folder in record.tool_folders],
    }
    partial = paths.record.with_suffix(".partial")
    partial.write_text(json.dumps(stored, indent=1))
    partial.rename(paths.record)


def load(paths: GroundPaths) -> GroundRecord | None:
    """Reads the record of a ground; None when it has none."""
    try:
        stored = json.loads(paths.record.read_text())
    except FileNotFoundError:
        return None
    return GroundRecord(
        boot_id=stored["boot_id"],
        starter=PidRecord.from_json(stored["starter"]),
        owner=PidRecord.from_json(stored["owner"]) if stored["owner"] else None,
        is_started=stored["is_started"],
        options=options_from_json(stored["options"]),
        tool_folders=tuple(Path(folder) for folder in stored["tool_folders"]),
    )
