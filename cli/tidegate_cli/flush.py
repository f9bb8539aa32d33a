"""`tidegate flush --once`: takes what is sealed here to the remote tier, by hand."""

import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate_cli.look import open_run
from tidegate_cli.places import check_remote, split_existing
from tidegate_cli.terminal import err, naming, plain, say, say_json
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.tiers import check_apart, check_is_local
from tidegate_sidecar.settings import Settings, parse_policy, split_remote

if TYPE_CHECKING:
    from tidegate_sidecar.flush import Pass

_TIERS = ("--local", "--remote")


def flush(
    local: Annotated[
        Path, typer.Option(metavar="DIR", readable=False, help="the run's folder on this node")
    ],
    remote: Annotated[
        Path,
        typer.Option(metavar="DIR", readable=False, help="the run's folder on the remote tier"),
    ],
    is_once: Annotated[
        bool, typer.Option("--once", help="flush what is sealed now, and end; required")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document instead")] = False,
) -> None:
    """Copy what is sealed here to the remote tier, and commit it.

    Prints what became of each sealed step, newest first. Deletes nothing. It is refused while the
    run's own sidecar flushes the folder: that does the same, all the time.
    """
    if not is_once:
        raise typer.BadParameter("by hand there is one pass only: add --once")
    _check_places(local, remote)
    _show_log()
    with err.status(f"copying from {plain(str(local))}") if err.is_terminal else nullcontext():
        with naming(local):
            done = _flush_once(_settings(local, remote))
    if as_json:
        say_json({"whole": done.is_whole, "steps": list(done.lines)})
    else:
        for line in done.lines or ("nothing is sealed here",):
            say(line)
    raise typer.Exit(0 if done.is_whole else 1)


def _check_places(local: Path, remote: Path) -> None:
    check_apart(local, remote, _TIERS)
    try:
        with open_run(local) as (run, identity):
            check_is_local(run, _TIERS)
            check_remote(remote, identity.name)
    except Corrupt:
        # the flusher mends it from a remote folder that is there, and says if it cannot
        with Folder.open(local) as run:
            check_is_local(run, _TIERS)


def _flush_once(settings: Settings) -> "Pass":
    """Imports the flusher only now: it is half of the command's start, and an extra of its own."""
    try:
        from tidegate_sidecar.flush import flush_once
    except ModuleNotFoundError as error:
        raise Reject(f"flush needs {error.name}: install tidegate[cli,sidecar]") from error
    return flush_once(settings)


def _settings(local: Path, remote: Path) -> Settings:
    root, path = split_remote(Path(os.path.abspath(remote)))
    if path == ".":  # in a pod the tier's root is trusted; elsewhere what exists already
        root, path = split_existing(root)
    return Settings(
        local=Path(os.path.abspath(local)),
        remote_root=root,
        remote=path,
        may_create=True,
        policy=parse_policy(os.environ),
        is_single_pass=True,
    )


class _Sentences(logging.Handler):
    """The flusher's warnings as one line each on stderr; its figures are for machines."""

    def emit(self, record: logging.LogRecord) -> None:
        error = getattr(record, "error", None)
        err.print(plain(record.getMessage() + (f": {error}" if error else "")))


def _show_log() -> None:
    logger = logging.getLogger("tidegate_sidecar")
    logger.handlers = [_Sentences(logging.WARNING)]
    logger.propagate = False
