"""A part of Tidegate dies by SIGKILL during a drain: the save is kept, the node is freed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tidegate_demo.stage import SYSTEM, JobPlan
from tidegate_demo.walk import Walk, drain_state, durable_step, progress_step
from tidegate_ground.ground import Ground

pytestmark = [pytest.mark.ground, pytest.mark.timeout(600)]

HELD = ("Requested", "Saving", "Flushing")


def kill_flushers(ground: Ground, walk: Walk) -> None:
    """SIGKILL to the sidecar processes on the drained rank's node."""
    _kill(ground, walk.pod(1).node, "tidegate_sidecar flush")


def kill_gates(ground: Ground, _: Walk) -> None:
    """SIGKILL to every gate replica."""
    for node in _nodes_of(ground, "gate"):
        _kill(ground, node, "tidegate_operator gate")


def kill_controller(ground: Ground, _: Walk) -> None:
    """SIGKILL to the controller."""
    for node in _nodes_of(ground, "controller"):
        _kill(ground, node, "tidegate_operator controller")


def _nodes_of(ground: Ground, component: str) -> set[str]:
    pods = ground.get("pods", "-n", SYSTEM, "-l", f"app.kubernetes.io/component={component}")
    return {pod["spec"]["nodeName"] for pod in pods["items"]}


def _kill(ground: Ground, node: str, command: str) -> None:
    ground.node(node).exec("pkill", "-KILL", "-f", command)


@pytest.mark.parametrize("kill", [kill_flushers, kill_gates, kill_controller])
def test_drain_survives_a_death(
    kill: Callable[[Ground, Walk], None],
    new_walk: Callable[[JobPlan], Walk],
    installed: Ground,
    tmp_path: Path,
) -> None:
    walk = new_walk(JobPlan(steps=5000))
    walk.start()
    before = durable_step(walk.wait_durable())
    node = walk.pod(1).node
    try:
        with walk.drain(node, tmp_path / "log"):
            walk.wait("the node is held", lambda now: drain_state(now, node) in HELD, 60)
            kill(installed, walk)
        assert walk.drain_status == 0, walk.drain_log
    finally:
        installed.kubectl("uncordon", node)
    (entry,) = (e for e in walk.now.run["drains"] if e["node"] == node)
    assert entry["state"] == "Released"
    assert entry["reason"] in ("Durable", "DeadlineExceeded", "Silent")
    if entry["reason"] == "Durable":
        assert durable_step(walk.now) > before
    at_release = durable_step(walk.now)
    walk.wait("training goes on", lambda now: progress_step(now) > at_release, 180)
