"""The gate process: watches, clocks, and two listeners, wired and stopped in order.

TLS on the gate's port for the API server and the sidecars; plain HTTP on 8080 for probes and
metrics. Ready once the caches are whole and the certificate is loaded. On SIGTERM it answers on for
a moment, as the Service still sends to it, ends every held poll so that leads move to another
replica, and leaves.
"""

import asyncio
import ipaddress
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

from tidegate_contract import __version__, keys
from tidegate_contract.errors import Reject
from tidegate_operator.gate.admission import AdmissionEndpoints
from tidegate_operator.gate.clocks import Clocks
from tidegate_operator.gate.metrics import Metrics
from tidegate_operator.gate.observe import Release
from tidegate_operator.gate.records import PolicyRecord, slim_node, slim_pod, slim_policy
from tidegate_operator.gate.reports import ReportEndpoint
from tidegate_operator.gate.sidecar import GateAddress
from tidegate_operator.gate.tls import Identity, watch
from tidegate_operator.gate.tokens import TokenReviewer
from tidegate_operator.gate.world import World, read_run
from tidegate_operator.kube.client import Client
from tidegate_operator.kube.events import Recorder
from tidegate_operator.kube.kinds import NODES, PODS, POLICIES, RUNS, SERVICES
from tidegate_operator.kube.watch import Reflector, Selection
from tidegate_operator.settings import Settings

HEALTH_PORT = 8080
SERVICE_PORT = 443
MAX_REVIEW = 4 << 20
"""An object of the API is at most 1.5 MiB; a review has it twice at most."""
LINGER_SECONDS = 5.0
"""Endpoints of a Service lag behind a pod's end by about this much."""
CLOSE_SECONDS = 5.0

logger = logging.getLogger(__name__)


def main(settings: Settings) -> None:
    """Runs the gate until SIGTERM or SIGINT.

    Raises:
        Reject: there is no API server to talk to.
    """
    asyncio.run(serve(settings))


async def serve(settings: Settings) -> None:
    """Runs the gate in this event loop until SIGTERM or SIGINT.

    Raises:
        Reject: there is no API server to talk to.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with await Client.connect() as client:
        await Gate(settings, client).run(stop)


class Gate:
    """One replica."""

    def __init__(self, settings: Settings, client: Client, health_port: int = HEALTH_PORT) -> None:
        """Wires what needs no I/O.

        Args:
            settings: of the installation.
            client: of the API server; entered.
            health_port: of probes and metrics.
        """
        self._settings = settings
        self._health_port = health_port
        self._client = client
        self._is_ready = False
        self._metrics = Metrics()
        self._identity = Identity()
        self._world = World()
        self._reports = ReportEndpoint(self._world, TokenReviewer(client), self._metrics)
        self._reflectors = build_reflectors(client, self._world)

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set."""
        async with AsyncExitStack() as stack:
            health = build_health_app(lambda: self._is_ready, self._metrics)
            await _listen(stack, health, self._health_port)
            background = await stack.enter_async_context(_Background())
            background.start(
                watch(
                    self._client,
                    self._identity,
                    self._settings.namespace,
                    self._settings.gate.secret,
                )
            )
            for reflector in self._reflectors:
                background.start(reflector.run())
            serving = background.start(self._serve(stack, background))
            await background.until(stop)
            serving.cancel()
            await self._leave()

    async def _serve(self, stack: AsyncExitStack, background: "_Background") -> None:
        for reflector in self._reflectors:
            await reflector.wait_synced()
        await self._identity.wait_loaded()
        address = await self._address()
        release = Release(version=__version__, gate=address)
        admission = AdmissionEndpoints(self._world, self._settings, release, self._metrics)
        recorder = Recorder(
            self._client,
            controller=f"{keys.GROUP}/gate",
            instance=os.environ.get("HOSTNAME", "gate"),
        )
        clocks = Clocks(self._client, self._world, self._settings.drain, recorder, self._metrics)
        background.start(clocks.run())
        app = build_app(admission, self._reports)
        await _listen(stack, app, self._settings.gate.port, self._identity)
        self._is_ready = True
        logger.info("gate serves", extra={"url": address.url})

    async def _address(self) -> GateAddress:
        names = self._settings
        service = await self._client.get(SERVICES.path(names.namespace, names.gate.service))
        return build_address(
            service["spec"]["clusterIP"], names.gate.service, names.namespace, self._identity
        )

    async def _leave(self) -> None:
        was_ready, self._is_ready = self._is_ready, False
        logger.info("gate stops")
        self._reports.stop()
        if was_ready:
            await asyncio.sleep(LINGER_SECONDS)


def build_address(ip: str, service: str, namespace: str, identity: Identity) -> GateAddress:
    """Where sidecars find the gate's Service.

    Raises:
        Reject: the Service has no address of its own.
    """
    try:
        version = ipaddress.ip_address(ip).version
    except ValueError as error:
        raise Reject(f"Service {namespace}/{service} has no cluster IP, it has {ip!r}") from error
    host = f"[{ip}]" if version == 6 else ip
    return GateAddress(
        url=f"https://{host}:{SERVICE_PORT}",
        server_name=f"{service}.{namespace}.svc",
        authority=identity.authority,
    )


def build_reflectors(client: Client, world: World) -> tuple[Reflector[Any], ...]:
    """The watches that keep a world current."""
    opted_in = Selection(labels=keys.POLICY_LABEL)
    return (
        Reflector(client, POLICIES, slim=_read_policy, on_change=world.on_policy),
        Reflector(client, RUNS, slim=read_run, on_change=world.on_run),
        Reflector(client, NODES, slim=slim_node, on_change=world.on_node),
        Reflector(client, PODS, slim=slim_pod, on_change=world.on_pod, selection=opted_in),
    )


def build_app(admission: AdmissionEndpoints, reports: ReportEndpoint) -> web.Application:
    """The application behind TLS."""
    app = web.Application(client_max_size=MAX_REVIEW)
    app.router.add_post(keys.INJECT_PATH, admission.handle_inject)
    app.router.add_post(keys.EVICT_PATH, admission.handle_evict)
    app.router.add_post(keys.REPORT_PATH, reports.handle)
    return app


def build_health_app(is_ready: Callable[[], bool], metrics: Metrics) -> web.Application:
    """Probes and metrics, in the clear."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def readyz(_: web.Request) -> web.Response:
        if is_ready():
            return web.Response(text="ok")
        return web.Response(text="caches or certificate are not there yet", status=503)

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain"})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", exposition)
    return app


def _read_policy(raw: dict[str, Any]) -> PolicyRecord | None:
    try:
        return slim_policy(raw)
    except Reject as error:
        logger.warning("policy cannot be read", extra={"error": str(error)})
        return None


async def _listen(
    stack: AsyncExitStack, app: web.Application, port: int, identity: Identity | None = None
) -> None:
    # A sidecar cuts its poll short when it has news: the abandoned one must not be held on.
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=CLOSE_SECONDS, handler_cancellation=True
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    context = identity.context if identity is not None else None
    await web.TCPSite(runner, port=port, ssl_context=context).start()


class _Background:
    """Tasks that must not end before the process does: one that does takes the process with it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "_Background":
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    async def until(self, stop: asyncio.Event) -> None:
        """Waits for `stop`; raises what ended a task before."""
        waiting: Awaitable[Any] = stop.wait()
        stopped = asyncio.ensure_future(waiting)
        try:
            while not stopped.done():
                await asyncio.wait({stopped, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in self._tasks if task.done()]:
                    self._tasks.discard(task)
                    task.result()
        finally:
            stopped.cancel()
