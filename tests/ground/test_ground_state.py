"""What a ground knows of itself: processes, records, paths, options, which cluster is meant."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tidegate_ground import cgroups, choose, options, paths, processes, record
from tidegate_ground.choose import GivenCluster, OwnGround, RunningGround
from tidegate_ground.errors import GroundError
from tidegate_ground.options import GIB, GroundOptions, Mount
from tidegate_ground.paths import GroundPaths
from tidegate_ground.processes import PidRecord
from tidegate_ground.record import Abandoned, GroundRecord

SELF = PidRecord(pid=10, start_ticks=1000)
OWNER = PidRecord(pid=20, start_ticks=2000)


def a_record(**changed: object) -> GroundRecord:
    values: dict[str, object] = {
        "boot_id": "now",
        "starter": SELF,
        "owner": OWNER,
        "is_started": True,
        "options": GroundOptions(),
        "tool_folders": (Path("/opt/a/bin"),),
    }
    return GroundRecord(**{**values, **changed})  # type: ignore[arg-type]


class TestProcesses:
    def test_stat_of_a_program_with_spaces_and_brackets_in_its_name(self) -> None:
        fields = " ".join(str(number) for number in range(4, 53))
        assert processes.parse_stat(f"7 (a) b (c) S {fields}\n") == ("S", 22)

    def test_record_survives_storage(self, tmp_path: Path) -> None:
        processes.save(OWNER, tmp_path / "p.json")
        assert processes.load(tmp_path / "p.json") == OWNER
        assert processes.load(tmp_path / "none.json") is None

    def test_pid_with_another_start_is_another_process(self) -> None:
        me = processes.require(os.getpid())
        assert processes.is_alive(me)
        assert not processes.is_alive(PidRecord(pid=me.pid, start_ticks=me.start_ticks + 1))

    def test_hierarchies_of_a_mixed_machine(self) -> None:
        mounts = (
            "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n"
            "cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu,cpuacct 0 0\n"
            "cgroup /sys/fs/cgroup/systemd cgroup rw,xattr,name=systemd 0 0\n"
            "cgroup2 /sys/fs/cgroup/unified cgroup2 rw,nsdelegate 0 0\n"
        )
        found = cgroups.parse_hierarchies(mounts, "#name\ncpu\t1\t1\t1\ncpuacct\t2\t1\t1\n")
        assert [h.controllers for h in found] == [("cpu", "cpuacct"), ("name=systemd",), ()]
        assert [h.needs_delegation for h in found] == [False, False, False]

    def test_version_2_standing_alone_needs_delegation(self) -> None:
        (alone,) = cgroups.parse_hierarchies("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "")
        assert alone.needs_delegation

    def test_group_that_vanishes_while_it_is_listed_is_passed_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, pid in (("", 1), ("pod", 2), ("pod/container", 3)):
            (tmp_path / "ground" / name).mkdir()
            (tmp_path / "ground" / name / "cgroup.procs").write_text(f"{pid}\n")
        hierarchy = cgroups.Hierarchy(path=tmp_path, version=2, controllers=())
        monkeypatch.setattr(cgroups, "observe_hierarchies", lambda: (hierarchy,))
        listing = os.scandir

        def vanish(path: str | Path) -> object:
            if Path(path).name == "container":
                raise FileNotFoundError(path)
            return listing(path)

        monkeypatch.setattr(os, "scandir", vanish)
        assert cgroups.observe_pids("ground") == {1, 2}


class TestRecord:
    @pytest.mark.parametrize(
        ("found", "alive", "want"),
        [
            pytest.param(a_record(), {SELF, OWNER}, None, id="owned"),
            pytest.param(a_record(), {OWNER}, None, id="starter ended, owner lives"),
            pytest.param(a_record(), {SELF}, Abandoned.OWNER_ENDED, id="owner ended"),
            pytest.param(a_record(owner=None), set(), None, id="owned by nobody, stays"),
            pytest.param(
                a_record(owner=None, is_started=False), {SELF}, None, id="is being started"
            ),
            pytest.param(
                a_record(owner=None, is_started=False),
                set(),
                Abandoned.START_BROKE_OFF,
                id="start broke off",
            ),
            pytest.param(
                a_record(boot_id="before"), {SELF, OWNER}, Abandoned.OTHER_BOOT, id="other boot"
            ),
            pytest.param(None, set(), Abandoned.NO_RECORD, id="no record"),
        ],
    )
    def test_ground_is_abandoned_when(
        self, found: GroundRecord | None, alive: set[PidRecord], want: Abandoned | None
    ) -> None:
        assert record.decide_abandoned(found, "now", alive.__contains__) == want

    @pytest.mark.parametrize("owner", [None, OWNER])
    def test_record_survives_storage(self, tmp_path: Path, owner: PidRecord | None) -> None:
        ground_paths = GroundPaths(name="main", root=tmp_path)
        ground_paths.state.mkdir()
        want = a_record(owner=owner)
        assert record.load(ground_paths) is None
        record.save(want, ground_paths)
        assert record.load(ground_paths) == want


class TestPaths:
    @pytest.mark.parametrize("hidden", ["/tmp/x", "/run/x", "/var/cache/x", "/mnt"])
    def test_cache_that_nodes_cannot_see_is_refused(self, hidden: str) -> None:
        with pytest.raises(GroundError, match=r"TIDEGATE_CACHE .* must not lie under"):
            paths.cache_root({"TIDEGATE_CACHE": hidden})

    def test_cache_in_a_folder_that_only_starts_alike_is_taken(self) -> None:
        assert paths.cache_root({"TIDEGATE_CACHE": "/variety"}) == Path("/variety")

    @pytest.mark.parametrize("name", ["", "Main", "a/b", "..", "-a", "a-", "1a", "a" * 33])
    def test_name_that_is_none_is_refused(self, name: str) -> None:
        with pytest.raises(GroundError, match="A ground's name is"):
            paths.ground_paths(name)

    def test_same_name_in_two_caches_is_two_cgroups(self) -> None:
        one, other = (GroundPaths(name="main", root=Path(root)) for root in ("/a", "/b"))
        assert one.cgroup != other.cgroup


class TestOptions:
    def test_options_survive_storage(self, tmp_path: Path) -> None:
        mount = Mount(source=tmp_path, target="/mnt/torch")
        want = GroundOptions(nodes=2, nvme_bytes=GIB, mounts=(mount,), images=(Path("/a.tar"),))
        assert options.options_from_json(json.loads(json.dumps(want.to_json()))) == want

    @pytest.mark.parametrize(
        "target", ["/mnt", "/mnt/nvme", "/mnt/pfs/x", "/opt/x", "/mnt/../etc", "mnt/x", "/mntx"]
    )
    def test_mount_outside_of_mnt_is_refused(self, tmp_path: Path, target: str) -> None:
        with pytest.raises(GroundError, match="below /mnt"):
            options.parse_mount(f"{tmp_path}:{target}")

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [("/mnt/torch", "has no colon"), ("/no/such:/mnt/torch", "is not a folder")],
    )
    def test_mount_that_cannot_be_is_refused(self, text: str, sentence: str) -> None:
        with pytest.raises(GroundError, match=sentence):
            options.parse_mount(text)

    def test_mount_is_read(self, tmp_path: Path) -> None:
        want = Mount(source=tmp_path.resolve(), target="/mnt/torch/lib")
        assert options.parse_mount(f"{tmp_path}:/mnt/torch/lib") == want

    @pytest.mark.parametrize(
        ("changed", "field"), [({"nodes": 0}, "nodes"), ({"nvme_bytes": 1}, "nvme_bytes")]
    )
    def test_option_out_of_bounds_is_refused_by_its_name(
        self, changed: dict[str, int], field: str
    ) -> None:
        with pytest.raises(GroundError, match=field):
            GroundOptions(**changed)  # type: ignore[arg-type]


class TestChoose:
    @pytest.fixture
    def given(self, tmp_path: Path) -> Path:
        file = tmp_path / "config"
        file.touch()
        return file

    def test_nothing_given_means_a_ground_of_its_own(self, tmp_path: Path) -> None:
        assert choose.decide_cluster({}, tmp_path) == OwnGround()

    def test_kubeconfig_of_ours_goes_before_everything(self, given: Path, tmp_path: Path) -> None:
        environment = {
            "TIDEGATE_KUBECONFIG": str(given),
            "TIDEGATE_GROUND": "main",
            "KUBECONFIG": "/x",
        }
        want = GivenCluster(kubeconfig=given, variable="TIDEGATE_KUBECONFIG")
        assert choose.decide_cluster(environment, tmp_path / "grounds") == want

    def test_named_ground_goes_before_kubeconfig(self, given: Path, tmp_path: Path) -> None:
        environment = {"TIDEGATE_GROUND": "main", "KUBECONFIG": str(given)}
        assert choose.decide_cluster(environment, tmp_path) == RunningGround(name="main")

    def test_kubeconfig_given_by_hand_is_used(self, given: Path, tmp_path: Path) -> None:
        want = GivenCluster(kubeconfig=given, variable="KUBECONFIG")
        assert choose.decide_cluster({"KUBECONFIG": str(given)}, tmp_path / "grounds") == want

    def test_kubeconfig_of_a_ground_is_that_ground(self, tmp_path: Path) -> None:
        file = tmp_path / "grounds" / "main" / "kubeconfig"
        file.parent.mkdir(parents=True)
        file.touch()
        choice = choose.decide_cluster({"KUBECONFIG": str(file)}, tmp_path / "grounds")
        assert choice == RunningGround(name="main")

    def test_kubeconfig_that_is_not_there_is_no_cluster(self, tmp_path: Path) -> None:
        missing = str(tmp_path / "none")
        assert choose.decide_cluster({"KUBECONFIG": missing}, tmp_path) == OwnGround()
        with pytest.raises(GroundError, match="which is not a file"):
            choose.decide_cluster({"TIDEGATE_KUBECONFIG": missing}, tmp_path)

    def test_several_kubeconfigs_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(GroundError, match="KUBECONFIG names 2 files"):
            choose.decide_cluster({"KUBECONFIG": "/a:/b"}, tmp_path)
