"""A watch whose user makes objects that nobody foresaw: only these are missed."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tidegate_operator.kube import watch
from tidegate_operator.kube.errors import Unavailable
from tidegate_operator.kube.kinds import PODS, Key
from tidegate_operator.kube.watch import Change, Reflector

ONE: Any = {"return_when": asyncio.FIRST_COMPLETED}


class Follower:
    """Follows a watch; breaks at what is marked so."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def slim(self, item: Any) -> str:
        if item["spec"] == "breaks slim":
            raise RecursionError("odd")
        return str(item["spec"])

    def on_change(self, change: Change[str]) -> None:
        self.told.append((str(change.type), change.key.name))
        if change.new == "breaks change" or (change.new is None and change.old == "breaks end"):
            raise KeyError("odd")


@contextmanager
def following(client: Any, follower: Follower) -> Iterator[tuple[Reflector[str], Any]]:
    reflector = Reflector(client, PODS, slim=follower.slim, on_change=follower.on_change)
    task = asyncio.create_task(reflector.run())
    try:
        yield reflector, task
    finally:
        task.cancel()


async def until_told(follower: Follower, *last: tuple[str, str]) -> None:
    async with asyncio.timeout(5):
        while not set(last) <= set(follower.told):
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("odd", ["breaks slim", "breaks change"])
def test_reflector_odd_object_of_a_list_is_absent_and_others_are_there(
    with_server: Any, odd: str
) -> None:
    async def body(server: Any, client: Any) -> None:
        for name, spec in (("a", "1"), ("b", odd), ("c", "1")):
            server.put(name, spec=spec)
        with following(client, follower := Follower()) as (reflector, task):
            await asyncio.wait({task, sync := asyncio.create_task(reflector.wait_synced())}, **ONE)
            assert sync.done()
            assert set(reflector.cache) == {Key("ns", "a"), Key("ns", "c")}
            server.put("b", spec="2")
            await until_told(follower, ("Added", "b"))
            assert not task.done()
            assert reflector.cache[Key("ns", "a")] == "1"

    with_server(body)


@pytest.mark.parametrize("odd", ["breaks slim", "breaks change"])
def test_reflector_object_that_turns_odd_is_logged_once_and_told_deleted(
    with_server: Any, odd: str, caplog: Any
) -> None:
    async def body(server: Any, client: Any) -> None:
        server.put("a", spec="1")
        with following(client, follower := Follower()) as (reflector, task):
            await asyncio.wait({task, asyncio.create_task(reflector.wait_synced())}, **ONE)
            for turn in range(3):
                server.put("a", spec=odd, turn=turn)
            server.put("z", spec="1")
            await until_told(follower, ("Added", "z"), ("Deleted", "a"))
            assert not task.done()
            assert set(reflector.cache) == {Key("ns", "z")}

    with caplog.at_level(logging.ERROR):
        with_server(body)
    (record,) = caplog.records
    assert (record.kind, record.namespace, record.object) == ("Pod", "ns", "a")


def test_reflector_callback_that_fails_at_an_end_does_not_stop_it(with_server: Any) -> None:
    async def body(server: Any, client: Any) -> None:
        server.put("a", spec="breaks end")
        with following(client, follower := Follower()) as (reflector, task):
            await asyncio.wait({task, asyncio.create_task(reflector.wait_synced())}, **ONE)
            server.remove("a")
            server.put("z", spec="1")
            await until_told(follower, ("Deleted", "a"), ("Added", "z"))
            assert not task.done()

    with_server(body)


def test_event_too_deep_to_read_counts_as_a_broken_stream() -> None:
    with pytest.raises(Unavailable, match="within an event"):
        watch.parse_event("/api/v1/pods", b'{"type":"MODIFIED","object":' + b"[" * 5000)
