"""The whole process's start and stop, in one event loop, against a fake API server.

The fake knows lists, watches that stay open, one Secret and one Service; what a real API server and
a real drain do with the gate is tested on the ground.
"""

import asyncio
import base64
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tidegate_contract import keys
from tidegate_operator.gate import server
from tidegate_operator.gate.server import Gate, build_address
from tidegate_operator.gate.tls import Identity
from tidegate_operator.kube.access import Access
from tidegate_operator.kube.client import Client


class FakeApi:
    """Serves what a gate reads at its start; `put_certificate` ends the watch of the Secret."""

    def __init__(self, policies: list[Any]) -> None:
        self.policies = policies
        self.secret: dict[str, Any] = {"metadata": {"name": "s", "resourceVersion": "1"}}
        self.changed = asyncio.Event()
        self.paths: list[str] = []

    def put_certificate(self, certificate: Any) -> None:
        parts = {"tls.crt": certificate.chain, "tls.key": certificate.key}
        parts["ca.crt"] = certificate.authority.encode()
        self.secret["data"] = {k: base64.b64encode(v).decode() for k, v in parts.items()}
        self.changed.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        if "watch" in request.query:
            return await self._watch(request)
        if request.path.endswith("/services/tidegate-gate"):
            return web.json_response({"spec": {"clusterIP": "10.96.0.9"}})
        items = self.policies if request.path.endswith("/checkpointpolicies") else []
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while "secrets" in request.path:
            event = {"type": "MODIFIED", "object": self.secret}
            await response.write(json.dumps(event).encode() + b"\n")
            await self.changed.wait()
            self.changed.clear()
        await asyncio.Event().wait()
        return response


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def run_gate(
    monkeypatch: pytest.MonkeyPatch, a_policy: Any, some_settings: Any
) -> Callable[..., None]:
    """Runs a test body beside a gate; the body gets the fake, the ports and the stop event."""
    monkeypatch.setattr(server, "LINGER_SECONDS", 0.0)
    tls_port, health_port = free_port(), free_port()
    settings = some_settings(gate={"port": tls_port})

    async def whole(body: Callable[..., Awaitable[None]]) -> None:
        api = FakeApi([a_policy() | {"metadata": a_policy()["metadata"]}])
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", api.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stop = asyncio.Event()
        access = Access(server=f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with asyncio.timeout(15), Client(access) as client:
            gate = asyncio.create_task(Gate(settings, client, health_port).run(stop))
            await body(api, tls_port, health_port, stop)
            stop.set()
            await gate
        await runner.cleanup()

    return lambda body: asyncio.run(whole(body))


async def status_of(session: aiohttp.ClientSession, port: int, path: str) -> int:
    try:
        async with session.get(f"http://127.0.0.1:{port}{path}") as response:
            return response.status
    except aiohttp.ClientConnectorError:
        return 0


async def until_status(session: aiohttp.ClientSession, port: int, path: str, want: int) -> None:
    while await status_of(session, port, path) != want:
        await asyncio.sleep(0.01)


def test_gate_is_ready_once_its_certificate_is_there_and_serves_by_it(
    run_gate: Any, a_certificate: Any, trusting: Any, a_pod: Any
) -> None:
    certificate = a_certificate()

    async def body(api: FakeApi, port: int, health: int, _: asyncio.Event) -> None:
        async with aiohttp.ClientSession() as session:
            await until_status(session, health, "/healthz", 200)
            while "/api/v1/pods" not in api.paths:
                await asyncio.sleep(0.01)
            assert await status_of(session, health, "/readyz") == 503
            api.put_certificate(certificate)
            await until_status(session, health, "/readyz", 200)
            review = {"request": {"uid": "u", "namespace": "team-a", "object": a_pod()}}
            async with session.post(
                f"https://127.0.0.1:{port}{keys.INJECT_PATH}",
                json=review,
                ssl=trusting(certificate),
                server_hostname="gate.svc",
            ) as response:
                answer = (await response.json())["response"]
            patch = base64.b64decode(answer["patch"]).decode()
            assert "https://10.96.0.9:443" in patch
            assert "tidegate-gate.tidegate-system.svc" in patch
            async with session.get(f"http://127.0.0.1:{health}/metrics") as response:
                text = await response.text()
            assert 'tidegate_gate_injections_total{result="patched"} 1.0' in text

    run_gate(body)


def test_gate_stops_though_it_never_became_ready(run_gate: Any) -> None:
    async def body(api: FakeApi, _: int, health: int, stop: asyncio.Event) -> None:
        async with aiohttp.ClientSession() as session:
            await until_status(session, health, "/healthz", 200)

    run_gate(body)


@pytest.mark.parametrize(
    ("address", "want"),
    [("10.96.0.9", "https://10.96.0.9:443"), ("fd00::9", "https://[fd00::9]:443")],
)
def test_gate_address_is_that_of_its_service(address: str, want: str) -> None:
    assert build_address(address, "gate", "system", Identity()).url == want
