"""Real kills: processes that save, flush, commit, tidy and restore end by SIGKILL."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tidegate_crash.kills_campaign import run_program

PROGRAM = "tidegate_crash.kills_run"
pytestmark = pytest.mark.long


@pytest.mark.timeout(600)
def test_processes_killed_at_any_call_lose_nothing_and_a_second_run_finishes(
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    tally = run_program(PROGRAM, tmp_path, "--kills", "190", "--moments", "10")
    record_property("counts", tally.in_words())
    assert not tally.sentences
    assert (tally.kills, tally.torn, tally.lost, tally.stuck) == (200, 0, 0, 0)


@pytest.mark.timeout(120)
def test_processes_that_write_under_final_names_are_found_torn_when_killed(tmp_path: Path) -> None:
    options = ("--kills", "6", "--only", "write", "--plant", "in-place", "--scenarios", "race")
    assert run_program(PROGRAM, tmp_path, *options).torn > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_real_kills(
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    write_result: Callable[[dict[str, Any]], None],
) -> None:
    tally = run_program(PROGRAM, tmp_path, "--kills", "1900", "--moments", "100", "--seed", "2")
    record_property("counts", tally.in_words())
    write_result(asdict(tally))
    assert not tally.sentences
    assert tally.kills == 2000
