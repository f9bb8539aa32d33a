"""Events for people, by `events.k8s.io`: repeated ones become a series, a flood is cut off.

Called by controller and gate when a decision *changes*. A failed event is logged and forgotten; it
never fails the work it tells about.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from tidegate_operator.kube.client import Client
from tidegate_operator.kube.errors import ApiError, NotFound
from tidegate_operator.kube.kinds import EVENTS, Kind
from tidegate_operator.kube.times import format_micro_time

SERIES_WINDOW = timedelta(minutes=10)
"""The same event within this time of its last repetition adds to its series."""
REFILL = timedelta(minutes=1)
BURST = 10
"""Events about one object at once; one more for each `REFILL`."""
MOST_REMEMBERED = 4096
MAX_NOTE = 1024

logger = logging.getLogger(__name__)


class EventType(StrEnum):
    """The two types that the API knows."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something to tell about one object.

    Attributes:
        type: Normal or Warning.
        reason: why, one CamelCase word.
        action: what was done about it, one CamelCase word.
        note: one sentence.
    """

    type: EventType = EventType.NORMAL
    reason: str
    action: str
    note: str


@dataclass(slots=True, kw_only=True)
class _Series:
    name: str
    count: int
    last: datetime


@dataclass(slots=True, kw_only=True)
class _Bucket:
    tokens: float
    at: datetime


class Recorder:
    """Writes events as one reporting controller; one event loop."""

    def __init__(
        self,
        client: Client,
        *,
        controller: str,
        instance: str,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Remembers nothing yet.

        Args:
            client: of the API server.
            controller: name of the reporting controller, as in `tidegate.io/gate`.
            instance: this process, as in the pod's name.
            clock: aware UTC now.
        """
        self._client = client
        self._controller = controller
        self._instance = instance
        self._clock = clock
        self._series: dict[tuple[str, ...], _Series] = {}
        self._buckets: dict[str, _Bucket] = {}

    async def record(self, kind: Kind, regarding: Mapping[str, Any], event: Event) -> None:
        """Tells about an object; never raises for what the API server answers.

        Args:
            kind: of the object.
            regarding: the object as read; gives its name, namespace and uid.
            event: what to tell.
        """
        now, metadata = self._clock(), regarding["metadata"]
        uid = metadata.get("uid", "")
        identity = (uid, event.type, event.reason, event.action, event.note)
        if not self._is_allowed(uid, now):
            return
        self._forget_old(now)
        try:
            series = self._series.get(identity)
            if series is None or not await self._repeat(metadata, series, now):
                name = await self._create(kind, metadata, event, now)
                self._series[identity] = _Series(name=name, count=1, last=now)
        except ApiError as error:
            logger.warning("event not written", extra={"reason": event.reason, "error": str(error)})

    async def _repeat(self, metadata: Mapping[str, Any], series: _Series, now: datetime) -> bool:
        series.count, series.last = series.count + 1, now
        body = {"series": {"count": series.count, "lastObservedTime": format_micro_time(now)}}
        try:
            await self._client.patch(EVENTS.path(_namespace(metadata), series.name), body)
        except NotFound:
            return False
        return True

    async def _create(
        self, kind: Kind, metadata: Mapping[str, Any], event: Event, now: datetime
    ) -> str:
        namespace = _namespace(metadata)
        seed = f"{metadata.get('uid')}/{event}/{now.timestamp()}/{self._instance}"
        name = f"{metadata['name'][:200]}.{hashlib.sha256(seed.encode()).hexdigest()[:16]}"
        reference = {"apiVersion": kind.api_version, "kind": kind.kind, "name": metadata["name"]}
        for field in ("namespace", "uid"):
            if metadata.get(field):
                reference[field] = metadata[field]
        body = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": format_micro_time(now),
            "type": event.type,
            "reason": event.reason,
            "action": event.action,
            "note": event.note[:MAX_NOTE],
            "regarding": reference,
            "reportingController": self._controller,
            "reportingInstance": self._instance[:128],
        }
        await self._client.create(EVENTS.path(namespace), body)
        return name

    def _is_allowed(self, uid: str, now: datetime) -> bool:
        bucket = self._buckets.setdefault(uid, _Bucket(tokens=BURST, at=now))
        bucket.tokens = min(BURST, bucket.tokens + (now - bucket.at) / REFILL)
        bucket.at = now
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True

    def _forget_old(self, now: datetime) -> None:
        oldest = now - SERIES_WINDOW
        self._series = {key: one for key, one in self._series.items() if one.last > oldest}
        if len(self._buckets) > MOST_REMEMBERED:
            full = now - REFILL * BURST
            self._buckets = {uid: one for uid, one in self._buckets.items() if one.at > full}


def _namespace(metadata: Mapping[str, Any]) -> str:
    # Events about objects without a namespace live in `default`, where kubectl looks for them.
    return metadata.get("namespace") or "default"
