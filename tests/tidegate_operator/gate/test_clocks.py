"""One pass after another against a small fake of the API server's status and patch endpoints.

It keeps what a real one keeps: resourceVersions, one set of fields per manager, conditional writes.
How the real server answers is tested on the ground.
"""

import asyncio
import copy
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_contract.layout import Attempt
from tidegate_contract.wire import (
    AnswerResult,
    DurableNote,
    Phase,
    Report,
    SaveAnswer,
    StepNote,
    TrainerState,
)
from tidegate_operator.gate.clocks import Clocks, build_label_patch
from tidegate_operator.gate.facts import Eviction
from tidegate_operator.gate.injected import Injected, build_injected
from tidegate_operator.gate.metrics import Metrics
from tidegate_operator.gate.records import slim_node, slim_pod, slim_policy, slim_run
from tidegate_operator.gate.report_status import FIELDS
from tidegate_operator.gate.world import World
from tidegate_operator.kube.errors import Conflict, Unavailable
from tidegate_operator.kube.events import Recorder
from tidegate_operator.kube.kinds import Key
from tidegate_operator.kube.watch import Change, ChangeType
from tidegate_operator.settings import DrainSettings

RUN = Key("team-a", "llama")
RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
OWNED = {"tidegate-gate": set(FIELDS), "tidegate-gate-drain": {"drains"}}


class FakeApi:
    """One run, its pods, and the order of writes."""

    def __init__(self) -> None:
        metadata = {"name": "llama", "namespace": "team-a", "uid": "r", "resourceVersion": "5"}
        self.run: dict[str, Any] = {"metadata": metadata, "status": {}}
        self.log: list[str] = []
        self.is_down = False
        self.notes: list[str] = []
        self.pod_patches: list[Any] = []

    async def apply(self, path: str, body: Any, manager: str) -> Any:
        if self.is_down:
            raise Unavailable("no answer in time")
        told = body["metadata"].get("resourceVersion")
        if told is not None and told != self.run["metadata"]["resourceVersion"]:
            raise Conflict("changed")
        assert body["status"].keys() <= OWNED[manager]
        for field in OWNED[manager]:
            self.run["status"].pop(field, None)
        self.run["status"] |= copy.deepcopy(body["status"])
        self.touch()
        self.log.append(manager)
        return copy.deepcopy(self.run)

    def touch(self) -> None:
        metadata = self.run["metadata"]
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)

    async def patch(self, path: str, body: Any) -> Any:
        self.log.append(f"patch {path.rpartition('/')[2]}")
        self.pod_patches.append(body)
        return {}

    async def create(self, path: str, body: Any, *, manager: str = "") -> Any:
        self.notes.append(f"{body['reason']} {body['note']}")
        return body


def added(key: Key, record: Any) -> Change[Any]:
    return Change(type=ChangeType.ADDED, key=key, old=None, new=record)


def a_pod(name: str, node: str) -> Any:
    note = build_injected(
        Injected(
            version="1",
            policy="default",
            generation=3,
            containers=("t",),
            marks=(keys.SAFE_TO_EVICT_ANNOTATION,),
        )
    )
    labels = {keys.RUN_LABEL: "llama", keys.POLICY_LABEL: "default", keys.HOLD_LABEL: "true"}
    metadata = {"name": name, "namespace": "team-a", "uid": f"uid-{name}", "labels": labels}
    metadata["annotations"] = {keys.INJECTED_ANNOTATION: note}
    spec, status = {"nodeName": node}, {"phase": "Running"}
    return slim_pod({"metadata": metadata, "spec": spec, "status": status})


@pytest.fixture
def world(a_policy: Any) -> World:
    world = World()
    policy = slim_policy(a_policy(drain={"freshness": "0s"}))
    world.on_policy(added(Key("team-a", "default"), policy))
    for name, node in (("p0", "a"), ("p1", "b")):
        pod = a_pod(name, node)
        world.on_pod(added(pod.key, pod))
        raw = {"metadata": {"name": node, "uid": f"uid-{node}"}, "spec": {}}
        world.on_node(added(Key("", node), slim_node(raw)))
    return world


@pytest.fixture
def api(world: World) -> FakeApi:
    api = FakeApi()
    world.on_run(added(RUN, slim_run(copy.deepcopy(api.run))))
    return api


@pytest.fixture
def passes(world: World, api: FakeApi) -> Callable[..., None]:
    """Makes passes over the run, one per argument, each after its argument was called."""

    def run(*before: Callable[[], Any]) -> None:
        async def body() -> None:
            client: Any = api
            recorder = Recorder(client, controller="tidegate.io/gate", instance="g")
            clocks = Clocks(client, world, DrainSettings(), recorder, Metrics())
            for prepare in before:
                prepare()
                await clocks.pass_over(RUN)

        asyncio.run(body())

    return run


def evict(world: World) -> None:
    world.take_eviction(RUN, Eviction(node="b", requested_by="admin", at=datetime.now(UTC)))


def report(world: World, result: str | None = None, durable: bool = False, step: int = 120) -> None:
    now, ask = datetime.now(UTC), world.asks.get(RUN)
    attempt = Attempt(step=120, nonce="00000000000000aa")
    answer = None
    if result is not None and ask is not None:
        answer = SaveAnswer(request_id=ask.request_id, result=AnswerResult(result), attempt=attempt)
    state = TrainerState(
        run_id=RUN_ID,
        rank=0,
        world_size=2,
        pod_uid="uid-p0",
        phase=Phase.TRAINING,
        progress=StepNote(step=step, tokens=9, at=now),
        answer=answer or (world.reports[RUN].report.state.answer if durable else None),  # type: ignore[union-attr]
        written_at=now,
    )
    note = DurableNote(
        step=120,
        tokens=9,
        attempt=attempt,
        committed_at=now,
        path="team-a/llama/step",
        size_bytes=1,
        manifest_sha256="ab",
    )
    world.take_report(
        RUN,
        Report(
            namespace="team-a",
            run="llama",
            pod="p0",
            pod_uid="uid-p0",
            run_id=RUN_ID,
            state=state,
            durable=note if durable else None,
        ),
        now,
    )


def drain_of(api: FakeApi) -> tuple[str, str]:
    (drain,) = api.run["status"]["drains"]
    return drain["state"], drain["reason"]


def test_drain_goes_from_eviction_to_release_through_status(
    world: World, api: FakeApi, passes: Any
) -> None:
    seen = []

    def then(prepare: Callable[[], Any]) -> Callable[[], None]:
        def step() -> None:
            if "drains" in api.run["status"]:
                seen.append(drain_of(api)[0])
            prepare()

        return step

    passes(
        lambda: report(world),
        then(lambda: evict(world)),
        then(lambda: report(world, "Acknowledged")),
        then(lambda: report(world, "Sealed")),
        then(lambda: report(world, durable=True)),
    )
    assert seen == ["Requested", "Saving", "Flushing"]
    assert drain_of(api) == ("Released", "Durable")
    assert world.asks == {}


def test_release_writes_the_durable_step_then_the_drain_then_the_label(
    world: World, api: FakeApi, passes: Any
) -> None:
    passes(
        lambda: report(world),
        lambda: evict(world),
        lambda: report(world, "Sealed"),
        lambda: (api.log.clear(), report(world, durable=True)),
    )
    assert api.log == ["tidegate-gate", "tidegate-gate-drain", "patch p1"]
    assert api.run["status"]["lastDurable"]["step"] == 120
    (patch,) = api.pod_patches
    assert patch["metadata"] == {
        "uid": "uid-p1",
        "labels": {keys.HOLD_LABEL: None},
        "annotations": {keys.SAFE_TO_EVICT_ANNOTATION: None},
    }
    assert any(note.startswith("Durable node b: Released") for note in api.notes)


def test_drain_that_another_replica_changed_is_not_overwritten(
    world: World, api: FakeApi, passes: Any
) -> None:
    def meanwhile() -> None:
        evict(world)
        api.run["status"]["drains"] = [{"node": "a", "state": "Saving"}]
        api.touch()

    passes(meanwhile)
    assert [drain["node"] for drain in api.run["status"]["drains"]] == ["a"]
    assert api.pod_patches == []
    # the eviction is still there for the pass that knows the other replica's entry
    assert "b" in world.evictions[RUN]


def test_failed_pass_frees_nobody_and_is_made_again(
    world: World, api: FakeApi, passes: Any
) -> None:
    def down() -> None:
        evict(world)
        api.is_down = True

    passes(down)
    assert (api.log, api.pod_patches) == ([], [])
    api.is_down = False
    passes(lambda: None)
    assert drain_of(api)[0] in ("Requested", "Released")


def test_report_of_a_replica_that_lost_the_lead_does_not_undo_newer_ones(
    world: World, api: FakeApi, passes: Any
) -> None:
    def stale() -> None:
        report(world, step=7)
        api.run["status"] = {
            "progress": {"step": 99},
            "lastSealed": {"step": 90},
            "lastReportTime": datetime.now(UTC).isoformat(),
        }
        api.touch()
        world.on_run(added(RUN, slim_run(copy.deepcopy(api.run))))

    passes(stale)
    assert api.run["status"]["progress"] == {"step": 99}


def test_quiet_report_costs_no_write(world: World, api: FakeApi, passes: Any) -> None:
    passes(lambda: report(world), lambda: api.log.clear(), lambda: report(world, step=121))
    assert api.log == []


def test_label_patch_of_a_pod_held_again_sets_its_marks_again() -> None:
    patch = build_label_patch(a_pod("p0", "a"), is_held=True)
    assert patch["metadata"] == {
        "uid": "uid-p0",
        "labels": {keys.HOLD_LABEL: "true"},
        "annotations": {keys.SAFE_TO_EVICT_ANNOTATION: "false"},
    }


def test_clocks_move_a_stirred_run_without_waiting_for_the_tick(world: World, api: FakeApi) -> None:
    async def body() -> None:
        client: Any = api
        recorder = Recorder(client, controller="tidegate.io/gate", instance="g")
        clocks = Clocks(client, world, DrainSettings(), recorder, Metrics())
        task = asyncio.create_task(clocks.run())
        async with asyncio.timeout(5):
            while not world.runs[RUN].drains:
                if RUN not in world.evictions:
                    evict(world)
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    started = datetime.now(UTC)
    asyncio.run(body())
    assert datetime.now(UTC) - started < timedelta(seconds=0.9)
