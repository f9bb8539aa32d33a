"""What a restore concludes from what it saw."""

from datetime import UTC, datetime

import pytest

from tidegate.deadline import run_within
from tidegate.observe import find_existing_attempts
from tidegate_contract.errors import Retry
from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import (
    Attempt,
    parse_quarantined_file,
    quarantined_file,
    step_folder,
)
from tidegate_contract.restore_point import Copy, World

FIVE = Attempt(step=5, nonce="0000000000000005")


def a_copy(**fields) -> Copy:
    facts = {"attempt": FIVE, "lineage": 1, "tokens": 1, "world_size": 2}
    return Copy(**{**facts, "ranks": frozenset(), "folder": step_folder(FIVE), **fields})


def a_claim(number: int, restored: Attempt | None = FIVE) -> LineageClaim:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return LineageClaim(run_id="r", number=number, restored=restored, claimed_at=now)


HALF = a_copy(ranks=frozenset({1}))
FIRST = [a_claim(1, None)]


@pytest.mark.parametrize(
    ("local", "remote", "claims", "want"),
    [
        ([[a_copy(ranks=frozenset({0}))], [HALF]], [], FIRST, {FIVE}),
        ([[], [HALF]], [], FIRST, set()),
        ([[], []], [], FIRST, set()),
        ([[], [HALF]], [a_copy()], FIRST, {FIVE}),
        ([[], [HALF]], None, FIRST, {FIVE}),
        ([[], [a_copy(ranks=frozenset({1}), lineage=4)]], [], FIRST, {FIVE}),
        ([[], []], [a_copy()], FIRST, set()),
        ([[], []], [a_copy(is_announced=True)], FIRST, {FIVE}),
        ([[], []], [a_copy(is_committed=True, ranks=frozenset({0, 1}))], FIRST, {FIVE}),
    ],
    ids=[
        "sealed on both nodes",
        "torn first save: one rank's seal, nothing on the remote tier",
        "no seal at all",
        "one rank's seal, announced there",
        "one rank's seal, no remote tier to ask",
        "one rank's seal of a lineage that the remote tier does not know",
        "one rank's announcement only",
        "announced",
        "committed",
    ],
)
def test_checkpoints_exist_unless_only_a_first_save_was_torn(local, remote, claims, want):
    nodes = (frozenset({0}), frozenset({1}))
    claimed = None if remote is None else {claim.number for claim in claims}
    world = World(
        nodes=nodes,
        local=tuple(map(tuple, local)),
        remote=tuple(remote or ()),
        claims=tuple(claims),
    )
    assert find_existing_attempts(world, claimed=claimed) == want


@pytest.mark.parametrize("name", ["weights-0.distcp", ".metadata"])
def test_quarantined_file_tells_its_attempt(name):
    assert parse_quarantined_file(quarantined_file(FIVE, name, "0" * 8)) == FIVE


@pytest.mark.parametrize("name", [step_folder(FIVE), "b2f0", step_folder(FIVE) + "x.y"])
def test_other_names_in_quarantine_tell_nothing(name):
    assert parse_quarantined_file(name) is None


def test_call_that_hangs_is_left_behind():
    import threading

    with pytest.raises(Retry, match="reading did not end within 0 s"):
        run_within(0.01, "reading", threading.Event().wait)


def test_call_gives_its_result_or_its_error():
    assert run_within(5, "adding", lambda: 1 + 1) == 2
    with pytest.raises(FileNotFoundError):
        run_within(5, "opening", lambda: open("/nowhere/at/all"))
