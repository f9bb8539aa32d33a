"""The explorer finds planted faults of small actors, misses no state, always counts the same."""

from dataclasses import asdict

import pytest

from tidegate_contract.folder import Folder, NewFile
from tidegate_crash import explore as engine
from tidegate_crash.branches import Branches
from tidegate_crash.explore import explore
from tidegate_crash.scenario import Actor, Check, Fact, Fault, History, Place, Scenario
from tidegate_crash.schedule import Event, Run, Turn

EVERY_FAULT = frozenset(Fault)


def nothing(place: Place, history: History) -> None:
    """Does nothing."""


def find_nothing(place: Place, history: History) -> list[str]:
    """All is well."""
    return []


def opened(place: Place) -> Folder:
    """The run's folder on the remote tier, which is the file system's root here."""
    return Folder.open(place.remote.split("/team")[0])


def sync(file: NewFile) -> None:
    """fsync of a file, which is none of the contract's methods."""
    Folder(file.fd, file.name).sync()


def put(name: str, data: bytes) -> Actor:
    """Publishes a file and promises nothing."""

    def actor(place: Place, history: History) -> None:
        with opened(place) as folder, folder.new_file(name) as file:
            file.write(data)
            file.publish(len(data))

    return actor


def write(name: str, data: bytes, *, syncs_bytes: bool = True, syncs_name: bool = True) -> Actor:
    """Writes a file and then promises that it is there."""

    def actor(place: Place, history: History) -> None:
        with opened(place) as folder:
            with folder.new_file(name) as file:
                file.write(data)
                if syncs_bytes:
                    sync(file)
                folder.rename(file.name, name)
            if syncs_name:
                folder.sync()
        history.note(Fact.SEALED)

    return actor


def expect(name: str, *wanted: bytes | None) -> Check:
    """Once promised, a file holds one of these."""

    def check(place: Place, history: History) -> list[str]:
        with opened(place) as folder:
            found = folder.read(name)
        is_bad = history.has(Fact.SEALED) and found not in wanted
        return [f"{name} holds {found!r}"] if is_bad else []

    return check


def a_scenario(
    *actors: Actor,
    prepare: Actor = nothing,
    recover: Actor = nothing,
    check: Check = find_nothing,
    check_final: Check = find_nothing,
    faults: frozenset[Fault] = EVERY_FAULT,
) -> Scenario:
    return Scenario(
        name="small",
        prepare=prepare,
        actors=actors,
        nodes=tuple(range(len(actors))),
        recover=recover,
        check=check,
        check_final=check_final,
        faults=faults,
    )


@pytest.mark.parametrize(
    ("actor", "want"),
    [
        pytest.param(write("f", b"data"), "", id="everything is synced"),
        pytest.param(write("f", b"data", syncs_bytes=False), "is lost: f holds b''", id="bytes"),
        pytest.param(write("f", b"data", syncs_name=False), "holds None", id="the name"),
    ],
)
def test_fsync_that_is_left_out_shows_after_a_power_cut(actor: Actor, want: str) -> None:
    counts = explore(a_scenario(actor, check=expect("f", b"data")), depth=0)
    assert bool(counts.violations) == bool(want)
    assert want in "".join(counts.violations)


def keep_trying(place: Place, history: History) -> None:
    """Takes a second fsync for a success."""
    with opened(place) as folder, folder.new_file("f") as file:
        file.write(b"data")
        try:
            sync(file)
        except OSError:
            sync(file)
        folder.rename(file.name, "f")
        folder.sync()
    history.note(Fact.SEALED)


@pytest.mark.parametrize(("depth", "want"), [(0, False), (1, True)], ids=["no event", "one event"])
def test_fsync_that_is_repeated_after_a_failure_shows(depth: int, want: bool) -> None:
    counts = explore(a_scenario(keep_trying, check=expect("f", b"data")), depth=depth)
    assert bool(counts.violations) == want


def create_unless_there(place: Place, history: History) -> None:
    """Looks and then writes: the other one may do so in between."""
    with opened(place) as folder:
        if folder.read("f") is not None:
            return
        with folder.new_file("f") as file:
            file.write(b"data")
            file.publish(4)
    name = Fact.SEALED if not history.has(Fact.SEALED) else Fact.COMMITTED
    history.note(name)


def find_two_owners(place: Place, history: History) -> list[str]:
    return ["two owners"] if history.has(Fact.COMMITTED) else []


@pytest.mark.parametrize(("depth", "want"), [(0, False), (1, True)], ids=["no event", "one event"])
def test_race_of_two_actors_shows_with_one_switch(depth: int, want: bool) -> None:
    actors = create_unless_there, create_unless_there
    counts = explore(a_scenario(*actors, check=find_two_owners), depth=depth)
    assert bool(counts.violations) == want


def test_violation_tells_scenario_fault_and_calls() -> None:
    actors = create_unless_there, create_unless_there
    (told,) = explore(a_scenario(*actors, check=find_two_owners), depth=1).violations
    lines = told.splitlines()
    assert lines[0] == "small: all are killed: two owners"
    assert sum("-- switch to" in line for line in lines) == 1
    assert any(line.startswith("  actor 0 on node 0: rename(") for line in lines)
    assert any(line.startswith("  actor 1 on node 1: rename(") for line in lines)


def remove_old(place: Place, history: History) -> None:
    with opened(place) as folder:
        folder.remove("f")


def promise(place: Place, history: History) -> None:
    """Says once that the file is there, and must not be contradicted."""
    with opened(place) as folder:
        if folder.read("f") is not None:
            history.note(Fact.SEALED)
        elif history.has(Fact.SEALED):
            history.complain("f is gone")


def complaints(place: Place, history: History) -> list[str]:
    return sorted(history.complaints)


@pytest.mark.parametrize(
    ("faults", "want"),
    [
        pytest.param(EVERY_FAULT - {Fault.LATE, Fault.DISK}, False, id="without late calls"),
        pytest.param(frozenset({Fault.LATE}), True, id="with late calls"),
    ],
)
def test_late_call_arrives_after_the_second_run(faults: frozenset[Fault], want: bool) -> None:
    scenario = a_scenario(
        remove_old,
        prepare=put("f", b"old"),
        recover=promise,
        check_final=complaints,
        faults=faults,
    )
    found = "".join(explore(scenario, depth=1).violations)
    assert ("its unlink arrives after" in found and "f is gone" in found) == want


def test_late_call_of_a_paused_actor_arrives_between_calls_of_the_other() -> None:
    def replace(place: Place, history: History) -> None:
        with opened(place) as folder:
            folder.remove("f")
            with folder.new_file("f") as file:
                file.write(b"new")
                file.publish(3)
        history.note(Fact.SEALED)

    scenario = a_scenario(
        remove_old,
        replace,
        prepare=put("f", b"old"),
        check=expect("f", b"new"),
        faults=frozenset({Fault.LATE}),
    )
    (told,) = explore(scenario, depth=2).violations
    assert "f holds None" in told


def test_power_cut_of_one_machine_leaves_the_other_actor_at_work() -> None:
    actors = write("a", b"1", syncs_name=False), write("b", b"2")
    counts = explore(a_scenario(*actors, check=expect("b", None, b"2")), depth=2)
    assert counts.violations == []
    assert counts.cuts > 0


def fail_unexpectedly(place: Place, history: History) -> None:
    raise KeyError("defect")


def fail_as_production_does(place: Place, history: History) -> None:
    with opened(place) as folder:
        folder.child("missing")


@pytest.mark.parametrize(
    ("actor", "want"),
    [
        pytest.param(fail_as_production_does, "", id="what production raises"),
        pytest.param(fail_unexpectedly, "raised KeyError", id="a defect"),
    ],
)
def test_exception_of_an_actor_is_a_violation_if_it_is_a_defect(actor: Actor, want: str) -> None:
    counts = explore(a_scenario(actor), depth=0)
    assert bool(counts.violations) == bool(want)
    assert want in "".join(counts.violations)


def test_second_run_that_fails_is_a_violation() -> None:
    counts = explore(a_scenario(nothing, recover=fail_as_production_does), depth=0)
    assert "the second run raised FileNotFoundError" in counts.violations[0]


def test_lost_disk_and_flipped_bit_are_noted_and_seen() -> None:
    def check(place: Place, history: History) -> list[str]:
        with opened(place) as folder:
            data = folder.read("weights-0.distcp")
        is_bad = data not in (None, b"data") and not history.of(Fact.FLIPPED)
        lost = [f"node {note.number}" for note in history.of(Fact.DISK_LOST)]
        if lost:
            seen.update(lost)
        if data not in (None, b"data"):
            seen.add("flip")
        return ["changed"] if is_bad else []

    seen: set[str] = set()
    faults = frozenset({Fault.FLIP, Fault.DISK})
    actor = write("weights-0.distcp", b"data")
    assert explore(a_scenario(actor, check=check, faults=faults), depth=0).violations == []
    assert seen == {"node 0", "node 1", "flip"}


def rename_twice(place: Place, history: History) -> None:
    with opened(place) as folder:
        folder.rename("f", "g")
        folder.sync()
        folder.names()
        folder.rename("g", "f")


def test_same_scenario_gives_the_same_counts() -> None:
    scenario = a_scenario(rename_twice, keep_trying, prepare=put("f", b"old"))
    first, second = (explore(scenario, depth=2) for _ in range(2))
    assert first == second
    assert all(asdict(first)[name] for name in set(asdict(first)) - {"violations", "flips"})


def ask(place: Place, history: History) -> None:
    with opened(place) as folder:
        folder.ensure_child("asked").close()
        if folder.size("answer") is None and "answer" in folder.names():
            folder.ensure_child("heard").close()
        folder.ensure_child("end").close()


def answer(place: Place, history: History) -> None:
    with opened(place) as folder:
        if "asked" in folder.names():
            put("answer", b"1")(place, history)


def answer_shortly(place: Place, history: History) -> None:
    answer(place, history)
    with opened(place) as folder:
        folder.remove("answer")


class EveryBranch(Branches):
    """Leaves nothing out."""

    def leave(self, run: Run, current: int | None, *, is_known: bool) -> None:
        """Holds nothing back."""

    def branch(self, run: Run, current: int) -> None:
        at = run.boundary - 1
        self.longer += [
            self._plus(Turn(at, Event.SWITCH, other)) for other in run.alive() if other != current
        ]
        for number, _, _ in run.late_calls():
            if number != current:
                self.longer.append(self._plus(Turn(at, Event.ARRIVE, number)))


@pytest.mark.parametrize("depth", [1, 2], ids=["one event", "two events"])
@pytest.mark.parametrize(
    "actors",
    [
        pytest.param((create_unless_there, create_unless_there), id="the same"),
        pytest.param((rename_twice, write("g", b"1")), id="names that meet"),
        pytest.param((remove_old, rename_twice), id="remove and rename"),
        pytest.param((ask, answer), id="what one reads the other writes"),
        pytest.param((answer, ask), id="the second begins"),
        pytest.param((ask, answer_shortly), id="for one moment only"),
    ],
)
def test_branches_that_are_left_out_would_show_no_other_state(
    actors: tuple[Actor, ...], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = frozenset({Fault.LATE})
    scenario = a_scenario(*actors, prepare=put("f", b"old"), faults=faults)
    found = explore(scenario, depth=depth, mixes=0)
    monkeypatch.setattr(engine, "Branches", EveryBranch)
    want = explore(scenario, depth=depth, mixes=0)
    assert found.states == want.states
    assert found.schedules <= want.schedules


def test_schedules_are_limited_on_demand() -> None:
    actors = create_unless_there, create_unless_there
    assert explore(a_scenario(*actors), depth=2, most=50).schedules == 50
