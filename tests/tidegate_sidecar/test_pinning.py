"""A pin beside everybody who moves its step: what a person is told is so."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tidegate_contract.folder import Folder
from tidegate_contract.identity import Pin
from tidegate_contract.layout import TRASH, Attempt, step_folder
from tidegate_contract.run_documents import scan_pins
from tidegate_sidecar import pinning
from tidegate_sidecar.pinning import Found, pin_step
from tidegate_sidecar.removal import empty_step, is_durable, restore_step, trash_step

Build = Callable[..., Any]
RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"


def a_pin(attempt: Attempt) -> Pin:
    return Pin(run_id=RUN_ID, attempt=attempt, pinned_at=datetime.now(UTC))


@pytest.fixture
def dropped(a_run: Build, a_sealed_step: Build) -> Any:
    """A run with two commits, of which the older lies in `.trash`."""
    run = a_run()
    older = a_sealed_step(run.locals[0], 10)
    run.flush_once()
    a_sealed_step(run.locals[0], 20)
    run.flush_once()
    with Folder.open(run.remote) as folder:
        trash_step(folder, older)
    return run, older


def test_step_that_the_lead_moves_back_between_two_looks_is_found(
    dropped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, older = dropped

    def look_too_early(folder: Folder, attempt: Attempt, run_id: str) -> bool:
        found = is_durable(folder, attempt, run_id)
        restore_step(folder, attempt)
        return found

    monkeypatch.setattr(pinning, "is_durable", look_too_early)
    with Folder.open(run.remote) as folder:
        assert pin_step(folder, a_pin(older)) is Found.IN_PLACE
        assert older in scan_pins(folder)


def test_step_whose_place_is_taken_is_held_in_trash(dropped: Any) -> None:
    run, older = dropped
    taken = run.remote / step_folder(older)
    taken.mkdir()
    (taken / "announced-0.json").write_text("a slow flusher makes it again")
    with Folder.open(run.remote) as folder:
        assert pin_step(folder, a_pin(older)) is Found.IN_TRASH
        assert not empty_step(folder, older)
    assert (run.remote / TRASH / step_folder(older)).is_dir()


def test_pin_of_what_is_gone_leaves_the_pin_of_others(dropped: Any) -> None:
    run, older = dropped
    with Folder.open(run.remote) as folder:
        empty_step(folder, older)
        assert pin_step(folder, a_pin(older)) is Found.GONE
        assert older in scan_pins(folder)
