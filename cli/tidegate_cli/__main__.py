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
from rich.table import Table

from tidegate_contract.errors import Corrupt, TidegateError
from tidegate_contract.folder import Folder
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

    Example: tidegate ls /mnt/pfs/tidegate/team-a/llama
    """
    name, records = _scan(folder)
    rows = [_row(record) for record in reversed(records)]
    if as_json:
        out.print_json(json.dumps({"run": name, "steps": rows}))
        return
    table = Table("STEP", "STATE", "TOKENS", "SIZE", "SAVED", "FOLDER", title=name, box=None)
    for row in rows:
        keys = ("step", "state", "tokens", "size", "saved", "folder")
        table.add_row(*(str(row[key]) for key in keys))
    out.print(table)
    for row in rows:
        for problem in row["problems"]:
            out.print(f"  {problem}")


@app.command()
def verify(folder: RunFolder, as_json: AsJson = False) -> None:
    """Read every durable step and compare each block with its digest.

    Example: tidegate verify /mnt/pfs/tidegate/team-a/llama
    """
    _, records = _scan(folder)
    durable = [record for record in records if record.committed is not None]
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
                _fail(f"{folder}: no run.json, so this is not a run's folder")
            return identity.name, scan_steps(run, identity.run_id)
    except (OSError, TidegateError) as error:
        _fail(str(error))


def _row(record: StepRecord) -> dict[str, Any]:
    head: Any = record.committed.manifest if record.committed else None
    if head is None:
        known = record.announced | record.seals
        head = known[min(known)] if known else None
    size = sum(e.size for e in head.files) if record.committed else None
    return {
        "step": record.attempt.step,
        "state": _state(record),
        "tokens": head.tokens if head else None,
        "size": "" if size is None else _size(size),
        "saved": head.sealed_at.strftime("%Y-%m-%d %H:%M:%S") if head else "",
        "folder": record.folder,
        "problems": list(record.problems),
    }


def _state(record: StepRecord) -> str:
    if record.committed is not None:
        return "durable"
    known = record.announced | record.seals
    if not known:
        return "damaged" if record.problems else "empty"
    world = next(iter(known.values())).world_size
    return f"sealed {len(record.seals)}/{world}"


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
