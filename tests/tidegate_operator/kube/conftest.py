"""A fake API server for the protocol of list and watch: what the real one cannot be told to do.

It expires resourceVersions, cuts connections within an event and falls silent, on demand. What the
real server does with watches, applies and Leases is tested on the ground.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tidegate_operator.kube.access import Access
from tidegate_operator.kube.client import Client

Object = dict[str, Any]


class FakeServer:
    """Pods of one cluster, and the faults to show next."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.version = 100
        self.log: list[Object] = []
        self.oldest_watchable = 0
        self.requests: list[dict[str, str]] = []
        self.page_size = 2
        self.refusals: list[int] = []
        self.is_silent = False
        self._connections: list[web.StreamResponse] = []
        self._pages: dict[str, tuple[int, list[Object]]] = {}
        self._cut = asyncio.Event()

    def put(self, name: str, **fields: Any) -> None:
        self.version += 1
        kind = "MODIFIED" if ("ns", name) in self.objects else "ADDED"
        item = {
            "metadata": {"namespace": "ns", "name": name, "resourceVersion": str(self.version)},
            **fields,
        }
        self.objects["ns", name] = item
        self.log.append({"type": kind, "object": item})

    def remove(self, name: str) -> None:
        self.version += 1
        item = self.objects.pop(("ns", name))
        item = {"metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
        self.log.append({"type": "DELETED", "object": item})

    def expire(self) -> None:
        """Forgets all events so far: older resourceVersions answer 410 from now on."""
        self.log, self.oldest_watchable = [], self.version

    def cut(self) -> None:
        """Breaks every open watch in the middle of an event."""
        self._cut.set()
        self._cut = asyncio.Event()

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/api/v1/pods", self._get)
        return app

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(dict(request.query))
        if self.refusals:
            return _status(self.refusals.pop(0))
        if "watch" in request.query:
            return await self._watch(request)
        return self._list(request.query)

    def _list(self, query: Any) -> web.Response:
        token = query.get("continue")
        version, rest = self._pages.pop(token) if token else (self.version, [])
        if not token:
            rest = [self.objects[key] for key in sorted(self.objects)]
        page, rest = rest[: self.page_size], rest[self.page_size :]
        metadata = {"resourceVersion": str(version)}
        if rest:
            metadata["continue"] = f"{version}-{len(rest)}"
            self._pages[metadata["continue"]] = (version, rest)
        return web.json_response({"metadata": metadata, "items": page})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        version, cut = int(request.query["resourceVersion"]), self._cut
        if version < self.oldest_watchable:
            return _status(410)
        response = web.StreamResponse()
        await response.prepare(request)
        while not cut.is_set():
            for event in [e for e in self.log if _version(e) > version and not self.is_silent]:
                version = _version(event)
                await response.write(json.dumps(event).encode() + b"\n")
            await asyncio.sleep(0.005)
        await response.write(b'{"type": "MODIFIED", "obj')
        return response


def _version(event: Object) -> int:
    return int(event["object"]["metadata"]["resourceVersion"])


def _status(code: int) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": "told to"}, status=code)


@asynccontextmanager
async def serve(application: web.Application) -> AsyncIterator[Client]:
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with Client(Access(server=f"http://127.0.0.1:{port}")) as client:
            yield client
    finally:
        await runner.cleanup()


Body = Callable[[FakeServer, Client], Awaitable[None]]


@pytest.fixture
def with_server() -> Callable[[Body], None]:
    """Runs an async test body against a fake server of its own."""

    async def main(body: Body) -> None:
        server = FakeServer()
        async with serve(server.application()) as client, asyncio.timeout(10):
            await body(server, client)

    return lambda body: asyncio.run(main(body))
