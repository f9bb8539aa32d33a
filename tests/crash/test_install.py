"""Production cannot leave the simulated disk: all modules that touch files are known, all calls."""

import ast
import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tidegate_contract import folder as production
from tidegate_crash.calls import SimulatedOs
from tidegate_crash.disk import Disk
from tidegate_crash.explore import explore
from tidegate_crash.install import MODULES
from tidegate_crash.process import NotSimulated, Process, World
from tidegate_crash.scenario import Actor, History, Place, Scenario

ROOT = Path(__file__).parents[2]


def nothing(place: Place, history: History) -> None:
    """Does nothing."""


def a_scenario(*actors: Actor) -> Scenario:
    return Scenario(
        name="small",
        prepare=nothing,
        actors=actors,
        nodes=tuple(range(len(actors))),
        recover=nothing,
        check=lambda place, history: [],
        check_final=lambda place, history: [],
    )


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda fs: fs.truncate("/remote/a", 0), id="a call that nobody made yet"),
        pytest.param(lambda fs: fs.open("/remote", os.O_RDONLY | os.O_DIRECT), id="a flag"),
        pytest.param(lambda fs: fs.open("/remote/../node0", os.O_RDONLY), id="a path that goes up"),
        pytest.param(lambda fs: fs.fdopen(3, "wb"), id="a file object that writes"),
    ],
)
def test_call_that_is_not_simulated_is_named(call: Callable[[SimulatedOs], object]) -> None:
    world = World()
    world.process = Process("p", "m", 0, Disk(["remote", "node0"]))
    with pytest.raises(NotSimulated, match=r"not simulated|with flags|goes up|with mode"):
        call(SimulatedOs(world))


def leave_the_layer(place: Place, history: History) -> None:
    vars(production)["os"].truncate("f", 0)


@pytest.mark.parametrize("position", [0, 1], ids=["first actor", "second actor"])
def test_call_that_is_not_simulated_ends_the_exploration(position: int) -> None:
    actors = [nothing, nothing]
    actors[position] = leave_the_layer
    with pytest.raises(NotSimulated, match="truncate"):
        explore(a_scenario(*actors), depth=0)


FILE_CALLS = {name for name in vars(SimulatedOs) if not name.startswith("_")} | {
    *("access", "chmod", "chown", "listxattr", "makedirs", "readlink", "removedirs", "remove"),
    *("replace", "scandir", "statvfs", "symlink", "truncate", "walk"),
}
PIPES = {"close", "dup", "read", "write"}
"""Calls that modules outside the flush path make on descriptors that are no files."""
PATH_CALLS = {"exists", "iterdir", "is_dir", "is_file", "mkdir", "read_text", "write_text"}
NO_TIER = {
    "tidegate_contract.tiers": "compares the roots of two tiers",
    "tidegate_sidecar.__main__": "waits for a mount",
    "tidegate_sidecar.agent": "reads /proc",
    "tidegate_sidecar.memory": "reads the container's limit",
    "tidegate_sidecar.pods": "reads a token",
    "tidegate_sidecar.report": "reads a token",
}


def file_work(path: Path) -> set[str]:
    """Calls in a source that touch files without the contract's help."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr=name)):
                found |= {name} & (FILE_CALLS - PIPES)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="fcntl"), attr=name)):
                found.add(name)
            case ast.Call(func=ast.Attribute(attr=name)) if name in PATH_CALLS:
                found.add(name)
            case ast.Call(func=ast.Name(id="open")):
                found.add("open")
            case ast.Import(names=names) if any(n.name in ("shutil", "tempfile") for n in names):
                found.add("import")
    return found


def test_every_module_that_touches_files_is_simulated() -> None:
    packages = (ROOT / "contract/tidegate_contract", ROOT / "sidecar/tidegate_sidecar")
    sources = [path for package in packages for path in package.glob("*.py")]
    touching = {f"{path.parent.name}.{path.stem}" for path in sources if file_work(path)}
    assert touching - set(NO_TIER) <= set(MODULES)
    assert set(NO_TIER) <= touching


def test_modules_are_as_before_after_an_exploration() -> None:
    before = {name: dict(vars(importlib.import_module(name))) for name in MODULES}
    explore(a_scenario(nothing), depth=0)
    assert before == {name: dict(vars(importlib.import_module(name))) for name in MODULES}
