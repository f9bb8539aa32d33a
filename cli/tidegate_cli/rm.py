"""`tidegate rm`: takes one durable step away, first into `.trash`.

Decided on what is there, and again after the person has answered: the run goes on meanwhile.
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tidegate_cli.attempts import choose_attempt, explain_lack, find_commits
from tidegate_cli.look import RunView, is_in_trash, look_at_run, open_run
from tidegate_cli.pins import AsJson, RunFolder, Step
from tidegate_cli.rows import find_base_of, find_newest
from tidegate_cli.terminal import can_ask, plain, say, say_json, show_size, warn
from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.layout import LINEAGES, TRASH, Attempt, lineage_file
from tidegate_contract.restore_point import find_lost
from tidegate_contract.run_documents import scan_pins
from tidegate_contract.scan import StepRecord
from tidegate_sidecar.removal import (
    empty_step,
    find_remains,
    is_durable,
    lies_in_trash,
    restore_step,
    trash_step,
)


def rm(
    step: Step,
    run_folder: RunFolder,
    empties: Annotated[
        bool, typer.Option("--now", help="remove its files at once: there is no way back")
    ] = False,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop a durable step. For an hour it lies in .trash; `tidegate pin` brings it back from there.

    Refused are the newest durable step, a pinned one, the one that an explicit restore named or
    that training goes on from, and whatever is not durable: attempts that nobody needs go by
    themselves.
    """
    view = look_at_run(run_folder)
    attempt = choose_attempt(step, find_commits(view), explain_lack(view, step))
    check_removal(view, attempt, empties=empties)
    if not is_sure and not can_ask():
        raise typer.BadParameter("not a terminal: add --yes")
    if not is_sure and not _is_confirmed(view, attempt, empties=empties):
        warn("nothing was changed")
        raise typer.Exit(1)
    left = _remove(run_folder, attempt, empties=empties)
    done = "emptied" if empties else "dropped"
    if as_json:
        told = {"step": attempt.step, "attempt": attempt.nonce, "done": done}
        say_json({"run": view.identity.name, **told, "left_in_trash": left is not None})
    else:
        _print(view, attempt, run_folder, empties=empties, left=left)


def check_removal(view: RunView, attempt: Attempt, *, empties: bool) -> Attempt:
    """The commit that makes this one needless; pure.

    Args:
        view: the run's folder on the remote tier.
        attempt: a commit in it, in `.trash` or outside.
        empties: its files are to be removed at once.

    Raises:
        Reject: it must stay; the sentence says why.
    """
    newest = find_newest(view)
    records = [record for record in view.records if record.attempt == attempt and record.committed]
    key = max(view.key(record) for record in records)
    if newest is None or view.key(newest) <= key:
        raise Reject(f"step {attempt.step} is the newest good one: a restore needs it")
    if attempt in view.pins:
        raise Reject(f"step {attempt.step} is pinned: unpin it first")
    lost = find_lost(view.claims, view.key(newest)[0])
    if lost is not None:
        raise Reject(
            f"{LINEAGES}/{lineage_file(lost.number)} is damaged and may name step {attempt.step}: "
            f"it stays until a step of lineage {lost.number} or a newer one is durable"
        )
    named = [claim for claim in view.claims if claim.explicit]
    if named and named[-1].restored == attempt:
        raise Reject(
            f"step {attempt.step} was named by the last explicit restore "
            f"(lineage {named[-1].number}): it stays"
        )
    base = find_base_of(view)
    if base is not None and base.restored == attempt:
        raise Reject(
            f"step {attempt.step} is what lineage {base.number} goes on from: "
            "it stays until that lineage has a durable step"
        )
    if not empties and all(is_in_trash(record) for record in records):
        raise Reject(f"step {attempt.step} is in .trash already; --now empties it")
    return newest.attempt


def _is_confirmed(view: RunView, attempt: Attempt, *, empties: bool) -> bool:
    size = show_size(_size_bytes(view, attempt))
    what = f"step {attempt.step} of {view.identity.name} (attempt {attempt.nonce}, {size})"
    how = "Remove %s for good?" if empties else "Move %s to .trash?"
    return typer.confirm(plain(how % what), err=True)


def _size_bytes(view: RunView, attempt: Attempt) -> int:
    return max(_commit_bytes(record) for record in view.records if record.attempt == attempt)


def _commit_bytes(record: StepRecord) -> int:
    return record.committed.manifest.size_bytes if record.committed else 0


def _remove(path: Path, attempt: Attempt, *, empties: bool) -> str | None:
    """Moves the step, and empties it if asked.

    Returns:
        Name inside `.trash` of what stays, as it holds names that the format does not know.
    """
    view = look_at_run(path)
    if attempt not in find_commits(view):
        raise Reject(f"step {attempt.step} was removed meanwhile")
    with open_run(path) as (run, identity):
        newest = check_removal(view, attempt, empties=empties)
        if not is_durable(run, newest, identity.run_id):
            raise Reject(f"step {newest.step}, the newest one, does not hold: nothing is removed")
        _drop(run, attempt, identity.run_id, empties=empties)
        if not empties:
            return None
        empty_step(run, attempt)
        _check_pins_again(run, attempt, identity.run_id)
        return find_remains(run, attempt)


def _drop(run: Folder, attempt: Attempt, run_id: str, *, empties: bool) -> None:
    """Moves it into `.trash`, where an earlier copy of it may lie already."""
    if empties:
        empty_step(run, attempt)
    trash_step(run, attempt)
    _check_pins_again(run, attempt, run_id)
    if is_durable(run, attempt, run_id):
        raise Reject(
            f"step {attempt.step} stays, as another copy of it lies in .trash: --now removes both"
        )


def _check_pins_again(run: Folder, attempt: Attempt, run_id: str) -> None:
    """Whoever pinned between look and move saw the step in its place: it goes back there."""
    if attempt not in scan_pins(run):
        return
    restore_step(run, attempt)
    if is_durable(run, attempt, run_id) or lies_in_trash(run, attempt):
        raise Reject(f"step {attempt.step} was pinned meanwhile: it stays")


def _print(view: RunView, attempt: Attempt, path: Path, *, empties: bool, left: str | None) -> None:
    name = f"step {attempt.step} of {view.identity.name}"
    if not empties:
        say(f"{name} is in .trash, where sidecars empty it after an hour; until then")
        say(f"  tidegate pin {attempt.step} --run-folder {shlex.quote(str(path))}")
        say("brings it back")
    else:
        say(f"{name} is removed")
    if left is not None:
        warn(f"{path}/{TRASH}/{left} holds files that are not of the format")
