"""`Checkpointer`: what a user adds to a training loop, on every rank, in the main thread."""

import logging
import os
import threading
import time
from collections.abc import MutableMapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tidegate.agreement import AgreementLost
from tidegate.child import FlushChild
from tidegate.course import Course
from tidegate.observe import is_durable, note_trained_behind
from tidegate.ranks import Ranks
from tidegate.report import Reporter
from tidegate.restore import Outcome, Restore, Restored
from tidegate.settings import Arguments, Options, Settings, resolve_settings
from tidegate.signals import Termination, leave
from tidegate.site import Site, open_site
from tidegate.state import TrainingState
from tidegate_contract.cadence import Cadence, Progress
from tidegate_contract.errors import Reject, TidegateError
from tidegate_contract.layout import Attempt
from tidegate_contract.seal import SaveReason
from tidegate_contract.wire import Phase, RestoreNote, StepNote, TrainerState

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
_NOTE_SECONDS = 2.0
"""How long the end waits for the word that this restore came back to training."""


class Checkpointer:
    """Saves and restores one training run.

    Made on every rank after `init_process_group`; all methods but `add_tokens` are collective:
    every rank calls them in the same order, from its main thread. As a context manager it closes
    itself when the block ends without an exception.

    In a pod that Tidegate injected, its environment wins over `run`, `local`, `remote` and
    `cadence`; that is logged once. Without a sidecar and with a remote tier, each node's first rank
    starts the flusher as its own child.

    Args:
        state: name → Module, Optimizer, anything with `state_dict` and `load_state_dict`, a
            `(get, set)` pair of functions, or a plain value. Plain values are read from this
            mapping at each save and written back into it by `restore`.
        rank_state: the same for what differs between ranks, such as data loaders.
        run: NAME or NAMESPACE/NAME; the same name resumes.
        local: folder on this node's own disk; made where missing.
        remote: folder on the file system that all nodes share; must exist. None keeps saves on the
            nodes, where nothing deletes older ones.
        cadence: when to save; a number means tokens.
        options: what is seldom changed.
    """

    def __init__(  # noqa: PLR0913  # the one call that a user writes
        self,
        state: MutableMapping[str, Any],
        *,
        rank_state: MutableMapping[str, Any] | None = None,
        run: str | None = None,
        local: str | os.PathLike[str] | None = None,
        remote: str | os.PathLike[str] | None = None,
        cadence: Cadence | int | None = None,
        options: Options | None = None,
    ) -> None:
        """Opens the run's folders and agrees with the other ranks on what the run is.

        Raises:
            Reject: a name or a value is not allowed, or the run belongs to another owner.
            Retry, Corrupt: a tier cannot be used, or a document of the run is damaged.
        """
        given = Arguments(
            run=run, local=_absolute(local), remote=_absolute(remote), cadence=cadence
        )
        settings = _resolve(given, options or Options())
        self._ranks = _join(settings)
        self._state = TrainingState(
            state,
            rank_state,
            rank=self._ranks.rank,
            keeps_rng=settings.options.keeps_rng,
            on_world_change=settings.options.on_world_change,
        )
        self._site = open_site(settings, self._ranks)
        self._reporter = Reporter(self._site.local, _first_state(self._site, self._ranks))
        self._termination = Termination()
        parts = (self._site, self._ranks, self._state, self._reporter, self._termination)
        self._course = Course(*parts)
        self._is_started = self._is_closed = False
        self._untold: Outcome | None = None
        self._telling: threading.Thread | None = None
        self._termination.install()
        self._reporter.start()
        self._child = self._start_child()

    def restore(self, step: int | None = None) -> Restored | None:
        """Restores the newest step that all ranks can read; call it once, before the first step.

        Optimizers may be initialised by it only if there is something to restore. After an error
        the embedded flusher is ended; another call starts it again.

        Args:
            step: this one or none; the same on all ranks. Later starts go on from it, unnamed.

        Returns:
            What training goes on from, or None for a fresh start.

        Raises:
            Reject: checkpoints exist and none can be restored, or not the named one; or the number
                of ranks changed and rank state has no rule. The user must decide.
            Retry: the remote tier cannot be read.
        """
        if self._is_started:
            raise Reject("restore: called twice, or after the first step")
        begun = time.monotonic()
        self._child = self._child or self._start_child()
        self._reporter.update(phase=Phase.RESTORING)
        try:
            outcome = Restore(self._site, self._ranks, self._state, step).run()
        except BaseException:
            self._stop_child()
            raise
        self._take_outcome(outcome, time.monotonic() - begun)
        self._is_started = True
        found = outcome.candidate
        if found is None:
            return None
        self._untold = outcome
        return Restored(
            step=found.attempt.step,
            tokens=found.tokens,
            tier=outcome.tier or "",
            lineage=outcome.lineage,
            reason=outcome.reason,
        )

    def add_tokens(self, tokens: int) -> None:
        """Counts tokens of a micro-batch; not collective.

        Args:
            tokens: that this rank consumed.
        """
        self._course.add_tokens(tokens)

    def step(self, tokens: int = 0) -> None:
        """Ends one optimizer step: counts, and saves when it is due. Once per optimizer step.

        When it returns, a save that it began owns a copy of the state. An error of a save never
        reaches the caller unless the policy says so.

        Args:
            tokens: that this rank consumed in the step, beside those of `add_tokens`.

        Raises:
            SystemExit: 143, on all ranks at the same step, after a rank got SIGTERM.
            SavesFailed: the policy ends training after so many failed saves in a row.
        """
        self._require_started("step")
        self._course.add_tokens(tokens)
        try:
            goes_on = self._course.advance()
        except AgreementLost as error:
            self._end_saving(error)
            goes_on = not self._termination.is_asked
        self._tell_trained()
        if not goes_on:
            self._stop()

    def save(self, reason: str = "") -> bool:
        """Saves the current step now, whatever the cadence says; the writing goes on behind.

        Args:
            reason: for the log.

        Returns:
            False if the ranks refused it: they are at different steps, or no slot came free.

        Raises:
            AgreementLost: a rank is gone.
        """
        self._require_started("save")
        _LOG.info("save asked", extra={"why": reason})
        return self._course.save_now(SaveReason.CALL)

    def wait(self, until: Literal["sealed", "durable"] = "sealed") -> bool:
        """Waits until every save that was begun is safe.

        Args:
            until: `sealed` on the nodes' disks, or `durable` on the remote tier.

        Returns:
            False if the newest save failed to get there in time; True if none was begun.

        Raises:
            AgreementLost: a rank is gone.
            Reject: `durable` without a remote tier.
        """
        self._require_started("wait")
        if until == "durable" and self._site.settings.remote is None:
            raise Reject("wait: 'durable' needs a remote tier; allowed here is 'sealed'")
        self._course.drain()
        if self._course.sealed is None:
            return self._reporter.state.saves.total == 0
        return until == "sealed" or self._await_durable_together()

    def close(self) -> None:
        """Saves what is not saved, waits until it is sealed, and reports the end.

        With the embedded flusher it also waits until the newest save is durable, as nobody else
        would finish the copy. All waits have deadlines. A second call does nothing.
        """
        if self._is_closed:
            return
        is_together = False
        if self._is_started:
            try:
                is_together = self._course.close()
            except AgreementLost as error:
                self._end_saving(error)
        self._finish(is_together=is_together)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes after a whole block; after an exception it only leaves, and posts nothing."""
        if kind is None:
            self.close()
        elif not self._is_closed:
            self._release()

    def _tell_trained(self) -> None:
        """After the first step: the restored step can be trained from, whatever happens next."""
        told, self._untold = self._untold, None
        if told is not None:
            self._telling = note_trained_behind(
                self._site, told.claim, is_remote=told.is_remote_claim
            )

    def _require_started(self, call: str) -> None:
        if not self._is_started or self._is_closed:
            raise Reject(f"{call}: allowed between restore() and close()")

    def _start_child(self) -> FlushChild | None:
        settings = self._site.settings
        is_needed = settings.remote is not None and not settings.has_sidecar
        return FlushChild(settings) if is_needed and self._site.is_first_of_node else None

    def _take_outcome(self, outcome: Outcome, seconds: float) -> None:
        found = outcome.candidate
        sealed = None
        progress = Progress(step=0, tokens=0)
        if found is not None:
            progress = Progress(step=found.attempt.step, tokens=found.tokens)
            sealed = StepNote(
                step=progress.step,
                tokens=progress.tokens,
                at=outcome.sealed_at or datetime.now(UTC),
                attempt=found.attempt,
            )
        note = RestoreNote(
            attempt=found.attempt if found is not None else None,
            tier=outcome.tier,
            reason=outcome.reason,
            lineage=outcome.lineage,
            seconds=seconds,
            bytes_local=outcome.bytes_local,
            bytes_remote=outcome.bytes_remote,
            at=datetime.now(UTC),
        )
        self._course.start(progress, outcome.lineage, sealed)
        self._reporter.update(
            phase=Phase.TRAINING,
            restore=note,
            sealed=sealed,
            progress=StepNote(step=progress.step, tokens=progress.tokens, at=note.at),
        )
        _LOG.info("restored", extra={"step": progress.step, "tier": note.tier, "why": note.reason})

    def _stop(self) -> None:
        self._reporter.update(phase=Phase.STOPPING)
        is_together = not self._course.is_over
        try:
            self._course.finish_stop()
        except AgreementLost as error:
            self._end_saving(error)
            is_together = False
        self._finish(is_together=is_together)
        leave()

    def _end_saving(self, error: AgreementLost) -> None:
        _LOG.error("saving has ended, training goes on", extra={"why": str(error)})
        self._course.is_over = True

    def _finish(self, *, is_together: bool) -> None:
        if not self._site.settings.has_sidecar and self._site.settings.remote is not None:
            try:
                if is_together:
                    self._await_durable_together()
                elif self._site.is_first_of_node:
                    self._await_durable()
            except AgreementLost as error:
                _LOG.warning("a rank left early", extra={"why": str(error)})
        self._reporter.update(phase=Phase.FINISHED)
        self._release()
        if is_together:
            self._ranks.close()

    def _release(self) -> None:
        self._is_closed = True
        if self._telling is not None:
            self._telling.join(_NOTE_SECONDS)
        self._reporter.stop()
        self._course.end()
        self._termination.uninstall()
        self._stop_child()

    def _stop_child(self) -> None:
        if self._child is not None:
            self._child.stop()
        self._child = None

    def _await_durable_together(self) -> bool:
        """Rank 0 asks the remote tier, the others wait for its word: all leave together."""
        is_lead = self._ranks.rank == 0
        return self._ranks.attempt(lambda: self._await_durable() if is_lead else True)[0]

    def _await_durable(self) -> bool:
        sealed = self._course.sealed
        if sealed is None or sealed.attempt is None:
            return False
        until = time.monotonic() + self._site.settings.options.durable_timeout.total_seconds()
        while not self._is_durable(sealed.attempt):
            has_flusher = self._child is None or self._child.exit_code is None
            if time.monotonic() > until or not has_flusher:
                _LOG.error("newest save is not durable", extra={"step": sealed.step})
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _is_durable(self, attempt: Attempt) -> bool:
        try:
            return is_durable(self._site, attempt)
        except (OSError, TidegateError) as error:
            _LOG.warning("remote tier not read", extra={"error": str(error)})
            return False


def _absolute(path: str | os.PathLike[str] | None) -> Path | None:
    return None if path is None else Path(path).absolute()


def _resolve(given: Arguments, options: Options) -> Settings:
    settings = resolve_settings(given, options, os.environ)
    if settings.overruled:
        _LOG.info("environment wins", extra={"arguments": settings.overruled})
    return settings


def _join(settings: Settings) -> Ranks:
    policy = settings.policy
    # The longest that one rank may work for all of them in one call.
    work = timedelta(seconds=policy.restore_timeout_seconds + policy.wait_for_flush_seconds)
    longest = max(settings.options.agreement_timeout, settings.options.durable_timeout) + work
    save_timeout = timedelta(seconds=policy.save_timeout_seconds)
    return Ranks(timeout=longest, save_timeout=save_timeout)


def _first_state(site: Site, ranks: Ranks) -> TrainerState:
    now = datetime.now(UTC)
    return TrainerState(
        run_id=site.identity.run_id,
        rank=ranks.rank,
        world_size=ranks.world_size,
        pod_uid=site.settings.pod_uid,
        phase=Phase.STARTING,
        progress=StepNote(step=0, tokens=0, at=now),
        written_at=now,
    )
