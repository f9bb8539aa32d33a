"""What is sent for events; how the API server shows them is tested on the ground."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from tidegate_operator.kube.client import Client
from tidegate_operator.kube.errors import Forbidden, NotFound
from tidegate_operator.kube.events import BURST, Event, EventType, Recorder
from tidegate_operator.kube.kinds import NODES, RUNS

RUN = {"metadata": {"namespace": "team-a", "name": "llama", "uid": "u"}}
EVENT = Event(type=EventType.WARNING, reason="Late", action="Release", note="too late")


class Sent:
    """A client that keeps what it was asked to write, and refuses by a given error."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 29, 12, tzinfo=UTC)
        self.created: list[Mapping[str, Any]] = []
        self.patched: list[tuple[str, Mapping[str, Any]]] = []
        self.error: Exception | None = None
        self.recorder = Recorder(
            cast("Client", self), controller="tidegate.io/x", instance="pod", clock=lambda: self.now
        )

    async def create(self, path: str, body: Mapping[str, Any]) -> None:
        assert path == f"/apis/events.k8s.io/v1/namespaces/{body['metadata']['namespace']}/events"
        if self.error:
            raise self.error
        self.created.append(body)

    async def patch(self, path: str, body: Mapping[str, Any]) -> None:
        if self.error:
            error, self.error = self.error, None
            raise error
        self.patched.append((path.rsplit("/", 1)[1], body))

    def record(self, event: Event = EVENT, times: int = 1) -> None:
        async def main() -> None:
            for _ in range(times):
                await self.recorder.record(RUNS, RUN, event)

        asyncio.run(main())


def test_event_names_its_object_and_its_author() -> None:
    sent = Sent()
    sent.record()
    (body,) = sent.created
    assert body["regarding"] == {
        "apiVersion": "tidegate.io/v1alpha1",
        "kind": "CheckpointRun",
        "namespace": "team-a",
        "name": "llama",
        "uid": "u",
    }
    assert (body["type"], body["reason"], body["note"]) == ("Warning", "Late", "too late")
    assert (body["reportingController"], body["eventTime"]) == (
        "tidegate.io/x",
        "2026-11-29T12:00:00.000000Z",
    )


def test_event_repeated_within_ten_minutes_is_a_series() -> None:
    sent = Sent()
    sent.record(times=3)
    assert len(sent.created) == 1
    name = sent.created[0]["metadata"]["name"]
    assert [(one, body["series"]["count"]) for one, body in sent.patched] == [(name, 2), (name, 3)]
    sent.now += timedelta(minutes=11)
    sent.record()
    assert len(sent.created) == 2


def test_event_whose_series_was_deleted_is_written_anew() -> None:
    sent = Sent()
    sent.record()
    sent.error = NotFound("gone")
    sent.record()
    assert len(sent.created) == 2


def test_event_flood_about_one_object_is_cut_off_and_refilled() -> None:
    sent = Sent()
    for number in range(BURST + 5):
        sent.record(Event(reason="A", action="B", note=str(number)))
    assert len(sent.created) == BURST
    sent.now += timedelta(minutes=2)
    for number in range(5):
        sent.record(Event(reason="A", action="B", note=f"later {number}"))
    assert len(sent.created) == BURST + 2


def test_event_that_is_refused_never_fails_its_caller() -> None:
    sent = Sent()
    sent.error = Forbidden("no")
    sent.record()
    assert sent.created == []


def test_event_about_an_object_without_namespace_lives_in_default() -> None:
    sent = Sent()
    node = {"metadata": {"name": "n", "uid": "u"}}
    asyncio.run(sent.recorder.record(NODES, node, EVENT))
    assert sent.created[0]["metadata"]["namespace"] == "default"
