"""`tidegate seal`: a folder that another framework wrote becomes a sealed attempt of a run."""

import os
import shlex
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tidegate_cli.foreign import Sealing, draw_attempt, list_files, seal_folder
from tidegate_cli.look import RunView, is_known_name, lineage_of, look_at_run, open_run
from tidegate_cli.places import check_run_path, split_existing
from tidegate_cli.rows import find_lineage
from tidegate_cli.terminal import bytes_progress, naming, say, say_json, show_size, warn
from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import RUN_DOCUMENT, Attempt, check_run_name
from tidegate_contract.publish import ensure_identity
from tidegate_contract.restore_point import order_key
from tidegate_contract.run_documents import read_identity
from tidegate_contract.tiers import lies_inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """What was made.

    Attributes:
        identity: of the run.
        sealing: what was declared.
        folder: of the attempt, with the run's folder.
        sizes: of its files, in bytes.
        newer: steps of the run that stay newer than this one.
    """

    identity: RunIdentity
    sealing: Sealing
    folder: str
    sizes: tuple[int, ...]
    newer: tuple[int, ...]


_Dir = Annotated[
    Path, typer.Argument(metavar="DIR", readable=False, help="the folder; it stays as it is")
]
_Run = Annotated[str, typer.Option(metavar="NAMESPACE/NAME", help="the run's name")]
_Step = Annotated[int, typer.Option(min=0, metavar="N", help="optimizer steps done")]
_Local = Annotated[
    Path, typer.Option(metavar="RUN_FOLDER", readable=False, help="the run's folder on this node")
]
_Tokens = Annotated[int, typer.Option(min=0, metavar="N", help="tokens since the run began")]
_Remote = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        readable=False,
        help="the run's folder on the remote tier: takes its run.json",
    ),
]
_Lineage = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="raise it when training went back to an earlier step"),
]
_SharesFiles = Annotated[
    bool, typer.Option("--link", help="hard links, no copies: nobody may write these files again")
]
_AsJson = Annotated[bool, typer.Option("--json", help="one JSON document instead")]


def seal(  # noqa: PLR0913  # each parameter is an option of the command
    source: _Dir,
    run: _Run,
    step: _Step,
    local: _Local,
    tokens: _Tokens = 0,
    remote: _Remote = None,
    lineage: _Lineage = None,
    shares_files: _SharesFiles = False,
    as_json: _AsJson = False,
) -> None:
    """Seal a folder that another framework wrote.

    From then on it is like any saved step. A flat folder of regular files is copied, and hashed
    while it is read; a link, a subfolder or a file that changes meanwhile is refused. Sealing the
    same step again makes a second, newer attempt. Where RUN_FOLDER holds no run, this begins one.
    """
    _check_name(run)
    with Folder.open(source) as folder:
        sizes = list_files(folder)
        identity = _decide_identity(source, local, run, remote)
        sealing, newer = _declare(local, identity, (step, tokens, lineage), shares_files)
        # nothing was written until here
        with bytes_progress(is_hidden=as_json) as progress, _ensure_run_folder(local) as place:
            task = progress.add_task(f"step {step}", total=sum(sizes.values()))
            begin = partial(_begin_run, place, identity)
            made = seal_folder(folder, place, sealing, partial(progress.advance, task), begin)
    done = Sealed(
        identity=identity,
        sealing=sealing,
        folder=f"{local}/{made}",
        sizes=tuple(sizes.values()),
        newer=newer,
    )
    if as_json:
        say_json(_document(done))
    else:
        _print(done, local, remote)


def _check_name(run: str) -> None:
    try:
        check_run_name(run)
    except Reject as error:
        raise typer.BadParameter(str(error), param_hint="--run") from error


def _ensure_run_folder(path: Path) -> Folder:
    """The open folder; what is missing of the path is made, durably."""
    root, rest = split_existing(Path(os.path.abspath(path)))
    folder = Folder.open(root)
    for part in Path(rest).parts:
        with folder as parent, naming(parent.path):
            folder = parent.ensure_child(part)
    return folder


def _decide_identity(source: Path, local: Path, run: str, remote: Path | None) -> RunIdentity:
    """The run that the step is to belong to; a new one is not written yet."""
    if lies_inside(local, source):
        raise Reject(f"--local lies inside {source}: the step would be a part of itself")
    wanted = _identity_of(remote, run)
    if wanted.name != run:
        raise Reject(f"{remote}/{RUN_DOCUMENT}: is of run {wanted.name}, not of {run}")
    found = _local_identity(local)
    if found is None:
        check_run_path(local, run)
        return wanted
    if found.name != run:
        raise Reject(f"{local}/{RUN_DOCUMENT}: is of run {found.name}, not of {run}")
    if remote is not None and found.run_id != wanted.run_id and (remote / RUN_DOCUMENT).exists():
        raise Reject(f"{local}/{RUN_DOCUMENT}: is not the run of this name in {remote}")
    return found


def _local_identity(local: Path) -> RunIdentity | None:
    if not os.path.lexists(local):
        return None
    with Folder.open(local) as place, naming(local):
        found = read_identity(place)
        strange = [name for name in place.names() if not is_known_name(name)]
    if found is None and strange:
        raise Reject(
            f"{local}: holds {strange[0]} and no {RUN_DOCUMENT}, so it is no run's folder;"
            " allowed is one of a run, an empty or a new one"
        )
    return found


def _begin_run(place: Folder, identity: RunIdentity) -> None:
    with naming(place.path):
        found = ensure_identity(place, identity)
    if found.run_id != identity.run_id:
        raise Reject(f"{place.path}/{RUN_DOCUMENT}: another run began here meanwhile; seal again")


def _identity_of(remote: Path | None, run: str) -> RunIdentity:
    """The run's identity on the remote tier; a new one where it is not known there yet."""
    if remote is not None and remote.exists():
        try:
            with open_run(remote) as (_, identity):
                return identity
        except Reject:
            if (remote / RUN_DOCUMENT).exists():
                raise
    return RunIdentity(
        run_id=str(uuid.uuid4()), name=run, uid=os.getuid(), created_at=datetime.now(UTC)
    )


def _declare(
    local: Path, identity: RunIdentity, wanted: tuple[int, int, int | None], shares_files: bool
) -> tuple[Sealing, tuple[int, ...]]:
    """What is to be sealed, and the steps that stay newer than it."""
    step, tokens, lineage = wanted
    view = (
        look_at_run(local)
        if (local / RUN_DOCUMENT).exists()
        else RunView(path=str(local), identity=identity, records=())
    )
    lineage = lineage or max(1, find_lineage(view))
    known = [(record.attempt, lineage_of(record)) for record in view.records]
    attempt = draw_attempt(step, lineage, known)
    key = order_key(attempt, lineage, view.claims)
    newer = {record.attempt.step for record in view.records if view.key(record) > key}
    sealing = Sealing(
        run_id=identity.run_id,
        lineage=lineage,
        attempt=attempt,
        tokens=tokens,
        now=datetime.now(UTC),
        shares_files=shares_files,
    )
    return sealing, tuple(sorted(newer, reverse=True))


def _print(done: Sealed, local: Path, remote: Path | None) -> None:
    attempt: Attempt = done.sealing.attempt
    count = len(done.sizes)
    what = f"{count} {'file' if count == 1 else 'files'}, {show_size(sum(done.sizes))}"
    say(f"step {attempt.step} of {done.identity.name} is sealed: {what}")
    say(done.folder)
    if done.newer:
        warn(
            f"step {done.newer[0]} stays newer, so a flush leaves this one out; if training went "
            f"back, seal it again with --lineage {done.sealing.lineage + 1}"
        )
        return
    where = shlex.quote(str(remote)) if remote else f"REMOTE/{done.identity.name}"
    say("make it durable:")
    say(f"  tidegate flush --once --local {shlex.quote(str(local))} --remote {where}")


def _document(done: Sealed) -> dict[str, Any]:
    sealing = done.sealing
    return {
        "run": done.identity.name,
        "run_id": done.identity.run_id,
        "step": sealing.attempt.step,
        "attempt": sealing.attempt.nonce,
        "lineage": sealing.lineage,
        "tokens": sealing.tokens,
        "folder": done.folder,
        "files": len(done.sizes),
        "size_bytes": sum(done.sizes),
        "newer_steps": list(done.newer),
    }
