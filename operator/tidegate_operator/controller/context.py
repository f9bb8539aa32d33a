"""What every part of the controller works with, made once at start."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tidegate_operator.controller.health import Metrics
from tidegate_operator.controller.observe import World
from tidegate_operator.controller.queue import Queue
from tidegate_operator.kube.client import Client
from tidegate_operator.kube.events import Recorder
from tidegate_operator.settings import Settings


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The parts of one controller process.

    Attributes:
        client: of the API server.
        settings: of the installation.
        queue: of keys to look at.
        world: what is seen.
        metrics: what is counted.
        recorder: writes events.
        clock: aware UTC now.
    """

    client: Client
    settings: Settings
    queue: Queue
    world: World
    metrics: Metrics
    recorder: Recorder
    clock: Callable[[], datetime] = field(default=_utc_now)
