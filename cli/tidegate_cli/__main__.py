"""`tidegate ls` and `tidegate verify`: what a run's folder really holds.

Reads one tier's run folder through `contract.scan`; never writes. Exit status: 0 all well,
1 something is damaged or nothing is there, 2 wrong usage.
"""

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column, Table

from tidegate_contract.errors import Corrupt, TidegateError
from tidegate_contract.folder import Folder
from tidegate_contract.layout import TRASH, parse_step_folder
from tidegate_contract.scan import StepRecord, read_identity, scan_steps, verify_file

app = typer.Typer(no_args_is_help=True, add_completion=True, rich_markup_mode=None)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

RunFolder = Annotated[
    Path, typer.Argument(help="the run's folder on one tier, e.g. /mnt/pfs/tidegate/team-a/llama")
]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON document instead of a table")]


@app.command()
def ls(folder: RunFolder, as_json: AsJson = False) -> None:
    """List the steps of a run: which are durable, which are not, and why.

    `dropped` steps lie in .trash for an hour more; `N of M ranks` are whole, the others are not.

    Example: tidegate ls /mnt/pfs/tidegate/team-a/llama
    """
    name, records = _scan(folder)
    rows = [_row(record) for record in reversed(records)]
    if as_json:
        out.print_json(json.dumps({"run": name, "steps": rows}))
        return
    keys = ("step", "state", "tokens", "size", "saved", "folder")
    cells = [[_shown(key, row[key]) for key in keys] for row in rows]
    table = Table(*(Column(key.upper(), no_wrap=True) for key in keys), title=name, box=None)
    for line in cells:
        table.add_row(*line)
    # A folder's name is the attempt's identity: wider than the terminal is better than cut off.
    needed = sum(3 + max(map(len, column)) for column in zip(keys, *cells, strict=True))
    Console(width=max(out.width, needed), highlight=False).print(table)
    for row in rows:
        for problem in row["problems"]:
            out.print(f"  {problem}")


@app.command()
def verify(folder: RunFolder, as_json: AsJson = False) -> None:
    """Read every durable step and compare each block with its digest.

    Example: tidegate verify /mnt/pfs/tidegate/team-a/llama
    """
    _, records = _scan(folder)
    durable = [r for r in records if r.committed and not r.folder.startswith(TRASH)]
    if not durable:
        _fail(f"{folder}: no durable step")
    bad = [problem for record in durable if (problem := _verify_step(folder, record, as_json))]
    if as_json:
        out.print_json(json.dumps({"verified": len(durable) - len(bad), "damaged": bad}))
    else:
        for problem in bad:
            err.print(problem)
        out.print(f"{len(durable) - len(bad)} of {len(durable)} durable steps are sound")
    raise typer.Exit(1 if bad else 0)


def _scan(folder: Path) -> tuple[str, list[StepRecord]]:
    try:
        with Folder.open(folder) as run:
            identity = read_identity(run)
            if identity is None:
                hint = " (a step's folder: its run is the folder above)" if _is_step(folder) else ""
                _fail(f"{folder}: no run.json, so this is not a run's folder{hint}")
            return identity.name, scan_steps(run, identity.run_id)
    except OSError as error:
        _fail(f"{folder}: {error.strerror}")
    except TidegateError as error:
        _fail(str(error))


def _is_step(folder: Path) -> bool:
    return parse_step_folder(folder.name) is not None


def _row(record: StepRecord) -> dict[str, Any]:
    known = record.announced | record.seals
    head: Any = known[min(known)] if known else None
    if record.committed is not None:
        head = record.committed.manifest
    entries = head.files if record.committed else [e for s in known.values() for e in s.files]
    size = sum(entry.size for entry in entries)
    return {
        "step": record.attempt.step,
        "state": _state(record),
        "tokens": head.tokens if head else None,
        "size": size,
        "saved": head.sealed_at.isoformat(timespec="seconds") if head else None,
        "folder": record.folder,
        "problems": list(record.problems),
    }


def _state(record: StepRecord) -> str:
    if record.folder.startswith(TRASH):
        return "dropped"
    if record.committed is not None:
        return "durable"
    known = record.announced | record.seals
    if not known:
        return "damaged" if record.problems else "empty"
    world = next(iter(known.values())).world_size
    return f"{len(record.seals)} of {world} ranks"


def _shown(key: str, value: Any) -> str:
    if value is None:
        return ""
    return _size(value) if key == "size" else str(value)


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _verify_step(folder: Path, record: StepRecord, quiet: bool) -> str:
    assert record.committed is not None
    entries = record.committed.manifest.files
    columns = (TextColumn(record.folder), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with (
        Folder.open(folder / record.folder) as step,
        Progress(*columns, console=err, disable=quiet or not err.is_terminal) as progress,
    ):
        task = progress.add_task("", total=sum(entry.size for entry in entries))
        for entry in entries:
            try:
                verify_file(step, entry)
            except (Corrupt, OSError) as error:
                return str(error)
            progress.advance(task, entry.size)
    return ""


def _fail(sentence: str) -> NoReturn:
    err.print(sentence)
    raise typer.Exit(1)


def main() -> None:
    """Entry point of the `tidegate` command."""
    app(prog_name="tidegate")


if __name__ == "__main__":
    main()
