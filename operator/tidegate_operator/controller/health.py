"""The controller's own plain HTTP port: /healthz, /readyz, /metrics.

/healthz fails when the watches have told nothing for minutes or a key is at work for minutes: then
this process is of no use, whatever the reason, and a new one is the remedy. A process that waits
for the Lease is healthy and ready.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tidegate_operator.controller.observe import World
from tidegate_operator.controller.queue import Queue
from tidegate_operator.kube.watch import Reflector

PORT = 8080
SILENT_AFTER = timedelta(minutes=5)
"""Bookmarks come about once a minute."""
STUCK_AFTER = timedelta(minutes=5)


class Metrics:
    """What the controller counts.

    Attributes:
        reconciles: passes, by subject and result (`ok`, `retry`, `reject`, `bug`).
        seconds: duration of a pass, by subject.
        writes: API writes, by what was written.
    """

    def __init__(self, queue: Queue, world: World) -> None:
        """Registers everything in a registry of its own."""
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "tidegate_controller_reconciles_total",
            "Passes over one key.",
            ["subject", "result"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "tidegate_controller_reconcile_seconds",
            "Duration of a pass over one key.",
            ["subject"],
            registry=self.registry,
        )
        self.writes = Counter(
            "tidegate_controller_writes_total",
            "Writes to the API server.",
            ["what"],
            registry=self.registry,
        )
        depth = Gauge(
            "tidegate_controller_queue_depth",
            "Keys that are due and not yet taken.",
            registry=self.registry,
        )
        depth.set_function(lambda: queue.depth)
        age = Gauge(
            "tidegate_controller_watch_age_seconds",
            "Time since a watch told something, bookmarks included.",
            ["kind"],
            registry=self.registry,
        )
        for watch in (world.pods, world.nodes, world.budgets):
            age.labels(watch.kind.kind).set_function(_age_of(watch))


def _age_of(watch: Reflector[Any]) -> Callable[[], float]:
    return lambda: time.monotonic() - watch.last_seen


class Health:
    """Whether this process is of use.

    Attributes:
        is_active: whether it holds the Lease.
    """

    def __init__(self, queue: Queue, world: World) -> None:
        """Judges by the queue and by the watches."""
        self.is_active = False
        self._queue = queue
        self._world = world

    def problem(self, now: float) -> str:
        """Why the process should be replaced; empty when it should not.

        Args:
            now: `time.monotonic()`.
        """
        if not self.is_active:
            return ""
        for watch in (self._world.pods, self._world.nodes, self._world.budgets):
            silent = now - watch.last_seen
            if silent > SILENT_AFTER.total_seconds():
                return f"the watch of {watch.kind.kind} was silent for {silent:.0f} s"
        if self._queue.longest_work > STUCK_AFTER.total_seconds():
            return f"one key is at work for {self._queue.longest_work:.0f} s"
        return ""

    @property
    def is_ready(self) -> bool:
        """Whether it has seen the cluster, or waits for its turn."""
        return not self.is_active or self._world.is_synced


@asynccontextmanager
async def serve_health(health: Health, metrics: Metrics, port: int = PORT) -> AsyncIterator[None]:
    """Serves on all addresses until the context ends."""

    async def healthz(_: web.Request) -> web.Response:
        problem = health.problem(time.monotonic())
        return web.Response(status=503 if problem else 200, text=problem or "ok")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(
            status=200 if health.is_ready else 503, text="ok" if health.is_ready else "not synced"
        )

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(metrics.registry),
            headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4},
        )

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", exposition)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()
