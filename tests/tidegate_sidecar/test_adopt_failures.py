"""What one run's folder or copy can do to the leftovers of all others: nothing."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.folder import Folder
from tidegate_contract.layout import target_file
from tidegate_contract.publish import write_document
from tidegate_contract.wire import Policy, Target
from tidegate_sidecar import adopt
from tidegate_sidecar.adopt import Adoptions, Leftover, observe_leftovers
from tidegate_sidecar.agent_settings import LocalTier, RemoteTier
from tidegate_sidecar.flush import flush_once

Build = Callable[..., Any]
GID = os.getegid()


def a_target(run: str, **changes: Any) -> Target:
    policy = Policy(**changes)
    return Target(tier="pfs", path=run, uid=os.geteuid(), gid=GID, policy=policy)


@pytest.fixture
def a_tier(tmp_path: Path, a_sealed_step: Build) -> LocalTier:
    """A local tier with leftovers of team/a, team/b and other/c."""
    root = tmp_path / "nvme"
    for run in ("team/a", "team/b", "other/c"):
        (root / run).mkdir(parents=True)
        a_sealed_step(root / run, 10)
        with Folder.open((root / run).parent) as parent:
            write_document(parent, target_file(run.split("/")[1]), a_target(run))
    return LocalTier(
        name="nvme", host_path="/mnt/nvme", root=root, gid=GID, require_mount_point=False
    )


def test_thing_in_place_of_a_lock_file_hides_no_leftovers(a_tier: LocalTier) -> None:
    (a_tier.root / "team/a" / ".flush-lock").mkdir()
    (a_tier.root / "team/b" / ".flush-lock").symlink_to("/nowhere")
    told: list[str] = []
    found = observe_leftovers(a_tier, lambda run, _: told.append(run))
    assert {left.run for left in found} == {"team/a", "team/b", "other/c"}
    assert told == []


@pytest.mark.parametrize("name", ["_signature", "_is_free", "read_target"])
def test_run_that_cannot_be_read_hides_no_other(
    a_tier: LocalTier, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = getattr(adopt, name)

    def fail(folder: Folder, *args: Any) -> Any:
        if folder.path.endswith("team/a") or args == ("a",):
            raise PermissionError(13, "Permission denied")
        return real(folder, *args)

    monkeypatch.setattr(adopt, name, fail)
    told: list[str] = []
    found = observe_leftovers(a_tier, lambda run, _: told.append(run))
    assert {left.run for left in found} == {"team/b", "other/c"}
    assert told == ["team/a"]


def a_leftover(run: str, **changes: Any) -> Leftover:
    target = a_target(run, **changes)
    return Leftover(run=run, folder=Path("/x"), gid=GID, target=target, signature=(("step", 1),))


@pytest.fixture
def adoptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Copies by a program that says one byte of progress and then hangs."""
    program = tmp_path / "program"
    program.write_text(
        '#!/bin/sh\nfor last; do :; done\necho > "/proc/self/fd/$last"\nexec sleep 60\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    made = Adoptions([RemoteTier(name="pfs", host_path="/mnt/pfs", root=tmp_path)])
    yield made
    made.close()


def test_copy_that_does_not_get_on_gives_its_slot_to_others(
    adoptions: Adoptions, wait_for: Build
) -> None:
    left = [a_leftover(run) for run in ("team/a", "team/b", "team/c")]
    adoptions.start(left, frozenset(), 0.0)
    assert adoptions.running == {"team/a", "team/b"}
    hung = [copy.process for copy in adoptions._running.values()]
    wait_for(lambda: all(copy.heard == 300.0 for copy in beaten(adoptions, 300.0)))
    adoptions.collect(899.0)
    assert adoptions.running == {"team/a", "team/b"}
    adoptions.collect(900.0)
    assert adoptions.running == frozenset()
    wait_for(lambda: all(process.poll() is not None for process in hung))
    adoptions.start(left, frozenset(), 901.0)
    assert adoptions.running == {"team/c"}
    adoptions.start(left, frozenset(), 960.0)
    assert adoptions.running == {"team/a", "team/c"}


def beaten(adoptions: Adoptions, now: float) -> list[Any]:
    adoptions.collect(now)
    return list(adoptions._running.values())


def test_copy_of_a_patient_policy_is_given_longer(adoptions: Adoptions, wait_for: Build) -> None:
    adoptions.start([a_leftover("team/a", stall_timeout_seconds=600.0)], frozenset(), 0.0)
    adoptions.collect(2999.0)
    assert adoptions.running == {"team/a"}


def test_single_pass_tells_of_its_progress(a_run: Build, a_sealed_step: Build) -> None:
    run = a_run()
    a_sealed_step(run.locals[0], 10)
    told: list[int] = []
    assert flush_once(run.settings(), lambda: told.append(1)).is_whole
    assert told
