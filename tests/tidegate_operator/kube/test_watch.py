"""The reflector against a small fake; the real API server's watches are tested on the ground."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tidegate_operator.kube import watch
from tidegate_operator.kube.backoff import Backoff
from tidegate_operator.kube.kinds import PODS, Key
from tidegate_operator.kube.watch import Change, Reflector


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "RETRY", Backoff(first_seconds=0.01, longest_seconds=0.02))


class Told(list[tuple[str, str]]):
    """Changes told so far, as (type, name)."""

    def __call__(self, change: Change[Any]) -> None:
        self.append((str(change.type), change.key.name))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running(client: Any, told: Told, **more: Any) -> AsyncIterator[Reflector[Any]]:
    reflector: Reflector[Any] = Reflector(
        client, PODS, slim=lambda item: item.get("spec"), on_change=told, **more
    )
    task = asyncio.create_task(reflector.run())
    await reflector.wait_synced()
    try:
        yield reflector
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_reflector_list_of_several_pages_fills_cache_before_synced(with_server: Any) -> None:
    async def body(server: Any, client: Any) -> None:
        for name in "abcde":
            server.put(name, spec=name)
        async with running(client, told := Told()) as reflector:
            assert reflector.is_synced
            assert dict(reflector.cache) == {Key("ns", name): name for name in "abcde"}
            assert told == [("Added", name) for name in "abcde"]
            assert len([q for q in server.requests if "watch" not in q]) == 3

    with_server(body)


def test_reflector_events_are_told_once_and_only_when_record_changes(with_server: Any) -> None:
    async def body(server: Any, client: Any) -> None:
        server.put("a", spec="1")
        async with running(client, told := Told()) as reflector:
            server.put("a", spec="1", status="noise")
            server.put("a", spec="2")
            server.put("b", spec="x" * 300_000)
            server.remove("a")
            await until(lambda: ("Deleted", "a") in told)
            want = [("Added", "a"), ("Modified", "a"), ("Added", "b"), ("Deleted", "a")]
            assert told == want
            assert set(reflector.cache) == {Key("ns", "b")}

    with_server(body)


def test_reflector_expired_version_lists_again_and_tells_what_was_deleted(
    with_server: Any,
) -> None:
    async def body(server: Any, client: Any) -> None:
        for name in "abc":
            server.put(name, spec="1")
        async with running(client, told := Told()) as reflector:
            server.is_silent = True
            server.remove("a")
            server.put("b", spec="2")
            server.put("d", spec="1")
            server.expire()
            server.is_silent = False
            server.cut()
            await until(lambda: ("Deleted", "a") in told)
            assert sorted(told[3:]) == [("Added", "d"), ("Deleted", "a"), ("Modified", "b")]
            assert {key.name for key in reflector.cache} == set("bcd")

    with_server(body)


def test_reflector_cut_connection_resumes_without_a_new_list(with_server: Any) -> None:
    async def body(server: Any, client: Any) -> None:
        server.put("a", spec="1")
        async with running(client, told := Told()):
            server.put("b", spec="1")
            await until(lambda: ("Added", "b") in told)
            server.cut()
            server.put("c", spec="1")
            await until(lambda: ("Added", "c") in told)
            assert told.count(("Added", "b")) == 1
            assert len([q for q in server.requests if "watch" not in q]) == 1

    with_server(body)


def test_reflector_silent_stream_is_reopened(with_server: Any) -> None:
    async def body(server: Any, client: Any) -> None:
        server.put("a", spec="1")
        async with running(client, Told(), inactivity_seconds=0.05):
            await until(lambda: len([q for q in server.requests if "watch" in q]) >= 3)
            assert len([q for q in server.requests if "watch" not in q]) == 1

    with_server(body)


@pytest.mark.parametrize("code", [403, 404, 410, 429, 500], ids=str)
def test_reflector_refused_list_is_tried_again(with_server: Any, code: int) -> None:
    async def body(server: Any, client: Any) -> None:
        server.put("a", spec="1")
        server.refusals = [code, code]
        async with running(client, told := Told()):
            assert told == [("Added", "a")]
            assert len(server.requests) >= 3

    with_server(body)


def test_reflector_bookmark_moves_the_version_it_resumes_from(with_server: Any) -> None:
    async def body(server: Any, client: Any) -> None:
        server.put("a", spec="1")
        async with running(client, told := Told()):
            server.version = 500
            bookmark = {"metadata": {"resourceVersion": "500"}}
            server.log.append({"type": "BOOKMARK", "object": bookmark})
            await until(lambda: server.requests[-1].get("watch") == "1")
            await asyncio.sleep(0.05)
            server.cut()
            await until(lambda: server.requests[-1].get("resourceVersion") == "500")
            assert told == [("Added", "a")]

    with_server(body)
