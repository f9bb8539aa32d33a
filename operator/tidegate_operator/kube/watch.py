"""List and watch of one kind: a cache of slim records that never keeps what is gone.

Owns the protocol: paged LIST, WATCH with bookmarks, resumption by resourceVersion, 410 answered by
a new LIST whose difference to the cache is told as changes, so a deletion is never missed. Decides
nothing about the objects. The operator's loops run it, one task per reflector; the callback and all
readers run in that same event loop.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Generic, TypeVar

from tidegate_operator.kube.backoff import Backoff
from tidegate_operator.kube.client import PAGE_SIZE, Client, Object
from tidegate_operator.kube.errors import ApiError, Gone, Unavailable, parse_error
from tidegate_operator.kube.kinds import Key, Kind

INACTIVITY_SECONDS = 70.0
"""The server sends a bookmark about every 60 s; more silence than this means a dead stream."""
WATCH_SECONDS = 300
"""After this the server ends a watch in good order, and it is resumed."""
RETRY = Backoff(first_seconds=0.5, longest_seconds=30.0)
SHORT_WATCH_SECONDS = 1.0
"""A stream that ends sooner and told nothing counts as a failure: it is not reopened hot."""

logger = logging.getLogger(__name__)

R = TypeVar("R")


class ChangeType(StrEnum):
    """What happened to an object since its last change."""

    ADDED = "Added"
    MODIFIED = "Modified"
    DELETED = "Deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Generic[R]):
    """One change of the cache.

    Attributes:
        type: what happened.
        key: of the object.
        old: the record before; None when added.
        new: the record now; None when deleted.
    """

    type: ChangeType
    key: Key
    old: R | None
    new: R | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which objects of a kind are watched; empty fields select all.

    Attributes:
        namespace: one namespace.
        labels: label selector.
        fields: field selector.
    """

    namespace: str = ""
    labels: str = ""
    fields: str = ""

    def params(self) -> dict[str, str]:
        """The selection as query parameters."""
        wanted = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {name: text for name, text in wanted.items() if text}


EVERYTHING = Selection()


class Reflector(Generic[R]):
    """Keeps `cache` equal to the server's objects.

    Attributes:
        kind: what is watched.
        is_synced: whether the first LIST is complete; the cache is no basis for a decision before.
        last_seen: `time.monotonic()` of the newest list page, event or bookmark.
    """

    def __init__(
        self,
        client: Client,
        kind: Kind,
        *,
        slim: Callable[[Object], R],
        on_change: Callable[[Change[R]], None],
        selection: Selection = EVERYTHING,
        inactivity_seconds: float = INACTIVITY_SECONDS,
    ) -> None:
        """Opens nothing; `run` does.

        Args:
            client: entered by the caller, which also closes it after `run` has ended.
            kind: what to watch.
            slim: the record to keep of one object; records that compare equal are no change. An
                object that makes it or `on_change` raise is logged once and counts as absent.
            on_change: called for each change, after the cache has it; must not block.
            selection: which objects.
            inactivity_seconds: silence after which a stream is reopened.
        """
        self.kind = kind
        self.is_synced = False
        self.last_seen = time.monotonic()
        self._client = client
        self._path = kind.path(selection.namespace)
        self._selection = selection
        self._slim = slim
        self._on_change = on_change
        self._inactivity_seconds = inactivity_seconds
        self._records: dict[Key, R] = {}
        self._odd: set[Key] = set()
        self._version = ""
        self._failures = 0
        self._synced = asyncio.Event()

    @property
    def cache(self) -> Mapping[Key, R]:
        """The records now; a live view, not to be kept across an await."""
        return MappingProxyType(self._records)

    async def wait_synced(self) -> None:
        """Returns once the first LIST is complete."""
        await self._synced.wait()

    async def run(self) -> None:
        """Lists and watches until cancelled; no answer of the server ends it."""
        self.last_seen = time.monotonic()
        while True:
            try:
                await self._pass()
                self._recovered()
            except ApiError as error:
                if isinstance(error, Gone):
                    self._version = ""
                await self._pause(error)

    async def _pass(self) -> None:
        if not self._version:
            await self._list()
        await self._watch()

    async def _list(self) -> None:
        params = {"limit": str(PAGE_SIZE), **self._selection.params()}
        found: set[Key] = set()
        while True:
            page = await self._client.list_page(self._path, params)
            self.last_seen = time.monotonic()
            for item in page.get("items") or []:
                found.add(self._store(item))
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                break
            params["continue"] = metadata["continue"]
        for key in (self._records.keys() | self._odd) - found:
            self._forget(key)
        self._version = metadata.get("resourceVersion", "")
        self.is_synced = True
        self._synced.set()

    async def _watch(self) -> None:
        params = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
            "resourceVersion": self._version,
            **self._selection.params(),
        }
        opened, told = time.monotonic(), False
        async with self._client.stream(self._path, params, self._inactivity_seconds) as lines:
            async for line in lines:
                self.last_seen = time.monotonic()
                self._take(line)
                told = True
                self._recovered()
        if not told and time.monotonic() - opened < SHORT_WATCH_SECONDS:
            raise Unavailable(f"WATCH {self._path}: the server ended it at once")

    def _take(self, line: bytes) -> None:
        kind, item = parse_event(self._path, line)
        match kind:
            case "ADDED" | "MODIFIED":
                self._store(item)
            case "DELETED":
                self._forget(_key(item))
        self._version = item.get("metadata", {}).get("resourceVersion") or self._version

    def _store(self, item: Object) -> Key:
        key = _key(item)
        try:
            self._keep(key, self._slim(item))
            self._odd.discard(key)
        except Exception:  # noqa: BLE001 - users write objects: an odd one must not end the watch
            self._set_aside(key)
            self._drop(key)
        return key

    def _keep(self, key: Key, new: R) -> None:
        old = self._records.get(key)
        self._records[key] = new
        if old is None:
            self._on_change(Change(type=ChangeType.ADDED, key=key, old=None, new=new))
        elif old != new:
            self._on_change(Change(type=ChangeType.MODIFIED, key=key, old=old, new=new))

    def _forget(self, key: Key) -> None:
        self._drop(key)
        self._odd.discard(key)

    def _drop(self, key: Key) -> None:
        old = self._records.pop(key, None)
        if old is None:
            return
        try:
            self._on_change(Change(type=ChangeType.DELETED, key=key, old=old, new=None))
        except Exception:  # noqa: BLE001 - as for an object that is there
            self._set_aside(key)

    def _set_aside(self, key: Key) -> None:
        if key not in self._odd:
            self._odd.add(key)
            names = {"kind": self.kind.kind, "namespace": key.namespace, "object": key.name}
            logger.error("object is odd, it counts as absent", exc_info=True, extra=names)

    def _recovered(self) -> None:
        if self._failures:
            logger.info("watch works again", extra={"kind": self.kind.kind})
        self._failures = 0

    async def _pause(self, error: ApiError) -> None:
        if not self._failures:
            logger.warning(
                "watch failed, trying again", extra={"kind": self.kind.kind, "error": str(error)}
            )
        self._failures += 1
        await asyncio.sleep(RETRY.delay(self._failures))


def parse_event(path: str, line: bytes) -> tuple[str, Object]:
    """Type and object of one line of a watch.

    Args:
        path: of the list, for the sentence.
        line: as the stream gave it.

    Raises:
        Gone: the watch began at a version that is too old.
        ApiError: the server says that it cannot go on, or the line is no event.
    """
    try:  # a connection that is cut leaves half a line at its end
        event = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"WATCH {path}: the connection broke within an event") from error
    if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
        raise Unavailable(f"WATCH {path}: the server sent something that is no event")
    item = event["object"]
    if event.get("type") == "ERROR":
        raise parse_error(f"WATCH {path}", int(item.get("code") or 0), item)
    return str(event.get("type")), item


def _key(item: Object) -> Key:
    metadata = item["metadata"]
    return Key(metadata.get("namespace", ""), metadata["name"])
