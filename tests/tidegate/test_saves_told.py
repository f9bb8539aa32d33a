"""What the log says of a sealed save, and when saves take longer than the time between two."""

import logging

import pytest

from tidegate.pace import Pace, describe_lateness
from tidegate.saves import Save
from tidegate.writer import Ticket
from tidegate_contract.cadence import Cadence, CadenceKind
from tidegate_contract.layout import Attempt
from tidegate_contract.seal import SaveReason

EVERY_FIVE = Cadence(by=CadenceKind.STEPS, steps=5)


def a_save(
    step: int = 1200,
    *,
    started: float = 0.0,
    seal_ms: float = 840.4,
    size_bytes: int = 3 << 29,
    reason: SaveReason = SaveReason.CADENCE,
) -> Save:
    attempt = Attempt(step=step, nonce="0000000000000001")
    ticket = Ticket(attempt=attempt, tokens=3_400_000, lineage=1, reason=reason)
    return Save(
        ticket=ticket, started=started, pause_ms=12.3, seal_ms=seal_ms, size_bytes=size_bytes
    )


def warned_at(caplog: pytest.LogCaptureFixture, saves: list[Save]) -> list[int]:
    pace = Pace()
    with caplog.at_level(logging.INFO, "tidegate.pace"):
        for save in saves:
            pace.tell(save, EVERY_FIVE, {"step": save.ticket.attempt.step})
    told = [r.step for r in caplog.records if r.levelno == logging.INFO]
    assert told == [save.ticket.attempt.step for save in saves], "one line each"
    return [r.step for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("size_bytes", "want"),
    [(3 << 29, "1.5 GiB"), (900, "900 bytes"), (5 << 40, "5120.0 GiB"), (2560, "2.5 KiB")],
)
def test_sealed_save_is_told_with_its_durations_and_size(caplog, size_bytes, want):
    assert not warned_at(caplog, [a_save(size_bytes=size_bytes)])
    assert caplog.messages == [
        "saved step 1200 (3400000 tokens): pause 12 ms, sealed on the nodes after 840 ms, "
        f"{want} on rank 0"
    ]


def test_saves_slower_than_their_cadence_are_warned_of_at_once_and_each_tenth_time(caplog):
    saves = [a_save(n, started=2.0 * n, seal_ms=2100) for n in range(25)]
    assert warned_at(caplog, saves) == [1, 11, 21]
    assert "saves take 2.1 s until they are sealed" in caplog.text
    assert "one is made every 2.0 s: raise cadence.steps" in caplog.text


def test_saves_that_keep_up_again_are_warned_of_anew_when_they_do_not(caplog):
    durations = [1000, 3000, 3000, 1000, 3000]
    saves = [a_save(n, started=2.0 * n, seal_ms=ms) for n, ms in enumerate(durations)]
    assert warned_at(caplog, saves) == [1, 4]


def test_save_that_was_asked_for_right_after_another_is_no_sign_of_slowness(caplog):
    asked = a_save(2, started=10.1, reason=SaveReason.REQUEST)
    saves = [a_save(1, started=10), asked, a_save(3, started=20), a_save(4, started=30)]
    assert not warned_at(caplog, saves)


@pytest.mark.parametrize("by", CadenceKind)
def test_warning_names_a_setting_that_the_cadence_has(by):
    cadence = Cadence(by=by, steps=1, interval_seconds=1, max_loss_seconds=1)
    sentence = describe_lateness(a_save(), 0.5, cadence)
    named = [word.strip(",:").split(".")[1] for word in sentence.split() if "cadence." in word]
    assert len(named) == 2
    assert all(hasattr(cadence, name) for name in named)
