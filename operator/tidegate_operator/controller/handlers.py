"""Every kopf handler: startup, cleanup, login, and two watches of our own kinds that only enqueue.

No handler here writes to an object, keeps state or needs a finalizer. Pods, nodes and budgets are
watched by `controller.observe`: the framework copies each object at each event and misses deletions
across a relist.
"""

import asyncio
import os
import platform
from collections.abc import Callable, Coroutine
from typing import Any, cast

import kopf

from tidegate_contract import keys
from tidegate_operator.controller.queue import Item, Queue, Subject
from tidegate_operator.kube.client import PAGE_SIZE

Work = Callable[[], Coroutine[Any, Any, None]]


class Background:
    """The controller's own tasks beside the framework's, ended before its cleanup is over.

    Attributes:
        stop: set when they ended by themselves; the framework stops then.
        error: what ended them; None when nothing did.
    """

    def __init__(self, work: Work) -> None:
        """Starts nothing yet.

        Args:
            work: runs until cancelled; whatever else ends it ends the process.
        """
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self.stop = asyncio.Event()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begins the work."""
        self._task = asyncio.create_task(self._run(), name="controller")

    async def end(self) -> None:
        """Cancels the work and waits until it is over."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._work()
        except Exception as error:  # noqa: BLE001 - kept for `operate`, which raises it
            self.error = error
        finally:
            self.stop.set()


def build_registry(queue: Queue, background: Background) -> kopf.OperatorRegistry:
    """All handlers of the controller.

    Args:
        queue: of keys to look at.
        background: the controller's own tasks.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        background.start()

    @kopf.on.cleanup(registry=registry)
    async def clean_up(**_: Any) -> None:
        await background.end()

    @kopf.on.login(registry=registry)
    def log_in(**arguments: Any) -> kopf.ConnectionInfo | None:
        if os.environ.get("KUBECONFIG"):
            return kopf.login_via_client(**arguments)
        return kopf.login_with_service_account(**arguments)

    @kopf.on.event(keys.GROUP, keys.VERSION, "checkpointpolicies", registry=registry)
    async def policy_changed(namespace: str | None, name: str, **_: Any) -> None:
        queue.add(Item(Subject.POLICY, namespace or "", name))

    @kopf.on.event(keys.GROUP, keys.VERSION, "checkpointruns", registry=registry)
    async def run_changed(namespace: str | None, name: str, **_: Any) -> None:
        queue.add(Item(Subject.RUN, namespace or "", name))

    return registry


def build_framework_settings() -> kopf.OperatorSettings:
    """The framework's settings; what is not named here is as it comes."""
    settings = kopf.OperatorSettings()
    # Kinds that are installed later must be served too.
    settings.scanning.disabled = False
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.watching.chunk_size = PAGE_SIZE
    settings.watching.server_timeout = 300
    settings.watching.connect_timeout = 5
    settings.networking.request_timeout = 30
    settings.process.ultimate_exiting_timeout = 20
    return settings


async def operate(queue: Queue, work: Work) -> None:
    """Runs the framework and the controller's own tasks until a signal, or until one of them ends.

    Args:
        queue: of keys to look at.
        work: the controller's own tasks.

    Raises:
        Exception: whatever ended `work` or the framework.
    """
    background = Background(work)
    await kopf.operator(
        registry=build_registry(queue, background),
        settings=build_framework_settings(),
        # By itself the framework looks up the user's name, and a container's uid has none.
        identity=cast("Any", platform.node()),
        standalone=True,
        clusterwide=True,
        stop_flag=background.stop,
    )
    if background.error is not None:
        raise background.error
