"""A scenario whose copy takes long enough to be killed inside a call of the kernel.

Two ranks of one node have larger files, which the flusher copies with two threads at once.
"""

import os
from threading import Event

from tidegate_contract.digest import ContentHasher
from tidegate_contract.errors import Corrupt
from tidegate_contract.folder import Folder
from tidegate_contract.layout import METADATA_REMOTE, Attempt, Part, data_file, step_folder
from tidegate_contract.publish import write_seal
from tidegate_contract.scan import CommittedStep, confirm_commit, read_commit, verify_file
from tidegate_contract.seal import FileEntry, SaveReason, Seal, file_entry
from tidegate_crash.scenario import Fact, History, Place, Scenario
from tidegate_crash.stage import NOW, RUN_ID, identity_of, make_run
from tidegate_sidecar.tasks import CopyRanks, Places, RemoteTier
from tidegate_sidecar.transfer import Meter, TokenBucket

FILE_BYTES = 8 << 20
_RANKS = (0, 1)
_ATTEMPT = Attempt(step=9, nonce=f"{0xA9:016x}")


def _prepare(place: Place, history: History) -> None:
    make_run(place)
    with Folder.open(place.nodes[0]) as run, run.ensure_child(step_folder(_ATTEMPT)) as step:
        for rank in _RANKS:
            pattern = bytes((rank * 31 + index) % 251 for index in range(1009))
            files = [_write(step, data_file(Part.WEIGHTS, rank), pattern * (FILE_BYTES // 1009))]
            if rank == 0:
                files.append(_write(step, METADATA_REMOTE, b"metadata of the step"))
            write_seal(step, _seal(rank, tuple(files)))
            history.note(Fact.SEALED, _ATTEMPT, rank)


def _write(step: Folder, name: str, data: bytes) -> FileEntry:
    hasher = ContentHasher()
    hasher.update(data)
    with step.new_file(name) as file:
        file.write(data)
        file.publish(len(data))
    return file_entry(name, hasher.finish())


def _seal(rank: int, files: tuple[FileEntry, ...]) -> Seal:
    return Seal(
        run_id=RUN_ID,
        lineage=1,
        attempt=_ATTEMPT,
        tokens=9000,
        rank=rank,
        world_size=len(_RANKS),
        sealed_at=NOW,
        reason=SaveReason.CADENCE,
        torch_version="2.15.0",
        files=files,
    )


def _flush(place: Place, history: History) -> None:
    tier = RemoteTier(
        Places(
            local=place.nodes[0],
            remote_root=place.remote_root,
            remote=os.path.basename(place.remote),
            identity=identity_of(),
        )
    )
    task = CopyRanks(
        attempt=_ATTEMPT, ranks=frozenset(_RANKS), bytes_per_second=None, files_at_once=2
    )
    tier.copy(task, Meter(TokenBucket(None), Event(), lambda _: None))
    tier.commit(_ATTEMPT, NOW)
    if _read(place, is_durable=True) is not None:
        history.note(Fact.COMMITTED, _ATTEMPT)


def _read(place: Place, *, is_durable: bool = False) -> CommittedStep | None:
    read = confirm_commit if is_durable else read_commit
    with Folder.open(place.remote) as run:
        try:
            step = run.child(step_folder(_ATTEMPT))
        except FileNotFoundError:
            return None
        with step:
            return read(step, _ATTEMPT, RUN_ID)


def _check(place: Place, history: History) -> list[str]:
    try:
        done = _read(place)
    except Corrupt as error:
        return [f"I2 a torn commit is offered: {error}"]
    if done is None and history.has(Fact.COMMITTED, _ATTEMPT):
        return ["I3 the commit is gone"]
    return []


def _check_final(place: Place, _history: History) -> list[str]:
    done = _read(place)
    if done is None:
        return ["I5 the second run did not commit the step"]
    try:
        with Folder.open(place.remote) as run, run.child(step_folder(_ATTEMPT)) as step:
            for entry in done.manifest.files:
                verify_file(step, entry)
    except Corrupt as error:
        return [f"I2 committed bytes are wrong: {error}"]
    return []


LARGE_COPY = Scenario(
    name="large-copy",
    prepare=_prepare,
    actors=(_flush,),
    nodes=(0,),
    recover=_flush,
    check=_check,
    check_final=_check_final,
)
