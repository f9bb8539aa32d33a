"""What all ranks decide together: one SUM of int64 a step, and pure decisions from that sum.

Whatever can differ between ranks is decided from the sum only, so all ranks decide alike. A message
is posted at every `step()` and read at the next one; a save first waits for its own step's message.
"""

import logging
import time
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from tidegate_contract.cadence import Cadence, CadenceKind, Progress, is_due
from tidegate_contract.errors import Retry
from tidegate_contract.seal import SaveReason
from tidegate_contract.wire import OnBusy

_LOG = logging.getLogger(__name__)
_SLICE = timedelta(seconds=1)
"""Waits return to Python this often, so that a second SIGTERM is heard."""
_LOG_EVERY_SECONDS = 30.0


class AgreementLost(Retry):
    """A rank's message did not come: saving has ended, training may go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One rank's word for one step.

    Attributes:
        step: optimizer steps of this rank.
        tokens: consumed by this rank since its last message.
        terminating: 1 after SIGTERM.
        closing: 1 from `close()`.
        free: 1 if a snapshot slot is free.
        sealed, failed: 1 if this rank sealed, or failed, the oldest attempt not yet agreed.
        broken: 1 if this rank's saving group must be made anew.
        request: from rank 0: id of a save request; 0 means none.
        nonce: from rank 0: 63 random bits for the attempt that this step may become.
        interval: from rank 0: 1 if the wall-time rule of the cadence lets a save pass.
        backlogged: from rank 0: 1 if the flush must catch up first.
        fresh: from rank 0: 1 if a durable step is young enough that a stop needs no save.
        policy_bytes: from rank 0: size of a new policy document that it will broadcast next.
    """

    step: int
    tokens: int = 0
    terminating: int = 0
    closing: int = 0
    free: int = 0
    sealed: int = 0
    failed: int = 0
    broken: int = 0
    request: int = 0
    nonce: int = 0
    interval: int = 0
    backlogged: int = 0
    fresh: int = 0
    policy_bytes: int = 0


_NAMES = tuple(field.name for field in fields(Message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """The sum of all ranks' messages.

    Attributes:
        world_size: number of ranks.
        step_squares: sum of the squared steps, modulo 2^64.
        sums: the fields of `Message`, summed.
    """

    world_size: int
    step_squares: int
    sums: Message

    @property
    def has_equal_steps(self) -> bool:
        """All ranks sent the same step: W·Σstep² = (Σstep)² holds only then."""
        return (self.world_size * self.step_squares - self.sums.step**2) % 2**64 == 0

    @property
    def step(self) -> int:
        """The common step; meaningful only with equal steps."""
        return self.sums.step // self.world_size

    @property
    def is_closed_by_all(self) -> bool:
        """Every rank is in `close()`, at the same step."""
        return self.sums.closing == self.world_size and self.has_equal_steps

    @property
    def is_settled(self) -> bool:
        """Every rank has sealed or failed the oldest attempt."""
        return self.sums.sealed + self.sums.failed == self.world_size


class Refusal(StrEnum):
    """Why all ranks refuse a save."""

    CLOSING = "a rank has finished its training"
    UNEQUAL_STEPS = "the ranks are at different steps"
    NO_SLOT = "a rank has no free snapshot slot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What every rank knows alike when it reads a message.

    Attributes:
        cadence, on_busy: of the live policy.
        before: counts at the previous message.
        now: counts at this message.
        is_owed: a due save was put off.
        request_taken: id of the newest save request that a save was made for.
    """

    cadence: Cadence
    on_busy: OnBusy
    before: Progress
    now: Progress
    is_owed: bool = False
    request_taken: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the ranks want to do at their next step.

    Attributes:
        reason: of a save; None means no save.
        is_stop: all ranks leave after that step.
        is_owed: a save is due until one begins.
        is_skipped: a due save was given up.
    """

    reason: SaveReason | None = None
    is_stop: bool = False
    is_owed: bool = False
    is_skipped: bool = False


def decide_wish(total: Total, standing: Standing) -> Wish:
    """What follows from one message: a stop before a request, a request before the cadence."""
    sums = total.sums
    if sums.terminating:
        return Wish(is_stop=True, is_owed=standing.is_owed)
    cadence = standing.cadence
    is_allowed = bool(sums.interval)
    is_timed = cadence.by in (CadenceKind.INTERVAL, CadenceKind.AUTO)
    due = standing.is_owed or is_due(
        cadence, standing.before, standing.now, interval_elapsed=is_allowed
    )
    if sums.request and sums.request != standing.request_taken:
        return Wish(reason=SaveReason.REQUEST, is_owed=due)
    if not due:
        return Wish()
    if sums.backlogged and standing.on_busy is OnBusy.SKIP:
        return Wish(is_skipped=True)
    if sums.backlogged or not (is_allowed or is_timed):
        return Wish(is_owed=True)
    return Wish(reason=SaveReason.CADENCE, is_owed=True)


def decide_refusal(total: Total) -> Refusal | None:
    """Whether the step of this message may be saved: on all ranks or on none."""
    if total.sums.closing:
        return Refusal.CLOSING
    if not total.has_equal_steps:
        return Refusal.UNEQUAL_STEPS
    if total.sums.free != total.world_size:
        return Refusal.NO_SLOT
    return None


class Agreement:
    """Posts and reads the messages; main thread only."""

    def __init__(self, group: Any, world_size: int, timeout: timedelta) -> None:
        """Takes the agreement group; nothing is sent yet."""
        self._group = group
        self._world_size = world_size
        self._timeout = timeout
        self._pending: tuple[Any, Any] | None = None

    def post(self, message: Message) -> None:
        """Sends this rank's message and returns at once; exactly one may be unread.

        Raises:
            AgreementLost: a peer is gone.
        """
        assert self._pending is None, "the previous message was not read"
        values = [getattr(message, name) for name in _NAMES]
        numbers = torch.tensor([message.step**2, *values], dtype=torch.int64)
        try:
            work = dist.all_reduce(numbers, group=self._group, async_op=True)
        except RuntimeError as error:
            raise AgreementLost(f"message of step {message.step} was not sent: {error}") from error
        self._pending = (work, numbers)

    def read(self) -> Total | None:
        """Waits for the message that was posted last; None if there is none.

        Raises:
            AgreementLost: it did not come within the timeout, or a peer is gone.
        """
        if self._pending is None:
            return None
        work, numbers = self._pending
        self._pending = None
        self._await(work)
        squares, *values = numbers.tolist()
        return Total(
            world_size=self._world_size,
            step_squares=squares % 2**64,
            sums=Message(**dict(zip(_NAMES, values, strict=True))),
        )

    def broadcast(self, data: bytes, size: int) -> bytes:
        """Rank 0's bytes on every rank; called by all ranks for the size that a message named.

        Raises:
            AgreementLost: a peer is gone.
        """
        numbers = torch.frombuffer(bytearray(data or bytes(size)), dtype=torch.uint8)
        try:
            dist.broadcast(numbers, group_src=0, group=self._group)
        except RuntimeError as error:
            raise AgreementLost(f"the live policy did not arrive: {error}") from error
        return bytes(numbers.tolist())

    def _await(self, work: Any) -> None:
        start = time.monotonic()
        told = start
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError as error:
                now = time.monotonic()
                if work.is_completed():
                    _finish(work)
                    return
                if now - start > self._timeout.total_seconds():
                    raise AgreementLost(
                        f"no message from all ranks after {now - start:.0f} s: {error}"
                    ) from error
                if now - told > _LOG_EVERY_SECONDS:
                    told = now
                    _LOG.warning(
                        "waiting for the other ranks' step", extra={"seconds": now - start}
                    )
            else:
                return


def _finish(work: Any) -> None:
    """The end of work that is complete: it may have come just after a slice of waiting was over."""
    try:
        work.wait()
    except RuntimeError as error:
        raise AgreementLost(f"no message from all ranks: {error}") from error
