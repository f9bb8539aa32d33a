"""What the ground is built from and needs: keys, images, requirements."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from tidegate_ground import images, requirements, sets
from tidegate_ground.errors import GroundError
from tidegate_ground.images import Archive
from tidegate_ground.options import GIB

FILES = {"go.mod": b"module ground", "go.sum": b"x"}


def an_archive(path: Path, tags: list[str], config: bytes = b"{}") -> Path:
    manifest = [{"Config": "abc.json", "RepoTags": tags, "Layers": []}]
    with tarfile.open(path, "w") as tar:
        for name, body in (("manifest.json", json.dumps(manifest).encode()), ("abc.json", config)):
            member = tarfile.TarInfo(name)
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    return path


class TestKeys:
    @pytest.mark.parametrize(
        ("recipe", "files"),
        [
            pytest.param("r2", FILES, id="recipe"),
            pytest.param("r", {**FILES, "go.sum": b"y"}, id="content"),
            pytest.param("r", {"go.mod": b"module ground", "go.sun": b"x"}, id="name"),
            pytest.param("r", {**FILES, "more": b""}, id="one more file"),
        ],
    )
    def test_key_changes_with(self, recipe: str, files: dict[str, bytes]) -> None:
        assert sets.build_key(recipe, files) != sets.build_key("r", FILES)

    def test_key_does_not_depend_on_the_order_of_files(self) -> None:
        backwards = dict(reversed(FILES.items()))
        assert sets.build_key("r", backwards) == sets.build_key("r", FILES)

    def test_version_of_a_longer_module_name_is_not_taken(self) -> None:
        go_mod = "require (\n\tk8s.io/kubernetes-csi v9.9.9\n\tk8s.io/kubernetes v1.36.3\n)\n"
        assert sets.parse_version(go_mod, "k8s.io/kubernetes") == "v1.36.3"

    def test_version_of_a_module_not_required_is_refused(self) -> None:
        with pytest.raises(GroundError, match="does not require"):
            sets.parse_version("module ground\n", "k8s.io/kubernetes")

    def test_linker_flags_of_kubernetes_hold_its_version(self) -> None:
        (kubernetes,) = [s for s in sets.GO_SETS if s.name == "kubernetes"]
        flags = sets.build_linker_flags(kubernetes, "v1.36.3")
        assert "version.gitVersion=v1.36.3 " in flags
        assert flags.endswith("version.gitMinor=36")

    def test_committed_modules_name_nothing_of_the_machine_they_were_made_on(self) -> None:
        for go_set in sets.GO_SETS:
            go_mod = (sets.source_folder(go_set) / "go.mod").read_text()
            assert go_mod.startswith("module ground\n")
            assert "=> /" not in go_mod and "=> ." not in go_mod
            assert sets.parse_version(go_mod, go_set.module)


class TestImages:
    @pytest.mark.parametrize(
        ("name", "want"),
        [
            ("localhost/base:1", "localhost/base:1"),
            ("python:3.11", "docker.io/library/python:3.11"),
            ("grafana/loki:3", "docker.io/grafana/loki:3"),
            ("registry.k8s.io/pause:3", "registry.k8s.io/pause:3"),
            ("host:5000/a:1", "host:5000/a:1"),
        ],
    )
    def test_image_name_is_what_the_kubelet_looks_for(self, name: str, want: str) -> None:
        assert images.normalize_image_name(name) == want

    def test_archive_key_follows_the_content_not_the_file(self, tmp_path: Path) -> None:
        one = images.read_archive(an_archive(tmp_path / "1.tar", ["localhost/a:1"], b"{}"))
        same = images.read_archive(an_archive(tmp_path / "2.tar", ["localhost/a:1"], b"{}"))
        other = images.read_archive(an_archive(tmp_path / "3.tar", ["localhost/a:1"], b"{ }"))
        assert one.key == same.key != other.key

    def test_archive_without_a_name_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(GroundError, match="exactly one image, with a name"):
            images.read_archive(an_archive(tmp_path / "1.tar", []))

    def test_file_that_is_no_archive_is_refused_by_its_name(self, tmp_path: Path) -> None:
        file = tmp_path / "notes.txt"
        file.write_text("hello")
        with pytest.raises(GroundError, match=r"notes\.txt is not a docker-archive"):
            images.read_archive(file)

    def test_only_new_or_changed_images_are_loaded(self) -> None:
        same, changed, new = (
            Archive(path=Path(f"/{name}.tar"), image=name, key="k1") for name in "abc"
        )
        loaded = {"a": "k1", "b": "k0"}
        assert images.decide_loads([same, changed, new], loaded) == [changed, new]


class TestRequirements:
    def test_missing_packages_are_those_of_missing_programs(self) -> None:
        def has(program: str) -> bool:
            return program not in ("runc", "mkfs.ext4")

        assert requirements.missing_packages(has) == ["runc", "e2fsprogs"]

    def test_go_version_is_read(self) -> None:
        want = (1, 26)
        assert requirements.parse_go_version("go version go1.26.8 linux/amd64") == want

    def test_go_that_says_nothing_is_refused(self) -> None:
        with pytest.raises(GroundError, match="prints no version"):
            requirements.parse_go_version("command not found")

    def test_missing_go_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(requirements, "USUAL_GO", tmp_path / "go")
        with pytest.raises(GroundError, match=r"There is no Go: install Go 1\.26 or newer"):
            requirements.find_go()

    def test_old_go_is_refused_with_both_versions(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go = tmp_path / "go"
        go.write_text("#!/bin/sh\necho go version go1.19.8 linux/amd64\n")
        go.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        with pytest.raises(GroundError, match=r"is Go 1\.19; the ground needs Go 1\.26 or newer"):
            requirements.find_go()

    def test_missing_room_is_said_in_figures(self) -> None:
        requirements.require_disk(2 * GIB, 2 * GIB, Path("/x"))
        with pytest.raises(GroundError, match=r"needs 2 GiB in /x, 1\.5 GiB are free"):
            requirements.require_disk(2 * GIB, 3 * GIB // 2, Path("/x"))

    def test_without_root_it_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        with pytest.raises(GroundError, match="needs root"):
            requirements.require_root()
