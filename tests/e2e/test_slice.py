"""The main job on a real cluster: saved, flushed, drained only once durable, resumed bit-equal."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from tidegate_contract.keys import LAST_DURABLE_ANNOTATION
from tidegate_demo import losses
from tidegate_demo.stage import TIER_GID, JobPlan
from tidegate_demo.walk import Walk, durable_step, progress_step
from tidegate_ground.waiting import wait_until

pytestmark = [pytest.mark.ground, pytest.mark.timeout(900)]

STEPS = 500
DRAIN_TIMEOUT = 240


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished walk and what was taken down on its way."""

    walk: Walk
    node: str
    first_pods: dict[int, str]
    durable_at_release: int
    resumed_lines: list[dict[str, object]]
    table: str
    annotation: str


def last_durable(walk: Walk, node: str) -> str:
    """What the node tells schedulers; empty before it tells a time."""
    annotations = walk.ground.get("node", node)["metadata"]["annotations"]
    told = annotations.get(LAST_DURABLE_ANNOTATION, "never")
    return "" if told == "never" else told


@pytest.fixture(scope="module")
def outcome(
    new_walk: Callable[[JobPlan], Walk], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Outcome]:
    walk = new_walk(JobPlan(steps=STEPS))
    walk.start()
    walk.wait_durable()
    first = {pod.rank: pod.uid for pod in walk.now.pods}
    node = walk.pod(1).node
    annotation = wait_until("the node's annotation", lambda: last_durable(walk, node), 30)
    try:
        with walk.drain(node, tmp_path_factory.mktemp("drain") / "log", DRAIN_TIMEOUT):
            pass
    finally:
        walk.ground.kubectl("uncordon", node)
    at_release = durable_step(walk.now)
    walk.wait("training goes on", lambda now: progress_step(now) > at_release, 180)
    table = walk.ground.kubectl("get", "cpol,crun", "-n", walk.namespace).stdout
    walk.wait("the job is complete", lambda now: now.is_complete, 300)
    yield Outcome(
        walk=walk,
        node=node,
        first_pods=first,
        durable_at_release=at_release,
        resumed_lines=walk.lines(),
        table=table,
        annotation=annotation,
    )


def test_drain_is_told_what_it_waits_for(outcome: Outcome) -> None:
    refusals = [line for line in outcome.walk.drain_log.splitlines() if "denied" in line]
    assert refusals
    assert all(f"{outcome.walk.namespace}/bytelm" in line for line in refusals)
    assert re.search(r"(?i)until|latest|by ", refusals[0])
    assert outcome.walk.drain_status == 0


def test_drain_is_let_go_only_once_its_save_is_durable(outcome: Outcome) -> None:
    (entry,) = (e for e in outcome.walk.now.run["drains"] if e["node"] == outcome.node)
    assert (entry["state"], entry["reason"]) == ("Released", "Durable")
    asked = datetime.fromisoformat(entry["requestedTime"])
    released = datetime.fromisoformat(entry["releasedTime"])
    durable = [
        datetime.fromisoformat(s.run["lastDurable"]["time"])
        for s in outcome.walk.snapshots
        if s.run.get("lastDurable")
    ]
    assert any(asked <= time <= released for time in durable)


def test_ranks_leave_with_143_and_nobody_is_charged(outcome: Outcome) -> None:
    walk = outcome.walk
    assert {walk.exits[uid, 0] for uid in outcome.first_pods.values()} == {143}
    job = walk.ground.get("job", "bytelm", "-n", walk.namespace)
    assert job["status"]["succeeded"] == 2
    assert not job["status"].get("failedIndexes")


def test_survivor_restarts_in_place_and_the_drained_rank_moves(outcome: Outcome) -> None:
    pods = {pod.rank: pod for pod in outcome.walk.now.pods}
    assert pods[0].uid == outcome.first_pods[0]
    assert pods[0].restarts == 1
    assert pods[1].uid != outcome.first_pods[1]


def test_training_resumes_from_the_newest_durable_step(outcome: Outcome) -> None:
    resumed = {line["resumed"] for line in outcome.resumed_lines if "resumed" in line}
    assert len(resumed) == 1
    assert min(resumed) >= outcome.durable_at_release


def test_losses_are_those_of_an_uninterrupted_run(
    outcome: Outcome, new_walk: Callable[[JobPlan], Walk]
) -> None:
    reference = new_walk(JobPlan(name="reference", steps=STEPS, is_saved=False))
    reference.start()
    reference.wait("the reference is complete", lambda now: now.is_complete, 300)
    want = losses.losses_by_step(reference.lines())
    got = losses.losses_by_step(outcome.resumed_lines)
    assert {rank for rank, _ in got} == {0, 1}
    assert losses.find_difference(got, want) is None
    assert losses.has_fallen(want)


def test_pfs_copy_loads_with_stock_torch(outcome: Outcome, pfs: Path, tmp_path: Path) -> None:
    durable = outcome.walk.now.run["lastDurable"]
    script = (
        "import sys, torch\n"
        "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save\n"
        "dcp_to_torch_save(sys.argv[1], sys.argv[2])\n"
        "state = torch.load(sys.argv[2], weights_only=False)\n"
        "assert not [name for name in sys.modules if name.startswith('tidegate')]\n"
        "print(state['sched']['last_epoch'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, pfs / durable["path"], tmp_path / "model"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) == durable["step"]


def test_kubectl_shows_the_run_as_a_status_page(outcome: Outcome) -> None:
    header = next(line for line in outcome.table.splitlines() if "DURABLE" in line)
    assert header.split() == [
        *("NAME", "STEP", "DURABLE", "SAVED", "BACKLOG", "DRAIN", "READY", "REASON", "AGE")
    ]
    row = next(line for line in outcome.table.splitlines() if "/bytelm" in line).split()
    assert int(row[1]) >= int(row[2]) > 0


def test_node_tells_schedulers_the_newest_durable_time(outcome: Outcome) -> None:
    told = datetime.fromisoformat(outcome.annotation)
    times = [
        datetime.fromisoformat(s.run["lastDurable"]["time"])
        for s in outcome.walk.snapshots
        if s.run.get("lastDurable")
    ]
    assert any(abs((told - time).total_seconds()) < 1 for time in times)


def test_tiers_belong_to_the_trainer_and_the_tiers_group(outcome: Outcome, pfs: Path) -> None:
    run = pfs / outcome.walk.namespace / "bytelm"
    step = pfs / outcome.walk.now.run["lastDurable"]["path"]
    for folder in (run, step):
        found = folder.stat()
        assert (found.st_gid, oct(found.st_mode & 0o7777)) == (TIER_GID, "0o2770")
    assert step.stat().st_uid == 1000


def test_only_what_retention_keeps_is_left(outcome: Outcome, pfs: Path) -> None:
    run = pfs / outcome.walk.namespace / "bytelm"
    committed = [path for path in run.glob("step-*") if (path / "COMMIT").exists()]
    assert 1 <= len(committed) <= 4  # keep is 3, one may be on its way out
