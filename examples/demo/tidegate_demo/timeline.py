"""What changed between two looks at a job, in words. Pure."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tidegate_demo.observe import PodFacts, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the timeline.

    Attributes:
        at: UTC; the status's own time where it has one, else the time of the look.
        what: a word: save, sealed, durable, drain asked, held, released, stopped, started, resumed.
        text: the rest.
    """

    at: datetime
    what: str
    text: str


def find_events(before: Snapshot, after: Snapshot, now: datetime) -> list[Event]:
    """What is new in `after`, oldest first."""
    events = [
        *_find_saves(before.run, after.run, now),
        *_find_drains(before.run, after.run, now),
        *_find_pods(before.pods, after.pods, now),
        *_find_restores(before.run, after.run, now),
    ]
    return sorted(events, key=lambda event: event.at)


def _find_saves(before: dict[str, Any], after: dict[str, Any], now: datetime) -> list[Event]:
    events = []
    sealed, durable = after.get("lastSealed"), after.get("lastDurable")
    if sealed and sealed != before.get("lastSealed"):
        text = f"step {sealed['step']}, {sealed['tokens']:,} tokens"
        events += [
            Event(at=_time(sealed["time"], now), what="save", text=f"{text}, a copy in memory"),
            Event(at=now, what="sealed", text=f"{text}, on every node's NVMe"),
        ]
    if durable and durable != before.get("lastDurable"):
        text = f"step {durable['step']}, {durable['tokens']:,} tokens, committed on the PFS"
        events.append(Event(at=_time(durable["time"], now), what="durable", text=text))
    return events


def _find_drains(before: dict[str, Any], after: dict[str, Any], now: datetime) -> list[Event]:
    known = {entry["node"]: entry for entry in before.get("drains", [])}
    events = []
    for entry in after.get("drains", []):
        old = known.get(entry["node"], {})
        if old.get("state") == entry["state"]:
            continue
        if not old:
            text = f"{entry['node']}; held until {entry.get('deadline', '?')} at the latest"
            asked = _time(entry.get("requestedTime"), now)
            events.append(Event(at=asked, what="drain asked", text=text))
        if entry["state"] == "Released":
            text = f"{entry['node']}: {entry.get('reason', '')}"
            at = _time(entry.get("releasedTime"), now)
            events.append(Event(at=at, what="released", text=text))
        else:
            text = f"{entry['node']}: {entry['state']}"
            events.append(Event(at=now, what="held", text=text))
    return events


def _find_pods(
    before: tuple[PodFacts, ...], after: tuple[PodFacts, ...], now: datetime
) -> list[Event]:
    known = {pod.uid: pod for pod in before}
    events = []
    for pod in after:
        old = known.get(pod.uid)
        was_running = old is not None and old.is_running
        has_restarted = old is not None and pod.restarts > old.restarts
        if was_running and (has_restarted or not pod.is_running):
            text = f"rank {pod.rank} on {pod.node}, exit status {pod.exit_code}"
            events.append(Event(at=now, what="stopped", text=text))
        if pod.is_running and (has_restarted or not was_running):
            how = "again in place" if pod.restarts else "in a new pod"
            text = f"rank {pod.rank} on {pod.node}, {how}"
            events.append(Event(at=now, what="started", text=text))
    return events


def _find_restores(before: dict[str, Any], after: dict[str, Any], now: datetime) -> list[Event]:
    note = after.get("lastRestore") or {}
    if not note or note == (before.get("lastRestore") or {}) or note.get("step") is None:
        return []
    text = f"at step {note['step']} from {note.get('tier', '?')}"
    return [Event(at=_time(note.get("time"), now), what="resumed", text=text)]


def _time(text: str | None, now: datetime) -> datetime:
    return datetime.fromisoformat(text) if text else now
