import os
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_contract.document import encode
from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.layout import ROOT_ID, TIER_DOCUMENT, step_folder, target_file
from tidegate_contract.wire import Policy, Target
from tidegate_sidecar.adopt import (
    Adoptions,
    Attempted,
    Leftover,
    decide_adoptions,
    observe_leftovers,
)
from tidegate_sidecar.agent import Agent, find_tier
from tidegate_sidecar.agent_settings import (
    AgentSettings,
    ApiServer,
    LocalTier,
    RemoteTier,
)
from tidegate_sidecar.folders import (
    read_target,
)
from tidegate_sidecar.lock import FlushLock
from tidegate_sidecar.mounts import TierReason, judge_tier, parse_mountinfo
from tidegate_sidecar.pods import Pod, parse_pod

Build = Callable[..., Any]
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
UID, GID = os.geteuid(), os.getegid()
needs_root = pytest.mark.skipif(UID != 0, reason="gives folders away")


def tell_nothing(run: str, word: str) -> None:
    raise AssertionError(f"{run}: {word}")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


MOUNTS = r"""
1 0 8:1 /var/lib/kubelet/pods/x/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw
2 0 259:0 / /tidegate/tiers/local/disk rw - ext4 /dev/nvme0n1 rw
3 0 8:1 /var/lib/tidegate /tidegate/tiers/local/folder rw - ext4 /dev/sda1 rw
4 0 259:0 /sub /tidegate/tiers/local/other rw - ext4 /dev/nvme0n1 rw
5 0 8:1 /mnt/nvme /tidegate/tiers/local/late rw - ext4 /dev/sda1 rw
6 0 259:1 / /tidegate/tiers/local/late rw - ext4 /dev/nvme1n1 rw
7 0 259:2 / /tidegate/tiers/local/a\040b rw - ext4 /dev/nvme2n1 rw
"""


@pytest.mark.parametrize(
    ("name", "required", "want"),
    [
        ("disk", True, TierReason.OK),
        ("folder", True, TierReason.ON_ROOT_DISK),
        ("folder", False, TierReason.OK),
        ("other", True, TierReason.NOT_MOUNTED),
        ("late", True, TierReason.OK),
        ("a b", True, TierReason.OK),
        ("nowhere", True, TierReason.NOT_MOUNTED),
    ],
    ids=[
        "a disk of its own",
        "a folder of the root disk",
        "a folder, and that is fine",
        "a folder of another disk",
        "mounted after the agent started",
        "a blank in its name",
        "not mounted",
    ],
)
def test_tier_is_judged_by_what_is_mounted(name: str, required: bool, want: TierReason) -> None:
    mounts = parse_mountinfo(MOUNTS)
    root = f"/tidegate/tiers/local/{name}"
    assert judge_tier(mounts, root, requires_mount_point=required) is want


def a_pod_spec() -> dict[str, Any]:
    return {
        "nodeName": "node-1",
        "securityContext": {"runAsUser": 1000, "runAsGroup": 1001},
        "initContainers": [
            {
                "name": keys.SIDECAR_CONTAINER,
                "env": [
                    {"name": keys.ENV_REMOTE, "value": "/tidegate/remote/x/team/bytelm"},
                    {"name": keys.ENV_POLICY, "value": encode(Policy(remote_every=4)).decode()},
                    {"name": keys.ENV_POD, "valueFrom": {}},
                ],
                "volumeMounts": [{"name": keys.LOCAL_VOLUME}],
            }
        ],
        "containers": [
            {"name": "helper", "securityContext": {"runAsUser": 7}},
            {
                "name": "trainer",
                "securityContext": {"runAsUser": 2000},
                "volumeMounts": [{"name": keys.LOCAL_VOLUME}],
            },
        ],
        "volumes": [
            {"name": keys.LOCAL_VOLUME, "hostPath": {"path": "/mnt/nvme/team/bytelm"}},
            {"name": keys.REMOTE_VOLUME, "hostPath": {"path": "/mnt/pfs"}},
        ],
    }


def a_pod_object(**changes: Any) -> dict[str, Any]:
    """An injected pod as the API server gives it."""
    pod: dict[str, Any] = {
        "metadata": {
            "name": "bytelm-0",
            "namespace": "team",
            "uid": "pod-uid",
            "labels": {keys.RUN_LABEL: "bytelm"},
        },
        "spec": a_pod_spec(),
        "status": {"phase": "Pending"},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        inner = pod
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    return pod


def test_pod_says_whose_folder_it_waits_for() -> None:
    assert parse_pod(a_pod_object()) == Pod(
        uid="pod-uid",
        run="team/bytelm",
        is_live=True,
        local_path="/mnt/nvme/team/bytelm",
        user=2000,
        group=1001,
        remote_host_path="/mnt/pfs",
        remote_path="x/team/bytelm",
        policy=Policy(remote_every=4),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"spec__volumes": [{"name": keys.LOCAL_VOLUME, "emptyDir": {}}]},
        {"metadata__labels": {}},
        {"spec__nodeName": None},
    ],
    ids=["folder dies with the pod", "no run", "not bound"],
)
def test_pod_without_a_folder_here_is_left_alone(changes: dict[str, Any]) -> None:
    assert parse_pod(a_pod_object(**changes)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata__labels", {keys.RUN_LABEL: "../../etc"}),
        ("metadata__namespace", "../x"),
        ("spec__initContainers", []),
        (
            "spec__initContainers",
            [
                {
                    "name": keys.SIDECAR_CONTAINER,
                    "env": [{"name": keys.ENV_REMOTE, "value": "/tidegate/remote/../team/bytelm"}],
                }
            ],
        ),
    ],
    ids=["run leaves", "namespace leaves", "no sidecar", "remote leaves"],
)
def test_pod_that_says_what_the_injector_never_says_is_refused(field: str, value: Any) -> None:
    with pytest.raises(Reject):
        parse_pod(a_pod_object(**{field: value}))


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_pod_that_is_over_is_not_live(phase: str) -> None:
    pod = parse_pod(a_pod_object(status={"phase": phase}))
    assert pod is not None
    assert not pod.is_live


@pytest.fixture
def a_node(tmp_path: Path) -> Any:
    """An agent of a node with one local and one remote tier in real folders."""
    for name in ("nvme", "pfs"):
        (tmp_path / name).mkdir()
    api = ApiServer(host="h", port=1, ca_file=tmp_path / "ca", token_file=tmp_path / "t")
    settings = AgentSettings(
        node="node-1",
        local=(
            LocalTier(
                name="nvme",
                host_path="/mnt/nvme",
                root=tmp_path / "nvme",
                gid=GID,
                require_mount_point=False,
            ),
        ),
        remote=(RemoteTier(name="pfs", host_path="/mnt/pfs", root=tmp_path / "pfs"),),
        api=api,
        metrics_port=0,
    )
    return settings


@pytest.fixture
def a_pod() -> Callable[..., Pod]:
    """A parsed pod of this user; keyword arguments replace its fields."""

    def build(**changes: Any) -> Pod:
        pod = parse_pod(a_pod_object())
        assert pod is not None
        return replace(pod, **({"user": UID, "group": GID} | changes))

    return build


def test_agent_makes_the_folder_of_a_bound_pod_and_notes_its_target(
    a_node: AgentSettings, a_pod: Build
) -> None:
    agent = Agent(a_node)
    agent.beat((a_pod(),), 0.0)
    root = a_node.local[0].root
    assert mode_of(root / "team" / "bytelm") == 0o2770
    assert (root / "team" / "bytelm" / ROOT_ID).read_text() == (root / ROOT_ID).read_text()
    with Folder.open(root / "team") as parent:
        target = read_target(parent, "bytelm")
    assert target == Target(
        tier="pfs", path="x/team/bytelm", uid=UID, gid=GID, policy=Policy(remote_every=4)
    )
    assert mode_of(root / "team" / target_file("bytelm")) & 0o007 == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"local_path": "/mnt/nvme/team/other"},
        {"local_path": "/etc"},
        {"local_path": "/mnt/nvme/team/bytelm/../../x"},
        {"is_live": False},
    ],
    ids=["another run's folder", "no tier", "leaves the tier", "over"],
)
def test_agent_makes_no_folder(a_node: AgentSettings, a_pod: Build, changes: Any) -> None:
    Agent(a_node).beat((a_pod(**changes),), 0.0)
    assert {path.name for path in a_node.local[0].root.iterdir()} == {ROOT_ID, TIER_DOCUMENT}


def test_c048_agent_makes_no_folder_on_a_tier_that_is_not_mounted(
    a_node: AgentSettings, a_pod: Build
) -> None:
    tier = replace(a_node.local[0], require_mount_point=True)
    agent = Agent(replace(a_node, local=(tier,)))
    agent.beat((a_pod(),), 0.0)
    assert agent.tiers == {"nvme": "NotMounted"}
    assert not (tier.root / "team").exists()


def test_tier_is_found_by_the_exact_folder(a_node: AgentSettings, a_pod: Build) -> None:
    assert find_tier(a_node.local, a_pod()) == a_node.local[0]


def a_leftover(run: str = "team/bytelm", signature: Any = (("step", 1),)) -> Leftover:
    target = Target(tier="pfs", path=run, uid=UID, gid=GID, policy=Policy())
    return Leftover(run=run, folder=Path("/x"), gid=GID, target=target, signature=signature)


SAME, OTHER = (("step", 1),), (("step", 2),)


@pytest.mark.parametrize(
    ("live", "last", "running", "now", "want"),
    [
        (set(), None, set(), 0.0, True),
        ({"team/bytelm"}, None, set(), 0.0, False),
        (set(), None, {"team/bytelm"}, 0.0, False),
        (set(), None, {"a/a", "b/b"}, 0.0, False),
        (set(), Attempted(signature=SAME, failures=0, ended_at=0.0), set(), 1799.0, False),
        (set(), Attempted(signature=OTHER, failures=0, ended_at=0.0), set(), 1.0, True),
        (set(), Attempted(signature=SAME, failures=1, ended_at=0.0), set(), 59.0, False),
        (set(), Attempted(signature=SAME, failures=1, ended_at=0.0), set(), 60.0, True),
        (set(), Attempted(signature=SAME, failures=2, ended_at=0.0), set(), 60.0, False),
    ],
    ids=[
        "never tried",
        "its pod lives",
        "under way",
        "enough under way",
        "was whole lately",
        "changed since",
        "failed lately",
        "failed a while ago",
        "failed twice",
    ],
)
def test_adoption(
    live: set[str], last: Attempted | None, running: set[str], now: float, want: bool
) -> None:
    attempted = {} if last is None else {"team/bytelm": last}
    got = decide_adoptions([a_leftover()], frozenset(live), attempted, frozenset(running), now)
    assert bool(got) is want


def test_agent_adopts_what_a_dead_pod_left_and_leaves_a_live_one_alone(
    a_node: AgentSettings, a_pod: Build, a_run: Build, a_sealed_step: Build, wait_for: Build
) -> None:
    run = a_run()
    agent = Agent(a_node)
    agent.beat((a_pod(),), 0.0)
    folder = a_node.local[0].root / "team" / "bytelm"
    for path in run.locals[0].iterdir():
        path.rename(folder / path.name)
    remote = a_node.remote[0].root / "x" / "team" / "bytelm"
    remote.parent.mkdir(parents=True)
    run.remote.rename(remote)
    attempt = a_sealed_step(folder, 10)
    agent.beat((a_pod(),), 10.0)
    assert agent.adopting == frozenset()
    agent.beat((a_pod(is_live=False),), 20.0)
    assert agent.adopting == {"team/bytelm"}
    wait_for((remote / step_folder(attempt) / "COMMIT").exists)

    def is_over() -> bool:
        agent.beat((), 30.0)
        return not agent.adopting

    wait_for(is_over)
    agent.beat((), 40.0)
    assert agent.adopting == frozenset()
    agent.close()


def test_leftovers_are_sealed_steps_that_nobody_flushes(
    a_node: AgentSettings, a_pod: Build, a_sealed_step: Build
) -> None:
    tier = a_node.local[0]
    Agent(a_node).beat((a_pod(),), 0.0)
    assert observe_leftovers(tier, tell_nothing) == []
    attempt = a_sealed_step(tier.root / "team" / "bytelm", 10)
    found = observe_leftovers(tier, tell_nothing)
    assert [(left.run, left.gid) for left in found] == [("team/bytelm", GID)]
    assert [name for name, _ in found[0].signature] == [step_folder(attempt)]
    with Folder.open(tier.root / "team" / "bytelm") as run:
        lock = FlushLock(run)
        assert lock.try_take()
        assert observe_leftovers(tier, tell_nothing) == []
        lock.release()


@needs_root
def test_adoption_runs_under_the_runs_user(
    a_node: AgentSettings, wait_for: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TemporaryDirectory() as name:  # the folder of pytest is closed to other users
        folder = Path(name)
        folder.chmod(0o777)
        program = folder / "program"
        program.write_text(f"#!/bin/sh\necho $(id -u) $(id -g) $(id -G) > {name}/new\n")
        program.write_text(program.read_text() + f"mv {name}/new {name}/who\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        target = Target(tier="pfs", path="team/bytelm", uid=4242, gid=4243, policy=Policy())
        adoptions = Adoptions(a_node.remote)
        adoptions.start([replace(a_leftover(), gid=64738, target=target)], frozenset(), 0.0)
        wait_for((folder / "who").exists)
        assert (folder / "who").read_text() == "4242 4243 4243 64738\n"
        adoptions.close()


def test_adoption_that_cannot_start_is_tried_again_later(
    a_node: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    adoptions = Adoptions(a_node.remote)
    adoptions.start([a_leftover()], frozenset(), 0.0)
    assert adoptions.running == frozenset()
