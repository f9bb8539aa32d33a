"""The course of one training: counts, saves, requests, stop and close, agreed by all ranks.

Everything that all ranks must do alike happens here and follows from the agreement's sums. Main
thread only; `Checkpointer` calls it and turns its ends into what the user's program sees.
"""

import logging
import threading
import time
from datetime import UTC, datetime, timedelta

from tidegate.agreement import (
    Agreement,
    AgreementLost,
    Message,
    Refusal,
    Standing,
    Total,
    Wish,
    decide_refusal,
    decide_wish,
)
from tidegate.answers import Answers
from tidegate.lead import Lead
from tidegate.outcomes import Outcomes
from tidegate.pace import Pace
from tidegate.ranks import Ranks
from tidegate.report import Reporter
from tidegate.saves import Save, Saves, Stage
from tidegate.signals import Termination
from tidegate.site import Site
from tidegate.state import TrainingState
from tidegate.writer import Ticket, build_desk
from tidegate_contract.cadence import Progress
from tidegate_contract.document import decode
from tidegate_contract.layout import Attempt
from tidegate_contract.seal import SaveReason
from tidegate_contract.wire import (
    OnBusy,
    OnFailure,
    Policy,
    StepNote,
)

_LOG = logging.getLogger(__name__)
_PAUSE_SECONDS = 10.0


def _start_saves(site: Site, ranks: Ranks, state: TrainingState) -> Saves:
    return Saves(
        build_desk(site, state.part_of),
        ranks.save_group,
        slots=site.settings.options.slots,
        timeout_seconds=site.settings.policy.save_timeout_seconds,
    )


class Course:
    """One rank's part in it."""

    def __init__(
        self,
        site: Site,
        ranks: Ranks,
        state: TrainingState,
        reporter: Reporter,
        termination: Termination,
    ) -> None:
        """Starts the writer thread; nothing is posted before the first `advance`."""
        self._run = site.identity.name
        self._ranks = ranks
        self._state = state
        self._reporter = reporter
        self._termination = termination
        self._policy = site.settings.policy
        self._agreement = Agreement(
            ranks.agreement_group, ranks.world_size, site.settings.options.agreement_timeout
        )
        self._saves = _start_saves(site, ranks, state)
        self._lead = Lead(site, reporter) if site.rank == 0 else None
        self._total: Total | None = None
        self._progress = Progress(step=0, tokens=0)
        self._step = 0
        self._tokens = 0
        self._lineage = 0
        self._saved_step = 0
        self._is_warm = False
        self._wish = Wish()
        self._is_closing = False
        self._answers = Answers(reporter)
        self._outcomes = Outcomes(reporter)
        self._pace = Pace()
        self.sealed: StepNote | None = None
        self.is_over = False

    def start(self, progress: Progress, lineage: int, sealed: StepNote | None) -> None:
        """Sets what the restore found; called once, before the first `advance`."""
        self._progress = progress
        self._step = self._saved_step = progress.step
        self._lineage = lineage
        self.sealed = sealed
        if self._lead is not None:
            self._lead.start()

    def add_tokens(self, tokens: int) -> None:
        """Counts tokens of this rank since its last message."""
        self._tokens += tokens

    def advance(self) -> bool:
        """Ends one optimizer step.

        Returns:
            False if all ranks stop here because one was asked to terminate.

        Raises:
            AgreementLost: a rank's message did not come.
            SavesFailed: the policy ends training after so many failures.
        """
        self._step += 1
        if self.is_over:
            return not self._termination.is_asked
        if not self._is_warm:
            self._is_warm = True
            self._saves.warm(self._state.capture)
        wish = self._read()
        if self.is_over:
            return not self._termination.is_asked
        self._post(asks_fresh=wish.is_stop)
        if wish.is_stop:
            self._read()
            return False
        if wish.reason is not None:
            self._save(wish.reason)
        self._heed_failures()
        return True

    def save_now(self, reason: SaveReason) -> bool:
        """Saves the current step; collective.

        Returns:
            False if all ranks refused it.
        """
        self._read()
        if self.is_over:
            return False
        self._post()
        return self._save(reason)

    def finish_stop(self) -> None:
        """After `advance` returned False: saves what is not safe yet, waits until it is sealed."""
        total = self._total
        is_together = (
            not self.is_over
            and total is not None
            and decide_refusal(total) in (None, Refusal.NO_SLOT)
        )
        if not is_together or total is None:
            self._saves.wait_all()
            return
        if self._step != self._saved_step and not total.sums.fresh:
            self._begin_if_allowed(SaveReason.TERMINATION)
        self.drain()

    def close(self) -> bool:
        """Ends the course: with equal steps on all ranks, unsaved state is saved and sealed.

        Returns:
            True if all ranks are here, so that collective calls may follow.
        """
        self._read()
        if self.is_over:
            self._saves.wait_all()
            return False
        if self._step != self._saved_step:
            self._saves.wait_free_slot()
        self._is_closing = True
        self._post()
        self._read()
        total = self._total
        if total is None or not total.is_closed_by_all:
            _LOG.warning("the ranks end at different steps; nothing is saved at the end")
            self._saves.wait_all()
            return False
        if self._step != self._saved_step and total.sums.free == total.world_size:
            self._begin(SaveReason.CLOSE, total)
        self.drain()
        self._answers.tell_nothing_new(self.sealed.attempt if self.sealed is not None else None)
        return True

    def drain(self) -> None:
        """Waits until all ranks know the outcome of every save in flight; collective."""
        self._read()
        if self.is_over and not self._is_closing:
            self._saves.wait_all()
            return
        while self._saves.in_flight:
            self._saves.wait_oldest()
            self._post()
            self._read()

    def end(self) -> None:
        """Ends the writer thread; nothing is awaited."""
        self.is_over = True
        self._saves.stop()
        if self._lead is not None:
            self._lead.close()

    def _post(self, *, asks_fresh: bool = False) -> None:
        save = self._saves.oldest()
        stage = save.stage if save is not None and save.ended.is_set() else None
        message = Message(
            step=self._step,
            tokens=self._tokens,
            terminating=int(self._termination.is_asked),
            closing=int(self._is_closing),
            free=int(self._saves.has_free_slot),
            sealed=int(stage is Stage.SEALED),
            failed=int(stage is Stage.FAILED),
            broken=int(stage is Stage.FAILED and save is not None and save.is_group_broken),
        )
        if self._lead is not None:
            message = self._lead.add_word(
                message, self._policy, self.sealed if asks_fresh else None
            )
        self._tokens = 0
        self._agreement.post(message)

    def _read(self) -> Wish:
        """Takes the pending message, if there is one, and does what all ranks do on it.

        Returns:
            What follows from the newest message and was not done yet: `wait()` may have read it.
        """
        total = self._agreement.read()
        if total is None:
            return self._wish
        self._total = total
        before = self._count(total)
        self._answers.hear(total.sums.request)
        if total.sums.policy_bytes:
            self._take_policy(total.sums.policy_bytes)
        if total.sums.broken:
            self._renew_group()
        elif total.is_settled:
            self._settle(self._saves.settle(), is_sealed=not total.sums.failed)
        if total.sums.closing:
            self.is_over = True
        self._wish = decide_wish(
            total,
            Standing(
                cadence=self._policy.cadence,
                on_busy=self._policy.on_busy,
                before=before,
                now=self._progress,
                is_owed=self._wish.is_owed,
                request_taken=self._answers.taken,
            ),
        )
        if self._wish.is_skipped:
            _LOG.warning("save skipped: the flush is behind", extra={"step": self._step})
        return self._wish

    def _count(self, total: Total) -> Progress:
        before = self._progress
        step = total.step if total.has_equal_steps else before.step
        self._progress = Progress(step=step, tokens=before.tokens + total.sums.tokens)
        self._reporter.update(is_news=False, progress=self._note(None))
        return before

    def _note(self, attempt: Attempt | None) -> StepNote:
        progress = self._progress
        now = datetime.now(UTC)
        return StepNote(step=progress.step, tokens=progress.tokens, at=now, attempt=attempt)

    def _take_policy(self, size: int) -> None:
        document = self._lead.announced if self._lead is not None else b""
        self._policy = decode(Policy, self._agreement.broadcast(document, size), "live policy")
        self._saves.timeout_seconds = self._policy.save_timeout_seconds
        _LOG.info("policy changed", extra={"step": self._step})

    def _renew_group(self) -> None:
        try:
            self._ranks.renew_save_group()
        except RuntimeError as error:
            raise AgreementLost(f"the saving group could not be made anew: {error}") from error
        for save in self._saves.restart(self._ranks.save_group):
            self._settle(save, is_sealed=False)

    def _save(self, reason: SaveReason) -> bool:
        wish = self._read()
        if wish.reason is SaveReason.REQUEST:
            reason = SaveReason.REQUEST
        return self._begin_if_allowed(reason)

    def _begin_if_allowed(self, reason: SaveReason) -> bool:
        """Begins a save of the step whose message was just read, on all ranks or on none."""
        total = self._total
        assert total is not None, "a message was read before"
        refusal = decide_refusal(total)
        may_wait = self._policy.on_busy is OnBusy.BLOCK or reason is not SaveReason.CADENCE
        has_waited = refusal is Refusal.NO_SLOT and may_wait
        if has_waited:
            self._saves.wait_free_slot()
            self._post()
            self._read()
            total = self._total or total
            refusal = decide_refusal(total)
        if refusal is None:
            self._begin(reason, total)
            return True
        _LOG.warning("save refused", extra={"step": self._step, "why": str(refusal)})
        has_failed = has_waited and refusal is Refusal.NO_SLOT
        if has_failed:
            # Owed again, training would stand for the whole timeout at nearly every step.
            self._outcomes.count_failed()
            self._answers.fail_open()
        is_dropped = has_failed or (reason is SaveReason.CADENCE and not may_wait)
        self._wish = Wish(is_owed=self._wish.is_owed and not is_dropped)
        return False

    def _begin(self, reason: SaveReason, total: Total) -> None:
        attempt = Attempt(step=self._step, nonce=f"{total.sums.nonce:016x}")
        ticket = Ticket(
            attempt=attempt,
            tokens=self._progress.tokens,
            lineage=self._lineage,
            reason=reason,
            request_id=self._answers.acknowledge(attempt),
        )
        self._saves.begin(ticket, self._state.capture)
        self._saved_step = self._step
        self._wish = Wish()
        if self._lead is not None:
            self._lead.note_save()

    def _settle(self, save: Save, *, is_sealed: bool) -> None:
        """All ranks have told how the oldest save ended."""
        ticket = save.ticket
        seen = {"run": self._run, "step": ticket.attempt.step, "tier": "local"}
        seen |= {"pause_ms": round(save.pause_ms, 1)}
        if self._lead is not None:
            self._lead.note_durations(save.pause_ms / 1000, save.seal_ms / 1000)
        if is_sealed:
            self.sealed = StepNote(
                step=ticket.attempt.step,
                tokens=ticket.tokens,
                at=datetime.now(UTC) - timedelta(seconds=time.monotonic() - save.started),
                attempt=ticket.attempt,
            )
            seen |= {"seal_ms": round(save.seal_ms, 1), "size_bytes": save.size_bytes}
            seen |= {"reason": str(ticket.reason)}
            if self._lead is not None:
                self._pace.tell(save, self._policy.cadence, seen)
            self._outcomes.count_sealed(save.pause_ms, save.seal_ms, sealed=self.sealed)
        else:
            self._outcomes.count_failed(save.pause_ms)
            if self._saved_step == ticket.attempt.step:
                self._saved_step = self.sealed.step if self.sealed is not None else -1
            why = save.error or "another rank failed"
            _LOG.error("save failed; training goes on", extra={**seen, "why": why})
        self._answers.settle(ticket.request_id, ticket.attempt, is_sealed=is_sealed)

    def _heed_failures(self) -> None:
        self._outcomes.check(self._policy)
        if self._outcomes.failures_in_row and self._policy.on_failure is OnFailure.PAUSE:
            self._pause()

    def _pause(self) -> None:
        """Training stands still until a save works; a stop or a finished rank ends it, too."""
        _LOG.error("training pauses until a save works", extra={"step": self._step})
        while self._outcomes.failures_in_row:
            self._read()
            self._post()
            self._read()
            if self.is_over or self._total is None or self._total.sums.terminating:
                return
            if self._begin_if_allowed(SaveReason.CADENCE):
                self.drain()
            if self._outcomes.failures_in_row:
                threading.Event().wait(_PAUSE_SECONDS)
