"""Looks at a job: its run's status, its pods, its printed lines. I/O through kubectl."""

import json
from dataclasses import dataclass, field
from typing import Any

from tidegate_ground.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """What a pod shows.

    Attributes:
        uid, name, rank, node: who and where; node is empty before it is bound.
        restarts: of the trainer container.
        is_running: the trainer container runs.
        exit_code: of the trainer's newest end; None if it never ended.
    """

    uid: str
    name: str
    rank: int
    node: str
    restarts: int = 0
    is_running: bool = False
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A job at one moment.

    Attributes:
        run: `CheckpointRun.status`; empty before there is one.
        pods: the trainers, by rank.
        is_complete, is_failed: the Job's word.
    """

    run: dict[str, Any] = field(default_factory=dict)
    pods: tuple[PodFacts, ...] = ()
    is_complete: bool = False
    is_failed: bool = False


def observe_job(cluster: Cluster, namespace: str, name: str) -> Snapshot:
    """One look at a job and its run."""
    found = cluster.get("pods,jobs,checkpointruns", "-n", namespace)["items"]
    run: dict[str, Any] = {}
    pods, conditions = [], set()
    for item in found:
        if item["kind"] == "CheckpointRun" and item["metadata"]["name"] == name:
            run = item.get("status", {})
        elif item["kind"] == "Job" and item["metadata"]["name"] == name:
            listed = item.get("status", {}).get("conditions", [])
            conditions = {c["type"] for c in listed if c["status"] == "True"}
        elif item["kind"] == "Pod" and item["metadata"]["labels"].get("job-name") == name:
            pods.append(_pod_facts(item))
    return Snapshot(
        run=run,
        pods=tuple(sorted(pods, key=lambda pod: pod.rank)),
        is_complete="Complete" in conditions,
        is_failed="Failed" in conditions,
    )


def _pod_facts(pod: dict[str, Any]) -> PodFacts:
    statuses = pod.get("status", {}).get("containerStatuses", [])
    trainer: dict[str, Any] = next((s for s in statuses if s["name"] == "trainer"), {})
    state = trainer.get("state", {})
    ended = state.get("terminated") or trainer.get("lastState", {}).get("terminated")
    annotations = pod["metadata"]["annotations"]
    return PodFacts(
        uid=pod["metadata"]["uid"],
        name=pod["metadata"]["name"],
        rank=int(annotations["batch.kubernetes.io/job-completion-index"]),
        node=pod["spec"].get("nodeName", ""),
        restarts=trainer.get("restartCount", 0),
        is_running="running" in state,
        exit_code=ended["exitCode"] if ended else None,
    )


def read_lines(cluster: Cluster, namespace: str, pod: str, *args: str) -> list[dict[str, Any]]:
    """The JSON lines that a trainer printed; none if its log cannot be read now."""
    done = cluster.kubectl("logs", "-n", namespace, pod, "-c", "trainer", *args, check=False)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
