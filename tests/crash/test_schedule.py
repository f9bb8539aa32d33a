"""One schedule at a time: what a dead process leaves, and what it gives back."""

import pytest

from tidegate_contract.folder import Folder
from tidegate_crash.disk import Disk
from tidegate_crash.install import installed
from tidegate_crash.process import World
from tidegate_crash.scenario import SIMULATED, Actor, Fact, History, Place
from tidegate_crash.schedule import Event, Role, Run, Schedule, Thread, Turn
from tidegate_sidecar.lock import FlushLock


def opened(place: Place) -> Folder:
    """The remote file system's root."""
    return Folder.open(place.remote.split("/team")[0])


def publish(place: Place, history: History) -> None:
    with opened(place) as folder, folder.new_file("f") as file:
        file.write(b"data")
        file.publish(4)


def a_run(world: World, *actors: Actor) -> Run:
    disk = Disk(["remote", "node0", "node1"])
    roles = [Role(actor, f"actor {n}", f"node {n}") for n, actor in enumerate(actors)]
    return Run(world, disk, SIMULATED, History(), roles)


def run_to_end(schedule: Schedule, *actors: Actor) -> Run:
    """Runs one schedule."""
    threads = [Thread() for _ in actors[1:]]
    with installed() as world:
        run = a_run(world, *actors)
        run.execute(schedule, 0, lambda run, actor: True, threads)
    for thread in threads:
        thread.do(None)
    return run


def paths(run: Run) -> list[str]:
    return [path for path, _ in run.disk.walk() if path.startswith("/remote/")]


def boundary_of(name: str, *actors: Actor) -> int:
    """Before which call of the first actor this one comes first."""
    told = [line for line in run_to_end((), *actors).told()]
    return next(n for n, line in enumerate(told) if f": {name}(" in line)


def test_cleanup_of_a_killed_process_does_not_reach_the_disk() -> None:
    actor = publish  # removes its unfinished file on any error
    at = boundary_of("fsync", actor)
    left = paths(run_to_end((Turn(at, Event.DIE, 0),), actor))
    assert paths(run_to_end((), actor)) == ["/remote/f"]
    assert [path.rpartition("-")[2] for path in left] == ["f"]
    assert left != ["/remote/f"]


def take_lock(place: Place, history: History) -> None:
    with opened(place) as folder:
        lock = FlushLock(folder)
        if lock.try_take():
            history.note(Fact.SEALED if not history.has(Fact.SEALED) else Fact.COMMITTED)
        folder.names()
        lock.release()


@pytest.mark.parametrize(
    ("event", "want"),
    [
        pytest.param(Event.SWITCH, False, id="its holder waits"),
        pytest.param(Event.DIE, True, id="its holder is dead"),
    ],
)
def test_lock_is_free_once_its_holder_is_dead(event: Event, want: bool) -> None:
    at = boundary_of("listdir", take_lock)
    actor = 1 if event is Event.SWITCH else 0
    run = run_to_end((Turn(at, event, actor),), take_lock, take_lock)
    assert run.history.has(Fact.COMMITTED) == want
