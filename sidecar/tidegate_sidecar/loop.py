"""One run on this node: observe, decide, apply, twice a second. I/O.

The only place that retries. Its thread touches the local tier alone; the remote one is a child's.
It remembers nothing that matters: killed at any byte, the next one starts from what lies on both
tiers.
"""

import logging
import random
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial

from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import CONTROL_DOCUMENT, Attempt
from tidegate_contract.wire import Report
from tidegate_sidecar.clocks import Clocks
from tidegate_sidecar.control import LiveControl
from tidegate_sidecar.decide import (
    Copy,
    Facts,
    Queued,
    decide_announcement,
    decide_commit,
    decide_copy,
    decide_interruption,
    decide_queue,
    find_lead,
    find_lineage,
    is_done,
    is_expected,
    look_interval_seconds,
)
from tidegate_sidecar.faults import Fault, Reason, Side, fault_of, unreadable
from tidegate_sidecar.health import Health
from tidegate_sidecar.local_writes import LocalWrites
from tidegate_sidecar.lock import FlushLock
from tidegate_sidecar.observe import LocalView, StepScanner, observe_local
from tidegate_sidecar.removal import do_each, empty_step, trash_step
from tidegate_sidecar.report import Reporter, Speaker, build_report
from tidegate_sidecar.retention import (
    RemotePlan,
    decide_local_retention,
    decide_remote_retention,
    is_restoring,
)
from tidegate_sidecar.settings import Settings
from tidegate_sidecar.tasks import (
    Announce,
    CommitNow,
    CopyRanks,
    Lane,
    Look,
    Places,
    Retain,
    Task,
)
from tidegate_sidecar.trouble import Troubles
from tidegate_sidecar.view import RemoteView, StepView
from tidegate_sidecar.workers import Outcome, Workers

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
_RETAIN_SECONDS = 5.0
_LAST_REPORT_SECONDS = 3.0
LINGER_SECONDS = 10.0
"""How long a finishing lead waits for other nodes' receipts, so that it can still tell the gate."""


class Beat(StrEnum):
    """How a beat ended."""

    ON = "On"
    DONE = "Done"
    RUN_CHANGED = "RunChanged"


class Loop:
    """Flushes one run until told to finish and done; one thread."""

    def __init__(
        self, settings: Settings, run: Folder, identity: RunIdentity, health: Health
    ) -> None:
        """Starts the reporter, if there is a gate; no child yet.

        Args:
            settings: of this process.
            run: the run's folder on this node; stays the caller's.
            identity: what lies in it.
            health: where the loop tells how it is.
        """
        self._settings = settings
        self._run = run
        self._identity = identity
        self._health = health
        self._wake = threading.Event()
        self._lock = FlushLock(run)
        self._scanner = StepScanner(run, identity.run_id, trusts_times=True)
        self._workers = Workers(
            Places(
                local=str(settings.local),
                remote_root=str(settings.remote_root),
                remote=settings.remote,
                identity=identity,
                may_create=settings.may_create,
            ),
            self._wake.set,
        )
        self._control: LiveControl | None = None
        self._reporter = Reporter(settings.gate, self._wake.set) if settings.gate else None
        if self._reporter is not None:
            self._reporter.start()
        self._local: tuple[StepView, ...] = ()
        self._remote: RemoteView | None = None
        self._troubles = Troubles()
        self._writes = LocalWrites()
        self._clocks = Clocks()
        self._report: Report | None = None
        self._copying: Copy | None = None
        self.is_finishing = False

    @property
    def holds_lock(self) -> bool:
        """This process is the node's flusher."""
        return self._lock.is_held

    @property
    def remote(self) -> RemoteView | None:
        """The remote tier as it was last seen."""
        return self._remote

    @property
    def reached(self) -> tuple[object, ...]:
        """Changes whenever bytes or steps reach the remote tier."""
        return (self._workers.written_bytes(Lane.COPY), self._remote and self._remote.steps)

    @property
    def local(self) -> tuple[StepView, ...]:
        """The step folders of this node as they were last seen, by step."""
        return self._local

    @property
    def troubles(self) -> Troubles:
        """What fails now."""
        return self._troubles

    @property
    def child_pid(self) -> int | None:
        """Of the process that touches the remote tier; None while there is none."""
        return self._workers.pid

    def wait(self) -> None:
        """Until the next beat is due, or there is news."""
        self._wake.wait(BEAT_SECONDS)
        self._wake.clear()

    def close(self) -> None:
        """Gives the last word to the gate, ends the child and frees the lock."""
        if self._reporter is not None:
            self._reporter.finish(self._report, _LAST_REPORT_SECONDS)
        self._workers.close()
        self._lock.release()

    def beat(self) -> Beat:
        """One pass.

        Raises:
            OSError: the local tier failed.
            TidegateError: the local `run.json` is damaged.
        """
        now = time.monotonic()
        local = observe_local(self._run, self._scanner)
        if local.identity is None or local.identity.run_id != self._identity.run_id:
            return Beat.RUN_CHANGED
        control = self._control = self._control or LiveControl(self._settings.policy, local.control)
        self._lock.try_take()
        for outcome in self._workers.collect(control.policy.stall_timeout_seconds):
            self._take(outcome, now)
        reply = self._reporter.take() if self._reporter else None
        if reply is not None:
            control.take_reply(reply)
        self._local = local.steps
        facts = self._facts(local, control, now)
        if not facts.is_lead:
            control.follow(local.control)
        queue = decide_queue(facts)
        self._start_copy(facts, queue, now)
        self._start_look(facts, queue, now)
        if facts.holds_lock and not self._settings.is_single_pass:
            tidy = partial(self._retain_local, local, facts)
            self._writes.attempt("removal of old steps", tidy, now)
        if self._tells_trainer(facts):
            is_full = local.used_percent >= control.policy.high_watermark_percent
            is_late = is_full and bool(queue)
            tell = partial(control.write, self._run, local.control, is_backlogged=is_late)
            self._writes.attempt(CONTROL_DOCUMENT, tell, now)
        self._tell(local, control, facts, queue)
        return Beat.DONE if self._may_end(facts, queue, now) else Beat.ON

    def _facts(self, local: LocalView, control: LiveControl, now: float) -> Facts:
        lead = find_lead(local.states)
        return Facts(
            policy=control.policy,
            local=local.steps,
            states=local.states,
            remote=self._remote,
            holds_lock=self._lock.is_held,
            is_lead=lead is not None and lead.pod_uid == self._settings.pod_uid,
            is_finishing=self.is_finishing,
            refused=self._troubles.refused(now),
            complete_seconds=self._clocks.complete_seconds(now),
            waited_seconds=now - self._clocks.received_at,
        )

    def _take(self, outcome: Outcome, now: float) -> None:
        kind = type(outcome.task)
        if outcome.fault is not None:
            self._take_fault(outcome.task, outcome.fault, now)
        elif not outcome.is_cancelled:
            self._troubles.succeed(kind)
        if outcome.view is not None:
            self._see(outcome.view, now - outcome.seconds, now)
        if isinstance(outcome.task, CopyRanks):
            self._clocks.end_copy(outcome.task.attempt, now)
            self._health.metrics.flushed.inc(outcome.copied_bytes)
            if outcome.fault is None and not outcome.is_cancelled:
                self._health.metrics.flush_seconds.observe(outcome.seconds)
                self._log("copied", outcome.task.attempt, seconds=round(outcome.seconds, 3))

    def _see(self, view: RemoteView, began: float, now: float) -> None:
        old = self._remote.newest if self._remote else None
        self._remote = view
        self._clocks.see(view, began, now)
        if view.newest is not None and (old is None or old.attempt != view.newest.attempt):
            self._health.metrics.commits.inc()
            self._log("durable", view.newest.attempt)

    def _take_fault(self, task: Task, fault: Fault, now: float) -> None:
        attempt: Attempt | None = getattr(task, "attempt", None)
        if fault.side is Side.REMOTE or attempt is None:
            fault = fault if fault.side is Side.REMOTE else unreadable(fault.message)
            self._health.metrics.remote_failures.inc()
            trouble = self._troubles.fail(type(task), fault, now, random.random())
            if trouble.failures == 1:
                told = {"reason": fault.reason, "error": fault.message}
                logger.warning("the remote tier fails", extra={"run": self._identity.name, **told})
            if fault.reason is Reason.STALLED:
                self._workers.give_up()  # handles may be stale: all are closed with the child
            return
        logger.error("an attempt fails", extra={"attempt": str(attempt), "error": fault.message})
        self._troubles.refuse(attempt, now)
        if fault.damaged_file is not None:
            self._health.metrics.verify_failures.inc()

    def _start_copy(self, facts: Facts, queue: tuple[Queued, ...], now: float) -> None:
        if self._workers.running(Lane.COPY) is not None:
            if self._copying and decide_interruption(facts, queue, self._copying):
                self._workers.cancel_copy()
            return
        copy = decide_copy(facts, queue)
        if not isinstance(copy, Copy) or copy.attempt == self._clocks.unseen:
            return
        task = CopyRanks(
            attempt=copy.attempt,
            ranks=copy.ranks,
            bytes_per_second=facts.policy.bandwidth_bytes_per_second,
            files_at_once=facts.policy.files_per_node,
        )
        if self._start(Lane.COPY, task, now):
            self._copying = copy

    def _start_look(self, facts: Facts, queue: tuple[Queued, ...], now: float) -> None:
        tasks = self._look_tasks(facts, queue, now)
        copying = {CopyRanks} if any(item.missing for item in queue) else set()
        self._troubles.keep({Look} | copying | {type(task) for task in tasks})
        if now - self._clocks.looked_at >= look_interval_seconds(facts, queue):
            tasks.append(Look())
        for task in tasks:
            if self._start(Lane.LOOK, task, now):
                return

    def _look_tasks(self, facts: Facts, queue: tuple[Queued, ...], now: float) -> list[Task]:
        tasks: list[Task] = []
        announcement = decide_announcement(facts, queue)
        if announcement is not None:
            tasks.append(Announce(attempt=announcement.attempt, ranks=announcement.ranks))
        commit = decide_commit(facts)
        if commit is not None:
            tasks.append(CommitNow(attempt=commit, now=datetime.now(UTC)))
        plan = self._retention_plan(facts, now)
        if plan is not None:
            tasks.append(Retain(plan=plan))
        return tasks

    def _retention_plan(self, facts: Facts, now: float) -> RemotePlan | None:
        """What the lead tidies now; one step is emptied at a time, so that commits get through."""
        if not facts.is_lead or facts.remote is None or facts.is_finishing:
            return None
        is_early = now - self._clocks.retained_at < _RETAIN_SECONDS
        if is_early or is_restoring(facts.states, self._settings.pod_uid):
            return None
        plan = decide_remote_retention(facts.remote, facts.policy.remote_keep)
        return replace(plan, is_gradual=True) if plan.is_needed else None

    def _start(self, lane: Lane, task: Task, now: float) -> bool:
        if not self._workers.can_start(lane) or not self._troubles.may_start(type(task), now):
            return False
        try:
            self._workers.start(lane, task)
        except OSError as error:  # no process to be had: the loop goes on and tries again
            self._take_fault(task, fault_of(error), now)
            return False
        if isinstance(task, Retain):
            self._clocks.retained_at = now
        return True

    def _retain_local(self, local: LocalView, facts: Facts) -> None:
        if local.is_remote or is_restoring(facts.states, self._settings.pod_uid):
            return
        copying = self._copying if self._workers.running(Lane.COPY) else None
        busy = copying.attempt if copying else None
        keep, lineage = facts.policy.local_keep, find_lineage(facts.states)
        gone = decide_local_retention(facts.local, facts.remote, keep=keep, lineage=lineage)
        do_each(
            [
                *(partial(empty_step, self._run, attempt) for attempt in local.trash),
                *(partial(self._remove, attempt) for attempt in gone if attempt != busy),
            ]
        )

    def _remove(self, attempt: Attempt) -> None:
        trash_step(self._run, attempt)
        empty_step(self._run, attempt)
        self._log("local copy removed", attempt)

    def _tell(
        self, local: LocalView, control: LiveControl, facts: Facts, queue: tuple[Queued, ...]
    ) -> None:
        written = self._workers.written_bytes(Lane.COPY)
        who = Speaker(
            settings=self._settings, run_id=self._identity.run_id, request_id=control.request_id
        )
        report = build_report(who, facts, queue, written, self._troubles.worst)
        self._report = report if facts.is_lead else None
        if self._reporter is not None:
            self._reporter.offer(self._report)
        metrics = self._health.metrics
        metrics.show(report, datetime.now(UTC))
        metrics.local_used.set(local.used_percent / 100)
        metrics.holds_lock.set(facts.holds_lock)
        metrics.leaked.set(self._workers.leaked)
        self._health.beat(
            phase="Finishing" if self.is_finishing else "Flushing",
            run=self._identity.name,
            flusher=facts.holds_lock,
            lead=facts.is_lead,
            backlog_steps=report.backlog.steps,
            remote=report.remote_reason,
            message=report.remote_message,
            local=self._writes.message,
        )

    def _tells_trainer(self, facts: Facts) -> bool:
        is_alone = self._settings.gate is None and facts.holds_lock
        return (facts.is_lead or is_alone) and not self._settings.is_single_pass

    def _may_end(self, facts: Facts, queue: tuple[Queued, ...], now: float) -> bool:
        if not self.is_finishing:
            return False
        if self._clocks.finishing_at is None:
            self._clocks.finishing_at = now
        is_busy = any(not isinstance(self._workers.running(lane), Look | None) for lane in Lane)
        if is_busy:
            return False
        if self._troubles.is_lasting:
            return True
        if not is_done(facts, queue):
            return False
        waits_for_others = (
            facts.is_lead and self._reporter is not None and is_expected(facts, queue)
        )
        return not waits_for_others or now - self._clocks.finishing_at >= LINGER_SECONDS

    def _log(self, message: str, attempt: Attempt, **fields: object) -> None:
        logger.info(
            message,
            extra={
                "run": self._identity.name,
                "step": attempt.step,
                "nonce": attempt.nonce,
                **fields,
            },
        )
