"""The command `controller`: puts the parts together and runs while this process holds the Lease."""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket

from tidegate_operator.controller.context import Context
from tidegate_operator.controller.handlers import operate
from tidegate_operator.controller.health import Health, Metrics, serve_health
from tidegate_operator.controller.observe import World
from tidegate_operator.controller.queue import Queue
from tidegate_operator.controller.reconcile import WORKERS, Reconciler
from tidegate_operator.kube.client import Client
from tidegate_operator.kube.events import Recorder
from tidegate_operator.kube.lease import Lease
from tidegate_operator.settings import Settings

logger = logging.getLogger(__name__)


def main(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT.

    Raises:
        TidegateError: the Lease was lost, or there is no API server to talk to.
    """
    asyncio.run(_main(settings))


async def _main(settings: Settings) -> None:
    async with await Client.connect() as client:
        queue = Queue()
        world = World(client, queue)
        context = Context(
            client=client,
            settings=settings,
            queue=queue,
            world=world,
            metrics=Metrics(queue, world),
            recorder=Recorder(
                client, controller="tidegate.io/controller", instance=socket.gethostname()
            ),
        )
        health = Health(queue, world)
        async with serve_health(health, context.metrics):
            # The random part tells this process from one before it in the same pod.
            holder = f"{socket.gethostname()}_{secrets.token_hex(4)}"
            lease = Lease(client, settings.namespace, settings.lease, holder)
            if not await _acquire(lease):
                return
            health.is_active = True
            await operate(queue, lambda: _work(context, lease))


async def _acquire(lease: Lease) -> bool:
    """Waits for the Lease; False when a signal came first."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    waits = [asyncio.create_task(lease.acquire()), asyncio.create_task(stop.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waits[0]
    if stop.is_set():
        await lease.release()
    return lease.is_held


async def _work(context: Context, lease: Lease) -> None:
    """The controller's own tasks: the first that fails ends all; then the Lease is given back."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(lease.hold(), name="lease")
            await _start(context, group)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    finally:
        # Only now: no task of this process writes any more.
        await lease.release()


async def _start(context: Context, group: asyncio.TaskGroup) -> None:
    world, reconciler = context.world, Reconciler(context)
    for watch in (world.pods, world.nodes, world.budgets):
        group.create_task(watch.run(), name=f"watch {watch.kind.kind}")
    await world.sync()
    logger.info("cluster seen", extra={"pods": len(world.pods.cache)})
    group.create_task(world.resync(), name="resync")
    for number in range(WORKERS):
        group.create_task(reconciler.work(), name=f"worker {number}")
