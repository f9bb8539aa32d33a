"""Every order of two processes, their deaths, late calls and power cuts: nothing is ever lost."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate_crash.campaign import Effort, as_record, explore_all, in_words, totals
from tidegate_crash.flusher import inline_copies
from tidegate_crash.judge import Counts
from tidegate_crash.pairs import pairs
from tidegate_crash.scenario import History, Place, Scenario
from tidegate_crash.scenarios import scenarios

WORKERS = 2
SCENARIOS = {scenario.name: scenario for scenario in scenarios()}
MOST = dict.fromkeys(("flushers", "same-step", "rollback", "cut", "flip-manifest"), 60)
"""Schedules of scenarios that show little new beyond them."""
ON_REAL_FOLDERS = ("save", "evict", "dead-slow", "pins", "undo-trash", "flip-half", "recreate")


def explored(
    efforts: list[Effort], capsys: pytest.CaptureFixture[str], enough: int | None = None
) -> list[Counts]:
    """Counts of each effort, in their order; ends early with so many states."""
    found: list[Counts] = []
    with capsys.disabled():
        sys.stdout.write("\n")
        for counts in explore_all(efforts, WORKERS):
            sys.stdout.write(f"{in_words(counts)}\n")
            sys.stdout.flush()
            found.append(counts)
            if enough is not None and totals(found)["states"] >= enough:
                break
    return found


def spread(all_pairs: list[Scenario]) -> list[Scenario]:
    """All of them, so that any beginning has pairs of every world."""
    return [pair for first in range(13) for pair in all_pairs[first::13]]


def test_scenarios_have_names_of_their_own() -> None:
    assert len(SCENARIOS) == len(scenarios())


@pytest.mark.parametrize("is_reversed", [False, True], ids=["in order", "reversed"])
@pytest.mark.parametrize("name", ON_REAL_FOLDERS)
def test_scenario_on_real_folders_keeps_every_promise(
    tmp_path: Path, name: str, is_reversed: bool
) -> None:
    scenario, history = SCENARIOS[name], History()
    place = Place(
        remote=str(tmp_path / "remote/team/run"),
        nodes=tuple(str(tmp_path / f"node{node}/team/run") for node in range(2)),
        remote_root=str(tmp_path / "remote/team"),
    )
    with inline_copies():
        scenario.prepare(place, history)
        for actor in scenario.actors[:: -1 if is_reversed else 1]:
            actor(place, history)
            assert scenario.check(place, history) == []
        scenario.recover(place, history)
    assert scenario.check_final(place, history) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_state_of_every_scenario_keeps_the_invariants(
    capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    efforts = [Effort(scenario=name, most=MOST.get(name, 250)) for name in SCENARIOS]
    efforts += [Effort(scenario=pair.name, depth=0) for pair in spread(pairs())]
    found = explored(efforts, capsys, enough=10_000)
    record_property("counts", totals(found))
    assert [violation for counts in found for violation in counts.violations] == []
    assert totals(found)["states"] >= 10_000


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_explore_deeply(
    capsys: pytest.CaptureFixture[str], write_result: Callable[[dict[str, Any]], None]
) -> None:
    efforts = [Effort(scenario=name, depth=2, mixes=16, most=60) for name in SCENARIOS]
    efforts += [Effort(scenario=pair.name, mixes=16, most=40) for pair in spread(pairs())]
    found = explored(efforts, capsys, enough=100_000)
    write_result({"totals": totals(found), "scenarios": [as_record(counts) for counts in found]})
    assert [violation for counts in found for violation in counts.violations] == []
    assert totals(found)["states"] >= 100_000
