"""Weights outside the job: one folder → a module, in any process that can read that folder.

For evaluation: no ranks, no run of one's own, and never a write to a tier, so nothing is claimed
and nothing damaged is set aside. Which step is loaded the contract's `restore_point` decides, as
for a restart. Called by users.
"""

import errno
import os
import pickle
import time
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tidegate.named import check_step, explain_missing, explain_named
from tidegate.reading import Load, OpenedCopy, open_copy
from tidegate.settings import check_uids
from tidegate.state import TrainingState
from tidegate.trust import own_uids, read_told
from tidegate_contract.errors import Corrupt, Reject, Retry
from tidegate_contract.folder import Folder, open_step
from tidegate_contract.identity import LineageClaim
from tidegate_contract.layout import (
    MANIFEST,
    METADATA,
    RUN_DOCUMENT,
    Attempt,
    parse_seal_file,
)
from tidegate_contract.restore_point import (
    Candidate,
    RestorePoint,
    World,
    copy_of,
    decide_restore_point,
    explain_doubt,
)
from tidegate_contract.run_documents import read_document, scan_claims
from tidegate_contract.scan import StepRecord, scan_step, scan_steps
from tidegate_contract.seal import Manifest, Seal

_USERS_ERRORS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP})
_UNPICKLING = (TypeError, ValueError, AttributeError, ImportError, pickle.UnpicklingError)
_TOLD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What was loaded.

    Attributes:
        step, tokens: of the step.
        lineage: that saved it.
        reason: a sentence: why this step and no newer one.
        folder: of the step.
        bytes_read: of its data files, by this process.
        seconds: that the call took.
    """

    step: int
    tokens: int
    lineage: int
    reason: str
    folder: Path
    bytes_read: int
    seconds: float


def load(
    folder: str | os.PathLike[str],
    into: MutableMapping[str, Any],
    *,
    step: int | None = None,
    trusted_uids: Collection[int] = (),
) -> Loaded:
    """Loads what a run saved under these names, and no more; not collective; writes nothing.

    Modules and tensors are filled in place, whatever the number of ranks that saved them; keys,
    shapes and dtypes must be those that were saved. Other values are replaced in `into`, or given
    to their `load_state_dict`. Every block that is read is compared with its digest before its use.

    Args:
        folder: of a run, on the remote tier or on a node that holds the files of all ranks; of one
            of its steps; or a copy of either.
        into: name, as the Checkpointer saved it → module, tensor or other value; no optimizer.
        step: this one or none; None means the newest by (lineage, step) that is durable or, on a
            node, sealed by all ranks.
        trusted_uids: numeric ids of users whose files may be loaded as well, which can run their
            code. This process's user and root are trusted, and whom a `run.json` of theirs names.

    Raises:
        Reject: there is no such step, or a stranger could have written it, or it does not fit.
        Corrupt: a file is damaged; `into` may then be partly overwritten, by sealed values only.
        Retry: the file system gives an error; `into` as for Corrupt.
    """
    begun = time.monotonic()
    _check_into(into)
    check_uids("trusted_uids", trusted_uids)
    state = TrainingState(into, None, rank=0, keeps_rng=False, on_world_change=None)
    target, loaded = _read(Path(folder).absolute(), state, check_step(step), trusted_uids)
    state.apply(target, saved_world=1, world_size=1)
    return replace(loaded, seconds=time.monotonic() - begun)


def _read(
    path: Path, state: TrainingState, step: int | None, trusted_uids: Collection[int]
) -> tuple[dict[str, Any], Loaded]:
    try:
        with Folder.open(path) as place:
            seen = _observe(place)
            chosen, reason = _choose(seen, step)
            trusted = own_uids() | {*seen.named_uids, *trusted_uids}
            copy = _open(place, seen, chosen, trusted)
        with copy.folder:
            target, bytes_read = _read_copy(copy, state, trusted)
    except OSError as error:
        raise _unreadable(path, error) from error
    return target, Loaded(
        step=chosen.attempt.step,
        tokens=chosen.tokens,
        lineage=chosen.lineage,
        reason=reason,
        folder=Path(copy.folder.path),
        bytes_read=bytes_read,
        seconds=0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What the folder holds.

    Attributes:
        path: for sentences.
        run_id: whose steps they are.
        records: of its steps; of one step's folder that one, which then lies at "".
        claims: lineage claims that lie beside them.
        named_uids: users whom a trusted `run.json` names.
    """

    path: str
    run_id: str
    records: tuple[StepRecord, ...]
    claims: tuple[LineageClaim, ...] = ()
    named_uids: frozenset[int] = frozenset()


def _observe(place: Folder) -> _Seen:
    told = read_told(place, own_uids())
    if told is None:
        return _observe_step(place)
    run_id = told.identity.run_id
    return _Seen(
        path=place.path,
        run_id=run_id,
        records=tuple(scan_steps(place, run_id)),
        claims=tuple(scan_claims(place, run_id)),
        named_uids=frozenset({told.identity.uid}),
    )


def _observe_step(step: Folder) -> _Seen:
    """One step's folder, whatever it is called: its documents tell what it is."""
    found: Manifest | Seal | None = read_document(step, Manifest, MANIFEST)
    seals = [name for name in step.names() if parse_seal_file(name) is not None]
    if found is None and seals:
        found = read_document(step, Seal, seals[0])
    if found is None:
        raise Reject(
            f"{step.path}: holds neither {RUN_DOCUMENT} nor a step's seals; allowed is the folder "
            "of a run, TIER/NAMESPACE/NAME, or of one of its steps"
        )
    record = scan_step(step, found.attempt, "", found.run_id)
    return _Seen(path=step.path, run_id=found.run_id, records=(record,))


def _choose(seen: _Seen, step: int | None) -> tuple[Candidate, str]:
    """The step that one rank would restore from this folder alone, and why. Pure."""
    copies = [(record, copy_of(record)) for record in seen.records]
    far = {r.attempt for r in seen.records if r.announced or r.committed is not None}
    world = World(
        nodes=(frozenset({0}),),
        local=(tuple(c for _, c in copies if c is not None and c.attempt not in far),),
        remote=tuple(c for _, c in copies if c is not None and c.attempt in far),
        claims=seen.claims,
        step=step,
    )
    point = decide_restore_point(world)
    if not point.candidates:
        raise Reject(f"{seen.path}: {_explain_none(seen, world)}")
    chosen = point.candidates[0]
    return chosen, _explain_choice(seen, point, step)


def _explain_choice(seen: _Seen, point: RestorePoint, step: int | None) -> str:
    chosen = point.candidates[0]
    newer = set(point.order[: point.order.index(chosen.attempt)])
    for record in seen.records:
        # Of what nothing can be read the lineage is unknown: the number of its step must do.
        if record.attempt not in point.order and record.attempt.step > chosen.attempt.step:
            newer.add(record.attempt)
    passed = [record for record in seen.records if record.attempt in newer]
    if step is not None:
        same = [_explain_record(record) for record in passed if record.attempt.step == step]
        return explain_named(same, step)
    told = f" ({_explain_records(passed)})" if passed else ""
    doubt = explain_doubt(seen.claims, chosen)
    more = f"; {doubt}" if doubt else ""
    return f"step {chosen.attempt.step} is the newest that can be loaded{told}{more}"


def _explain_none(seen: _Seen, world: World) -> str:
    if world.step is not None:
        return explain_missing(world, {r.attempt: _explain_record(r) for r in seen.records})
    told = _explain_records(seen.records)
    return f"no step can be loaded ({told})" if told else "no step was ever saved"


def _explain_records(records: Sequence[StepRecord]) -> str:
    newest = [f"step {r.attempt.step}: {_explain_record(r)}" for r in reversed(records)]
    return "; ".join(newest[:_TOLD])


def _explain_record(record: StepRecord) -> str:
    if record.problems:
        return record.problems[0]
    known = record.announced | record.seals
    if not known:
        return "no rank has sealed it"
    if record.announced:
        return "it is not durable yet"
    size = known[min(known)].world_size
    return f"only the files of {len(known)} of its {size} ranks are here; the remote tier has all"


def _open(place: Folder, seen: _Seen, chosen: Candidate, trusted: Collection[int]) -> OpenedCopy:
    path = chosen.folders[0]
    folder = open_step(place, path) if path else place.below(())
    written_by = _torch_of(seen, chosen.attempt)
    try:
        if not written_by and folder.size(METADATA) is None:
            raise Reject(f"{folder.path}: has no {METADATA}: another framework wrote it")
        return open_copy(folder, chosen.attempt, seen.run_id, chosen.sources[0], trusted)
    except BaseException as error:
        folder.close()
        if not isinstance(error, _UNPICKLING):
            raise
        # Its digest was right, so this torch does not know what that one wrote.
        raise Reject(
            f"{folder.path}/{METADATA}: written by torch {written_by}, cannot be read by this one, "
            f"{torch.__version__} ({error}); use that one or a newer one"
        ) from error


def _torch_of(seen: _Seen, attempt: Attempt) -> str:
    record = next(record for record in seen.records if record.attempt == attempt)
    if record.committed is not None:
        return record.committed.manifest.torch_version
    return record.seals[min(record.seals)].torch_version


def _read_copy(
    copy: OpenedCopy, state: TrainingState, trusted: Collection[int]
) -> tuple[dict[str, Any], int]:
    target = state.build_target(copy.metadata, is_same_world=True)
    misfit = state.find_misfit(target, copy.metadata)
    if misfit is not None:
        raise Reject(f"{copy.folder.path}: {misfit}")
    load = Load(copy, target, trusted)
    load.check_owners()
    try:
        return target, load.check_tied() + load.read()
    except Corrupt as error:
        raise Corrupt(f"{error}; nothing else is loaded in its place: name another step") from error


def _check_into(into: object) -> None:
    if not isinstance(into, Mapping) or not into:
        raise Reject('into: allowed is a mapping of names, such as {"model": model}')
    for name, value in into.items():
        if isinstance(value, torch.optim.Optimizer):
            raise Reject(f"into[{name!r}]: an optimizer; Checkpointer.restore brings those back")


def _unreadable(path: Path, error: OSError) -> Reject | Retry:
    name = "" if error.filename in (None, str(path)) else f" {error.filename}"
    sentence = f"{path}:{name} cannot be read ({error.strerror})"
    return (Reject if error.errno in _USERS_ERRORS else Retry)(sentence)
