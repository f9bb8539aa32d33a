"""Pins a step that retention may be moving or removing just now. I/O, on the remote tier.

Called by the command; the pins are read by `removal` and `tasks`.
"""

from enum import StrEnum

from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import Pin
from tidegate_contract.layout import TRASH, step_folder
from tidegate_contract.publish import write_pin
from tidegate_contract.scan import confirm_commit
from tidegate_sidecar.removal import give_back_hidden, is_durable, lies_in_trash, restore_step

_LOOKS = 3


class Found(StrEnum):
    """Where a step was found once its pin was written; all but `GONE` are held there."""

    IN_PLACE = "in its place"
    BACK = "back from .trash"
    IN_TRASH = "in .trash"
    GONE = "gone"


def pin_step(run: Folder, pin: Pin) -> Found:
    """Pins a commit and sees to it that it is there.

    Retention reads the pins before it moves a step and again before it empties one; here the pin
    is written first and the step looked at afterwards, so one of the two sees the other. The pin of
    a step that is not found stays: somebody else may have been told that it holds.

    Raises:
        OSError: the tier fails; the step may or may not be pinned.
    """
    write_pin(run, pin)
    is_moved = False
    for _ in range(_LOOKS):  # whoever moves it back may do so between the two looks
        if is_durable(run, pin.attempt, pin.run_id):
            return Found.BACK if is_moved else Found.IN_PLACE
        give_back_hidden(run)
        if lies_in_trash(run, pin.attempt):
            restore_step(run, pin.attempt)
            is_moved = True
    return Found.IN_TRASH if _is_whole_in_trash(run, pin) else Found.GONE


def _is_whole_in_trash(run: Folder, pin: Pin) -> bool:
    """Its place is taken, by an attempt to copy it anew."""
    try:
        with run.child(TRASH) as trash, trash.child(step_folder(pin.attempt)) as step:
            return confirm_commit(step, pin.attempt, pin.run_id) is not None
    except (FileNotFoundError, Corrupt, Reject):
        return False
