"""One job with one drain, from start to end, recorded: what the end-to-end tests assert on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate_demo.observe import PodFacts, Snapshot, observe_job, read_lines
from tidegate_demo.stage import JobPlan, draining, start_job
from tidegate_ground.ground import Ground
from tidegate_ground.waiting import wait_until

Probe = Callable[[Snapshot], bool]


@dataclass(slots=True, kw_only=True)
class Walk:
    """A job that is watched; not thread-safe.

    Attributes:
        ground, namespace, plan: where and what.
        snapshots: every look that differed from the one before.
        exits: pod UID and restart count → exit status of the trainer.
        drain_log: what kubectl printed.
        drain_status: kubectl's exit status; None while it runs.
    """

    ground: Ground
    namespace: str
    plan: JobPlan
    snapshots: list[Snapshot] = field(default_factory=list)
    exits: dict[tuple[str, int], int] = field(default_factory=dict)
    drain_log: str = ""
    drain_status: int | None = None

    @property
    def now(self) -> Snapshot:
        """The newest look."""
        return self.snapshots[-1]

    def start(self, policy: dict[str, Any] | None = None) -> None:
        """Applies policy and job."""
        start_job(self.ground, self.namespace, self.plan, policy)

    def look(self) -> Snapshot:
        """One look, recorded."""
        found = observe_job(self.ground, self.namespace, self.plan.name)
        if not self.snapshots or found != self.snapshots[-1]:
            self.snapshots.append(found)
        for pod in found.pods:
            if pod.exit_code is not None:
                ends = pod.restarts - pod.is_running
                self.exits[pod.uid, ends] = pod.exit_code
        assert not found.is_failed, f"the Job {self.plan.name} failed"
        return found

    def wait(self, what: str, holds: Probe, seconds: float) -> Snapshot:
        """Looks until a condition holds."""
        wait_until(what, lambda: holds(self.look()), seconds, every_seconds=0.3)
        return self.now

    def wait_durable(self, beyond: int = -1, seconds: float = 180) -> Snapshot:
        """Until a step beyond this one is durable."""
        return self.wait(
            f"a durable step beyond {beyond}", lambda now: durable_step(now) > beyond, seconds
        )

    def pod(self, rank: int) -> PodFacts:
        """The newest pod of a rank, as it was seen last."""
        return [pod for pod in self.now.pods if pod.rank == rank][-1]

    def lines(self) -> list[dict[str, Any]]:
        """What the trainers of the present pods printed since their last start."""
        return [
            line
            for pod in self.look().pods
            for line in read_lines(self.ground, self.namespace, pod.name)
        ]

    @contextmanager
    def drain(self, node: str, log: Path, timeout_seconds: int = 240) -> Iterator[None]:
        """Drains a node in the background while the body runs, then waits for the drain's end."""
        try:
            with draining(self.ground, node, log, timeout_seconds) as process:
                yield
                self.wait(
                    f"{node} is drained",
                    lambda _: process.poll() is not None,
                    timeout_seconds + 30,
                )
        finally:
            self.drain_status = process.returncode
            self.drain_log = log.read_text()


def durable_step(now: Snapshot) -> int:
    """The newest durable step that the status shows; -1 for none."""
    return int((now.run.get("lastDurable") or {}).get("step", -1))


def progress_step(now: Snapshot) -> int:
    """The newest step that the status shows; -1 for none."""
    return int((now.run.get("progress") or {}).get("step", -1))


def drain_state(now: Snapshot, node: str) -> str:
    """The drain's state of a node; `Held` where the status has no entry."""
    for entry in now.run.get("drains", []):
        if entry["node"] == node:
            return str(entry["state"])
    return "Held"
