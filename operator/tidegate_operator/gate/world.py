"""What this replica knows: the cluster as watched, the reports it took, the evictions it answered.

One event loop owns it; nothing here awaits or talks to the API server. The watches, the endpoints
and the clocks write to it through its methods, and `gate.observe` reads it. All of it is a cache:
another replica, or this one after a restart, comes to the same from the API server and the next
reports.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tidegate_contract.errors import Reject
from tidegate_contract.wire import Report, SaveRequest
from tidegate_operator.gate.facts import Eviction
from tidegate_operator.gate.records import NodeRecord, PodRecord, PolicyRecord, RunRecord, slim_run
from tidegate_operator.kube.kinds import Key
from tidegate_operator.kube.watch import Change

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenReport:
    """A report and when it came.

    Attributes:
        report: of the run's lead.
        received_at: UTC.
    """

    report: Report
    received_at: datetime


class World:
    """The caches and their indices.

    Attributes:
        pods: with the opt-in label.
        pods_by_run: the injected ones.
        nodes, policies, runs: by key; policies and runs that cannot be read are absent.
        reports: newest per run.
        evictions: answered and not yet recorded, per run and node.
        asks: the save that each run's lead should make now, as the clocks decided.
        saves_seen: value of `spec.saveRequest`, and UTC when this replica first saw it, per run.
        drained_since: UTC when this replica first saw a node drained.
        last_nodes: where a workload's completion index ran last, per run.
    """

    def __init__(self) -> None:
        """Knows nothing."""
        self.pods: dict[Key, PodRecord] = {}
        self.pods_by_run: defaultdict[Key, dict[Key, PodRecord]] = defaultdict(dict)
        self.nodes: dict[str, NodeRecord] = {}
        self.policies: dict[Key, PolicyRecord] = {}
        self.runs: dict[Key, RunRecord] = {}
        self.reports: dict[Key, TakenReport] = {}
        self.evictions: defaultdict[Key, dict[str, Eviction]] = defaultdict(dict)
        self.asks: dict[Key, SaveRequest] = {}
        self.saves_seen: dict[Key, tuple[str, datetime]] = {}
        self.drained_since: dict[str, datetime] = {}
        self.last_nodes: defaultdict[Key, dict[str, str]] = defaultdict(dict)
        self._stirred: set[Key] = set()
        self._wake = asyncio.Event()
        self._news: dict[Key, asyncio.Event] = {}

    def on_pod(self, change: Change[PodRecord]) -> None:
        """Takes a change of a watched pod."""
        for record in (change.old, change.new):
            if record is not None and record.run is not None:
                self.stir(record.run)
        moved_to = change.new.run if change.new is not None else None
        if change.old is not None and change.old.run not in (None, moved_to):
            self._forget_pod(change.old.run, change.key)
        if change.new is None:
            self.pods.pop(change.key, None)
            return
        pod = self.pods[change.key] = change.new
        if pod.run is not None:
            self.pods_by_run[pod.run][change.key] = pod
            if pod.place and pod.facts.node:
                self.last_nodes[pod.run][pod.place] = pod.facts.node

    def _forget_pod(self, run: Key, key: Key) -> None:
        pods = self.pods_by_run[run]
        pods.pop(key, None)
        if not pods:
            del self.pods_by_run[run]
            self.reports.pop(run, None)

    def on_node(self, change: Change[NodeRecord]) -> None:
        """Takes a change of a watched node."""
        name, node = change.key.name, change.new
        if node is None:
            self.nodes.pop(name, None)
        else:
            self.nodes[name] = node
        if node is not None and node.is_draining:
            self.drained_since.setdefault(name, datetime.now(UTC))
        else:
            self.drained_since.pop(name, None)
        for run, pods in self.pods_by_run.items():
            if any(pod.facts.node == name for pod in pods.values()):
                self.stir(run)

    def on_policy(self, change: Change[PolicyRecord | None]) -> None:
        """Takes a change of a watched policy; None stands for one that cannot be read."""
        if change.new is None:
            self.policies.pop(change.key, None)
        else:
            self.policies[change.key] = change.new
        for run in self.pods_by_run:
            if run.namespace == change.key.namespace:
                self.stir(run)
                self.tell(run)

    def on_run(self, change: Change[RunRecord | None]) -> None:
        """Takes a change of a watched run; None stands for one that cannot be read."""
        if change.new is not None:
            self.keep_run(change.key, change.new)
        else:
            self.runs.pop(change.key, None)
            self.saves_seen.pop(change.key, None)
            self.last_nodes.pop(change.key, None)
            self.asks.pop(change.key, None)
            self.evictions.pop(change.key, None)
        self.stir(change.key)

    def keep_run(self, key: Key, record: RunRecord) -> None:
        """Takes a run as watched, or as a write of ours answered it, whichever is newer."""
        known = self.runs.get(key)
        is_same = known is not None and known.run.metadata.uid == record.run.metadata.uid
        if known is not None and is_same and known.version > record.version:
            return
        self.runs[key] = record
        if self.saves_seen.get(key, ("",))[0] != record.save_value:
            self.saves_seen[key] = (record.save_value, datetime.now(UTC))
        entries = {drain.node for drain in record.drains}
        # What status now tells need not be remembered any more.
        for node in entries & self.evictions.get(key, {}).keys():
            if not self._is_exposed(record, node):
                self.forget_eviction(key, node)

    @staticmethod
    def _is_exposed(record: RunRecord, node: str) -> bool:
        return any(drain.node == node and drain.state == "Exposed" for drain in record.drains)

    def take_report(self, run: Key, report: Report, now: datetime) -> None:
        """Keeps a checked report."""
        self.reports[run] = TakenReport(report=report, received_at=now)
        self.stir(run)

    def take_eviction(self, run: Key, eviction: Eviction) -> None:
        """Remembers the first eviction of a node until it is recorded."""
        if eviction.node not in self.evictions[run]:
            self.evictions[run][eviction.node] = eviction
            self.stir(run)

    def forget_eviction(self, run: Key, node: str) -> None:
        """Drops an eviction that is recorded, or that nothing came of."""
        waiting = self.evictions.get(run, {})
        waiting.pop(node, None)
        if not waiting:
            self.evictions.pop(run, None)

    def set_ask(self, run: Key, ask: SaveRequest | None) -> None:
        """Keeps the save that a run's lead should make now; a new one ends its poll."""
        known = self.asks.get(run)
        if ask is None:
            self.asks.pop(run, None)
            return
        self.asks[run] = ask
        if known is None or known.request_id != ask.request_id:
            self.tell(run)

    def pods_of(self, run: Key) -> Mapping[Key, PodRecord]:
        """The injected pods of a run."""
        return self.pods_by_run.get(run, {})

    def stir(self, run: Key) -> None:
        """Has the clocks look at a run soon."""
        self._stirred.add(run)
        self._wake.set()

    def tell(self, run: Key) -> None:
        """Wakes whoever holds a poll of the run."""
        news = self._news.pop(run, None)
        if news is not None:
            news.set()

    def tell_all(self) -> None:
        """Wakes every held poll, as before a stop."""
        for run in tuple(self._news):
            self.tell(run)

    async def wait_news(self, run: Key, seconds: float) -> bool:
        """Waits for `tell`; False when the time is over first."""
        news = self._news.setdefault(run, asyncio.Event())
        try:
            await asyncio.wait_for(news.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def wait_stirred(self, seconds: float) -> None:
        """Waits until some run was stirred, at most so long."""
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except TimeoutError:
            return

    def take_stirred(self) -> set[Key]:
        """The runs that were stirred since the last call."""
        stirred, self._stirred = self._stirred, set()
        self._wake.clear()
        return stirred

    def restless_runs(self) -> Iterator[Key]:
        """Runs that time alone may move: drains, drained nodes, open requests."""
        for key, record in self.runs.items():
            if record.drains or record.save_value or key in self.evictions:
                yield key
                continue
            pods = self.pods_of(key).values()
            if self.drained_since and any(pod.facts.node in self.drained_since for pod in pods):
                yield key


def read_run(raw: dict[str, Any]) -> RunRecord | None:
    """`slim_run` for a watch, which must not fail; None for a run that cannot be read."""
    try:
        return slim_run(raw)
    except Reject as error:
        logger.warning("run cannot be read", extra={"error": str(error)})
        return None
