"""The images are those the chart names, and are built again only when they must be."""

import importlib.util
import io
import json
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """The program, which lies in no package."""
    spec = importlib.util.spec_from_file_location("images_build", ROOT / "images" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of the same shape, to be changed."""
    for name in (
        ".dockerignore",
        "contract/tidegate_contract/a.py",
        "operator/Dockerfile",
        "operator/tidegate_operator/a.py",
        "sidecar/Dockerfile",
        "sidecar/tidegate_sidecar/a.py",
        "requirements/operator.txt",
        "requirements/sidecar.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("ARG BASE=registry.example/python:3\n")
    program = tmp_path / "images" / "build.py"
    program.parent.mkdir()
    program.write_text("# program\n")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "__file__", str(program))
    return tmp_path


def an_archive(path: Path, *, tags: list[str], layers: list[int]) -> Path:
    names = [f"{index}.tar" for index in range(len(layers))]
    manifest = [{"Config": "c.json", "RepoTags": tags, "Layers": names}]
    files = {"manifest.json": json.dumps(manifest).encode(), "c.json": path.name.encode()}
    files |= {name: bytes(size) for name, size in zip(names, layers, strict=True)}
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def a_recipe(build: ModuleType, tree: Path, name: str = "operator", base: str | None = None) -> Any:
    found = build.observe_base(base, tree / name / "Dockerfile")
    return build.Recipe(name=name, tag="1.2.3", base=found, archive=tree / f"{name}.tar")


@pytest.mark.parametrize("name", ["operator", "sidecar"])
def test_image_is_the_one_the_chart_names(build: ModuleType, name: str) -> None:
    chart = ROOT / "charts" / "tidegate"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    image = values["image"] if name == "operator" else values["sidecar"]["image"]
    version = yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"]
    base = build.Base(reference="b", identity="b")
    tag = build.parse_arguments([]).tag
    recipe = build.Recipe(name=name, tag=tag, base=base, archive=Path("x.tar"))
    assert recipe.reference == f"docker.io/{image['repository']}:{version}"


CHANGES = {
    "its source": ("operator/tidegate_operator/a.py", True),
    "its Dockerfile": ("operator/Dockerfile", True),
    "the contract": ("contract/tidegate_contract/a.py", True),
    "its requirements": ("requirements/operator.txt", True),
    "a new file": ("operator/tidegate_operator/b.py", True),
    "the program": ("images/build.py", True),
    "bytecode": ("operator/tidegate_operator/__pycache__/a.pyc", False),
    "the other's source": ("sidecar/tidegate_sidecar/a.py", False),
    "the other's requirements": ("requirements/sidecar.txt", False),
}


@pytest.mark.parametrize(("name", "want"), CHANGES.values(), ids=CHANGES.keys())
def test_key_changes_with_what_goes_into_the_image(
    build: ModuleType, tree: Path, name: str, want: bool
) -> None:
    recipe = a_recipe(build, tree, base="b:1")
    before = build.observe_key(recipe)
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_text("changed\n")
    assert (build.observe_key(recipe) != before) is want


def test_key_changes_with_the_base(build: ModuleType, tree: Path) -> None:
    one = an_archive(tree / "one.tar", tags=["localhost/base:1"], layers=[10])
    two = an_archive(tree / "two.tar", tags=["localhost/base:1"], layers=[10])
    keys = {build.observe_key(a_recipe(build, tree, base=str(path))) for path in (one, two)}
    assert len(keys) == 2


def test_image_unchanged_needs_no_builder(
    build: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = a_recipe(build, tree)
    recipe.archive.write_bytes(b"x")
    record = {"key": build.observe_key(recipe), "size_bytes": 300_000_000, "own_bytes": 70_000_000}
    recipe.record.write_text(json.dumps(record))
    monkeypatch.setattr(build, "BUILDERS", ())
    want = "docker.io/tidegate/operator:1.2.3: unchanged, 300 MB, 70 MB above the base"
    assert build.ensure_image(recipe).startswith(want)


def test_base_absent_is_the_dockerfiles(build: ModuleType, tree: Path) -> None:
    assert a_recipe(build, tree).base.reference == "registry.example/python:3"


def test_base_archive_without_a_name_is_refused(build: ModuleType, tree: Path) -> None:
    nameless = an_archive(tree / "nameless.tar", tags=[], layers=[1])
    with pytest.raises(build.BuildError, match=r"nameless\.tar holds an image without a name"):
        a_recipe(build, tree, base=str(nameless))


def test_base_archive_that_is_none_is_refused(build: ModuleType, tree: Path) -> None:
    with pytest.raises(build.BuildError, match=r"absent\.tar is not a docker-archive"):
        a_recipe(build, tree, base=str(tree / "absent.tar"))


def test_builder_absent_is_one_sentence(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match=r"docker is not installed.*start Docker"):
        build.find_builder()


def test_image_of_no_such_name_is_refused(
    build: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build.parse_arguments(["trainer"])
    assert "no image is called trainer; there are operator and sidecar" in capsys.readouterr().err


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_commands_pass_no_installer_settings(build: ModuleType, tree: Path, builder: str) -> None:
    recipe = a_recipe(build, tree, base="b:1")
    commands = build.build_commands(builder, recipe, tree / "out")
    words = [word for command in commands for word in command]
    assert not [word for word in words if "pip" in word.lower() or word.startswith("--env")]
    assert {command[0] for command in commands} == {builder}
