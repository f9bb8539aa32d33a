"""What the leftovers of one tenant may cost the agent: memory, time of a look, further visits."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.folder import Folder
from tidegate_contract.layout import announced_file, seal_file, step_folder, target_file
from tidegate_contract.publish import write_document
from tidegate_contract.wire import Policy, Target
from tidegate_sidecar import memory
from tidegate_sidecar.adopt import (
    MAX_ADOPTIONS,
    MAX_FOLDERS,
    REVISIT_SECONDS,
    Adoptions,
    Attempted,
    Leftover,
    decide_adoptions,
    observe_leftovers,
)
from tidegate_sidecar.agent_settings import LocalTier, RemoteTier

Build = Callable[..., Any]
GID = os.getegid()
HUGE_BYTES = 150 << 20
"""Within what a seal may have, and more than either process of a copy may take."""


def a_target(path: str) -> Target:
    return Target(tier="pfs", path=path, uid=os.geteuid(), gid=GID, policy=Policy())


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, HUGE_BYTES)


def once(run: Any, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tidegate_sidecar", "flush", "--once", *more]
    places = ["--local", str(run.locals[0]), "--remote", str(run.remote)]
    return subprocess.run([*command, *places], capture_output=True, text=True, check=False)


def test_document_that_takes_too_much_memory_ends_its_copy_with_one_sentence(
    a_run: Build, a_sealed_step: Build
) -> None:
    run = a_run()
    name = step_folder(a_sealed_step(run.locals[0], 10))
    make_huge(run.locals[0] / name / seal_file(7))
    done = once(run, "--memory", "224")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "needs more memory than the 224 MiB" in done.stderr
    assert "agent.resources.limits.memory" in done.stderr


def test_remote_document_that_takes_too_much_memory_is_told(
    a_run: Build, a_sealed_step: Build
) -> None:
    run = a_run()
    name = step_folder(a_sealed_step(run.locals[0], 10))
    (run.remote / name).mkdir()
    make_huge(run.remote / name / announced_file(7))
    done = once(run, "--memory", "224")
    assert done.returncode == 1
    assert "it takes more memory than this process may have" in done.stdout
    assert "Traceback" not in done.stderr


def test_copy_within_its_memory_is_whole(a_run: Build, a_sealed_step: Build) -> None:
    run = a_run()
    a_sealed_step(run.locals[0], 10, size=1 << 20)
    assert once(run, "--memory", str(memory._LEAST_BYTES // memory.MIB)).returncode == 0
    assert run.durable() == [10]


def test_agent_outlives_a_copy_that_takes_too_much_and_tries_again_later(
    a_run: Build, a_sealed_step: Build, wait_for: Build, tmp_path: Path
) -> None:
    run = a_run()
    make_huge(run.locals[0] / step_folder(a_sealed_step(run.locals[0], 10)) / seal_file(7))
    adoptions = Adoptions([RemoteTier(name="pfs", host_path=None, root=tmp_path)])
    left = Leftover(
        run="team/a",
        folder=run.locals[0],
        gid=GID,
        target=a_target(run.remote.name),
        signature=(("step", 1),),
    )
    adoptions.start([left], frozenset(), 0.0)

    def is_over() -> bool:
        adoptions.collect(10.0)
        return not adoptions.running

    wait_for(is_over)
    adoptions.start([left], frozenset(), 69.0)
    assert not adoptions.running
    adoptions.start([left], frozenset(), 70.0)
    assert adoptions.running
    adoptions.close()


@pytest.mark.parametrize(
    ("told", "want"),
    [
        (None, (512 - 64) // MAX_ADOPTIONS),
        ("max\n", (512 - 64) // MAX_ADOPTIONS),
        (f"{1 << 30}\n", (1024 - 64) // MAX_ADOPTIONS),
        (f"{64 << 20}\n", 128),
    ],
    ids=["no file", "no limit", "1 GiB", "too little"],
)
def test_copies_share_what_the_container_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, want: int
) -> None:
    path = tmp_path / "memory.max"
    if told is not None:
        path.write_text(told)
    monkeypatch.setattr(memory, "_CONTAINER_LIMIT", path)
    assert memory.share_of_container(MAX_ADOPTIONS) == want


def test_pass_and_its_child_take_no_more_than_their_share_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [(resource.RLIM_INFINITY, resource.RLIM_INFINITY)]
    monkeypatch.setattr(memory.threading, "stack_size", lambda _: None)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    memory.limit_pass(224)
    of_pass, _ = limits[-1]
    memory.take_rest()
    of_child, _ = limits[-1]
    assert of_pass + of_child == 224 << 20


@pytest.fixture
def a_tier(tmp_path: Path, a_sealed_step: Build) -> LocalTier:
    """A local tier with leftovers of the runs team/a and team/b: steps 10 and 20 each."""
    root = tmp_path / "nvme"
    for run in ("team/a", "team/b"):
        (root / run).mkdir(parents=True)
        for step in (10, 20):
            a_sealed_step(root / run, step, size=10)
        with Folder.open((root / run).parent) as parent:
            write_document(parent, target_file(run.split("/")[1]), a_target(run))
    return LocalTier(
        name="nvme", host_path="/mnt/nvme", root=root, gid=GID, require_mount_point=False
    )


def test_look_opens_the_newest_of_too_many_step_folders_only(
    a_tier: LocalTier, attempt_of: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1000, 1000 + MAX_FOLDERS - 1):
        (a_tier.root / "team/a" / step_folder(attempt_of(step))).mkdir()
    opened: list[str] = []
    child = Folder.child

    def note(folder: Folder, name: str) -> Folder:
        opened.append(name)
        return child(folder, name)

    monkeypatch.setattr(Folder, "child", note)
    told: list[tuple[str, str]] = []
    found = observe_leftovers(a_tier, lambda run, word: told.append((run, word)))
    signatures = {left.run: [name for name, _ in left.signature] for left in found}
    both = [step_folder(attempt_of(step)) for step in (10, 20)]
    assert signatures == {"team/a": both[1:], "team/b": both}
    assert len([name for name in opened if name.startswith("step-")]) == MAX_FOLDERS + 2
    assert told == [
        ("team/a", f"more than {MAX_FOLDERS} step folders: only the newest are looked at")
    ]


def test_step_folder_that_cannot_be_listed_hides_no_other(
    a_tier: LocalTier, attempt_of: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Folder.names
    bad = step_folder(attempt_of(10))

    def refuse(folder: Folder) -> list[str]:
        if folder.path.endswith(f"team/a/{bad}"):
            raise OSError(5, "Input/output error")
        return names(folder)

    monkeypatch.setattr(Folder, "names", refuse)
    found = observe_leftovers(a_tier, lambda run, word: pytest.fail(f"{run}: {word}"))
    (left,) = (left for left in found if left.run == "team/a")
    assert [name for name, _ in left.signature] == [step_folder(attempt_of(20))]


def a_leftover(run: str) -> Leftover:
    return Leftover(
        run=run, folder=Path("/x"), gid=GID, target=a_target(run), signature=(("step", 1),)
    )


def a_whole_copy(**changes: Any) -> Attempted:
    fields: dict[str, Any] = {"signature": (("step", 1),), "failures": 0, "ended_at": 100.0}
    return Attempted(**(fields | changes))


@pytest.mark.parametrize(
    ("after", "want"), [(REVISIT_SECONDS - 1, False), (REVISIT_SECONDS, True)], ids=["soon", "late"]
)
def test_run_that_was_copied_whole_is_visited_again_after_a_while(after: float, want: bool) -> None:
    attempted = {"team/a": a_whole_copy()}
    got = decide_adoptions(
        [a_leftover("team/a")], frozenset(), attempted, frozenset(), 100.0 + after
    )
    assert bool(got) is want


def test_run_that_was_copied_whole_waits_for_those_that_were_not() -> None:
    attempted = {run: a_whole_copy() for run in ("team/a", "team/b", "team/c")}
    attempted["team/c"] = a_whole_copy(failures=1)
    left = [a_leftover(f"team/{name}") for name in "abcd"]
    got = decide_adoptions(left, frozenset(), attempted, frozenset(), 1e6)
    assert [found.run for found in got] == ["team/c", "team/d"]


def test_file_that_was_set_aside_remotely_is_copied_again_at_the_next_visit(
    a_run: Build, a_sealed_step: Build, tmp_path: Path, wait_for: Build
) -> None:
    run = a_run()
    name = step_folder(a_sealed_step(run.locals[0], 10, size=100))
    left = Leftover(
        run="team/a",
        folder=run.locals[0],
        gid=GID,
        target=a_target(run.remote.name),
        signature=((name, 1),),
    )
    adoptions = Adoptions([RemoteTier(name="pfs", host_path=None, root=tmp_path)])

    def visit(now: float) -> None:
        adoptions.start([left], frozenset(), now)
        wait_for(lambda: (adoptions.collect(now), not adoptions.running)[1])

    visit(0.0)
    assert run.durable() == [10]
    (run.remote / name / "optim-1.distcp").unlink()
    visit(REVISIT_SECONDS)
    assert run.durable() == [10]
    adoptions.close()
