"""What a rank process runs in the tests of the trainer; called by `ranks_host` in a fork."""

import os
import signal
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
from rank_loop import Loop, by_steps, open_run
from rank_shards import keep_pieces, train_shards  # noqa: F401  # programs like those below

import tidegate
from tidegate import reading, restore, saves
from tidegate.writer import Ticket
from tidegate_contract.folder import Folder
from tidegate_contract.layout import TRASH
from tidegate_contract.publish import write_document
from tidegate_contract.seal import FileEntry
from tidegate_contract.wire import Control, OnFailure, SaveRequest


def train(
    rank: int,
    world_size: int,
    *,
    steps: int,
    kind: str = "ddp",
    ends: dict | None = None,
    named: int | None = None,
    **where: object,
) -> dict:
    """Trains until `steps`; gives losses as exact texts, and how it began.

    `ends` may name a step: `terminate`, where the last rank gets SIGTERM; `crash`, where all die;
    `vanish`, where all die before the next save. A `stumble` dies before the first step.
    """
    loop = Loop(kind, rank)
    ends = ends or {}
    ckpt = open_run(loop, **where)
    start = ckpt.restore(named)
    first = start.step if start else 0
    if ends.get("stumble"):
        os._exit(9)
    losses = {}
    for step in range(first + 1, steps + 1):
        losses[step] = loop.train().hex()
        if step == ends.get("terminate") and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        ckpt.step(tokens=10 * (rank + 1))
        if step == ends.get("crash"):
            ckpt.wait("sealed")
            os._exit(9)
        if step == ends.get("vanish"):
            ckpt._telling.join()
            os._exit(9)
    ckpt.close()
    began = None if start is None else [start.step, start.tokens, start.tier, start.reason]
    lineage = None if start is None else start.lineage
    cursor = loop.loader["cursor"]
    return {"losses": losses, "start": began, "lineage": lineage, "cursor": cursor}


def restore_past_a_bad_disk(rank: int, world_size: int, *, local: str, **where: object) -> dict:
    """The node's own disk gives an error where the last rank's weights lie; nothing is damaged."""
    whole = reading.verify_file

    def verify(folder: Folder, entry: FileEntry) -> None:
        if folder.path.startswith(local) and entry.name == f"weights-{world_size - 1}.distcp":
            raise PermissionError(13, "Permission denied", entry.name)
        whole(folder, entry)

    reading.verify_file = verify
    return train(rank, world_size, steps=0, every=1000, local=local, **where)


def restore_what_moves(rank: int, world_size: int, **where: object) -> dict:
    """The lead moves the step out of `.trash` between this restore's look and its opening."""
    whole = restore.open_step

    def open_step(run: Folder, path: str) -> Folder:
        place = Path(run.path, path)
        if path.startswith(f"{TRASH}/") and place.exists():
            place.rename(Path(run.path, place.name))
        return whole(run, path)

    restore.open_step = open_step
    return train(rank, world_size, steps=0, **where)


def mutate(rank: int, world_size: int, *, local: str, steps: int) -> dict:
    """Overwrites the weights right after each `step()`; gives the digest that a save must have."""
    loop = Loop("plain", 0)
    ckpt = tidegate.Checkpointer(loop.state, run="tests/lm", local=local, cadence=by_steps(1))
    ckpt.restore()
    digests = {}
    for step in range(1, steps + 1):
        loop.train()
        digests[step] = loop.digest()
        ckpt.step()
        with torch.no_grad():
            for tensor in loop.model.state_dict().values():
                tensor.add_(1)
    ckpt.close()
    return digests


def end_unevenly(rank: int, world_size: int, *, local: str, steps: list[int]) -> dict:
    """Ranks without collective training end at different steps."""
    loop = Loop("plain", rank)
    ckpt = tidegate.Checkpointer(loop.state, run="tests/lm", local=local, cadence=by_steps(2))
    ckpt.restore()
    for _ in range(steps[rank]):
        loop.train()
        ckpt.step(tokens=1)
    ckpt.close()
    return {}


def save_on_request(rank: int, world_size: int, *, local: str, steps: int) -> dict:
    """Rank 0 finds a request and a live policy after step 3."""
    loop = Loop("ddp", rank)
    ckpt = tidegate.Checkpointer(loop.state, run="tests/lm", local=local, cadence=by_steps(1000))
    ckpt.restore()
    run = Folder.open(f"{local}/tests/lm")
    for step in range(1, steps + 1):
        loop.train()
        if step == 4 and rank == 0:
            deadline = datetime.now(UTC) + timedelta(seconds=60)
            request = SaveRequest(request_id=2**62 + 1, deadline=deadline)
            policy = tidegate.Policy(cadence=by_steps(7))
            write_document(run, "control.json", Control(policy=policy, request=request))
        ckpt.step(tokens=1)
    ckpt.close()
    return {}


def fail_once(rank: int, world_size: int, *, local: str, steps: int) -> dict:
    """A value of one rank cannot be copied in one save; the next save works."""

    class Stubborn:
        is_broken = True

        def __deepcopy__(self, memo: object) -> "Stubborn":
            if self.is_broken and rank == 1:
                raise ValueError("cannot be copied")
            return self

    loop = Loop("ddp", rank)
    stubborn = Stubborn()
    stubborn.is_broken = False
    private = {"stubborn": (lambda: stubborn if stubborn.is_broken else 1, lambda found: None)}
    ckpt = tidegate.Checkpointer(
        loop.state, rank_state=private, run="tests/lm", local=local, cadence=by_steps(2)
    )
    ckpt.restore()
    for step in range(1, steps + 1):
        loop.train()
        stubborn.is_broken = step == 3
        ckpt.step()
        if step % 2:
            ckpt.wait("sealed")
    ckpt.close()
    return {}


def hang_once(rank: int, world_size: int, *, local: str, steps: int) -> dict:
    """The first save of the last rank never ends; later ones are whole again."""
    whole = saves.write_attempt

    def write(desk: object, ticket: Ticket, *rest: object) -> int:
        if rank == world_size - 1 and ticket.attempt.step == 3:
            threading.Event().wait()
        return whole(desk, ticket, *rest)

    saves.write_attempt = write
    loop = Loop("ddp", rank)
    options = tidegate.Options(policy=tidegate.Policy(save_timeout_seconds=4))
    ckpt = tidegate.Checkpointer(
        loop.state, run="tests/lm", local=local, cadence=by_steps(2), options=options
    )
    ckpt.restore()
    for step in range(1, steps + 1):
        loop.train()
        ckpt.step()
        if step == 3:
            ckpt.wait("sealed")
    ckpt.close()
    return {}


def terminate_twice(rank: int, world_size: int, *, local: str) -> dict:
    """The second signal comes while the first is not even heard."""
    loop = Loop("plain", rank)
    ckpt = tidegate.Checkpointer(loop.state, run="tests/lm", local=local, cadence=by_steps(2))
    ckpt.restore()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    return {}


def lose_a_rank(rank: int, world_size: int, *, local: str) -> dict:
    """The last rank vanishes; the others train on without saves."""
    loop = Loop("plain", rank)
    ckpt = tidegate.Checkpointer(loop.state, run="tests/lm", local=local, cadence=by_steps(2))
    ckpt.restore()
    for step in range(1, 7):
        loop.train()
        if step == 4 and rank == world_size - 1:
            os._exit(9)
        ckpt.step()
    ckpt.close()
    return {"steps": 6}


def wait_often(rank: int, world_size: int, *, local: str, steps: int, every: int) -> dict:
    """A program that waits for its saves just when the cadence makes the next one due."""
    loop = Loop("plain", rank)
    ckpt = tidegate.Checkpointer(loop.state, run="tests/lm", local=local, cadence=by_steps(10))
    ckpt.restore()
    for step in range(1, steps + 1):
        loop.train()
        ckpt.step()
        if step == steps // 2 and rank == world_size - 1 and every == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if step % every == 0:
            ckpt.wait()
    ckpt.wait()
    os._exit(0)


def never_free(rank: int, world_size: int, *, local: str, steps: int, on_failure: str) -> dict:
    """The disk of every rank hangs from the first save on; gives how often a step stood still."""
    saves.write_attempt = lambda *_: threading.Event().wait()
    loop = Loop("plain", rank)
    policy = tidegate.Policy(
        cadence=by_steps(5),
        save_timeout_seconds=1,
        on_failure=OnFailure(on_failure),
        fail_after=2,
    )
    options = tidegate.Options(slots=1, policy=policy)
    ckpt = tidegate.Checkpointer(loop.state, run="tests/lm", local=local, options=options)
    ckpt.restore()
    waits = []
    for step in range(1, steps + 1):
        begun = time.monotonic()
        try:
            ckpt.step()
        except tidegate.SavesFailed:
            return {"waits": waits, "ended": step}
        if time.monotonic() - begun > 0.8:
            waits.append(step)
    found = ckpt._reporter.state.saves
    result = {"waits": waits, "total": found.total, "failed": found.failed}
    ckpt._release()
    return result


def cannot_warm(rank: int, world_size: int, *, local: str, steps: int) -> dict:
    """The user's state cannot be taken at the first step; later it can."""

    class Late:
        calls = 0

        def state_dict(self) -> dict:
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("no state yet")
            return {}

        def load_state_dict(self, found: dict) -> None: ...

    loop = Loop("plain", rank)
    ckpt = tidegate.Checkpointer(
        loop.state, rank_state={"late": Late()}, run="tests/lm", local=local, cadence=by_steps(10)
    )
    ckpt.restore()
    for _ in range(steps):
        loop.train()
        ckpt.step()
    ckpt.close()
    return {}


def fail_restore(rank: int, world_size: int, **where: object) -> dict:
    """`restore` raises; tells whether the flusher that was started lives on, and what it knew."""
    ckpt = open_run(Loop("plain", rank), every=1000, **where)
    child = ckpt._child._process
    environment = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
    try:
        ckpt.restore()
    except tidegate.Reject:
        parent = f"TIDEGATE_PARENT={os.getpid()}".encode()
        return {"is_left": child.poll() is None, "knows_parent": parent in environment}
    finally:
        child.kill()
        child.wait()
    return {}
