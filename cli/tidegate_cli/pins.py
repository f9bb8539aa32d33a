"""`tidegate pin` and `unpin`: what no retention removes, on the remote tier."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from tidegate_cli.attempts import choose_attempt, explain_lack, find_commits
from tidegate_cli.look import RunView, look_at_run, open_run
from tidegate_cli.terminal import naming, say, say_json
from tidegate_contract.errors import Reject
from tidegate_contract.identity import Pin
from tidegate_contract.layout import PINS, Attempt
from tidegate_contract.publish import remove_pin
from tidegate_sidecar.pinning import Found, pin_step

_MAX_REASON = 1000

RunFolder = Annotated[
    Path,
    typer.Option(
        "--run-folder", metavar="DIR", readable=False, help="the run's folder on the remote tier"
    ),
]
Step = Annotated[
    str, typer.Argument(metavar="STEP", help="the step's number, or the name of its folder")
]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON document instead")]


def pin(
    step: Step,
    run_folder: RunFolder,
    reason: Annotated[
        str | None, typer.Option(help="why, for those who come after you; else as it was")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Keep a durable step: no retention removes it. It comes back if it lies in .trash."""
    if reason is not None and len(reason) > _MAX_REASON:
        raise typer.BadParameter(f"allowed are {_MAX_REASON} characters", param_hint="--reason")
    view = look_at_run(run_folder)
    attempt = choose_attempt(step, find_commits(view), explain_lack(view, step))
    if reason is None:
        before = view.pins.get(attempt)
        reason = before.reason if before is not None else ""
    with open_run(run_folder) as (run, identity):
        now = datetime.now(UTC)
        wanted = Pin(run_id=identity.run_id, attempt=attempt, reason=reason, pinned_at=now)
        with naming(f"{run.path}/{PINS}"):
            found = pin_step(run, wanted)
    if found is Found.GONE:
        raise Reject(
            f"step {attempt.step} was removed meanwhile; its pin holds nothing:"
            f" tidegate unpin {attempt.step} takes it away"
        )
    tell(view, attempt, "pinned", found, as_json=as_json)


def unpin(step: Step, run_folder: RunFolder, as_json: AsJson = False) -> None:
    """Let retention treat a pinned step like all others again."""
    view = look_at_run(run_folder)
    attempt = choose_attempt(step, view.pins, f"has no pin in {run_folder}")
    with open_run(run_folder) as (run, _):
        with naming(f"{run.path}/{PINS}"):
            remove_pin(run, attempt)
    tell(view, attempt, "unpinned", Found.IN_PLACE, as_json=as_json)


def tell(view: RunView, attempt: Attempt, done: str, found: Found, *, as_json: bool) -> None:
    """What was done, in the shape that pins have."""
    if as_json:
        say_json(
            {
                "run": view.identity.name,
                "step": attempt.step,
                "attempt": attempt.nonce,
                "done": done,
                "back_from_trash": found is Found.BACK,
            }
        )
    else:
        back = f"; it is {found}" if found is not Found.IN_PLACE else ""
        say(f"step {attempt.step} of {view.identity.name} is {done}{back}")
