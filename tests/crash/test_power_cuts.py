"""Power cuts on real ext4: what was not synced is gone, and nothing that was promised."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tidegate_crash.kills import THE_END
from tidegate_crash.kills_campaign import run_program
from tidegate_crash.power import image_name, missing_prerequisite
from tidegate_ground.disks import observe_loop_files
from tidegate_ground.waiting import wait_until

PROGRAM = "tidegate_crash.power_run"
SHORT = ("--scenarios", "save", "race")
pytestmark = pytest.mark.disk


@pytest.fixture(autouse=True)
def can_cut_power() -> None:
    """Skips where that is impossible; on a machine that tests every change it is a fault."""
    lacking = missing_prerequisite()
    if lacking and os.environ.get("CI") == "true":
        pytest.fail(lacking)
    if lacking:
        pytest.skip(lacking)


@pytest.mark.timeout(300)
def test_power_cut_at_any_call_loses_nothing_and_a_second_run_finishes(
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    tally = run_program(PROGRAM, tmp_path, "--cuts", "50")
    record_property("counts", tally.in_words())
    assert not tally.sentences
    assert (tally.cuts, tally.torn, tally.lost, tally.stuck) == (50, 0, 0, 0)


@pytest.mark.timeout(120)
def test_power_cut_without_any_sync_is_found_to_lose_and_tear(tmp_path: Path) -> None:
    options = ("--cuts", "12", "--only", THE_END, "--plant", "no-sync")
    tally = run_program(PROGRAM, tmp_path, *options, *SHORT)
    assert tally.lost > 0
    assert tally.torn > 0


@pytest.mark.timeout(120)
def test_power_cut_program_that_is_killed_leaves_no_mount_and_no_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", PROGRAM, "--folder", str(tmp_path), "--cuts", "100000", *SHORT]
    program = subprocess.Popen(command, start_new_session=True)
    name = image_name(program.pid)

    def held() -> list[str]:
        return [file for file in observe_loop_files() if f"{name} " in f"{file} "]

    def works() -> bool:
        assert program.poll() is None, "it ended by itself"
        return len(held()) == 6  # three disks in each of two lanes

    try:
        wait_until("the program's disks", works, 60)
    finally:
        program.send_signal(signal.SIGKILL)
        program.wait()
    wait_until("the release of its disks", lambda: not held(), 30)
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_power_cuts(
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    write_result: Callable[[dict[str, Any]], None],
) -> None:
    tally = run_program(PROGRAM, tmp_path, "--cuts", "500")
    record_property("counts", tally.in_words())
    write_result(asdict(tally))
    assert not tally.sentences
    assert tally.cuts == 500
