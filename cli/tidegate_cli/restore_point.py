"""`tidegate restore-point`: what a restart would read, from where, and why nothing newer.

The world is built as the trainer builds it; the decision is the contract's. Never writes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tidegate_cli.look import RunView, is_in_trash, look_at_run
from tidegate_cli.terminal import naming, say, say_json, sentence_of, show_count, show_ranks, warn
from tidegate_contract.errors import Corrupt, Reject, TidegateError
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import LINEAGES, Attempt, step_folder
from tidegate_contract.restore_point import (
    Candidate,
    Copy,
    RestorePoint,
    Source,
    World,
    copy_of,
    decide_restore_point,
    explain_doubt,
    merge_claims,
    order_key,
)
from tidegate_contract.run_documents import scan_trained
from tidegate_contract.scan import StepRecord, committable_manifest
from tidegate_contract.wire import Policy

_NAMED_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the folders hold, as a restoring job would see it.

    Attributes:
        run: its name.
        remote: its folder on the remote tier.
        local: its folders on the nodes, in the order of the ranks.
        copies: of `remote`; None where it could not be read.
        local_copies: of each of `local`.
        claims, trained: of all folders; of two claims of one number the remote tier's.
        commits: attempts that every rank delivered: a restore commits them first.
        problems: sentences on everything that was refused, for people.
    """

    run: str
    remote: str
    local: tuple[str, ...]
    copies: tuple[Copy, ...] | None
    local_copies: tuple[tuple[Copy, ...], ...]
    views: tuple[RunView, ...]
    claims: tuple[LineageClaim, ...]
    trained: frozenset[int]
    commits: frozenset[Attempt]
    problems: tuple[tuple[Attempt | None, str], ...]


_Remote = Annotated[
    Path, typer.Option(metavar="DIR", readable=False, help="the run's folder on the remote tier")
]
_Locals = Annotated[
    list[Path] | None,
    typer.Option(
        "--local", metavar="DIR", readable=False, help="the run's folder on a node; once a node"
    ),
]
_Ranks = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="ranks of the job, in turn over the nodes"),
]
_RanksPerNode = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="ranks on each --local, in order")
]
_Step = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="what a restart would read of this step alone"),
]
_AsJson = Annotated[bool, typer.Option("--json", help="one JSON document instead")]


def restore_point(
    remote: _Remote,
    local: _Locals = None,
    ranks: _Ranks = None,
    ranks_per_node: _RanksPerNode = None,
    step: _Step = None,
    as_json: _AsJson = False,
) -> None:
    """Say what a restart would read, and why nothing newer.

    Give --local once for each node, in the order of its ranks. Without --ranks the job is taken to
    be as large as at its newest save, with the ranks that each folder holds.
    """
    if ranks is not None and ranks_per_node is not None:
        raise typer.BadParameter("give --ranks or --ranks-per-node, not both")
    if ranks_per_node is not None and not local:
        raise typer.BadParameter("--ranks-per-node counts the ranks of each --local: give one")
    seen = _observe(remote, local or [])
    if step is not None:
        _check_step(seen, step)
    nodes = decide_nodes(seen, ranks, ranks_per_node)
    if not nodes:
        raise Reject(f"run {seen.run}: nothing is saved in these folders")
    world = World(
        nodes=nodes,
        local=(*seen.local_copies, *[()] * (len(nodes) - len(seen.local))),
        remote=seen.copies,
        claims=seen.claims,
        step=step,
        trained=seen.trained,
        max_tries=Policy().max_restore_tries,
    )
    point = decide_restore_point(world)
    if as_json:
        say_json(_document(seen, world, point))
    else:
        _print(seen, world, point)
    raise typer.Exit(0 if point.candidates else 1)


def _check_step(seen: Seen, step: int) -> None:
    steps = {record.attempt.step for view in seen.views for record in view.records}
    if steps and step not in steps:
        there = ", ".join(str(known) for known in sorted(steps, reverse=True)[:_NAMED_STEPS])
        more = ", …" if len(steps) > _NAMED_STEPS else ""
        raise Reject(
            f"step {step} is not in these folders; there "
            f"{'is step' if len(steps) == 1 else 'are steps'} {there}{more}"
        )


def _observe(remote: Path, local: Sequence[Path]) -> Seen:
    """Both tiers; an unreadable folder is one that the job could not read either."""
    problems: list[tuple[Attempt | None, str]] = []
    far = _try_look(remote, problems)
    near = [_try_look(path, problems) for path in local]
    views = [view for view in (far, *near) if view is not None]
    if not views:
        raise Reject(problems[0][1])
    first = views[0].identity
    for view in views:
        if view.identity.run_id != first.run_id:
            raise Reject(
                f"{view.path} is of run {view.identity.name} ({view.identity.run_id}), "
                f"{views[0].path} of {first.name} ({first.run_id})"
            )
        problems += _problems(view)
    commits = frozenset() if far is None else _find_committable(far)
    return Seen(
        run=first.name,
        remote=str(remote),
        local=tuple(str(path) for path in local),
        copies=None if far is None else _copies(far.records, commits),
        local_copies=tuple(_copies(v.records) if v is not None else () for v in near),
        views=tuple(views),
        claims=merge_claims(*(view.claims for view in views)),
        trained=frozenset(number for view in views for number in _trained(view)),
        commits=commits,
        problems=tuple(problems),
    )


def _try_look(path: Path, problems: list[tuple[Attempt | None, str]]) -> RunView | None:
    try:
        return look_at_run(path)
    except (OSError, TidegateError) as error:
        problems.append((None, sentence_of(error)))
        return None


def _problems(view: RunView) -> Iterable[tuple[Attempt | None, str]]:
    for record in view.records:
        yield from ((record.attempt, problem) for problem in record.problems)
    for why in view.unreadable.values():
        yield None, why
    yield from ((None, problem) for problem in view.problems)


def _trained(view: RunView) -> frozenset[int]:
    with Folder.open(view.path) as run, naming(f"{view.path}/{LINEAGES}"):
        return scan_trained(run, view.identity.run_id)


def _find_committable(view: RunView) -> frozenset[Attempt]:
    """Delivered attempts that lack their commit only: the trainer commits them before it looks."""
    found = set()
    for record in view.records:
        if record.committed or not record.seals or is_in_trash(record):
            continue
        try:
            with Folder.open(f"{view.path}/{record.folder}") as step:
                if committable_manifest(step, record.attempt, view.identity.run_id) is not None:
                    found.add(record.attempt)
        except (OSError, Corrupt):
            continue  # the record's own problems say why
    return frozenset(found)


def _copies(
    records: Iterable[StepRecord], commits: frozenset[Attempt] = frozenset()
) -> tuple[Copy, ...]:
    copies = [copy for record in records if (copy := copy_of(record)) is not None]
    return tuple(
        replace(copy, is_committed=True) if copy.attempt in commits else copy for copy in copies
    )


def decide_nodes(
    seen: Seen, ranks: int | None, ranks_per_node: int | None
) -> tuple[frozenset[int], ...]:
    """Who restores: for each node its ranks, those of `seen.local` first; pure.

    Returns:
        Nothing where no size was given and nothing is saved.
    """
    if ranks_per_node is not None:
        ranks = ranks_per_node * len(seen.local)
    if ranks is not None:
        return _deal(ranks, max(1, len(seen.local)))
    newest = _newest_copy(seen)
    if newest is None:
        return ()
    nodes = [_ranks_of(copies, newest) for copies in seen.local_copies]
    taken: set[int] = set()
    for index, held in enumerate(nodes):  # of two folders with one rank the first has it
        nodes[index] = held - taken
        taken |= held
    rest = frozenset(range(newest.world_size)) - taken
    return (*nodes, *([rest] if rest else []))


def _deal(ranks: int, nodes: int) -> tuple[frozenset[int], ...]:
    ends = [ranks * (node + 1) // nodes for node in range(nodes)]
    return tuple(frozenset(range(start, end)) for start, end in zip([0, *ends], ends, strict=False))


def _newest_copy(seen: Seen) -> Copy | None:
    copies = [*(seen.copies or ()), *(copy for node in seen.local_copies for copy in node)]
    return max(copies, key=lambda c: order_key(c.attempt, c.lineage, seen.claims), default=None)


def _ranks_of(copies: Sequence[Copy], newest: Copy) -> frozenset[int]:
    """The ranks of a node: those it sealed in the newest attempt, else in its own newest one."""
    own = next((copy for copy in copies if copy.attempt == newest.attempt), None)
    if own is None:
        fitting = [copy for copy in copies if copy.world_size == newest.world_size]
        own = max(fitting, key=lambda copy: (copy.lineage, copy.attempt), default=None)
    return own.ranks if own is not None else frozenset()


def _print(seen: Seen, world: World, point: RestorePoint) -> None:
    size = sum(len(node) for node in world.nodes)
    say(f"{seen.run} restored by {size} {'rank' if size == 1 else 'ranks'}")
    if point.candidates:
        _print_candidate(seen, world, point)
    else:
        say("nothing can be restored", "bold")
    for attempt, why in refused_before(seen, point):
        say(f"not {step_folder(attempt)}")
        say(f"  {why}")
    if point.pending is not None:
        name = _name(point.pending, point)
        say(f"a restore first waits a while for step {name}, still being copied")
    if seen.copies is None:
        say("a job refuses to start without its remote tier, unless onRemoteUnreachable: LocalOnly")
    older = [_name(candidate.attempt, point) for candidate in point.candidates[1:6]]
    if older:
        say(f"if that fails: step {', '.join(older)}{', …' if len(point.candidates) > 6 else ''}")
    for problem in _general(seen, world, point):
        warn(problem)


def _name(attempt: Attempt, point: RestorePoint) -> str:
    """The step's number, with the nonce where another attempt has the same."""
    same = [other for other in point.order if other.step == attempt.step]
    return f"{attempt.step} (attempt {attempt.nonce})" if len(same) > 1 else str(attempt.step)


def _general(seen: Seen, world: World, point: RestorePoint) -> list[str]:
    told = [problem for attempt, problem in seen.problems if attempt is None]
    doubt = explain_doubt(seen.claims, next(iter(point.candidates), None))
    return told if doubt is None or world.step is not None else [*told, doubt]


def _print_candidate(seen: Seen, world: World, point: RestorePoint) -> None:
    best = point.candidates[0]
    tokens = f", {show_count(best.tokens)} tokens" if best.tokens else ""
    ranks = f"{best.world_size} {'rank' if best.world_size == 1 else 'ranks'}"
    say(
        f"step {_name(best.attempt, point)} of lineage {best.lineage}{tokens}, saved by {ranks}",
        "bold",
    )
    for ranks_there, source, folder in find_sources(seen, world, best):
        place = folder.removesuffix(f"/{step_folder(best.attempt)}")
        say(f"  {show_ranks(ranks_there)} from {source.lower()} {place}")
    say(f"  in {step_folder(best.attempt)}")
    if best.attempt in seen.commits:
        say("  every rank delivered it; the restore commits it first")


def find_sources(
    seen: Seen, world: World, best: Candidate
) -> list[tuple[frozenset[int], Source, str]]:
    """Which ranks read in which folder, nodes in order, the remote tier last; pure."""
    found = []
    far: frozenset[int] = frozenset()
    for index, node in enumerate(world.nodes):
        near = frozenset(rank for rank in node if best.sources[rank] is Source.LOCAL)
        far |= node - near
        if near:
            folder = best.folders[min(near)]
            found.append((near, Source.LOCAL, f"{seen.local[index]}/{folder}"))
    if far:
        found.append((far, Source.REMOTE, f"{seen.remote}/{best.remote_folder}"))
    return found


def refused_before(seen: Seen, point: RestorePoint) -> list[tuple[Attempt, str]]:
    """Attempts that come before the chosen one, newest first, and why they were not taken; pure.

    Damaged ones, of which nothing tells the lineage, are told by their step.
    """
    best = point.candidates[0].attempt if point.candidates else None
    newer = set(point.order[: point.order.index(best)] if best else point.order)
    problems: dict[Attempt, str] = {}
    for attempt, problem in seen.problems:
        if attempt is not None:
            problems.setdefault(attempt, problem)
    told = [
        (attempt, f"{why} ({problems[attempt]})" if attempt in problems else why)
        for attempt, why in point.refused
        if attempt in newer
    ]
    silent = [
        (attempt, problem)
        for attempt, problem in problems.items()
        if attempt not in point.order and (best is None or attempt.step >= best.step)
    ]
    return [*told, *sorted(silent, reverse=True)]


def _document(seen: Seen, world: World, point: RestorePoint) -> dict[str, Any]:
    best = point.candidates[0] if point.candidates else None
    return {
        "run": seen.run,
        "ranks": sum(len(node) for node in world.nodes),
        "nodes": [sorted(node) for node in world.nodes],
        "chosen": None if best is None else _candidate_document(seen, world, best),
        "fallbacks": [
            {"step": c.attempt.step, "attempt": c.attempt.nonce, "lineage": c.lineage}
            for c in point.candidates[1:]
        ],
        "refused": [
            {"step": attempt.step, "attempt": attempt.nonce, "why": why}
            for attempt, why in refused_before(seen, point)
        ],
        "pending": None
        if point.pending is None
        else {"step": point.pending.step, "attempt": point.pending.nonce},
        "problems": _general(seen, world, point),
    }


def _candidate_document(seen: Seen, world: World, best: Candidate) -> dict[str, Any]:
    return {
        "step": best.attempt.step,
        "attempt": best.attempt.nonce,
        "lineage": best.lineage,
        "tokens": best.tokens,
        "saved_by_ranks": best.world_size,
        "committed_first": best.attempt in seen.commits,
        "sources": [
            {"ranks": sorted(ranks), "tier": source.lower(), "folder": folder}
            for ranks, source, folder in find_sources(seen, world, best)
        ],
    }
