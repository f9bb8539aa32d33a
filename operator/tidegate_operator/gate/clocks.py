"""The hold's clocks: observe a run, decide by `gate.hold`, apply.

A pass is made over each run that something stirred, and each second over those that time moves.
Order within a pass matters. The report goes to status first, so that a durable step stands there
before anything is released for it; then `drains`, conditional on the version read, so that a stale
replica changes nothing; then the labels, so that a release that was not written frees nobody. A
pass that fails is simply made again.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from tidegate_contract import keys
from tidegate_contract.errors import Reject, TidegateError
from tidegate_contract.keys import DrainState, ReleaseReason
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.gate.facts import RunFacts
from tidegate_operator.gate.hold import Decision, LabelChange, Transition, decide
from tidegate_operator.gate.injected import MARKS
from tidegate_operator.gate.metrics import Metrics
from tidegate_operator.gate.observe import observe_run
from tidegate_operator.gate.records import PodRecord, RunRecord, build_drains, slim_run
from tidegate_operator.gate.report_status import build_report_status, is_write_due
from tidegate_operator.gate.world import World
from tidegate_operator.kube.apply import apply_status
from tidegate_operator.kube.backoff import Backoff
from tidegate_operator.kube.client import Client
from tidegate_operator.kube.errors import Conflict, NotFound
from tidegate_operator.kube.events import Event, EventType, Recorder
from tidegate_operator.kube.kinds import PODS, RUNS, Key
from tidegate_operator.settings import DrainSettings

REPORT_MANAGER = "tidegate-gate"
DRAIN_MANAGER = "tidegate-gate-drain"
TICK_SECONDS = 1.0
MOST_AT_ONCE = 32
RETRY = Backoff(first_seconds=0.25, longest_seconds=15.0)

_LOUD = frozenset(
    {ReleaseReason.DEADLINE_EXCEEDED, ReleaseReason.SILENT, ReleaseReason.SAVE_FAILED}
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """A run whose pass failed: how often in a row, why, and when it is tried again."""

    count: int
    sentence: str
    retry_at: float


class Clocks:
    """Moves the holds of all runs; one event loop, one pass per run at a time."""

    def __init__(
        self,
        client: Client,
        world: World,
        settings: DrainSettings,
        recorder: Recorder,
        metrics: Metrics,
    ) -> None:
        """Looks at nothing yet; `run` does.

        Args:
            client: of the API server.
            world: the caches, synced before `run` begins.
            settings: bounds of the installation.
            recorder: tells people what changed.
            metrics: counts.
        """
        self._client = client
        self._world = world
        self._settings = settings
        self._recorder = recorder
        self._metrics = metrics
        self._report_writes: dict[Key, datetime] = {}
        self._failures: dict[Key, _Failure] = {}
        self._moving: set[Key] = set()
        self._stirred_meanwhile: set[Key] = set()
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)

    async def run(self) -> None:
        """Passes over runs until cancelled."""
        loop = asyncio.get_running_loop()
        next_tick = loop.time()
        async with asyncio.TaskGroup() as passes:
            while True:
                due = self._world.take_stirred()
                if loop.time() >= next_tick:
                    next_tick = loop.time() + TICK_SECONDS
                    due |= {*self._world.restless_runs(), *self._failures}
                self._stirred_meanwhile |= due & self._moving
                for key in due - self._moving:
                    self._moving.add(key)
                    passes.create_task(self._move(key))
                await self._world.wait_stirred(max(next_tick - loop.time(), 0.0))

    async def _move(self, key: Key) -> None:
        try:
            async with self._slots:
                await self.pass_over(key)
        finally:
            self._moving.discard(key)
            if key in self._stirred_meanwhile:
                self._stirred_meanwhile.discard(key)
                self._world.stir(key)

    async def pass_over(self, key: Key) -> None:
        """One pass over one run; never raises, a failed one is made again later."""
        failure, now = self._failures.get(key), asyncio.get_running_loop().time()
        if failure is not None and now < failure.retry_at:
            return
        try:
            await self._pass(key)
        except Conflict:
            # Somebody wrote in between: the watch brings their version and stirs the run.
            logger.debug("run changed in between", extra=_names(key))
        except TidegateError as error:
            self._failed(key, str(error), now)
        except Exception as error:  # one run's trouble must not stop all clocks
            logger.exception("pass over run broke", extra=_names(key))
            self._failed(key, type(error).__name__, now)
        else:
            self._failures.pop(key, None)

    def _failed(self, key: Key, sentence: str, now: float) -> None:
        known = self._failures.get(key)
        count = known.count + 1 if known else 1
        if known is None or known.sentence != sentence:
            logger.warning("pass over run failed", extra={**_names(key), "error": sentence})
        self._metrics.failed_passes.inc()
        retry_at = now + RETRY.delay(count)
        self._failures[key] = _Failure(count=count, sentence=sentence, retry_at=retry_at)

    async def _pass(self, key: Key) -> None:
        record, now = self._world.runs.get(key), datetime.now(UTC)
        if record is None:
            self._forget(key)
            return
        await self._write_report(key, record, now)
        facts = observe_run(self._world, self._settings, key, now)
        if facts is None:
            return
        decision = decide(facts, now)
        self._world.set_ask(key, decision.ask)
        if decision.drains != facts.drains:
            await self._write_drains(key, decision)
        try:
            await self._label(key, decision.labels)
        finally:
            await self._tell(key, decision.transitions)
        self._drop_idle_evictions(key, facts)

    def _forget(self, key: Key) -> None:
        self._world.set_ask(key, None)
        self._report_writes.pop(key, None)
        self._failures.pop(key, None)

    def _drop_idle_evictions(self, key: Key, facts: RunFacts) -> None:
        """Drops evictions of a run that is not enforced, or of pods that have left."""
        for node in facts.evictions:
            if facts.mode is not DrainMode.ENFORCE or not facts.stays_on(node):
                self._world.forget_eviction(key, node)

    async def _write_report(self, key: Key, record: RunRecord, now: datetime) -> None:
        taken = self._world.reports.get(key)
        if taken is None:
            return
        run = record.run
        told = run.status.last_report_time
        # The lead may have moved to the other replica, which has newer reports than this one. A
        # time in the future is a wrong clock, not a newer report.
        if told is not None and taken.received_at <= told <= now:
            return
        wanted = build_report_status(
            taken.report, run.status, run.spec.save_request or "", taken.received_at
        )
        observed = record.observed["status"]
        if not is_write_due(observed, wanted, self._report_writes.get(key), now):
            return
        raw = await apply_status(
            self._client, RUNS, record.observed, wanted, manager=REPORT_MANAGER
        )
        self._report_writes[key] = now
        self._keep(key, raw)

    async def _write_drains(self, key: Key, decision: Decision) -> None:
        record = self._world.runs[key]
        drains = build_drains(decision.drains)
        raw = await apply_status(
            self._client,
            RUNS,
            record.observed,
            {"drains": drains} if drains else {},
            manager=DRAIN_MANAGER,
            is_conditional=True,
        )
        self._keep(key, raw)

    def _keep(self, key: Key, raw: dict[str, object]) -> None:
        try:
            self._world.keep_run(key, slim_run(raw))
        except Reject as error:
            logger.warning("run cannot be read", extra={**_names(key), "error": str(error)})

    async def _tell(self, key: Key, transitions: tuple[Transition, ...]) -> None:
        for change in transitions:
            state = change.new or "Held"
            fields = {
                **_names(key),
                "node": change.node,
                "state": state,
                "reason": change.reason,
                "sentence": change.message,
            }
            logger.info("drain moved", extra=fields)
            self._metrics.transitions.labels(state, change.reason).inc()
            is_loud = change.new is DrainState.RELEASED and change.reason in _LOUD
            event = Event(
                type=EventType.WARNING if is_loud else EventType.NORMAL,
                reason=change.reason,
                action=f"Drain{state}",
                note=f"node {change.node}: {state}: {change.message}",
            )
            await self._recorder.record(RUNS, self._world.runs[key].observed, event)

    async def _label(self, key: Key, changes: tuple[LabelChange, ...]) -> None:
        pods = {pod.facts.uid: pod for pod in self._world.pods_of(key).values()}
        for change in changes:
            if change.uid in pods:
                await self._label_one(pods[change.uid], change)

    async def _label_one(self, pod: PodRecord, change: LabelChange) -> None:
        body = build_label_patch(pod, is_held=change.hold)
        try:
            await self._client.patch(PODS.path(pod.key.namespace, pod.key.name), body)
        except (NotFound, Conflict):
            # Gone, or another pod of that name: the watch tells.
            return
        logger.info(
            "hold label changed",
            extra={"namespace": pod.key.namespace, "pod": pod.key.name, "is_held": change.hold},
        )


def build_label_patch(pod: PodRecord, *, is_held: bool) -> Mapping[str, object]:
    """The merge patch that sets or lifts a pod's hold, with the marks that the gate itself set."""
    marks = pod.injected.marks if pod.injected else ()
    metadata: dict[str, object] = {
        "uid": pod.facts.uid,
        "labels": {keys.HOLD_LABEL: keys.HOLD_VALUE if is_held else None},
    }
    if marks:
        metadata["annotations"] = {mark: MARKS[mark] if is_held else None for mark in marks}
    return {"metadata": metadata}


def _names(key: Key) -> dict[str, str]:
    return {"namespace": key.namespace, "run": key.name}
