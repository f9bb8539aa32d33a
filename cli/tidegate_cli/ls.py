"""`tidegate ls`: what each step of a run is, on the folders it is given, and why. Never writes."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from tidegate_cli.look import RunView, look_at_run
from tidegate_cli.rows import Row, State, build_rows
from tidegate_cli.terminal import (
    out,
    plain,
    say,
    say_json,
    say_styled,
    sentence_of,
    show_count,
    show_size,
    show_time,
    time_text,
    warn,
)
from tidegate_contract.errors import TidegateError

_STYLES = {
    State.DURABLE: "green",
    State.SEALED: "cyan",
    State.INCOMPLETE: "yellow",
    State.EMPTY: "dim",
    State.DAMAGED: "bold red",
    State.UNKNOWN: "yellow",
    State.DROPPED: "dim",
}


def ls(
    run_folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_FOLDER", readable=False, help="the run's folder, of either tier"
        ),
    ],
    local: Annotated[
        list[Path] | None,
        typer.Option(
            "--local", metavar="DIR", readable=False, help="the run's folder on a node; once a node"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document instead")] = False,
) -> None:
    """List the steps of a run, and why each is durable or not.

    Newest first. A step is `durable` once it is committed on the remote tier, `sealed` when every
    rank's files are whole, `incomplete`, `empty` or `damaged` when they are not, `unknown` if only
    a newer release can tell, and `dropped` once it lies in .trash, where it stays for an hour. With
    --local the folders of nodes are looked at, too, and LOCAL counts the ranks whose files they
    hold.
    """
    main = look_at_run(run_folder)
    views, refused = _look_at_locals(main, local or [])
    rows = build_rows(main, views)
    problems = [*refused, *_folder_problems([main, *views])]
    if as_json:
        say_json(_document(main, views, rows, problems))
    else:
        _print(main, rows, problems, has_locals=bool(local))
    is_bad = bool(problems) or any(one.record.problems for row in rows for one in row.held)
    raise typer.Exit(1 if is_bad else 0)


def _look_at_locals(main: RunView, paths: list[Path]) -> tuple[list[RunView], list[str]]:
    views, refused = [], []
    for path in paths:
        try:
            view = look_at_run(path)
        except (OSError, TidegateError) as error:
            refused.append(sentence_of(error))
            continue
        if view.identity.run_id == main.identity.run_id:
            views.append(view)
        else:
            refused.append(f"{path}: belongs to another run ({view.identity.name})")
    return views, refused


def _folder_problems(views: list[RunView]) -> list[str]:
    return [
        sentence
        for view in views
        for sentence in (
            *view.unreadable.values(),
            *view.problems,
        )
    ]


def _print(main: RunView, rows: list[Row], problems: list[str], *, has_locals: bool) -> None:
    say(f"{main.identity.name} in {main.path}")
    if rows:
        _print_table(rows, has_locals=has_locals)
    else:
        say("no steps yet")
    if main.unknown:
        shown = ", ".join(main.unknown[:5]) + (", …" if len(main.unknown) > 5 else "")
        say(f"not of the format, left alone: {shown}", "dim")
    for problem in problems:
        warn(problem)


def _print_table(rows: list[Row], *, has_locals: bool) -> None:
    keys = ["STEP", "STATE", "TOKENS", "SIZE", "SAVED (UTC)", "ATTEMPT"]
    if has_locals:
        keys.insert(5, "LOCAL")
    cells = [_cells(row, has_locals=has_locals) for row in rows]
    widths = [max(map(len, column)) for column in zip(keys, *cells, strict=True)]
    table = Table(*(Column(key, no_wrap=True) for key in keys), box=None, pad_edge=False)
    for row, texts in zip(rows, cells, strict=True):
        style = _STYLES[row.state]
        table.add_row(*(Text(text, style if i == 1 else "") for i, text in enumerate(texts)))
    # An attempt's name is its identity: wider than the terminal is better than cut off.
    console = Console(width=max(out.width, sum(widths) + 2 * len(widths)), highlight=False)
    with console.capture() as captured:
        console.print(table)
    head, *lines = captured.get().splitlines()
    say_styled(Text.from_ansi(head.rstrip(), style="bold"))
    for row, line in zip(rows, lines, strict=True):
        say_styled(Text.from_ansi(line.rstrip()))
        for sentence in row.why:
            say(f"    {sentence}", "dim")


def _cells(row: Row, *, has_locals: bool) -> list[str]:
    cells = [
        str(row.attempt.step),
        row.state,
        "" if row.tokens is None else show_count(row.tokens),
        show_size(row.size_bytes) if row.size_bytes else "",
        "" if row.saved_at is None else show_time(row.saved_at),
        row.attempt.nonce,
    ]
    if has_locals:
        cells.insert(5, f"{len(row.local_ranks)}/{row.world_size or '?'}")
    return [plain(cell) for cell in cells]


def _document(
    main: RunView, views: list[RunView], rows: list[Row], problems: list[str]
) -> dict[str, Any]:
    return {
        "run": main.identity.name,
        "run_id": main.identity.run_id,
        "folder": main.path,
        "local_folders": [view.path for view in views],
        "steps": [_step_document(row) for row in rows],
        "unknown": list(main.unknown),
        "problems": problems,
    }


def _step_document(row: Row) -> dict[str, Any]:
    return {
        "step": row.attempt.step,
        "attempt": row.attempt.nonce,
        "state": row.state,
        "why": list(row.why),
        "lineage": row.lineage,
        "tokens": row.tokens,
        "ranks": row.world_size,
        "size_bytes": row.size_bytes,
        "saved_at": time_text(row.saved_at),
        "committed_at": time_text(row.committed_at),
        "newest": row.is_newest,
        "pinned": row.is_pinned,
        "copies": [
            {
                "folder": f"{held.path}/{held.record.folder}",
                "whole_ranks": sorted(held.record.seals),
                "announced_ranks": sorted(held.record.announced),
                "committed": held.record.committed is not None,
                "problems": list(held.record.problems),
            }
            for held in row.held
        ],
    }
