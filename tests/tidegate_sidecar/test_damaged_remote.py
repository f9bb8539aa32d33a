"""One damaged document on the remote tier: told, waited for, and no reason never to end."""

from collections.abc import Callable
from typing import Any

import pytest

from tidegate_contract.layout import LINEAGES, RUN_DOCUMENT
from tidegate_sidecar.faults import Fault, Reason, Side
from tidegate_sidecar.tasks import Look
from tidegate_sidecar.trouble import Troubles

Build = Callable[..., Any]


def damage_identity(run: Any, a_sealed_step: Build) -> None:
    """As no flusher may mend it: a step beside it is of another run."""
    a_sealed_step(run.remote, 5, run_id="0c0a5f0e-0000-4000-8000-000000000000")
    (run.remote / RUN_DOCUMENT).write_bytes(b"")


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff"], ids=["empty", "no document", "no text"])
def test_damaged_claim_does_not_stop_the_flush(
    a_run: Build, a_sealed_step: Build, data: bytes
) -> None:
    run = a_run()
    (run.remote / LINEAGES).mkdir()
    (run.remote / LINEAGES / "1.json").write_bytes(data)
    a_sealed_step(run.locals[0], 10)
    assert run.flush_once().is_whole
    assert run.durable() == [10]


def test_damaged_identity_ends_a_single_pass_with_its_reason(
    a_run: Build, a_sealed_step: Build
) -> None:
    run = a_run()
    damage_identity(run, a_sealed_step)
    a_sealed_step(run.locals[0], 10)
    done = run.flush_once()
    assert not done.is_whole
    assert RUN_DOCUMENT in done.lines[0]


def test_damaged_identity_is_told_and_tried_again_seldom(
    a_run: Build, a_sealed_step: Build, a_loop: Build, beat_until: Build
) -> None:
    run = a_run()
    good = (run.remote / RUN_DOCUMENT).read_bytes()
    damage_identity(run, a_sealed_step)
    a_sealed_step(run.locals[0], 10)
    loop = a_loop(run)
    beat_until(loop, lambda: loop.troubles.worst)
    beat_until(loop, lambda: loop._health.words["remote"] == Reason.UNREADABLE)
    assert RUN_DOCUMENT in loop._health.words["message"]
    assert loop.troubles.worst.failures <= 2
    (run.remote / RUN_DOCUMENT).write_bytes(good)
    loop._troubles.succeed(Look)
    beat_until(loop, run.durable)


def test_failure_of_no_attempt_is_a_trouble_with_a_wait(a_run: Build, a_loop: Build) -> None:
    loop = a_loop(a_run())
    fault = Fault(side=Side.ATTEMPT, reason=Reason.OK, message="KeyError: 'x'")
    loop._take_fault(Look(), fault, 100.0)
    worst = loop.troubles.worst
    assert worst.reason is Reason.UNREADABLE
    assert "KeyError: 'x'" in worst.message
    assert not loop.troubles.may_start(Look, 100.5)


def test_finishing_flusher_ends_once_the_damage_lasts(
    a_run: Build, a_sealed_step: Build, a_loop: Build, wait_for: Build
) -> None:
    run = a_run()
    damage_identity(run, a_sealed_step)
    a_sealed_step(run.locals[0], 10)
    loop = a_loop(run)
    loop.is_finishing = True
    assert loop.beat() == "On"
    fault = Fault(side=Side.ATTEMPT, reason=Reason.OK, message="damaged")
    for now in (1.0, 2.0, 3.0):
        loop._take_fault(Look(), fault, now)
    wait_for(lambda: loop.beat() == "Done")


@pytest.mark.parametrize(
    ("reason", "failures", "want"),
    [(Reason.UNREADABLE, 2, False), (Reason.UNREADABLE, 3, True), (Reason.STALLED, 9, False)],
)
def test_only_damage_that_was_met_often_lasts(reason: Reason, failures: int, want: bool) -> None:
    troubles = Troubles()
    for _ in range(failures):
        troubles.fail(Look, Fault(side=Side.REMOTE, reason=reason, message=""), 0.0, 0.5)
    assert troubles.is_lasting is want
