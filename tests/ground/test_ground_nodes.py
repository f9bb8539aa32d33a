"""What tests may do to a ground's nodes and control plane, on a real one."""

from __future__ import annotations

import errno
import json
import os
import uuid
from pathlib import Path

import pytest

from tidegate_ground import sets
from tidegate_ground.cluster import Cluster
from tidegate_ground.ground import Ground
from tidegate_ground.waiting import wait_until

pytestmark = pytest.mark.ground
MIB = 1 << 20


def write(file: Path, body: bytes, *, fsync: bool) -> None:
    with file.open("wb") as stream:
        stream.write(body)
        stream.flush()
        if fsync:
            os.fsync(stream.fileno())
    if fsync:
        folder = os.open(file.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def a_name() -> str:
    """A file that no earlier test left on a disk that is kept."""
    return f"/mnt/nvme/{uuid.uuid4().hex}"


def size_bytes(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def test_ground_is_up_every_node_is_ready_with_the_pinned_versions(ground: Ground) -> None:
    nodes = ground.get("nodes")["items"]
    assert [node["metadata"]["name"] for node in nodes] == [node.name for node in ground.nodes]
    go_mod = (sets.SETS_FOLDER / "kubernetes" / "go.mod").read_text()
    want = sets.parse_version(go_mod, "k8s.io/kubernetes")
    for node in nodes:
        info = node["status"]["nodeInfo"]
        assert info["kubeletVersion"] == want
        assert info["containerRuntimeVersion"].startswith("containerd://2.")
    versions = json.loads(ground.kubectl("version", "-o", "json").stdout)
    assert versions["clientVersion"]["gitVersion"] == want
    assert versions["serverVersion"]["gitVersion"] == want
    assert all(status.is_ready for status in ground.observe_nodes().values())
    assert ground.helm("version", "--short").stdout.startswith("v4.")


def test_pod_finds_services_and_both_tiers(
    cluster: Cluster, ground: Ground, namespace: str
) -> None:
    program = (
        "import os, socket; socket.gethostbyname('kubernetes.default.svc.cluster.local');"
        "print(open('/mnt/pfs/' + os.environ['KEY']).read(), os.path.ismount('/mnt/nvme'))"
    )
    (ground.pfs / namespace).write_text("shared")
    mounts = {name: {"path": f"/mnt/{name}", "type": "Directory"} for name in ("nvme", "pfs")}
    container = {
        "name": "main",
        "image": "localhost/base:1",
        "command": ["python3", "-c", program],
        "env": [{"name": "KEY", "value": namespace}],
        "volumeMounts": [{"name": name, "mountPath": f"/mnt/{name}"} for name in mounts],
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "namespace": namespace},
        "spec": {
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [{"name": name, "hostPath": path} for name, path in mounts.items()],
        },
    }
    cluster.kubectl("create", "-f", "-", input=json.dumps(pod))
    phases = ("Succeeded", "Failed")
    of_pod = ("--namespace", namespace, "pod", "probe")
    wait_until("the pod's end", lambda: cluster.get(*of_pod)["status"]["phase"] in phases, 60)
    assert cluster.kubectl("logs", "--namespace", namespace, "probe").stdout == "shared True\n"


def test_power_cut_loses_what_was_not_fsynced_and_nothing_else(ground: Ground) -> None:
    node = ground.node("node2")
    synced, unsynced = a_name(), a_name()
    write(node.path(synced), b"x" * 3 * MIB, fsync=True)
    write(node.path(unsynced), b"x" * 3 * MIB, fsync=False)
    assert size_bytes(node.path(unsynced)) == 3 * MIB
    node.power_cut()
    assert not node.is_running
    node.start()
    assert size_bytes(node.path(synced)) == 3 * MIB
    assert size_bytes(node.path(unsynced)) == 0


def test_kill_keeps_what_only_the_page_cache_held(ground: Ground) -> None:
    node, unsynced = ground.node("node1"), a_name()
    write(node.path(unsynced), b"x" * 3 * MIB, fsync=False)
    node.kill()
    node.start()
    assert size_bytes(node.path(unsynced)) == 3 * MIB


def test_start_with_empty_disks_has_no_file_and_all_images(ground: Ground) -> None:
    node = ground.node("node3")
    write(node.path(a_name()), b"x", fsync=True)
    node.kill()
    node.start(keep_disk=False)
    assert os.listdir(node.path("/mnt/nvme")) == ["lost+found"]
    listed = node.exec("ctr", "-n", "k8s.io", "images", "ls", "-q").stdout
    assert "localhost/base:1" in listed.split()


def test_unchanged_image_is_not_loaded_again(ground: Ground) -> None:
    assert ground.load([sets.image_archive("base")]) == []


def test_folders_of_the_tiers_are_roots_and_closed_to_others(ground: Ground) -> None:
    for node in ground.nodes:
        for folder in ("/mnt/nvme", "/mnt/pfs"):
            status = node.path(folder).stat()
            assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (0, 0, 0o755)


@pytest.mark.parametrize("leave_bytes", [0, 8 * MIB])
def test_full_disk_refuses_what_does_not_fit(ground: Ground, leave_bytes: int) -> None:
    node = ground.node("node1")
    file = node.path(a_name())
    node.fill_disk(leave_bytes=leave_bytes)
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            write(file, b"x" * (leave_bytes + MIB), fsync=True)
        assert caught.value.errno == errno.ENOSPC
        assert size_bytes(file) >= leave_bytes // 2
    finally:
        node.free_disk()
    write(file, b"x" * (leave_bytes + MIB), fsync=True)
    assert size_bytes(file) == leave_bytes + MIB


@pytest.mark.parametrize("stopped", [(), ("kube-apiserver",)], ids=["all but etcd", "API server"])
def test_control_plane_comes_back_with_what_it_knew(
    ground: Ground, namespace: str, stopped: tuple[str, ...]
) -> None:
    control = ground.control_plane
    control.stop(*stopped)
    assert control.is_running("etcd")
    assert control.is_running("kube-scheduler") == bool(stopped)
    assert not control.is_ready()
    assert ground.kubectl("get", "nodes", check=False).returncode
    control.start()
    assert ground.get("namespace", namespace)["status"]["phase"] == "Active"
    wait_until("all components", lambda: all(ground.observe_components().values()), 10)
    for node in ground.nodes:
        node.wait_ready()
