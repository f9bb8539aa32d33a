"""What a failed pass does to the loop; whole passes are tested against a real API server."""

import asyncio
import logging
from typing import Any, cast

import pytest

from tidegate_contract.errors import Reject, Retry
from tidegate_operator.controller.context import Context
from tidegate_operator.controller.health import Health, Metrics
from tidegate_operator.controller.observe import World
from tidegate_operator.controller.queue import Item, Queue, Subject
from tidegate_operator.controller.reconcile import REJECTED_SECONDS, Reconciler
from tidegate_operator.kube.access import Access
from tidegate_operator.kube.client import Client
from tidegate_operator.kube.events import Recorder
from tidegate_operator.settings import Settings

POLICY = Item(Subject.POLICY, "team-a", "default")


class OddWorld(World):
    """A world in which looking at a policy fails."""

    error: Exception

    async def observe_policy(self, key: Any) -> Any:
        raise self.error


@pytest.fixture
def reconciler(settings: Settings) -> tuple[Reconciler, OddWorld, Metrics]:
    client, queue = Client(Access(server="http://127.0.0.1:1")), Queue()
    world = OddWorld(client, queue)
    metrics = Metrics(queue, world)
    recorder = Recorder(client, controller="tidegate.io/test", instance="test")
    context = Context(
        client=client,
        settings=settings,
        queue=queue,
        world=world,
        metrics=metrics,
        recorder=recorder,
    )
    return Reconciler(context), world, metrics


@pytest.mark.parametrize(
    ("error", "result", "least", "most"),
    [
        pytest.param(Retry("later"), "retry", 0.25, 0.5, id="retry"),
        pytest.param(Reject("wrong"), "reject", REJECTED_SECONDS, REJECTED_SECONDS, id="reject"),
        pytest.param(KeyError("bug"), "bug", 0.25, 0.5, id="bug"),
    ],
)
def test_pass_that_fails_is_counted_and_tried_again(
    reconciler: Any, error: Exception, result: str, least: float, most: float
) -> None:
    subject, world, metrics = reconciler
    world.error = error
    delay = asyncio.run(subject._attempt(POLICY))
    assert least <= delay <= most
    labels = {"subject": "policy", "result": result}
    name = "tidegate_controller_reconciles_total"
    assert metrics.registry.get_sample_value(name, labels) == 1


def test_pass_that_fails_again_and_again_waits_longer_up_to_a_minute(
    reconciler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    subject, world, _ = reconciler
    world.error = Retry("later")
    with caplog.at_level(logging.INFO):
        delays = [asyncio.run(subject._attempt(POLICY)) for _ in range(12)]
    assert delays[6] > delays[0]
    assert 30 <= delays[-1] <= 60
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO"] + ["WARNING"] * 11
    last = cast("Any", caplog.records[-1])
    assert (last.key, last.failures, last.error) == ("team-a/default", 12, "later")


def test_health_of_a_process_that_waits_is_good_and_of_a_silent_one_bad(reconciler: Any) -> None:
    _, world, _ = reconciler
    health = Health(Queue(), world)
    seen = world.pods.last_seen
    assert (health.problem(seen + 3600), health.is_ready) == ("", True)
    health.is_active = True
    assert not health.is_ready
    assert health.problem(seen + 299) == ""
    assert health.problem(seen + 301) == "the watch of Pod was silent for 301 s"
