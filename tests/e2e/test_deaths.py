"""A part of Tidegate dies by SIGKILL during a drain: the save is kept, the node is freed."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tidegate_demo.stage import SYSTEM, JobPlan
from tidegate_demo.walk import Walk, drain_state, durable_step, progress_step
from tidegate_ground.ground import Ground
from tidegate_ground.node import Node

pytestmark = [pytest.mark.ground, pytest.mark.timeout(600)]

HELD = ("Requested", "Saving", "Flushing")


def kill_flushers(ground: Ground, node: str) -> None:
    """SIGKILL to the sidecar processes on the drained node."""
    _kill([ground.node(node)], "tidegate_sidecar flush")


def kill_gates(ground: Ground, _: str) -> None:
    """SIGKILL to every gate replica."""
    _kill(ground.nodes, "tidegate_operator gate")


def kill_controller(ground: Ground, _: str) -> None:
    """SIGKILL to the controller."""
    _kill(ground.nodes, "tidegate_operator controller")


def _kill(nodes: Iterable[Node], command: str) -> None:
    """A drain moves pods, so one of the nodes may have none; but somewhere one must die."""
    ends = [node.exec("pkill", "-KILL", "-f", command, check=False) for node in nodes]
    assert any(end.returncode == 0 for end in ends), f"no process runs {command}"


def node_without_controller(ground: Ground, walk: Walk) -> str:
    """The node of a rank whose drain does not move the controller, so that it is there to die."""
    label = "app.kubernetes.io/component=controller"
    pods = ground.get("pods", "-n", SYSTEM, "-l", label)["items"]
    taken = {pod["spec"].get("nodeName") for pod in pods}
    return next(pod.node for pod in walk.now.pods if pod.node not in taken)


@pytest.mark.parametrize("kill", [kill_flushers, kill_gates, kill_controller])
def test_drain_survives_a_death(
    kill: Callable[[Ground, str], None],
    new_walk: Callable[[JobPlan], Walk],
    installed: Ground,
    tmp_path: Path,
) -> None:
    walk = new_walk(JobPlan(steps=5000))
    walk.start()
    before = durable_step(walk.wait_durable())
    node = node_without_controller(installed, walk)
    try:
        with walk.drain(node, tmp_path / "log"):
            walk.wait("the node is held", lambda now: drain_state(now, node) in HELD, 60)
            kill(installed, node)
        assert walk.drain_status == 0, walk.drain_log
    finally:
        installed.kubectl("uncordon", node)
    (entry,) = (e for e in walk.now.run["drains"] if e["node"] == node)
    assert entry["state"] == "Released"
    assert entry["reason"] in ("Durable", "DeadlineExceeded", "Silent")
    if entry["reason"] == "Durable":
        assert durable_step(walk.now) > before
    else:
        assert entry["releasedTime"] <= entry["deadline"] or entry["reason"] == "DeadlineExceeded"
    at_release = durable_step(walk.now)
    walk.wait("training goes on", lambda now: progress_step(now) > at_release, 180)
