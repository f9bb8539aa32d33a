"""Nodes, waiting and what a failed test leaves: the parts that need no cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidegate_ground import components, node, node_init, node_spec
from tidegate_ground.artifacts import artifact_folder, containers_of
from tidegate_ground.errors import CommandFailed, DeadlineExceeded
from tidegate_ground.images import Archive
from tidegate_ground.options import Mount
from tidegate_ground.paths import GroundPaths
from tidegate_ground.waiting import wait_until

NODE = {
    "status": {
        "nodeInfo": {"bootID": "b2"},
        "conditions": [
            {"type": "MemoryPressure", "status": "False"},
            {"type": "Ready", "status": "True"},
        ],
    }
}


def a_spec() -> node_spec.NodeSpec:
    return node_spec.NodeSpec(
        number=2,
        paths=GroundPaths(name="main", root=Path("/g")),
        cni_folder=Path("/cni"),
        var_bytes=1,
        nvme_bytes=2,
        mounts=(Mount(source=Path("/s"), target="/mnt/s"),),
        archives=(Archive(path=Path("/a.tar"), image="localhost/a:1", key="k"),),
    )


class TestNode:
    @pytest.mark.parametrize(
        ("shown", "boot_id", "want"),
        [
            pytest.param(NODE, "b2", True, id="ready"),
            pytest.param(NODE, "b3", False, id="still the boot before"),
            pytest.param(None, "b2", False, id="no answer"),
            pytest.param({"status": {}}, "b2", False, id="just registered"),
        ],
    )
    def test_ready_is_of_this_boot(self, shown: object, boot_id: str, want: bool) -> None:
        assert node.shows_ready(shown, boot_id) is want

    def test_specification_survives_storage(self) -> None:
        want = a_spec()
        assert node_spec.node_spec_from_json(json.loads(json.dumps(want.to_json()))) == want

    def test_lease_is_renewed_well_within_the_grace_period(self) -> None:
        kubelet = json.loads(node_spec.build_settings(a_spec())["kubelet.json"])
        renewed_seconds = kubelet["nodeLeaseDurationSeconds"] / 4
        assert renewed_seconds * 3 < components.NODE_GRACE_SECONDS


class TestMounts:
    LINES = (
        "21 1 8:1 / / rw - ext4 /dev/a rw",
        "22 21 0:2 / /run rw - tmpfs run rw",
        "23 22 0:3 net:[1] /run/netns/a rw - nsfs nsfs rw",
        "24 21 8:2 / /home rw - ext4 /dev/b rw",
        "25 21 8:3 / /mnt/my\\040disk rw - ext4 /dev/c rw",
        "26 25 8:4 / /mnt/my\\040disk/deeper rw - ext4 /dev/d rw",
    )

    @pytest.mark.parametrize(
        ("needed", "want"),
        [
            pytest.param([], ["/run/netns/a", "/mnt/my disk"], id="none needed"),
            pytest.param(["/home/x"], ["/run/netns/a", "/mnt/my disk"], id="needed elsewhere"),
            pytest.param(
                ["/mnt/my disk/torch"],
                ["/run/netns/a", "/mnt/my disk/deeper"],
                id="its parent needed",
            ),
        ],
    )
    def test_hidden_mounts_of_the_host_are_let_go(self, needed: list[str], want: list[str]) -> None:
        found = node_init.decide_detached("\n".join(self.LINES), [Path(n) for n in needed])
        assert found == [Path(point) for point in want]


class TestWaiting:
    def test_value_of_the_probe_is_returned(self) -> None:
        values = iter([None, "", "here"])
        assert wait_until("it", lambda: next(values), 5, every_seconds=0) == "here"

    def test_deadline_says_what_was_awaited_and_last_seen(self) -> None:
        def probe() -> bool:
            raise AssertionError("2 of 3")

        with pytest.raises(DeadlineExceeded, match=r"nodes Ready: not within 0 s.*2 of 3"):
            wait_until("nodes Ready", probe, 0)

    def test_failed_command_is_not_the_end(self) -> None:
        answers = iter([CommandFailed(["kubectl"], 1, "", "refused"), None])

        def probe() -> bool:
            if error := next(answers):
                raise error
            return True

        assert wait_until("an answer", probe, 5, every_seconds=0)


class TestArtifacts:
    def test_folder_of_a_parametrized_test_is_one_folder(self, tmp_path: Path) -> None:
        folder = artifact_folder(tmp_path, "tests/e2e/test_a.py::test_b[x/y z]")
        assert folder.parent == tmp_path / ".artifacts"
        assert folder.name == "tests_e2e_test_a.py_test_b_x_y_z"

    def test_containers_of_every_kind_are_found(self) -> None:
        started = {"name": "tide", "restartCount": 2}
        pods = {
            "items": [
                {"metadata": {"name": "p"}, "status": {"initContainerStatuses": [started]}},
                {"metadata": {"name": "pending"}, "status": {}},
            ]
        }
        assert list(containers_of(json.dumps(pods))) == [("p", "tide", 2)]
