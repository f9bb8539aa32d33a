"""What a failed test leaves for a person to read: logs, events and objects of its namespaces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tidegate_ground.cluster import Cluster

SYSTEM_NAMESPACE = "tidegate-system"
# Secrets are nobody's reading; events have a file of their own.
LEFT_OUT = ("secrets", "events", "events.events.k8s.io")


def artifact_folder(root: Path, test_id: str) -> Path:
    """Returns the folder of one test below `root/.artifacts`."""
    return root / ".artifacts" / re.sub(r"[^A-Za-z0-9._-]+", "_", test_id).strip("_")


def collect(cluster: Cluster, namespaces: Iterable[str], folder: Path) -> None:
    """Writes what the namespaces hold into a folder each.

    It takes what it gets: a cluster that does not answer, or half of it, is no error here, because
    the test has failed already and its own error is the one to be seen.
    """
    for namespace in namespaces:
        place = folder / namespace
        place.mkdir(parents=True, exist_ok=True)
        _keep(cluster, place / "events.txt", "events", "--sort-by=.lastTimestamp", ns=namespace)
        kinds = cluster.kubectl(
            "api-resources", "--verbs=list", "--namespaced", "--output=name", check=False
        ).stdout.split()
        wanted = ",".join(kind for kind in kinds if kind not in LEFT_OUT)
        if wanted:
            _keep(cluster, place / "objects.yaml", wanted, "--output=yaml", ns=namespace)
        _keep_logs(cluster, namespace, place)


def _keep(cluster: Cluster, file: Path, *args: str, ns: str) -> None:
    done = cluster.kubectl("get", "--namespace", ns, "--ignore-not-found", *args, check=False)
    file.write_text(done.stdout + done.stderr)


def _keep_logs(cluster: Cluster, namespace: str, place: Path) -> None:
    listed = cluster.kubectl("get", "pods", "--namespace", namespace, "-o", "json", check=False)
    if listed.returncode:
        return
    for pod, container, restarts in containers_of(listed.stdout):
        tail = ["logs", "--namespace", namespace, pod, "--container", container, "--timestamps"]
        logs = cluster.kubectl(*tail, check=False)
        (place / f"{pod}.{container}.log").write_text(logs.stdout + logs.stderr)
        if restarts:
            logs = cluster.kubectl(*tail, "--previous", check=False)
            (place / f"{pod}.{container}.previous.log").write_text(logs.stdout + logs.stderr)


def containers_of(pod_list: str) -> Iterator[tuple[str, str, int]]:
    """Yields pod, container and restarts for each container that was started, of any kind."""
    pods: list[dict[str, Any]] = json.loads(pod_list)["items"]
    for pod in pods:
        for kind in ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses"):
            for status in pod["status"].get(kind, []):
                yield pod["metadata"]["name"], status["name"], status["restartCount"]
