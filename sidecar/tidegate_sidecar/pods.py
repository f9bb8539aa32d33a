"""The pods of this node that belong to runs, watched by plain HTTPS. I/O in its own thread.

`parse_pod` is pure. The watch lists, follows, and lists again after every doubt; its newest picture
is whole or absent, never half of one.
"""

import http.client
import json
import logging
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlencode

from tidegate_contract import keys
from tidegate_contract.errors import Reject
from tidegate_contract.layout import check_run_name
from tidegate_contract.wire import Policy
from tidegate_sidecar.agent_settings import ApiServer
from tidegate_sidecar.settings import parse_policy

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 60
_TIMEOUT_SECONDS = 75.0
_MAX_BACKOFF_SECONDS = 15.0
_CLOSE_SECONDS = 2.0
_TERMINAL = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What the agent needs of a pod.

    Attributes:
        uid: of the pod.
        run: `namespace/name`.
        is_live: bound and not over.
        local_path: host path of its folder on a local tier.
        user, group: of the trainer; 0 when unset.
        remote_host_path: host path of its remote tier; None for a claim.
        remote_path: the run's folder below the remote tier's root.
        policy: at admission.
    """

    uid: str
    run: str
    is_live: bool
    local_path: str
    user: int
    group: int
    remote_host_path: str | None
    remote_path: str
    policy: Policy


def parse_pod(pod: Mapping[str, Any]) -> Pod | None:
    """The pod, if it was injected with a folder on a local tier of the node.

    Raises:
        Reject: its label, environment or volumes say what the injector never says.
    """
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    volumes = {volume.get("name"): volume for volume in spec.get("volumes") or ()}
    local = (volumes.get(keys.LOCAL_VOLUME) or {}).get("hostPath")
    run = (metadata.get("labels") or {}).get(keys.RUN_LABEL)
    if local is None or not run or not spec.get("nodeName"):
        return None
    full = check_run_name(f"{metadata['namespace']}/{run}")
    env = _sidecar_env(spec)
    user, group = _identity(spec)
    remote = (volumes.get(keys.REMOTE_VOLUME) or {}).get("hostPath") or {}
    return Pod(
        uid=metadata["uid"],
        run=full,
        is_live=(pod.get("status") or {}).get("phase") not in _TERMINAL,
        local_path=str(local.get("path", "")),
        user=user,
        group=group,
        remote_host_path=remote.get("path"),
        remote_path=_remote_path(env.get(keys.ENV_REMOTE, ""), full),
        policy=parse_policy(env),
    )


def _sidecar_env(spec: Mapping[str, Any]) -> dict[str, str]:
    for container in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
        if container.get("name") == keys.SIDECAR_CONTAINER:
            return {
                item["name"]: item["value"]
                for item in container.get("env") or ()
                if isinstance(item.get("value"), str)
            }
    return {}


def _identity(spec: Mapping[str, Any]) -> tuple[int, int]:
    trainer: Mapping[str, Any] = next(
        (
            container
            for container in spec.get("containers") or ()
            if any(
                mount.get("name") == keys.LOCAL_VOLUME
                for mount in container.get("volumeMounts") or ()
            )
        ),
        {},
    )
    pod_context = spec.get("securityContext") or {}
    context = {**pod_context, **(trainer.get("securityContext") or {})}
    return int(context.get("runAsUser") or 0), int(context.get("runAsGroup") or 0)


def _remote_path(text: str, run: str) -> str:
    path = PurePosixPath(text)
    root = PurePosixPath(keys.REMOTE_MOUNT)
    if ".." in path.parts or not path.is_relative_to(root) or not str(path).endswith(f"/{run}"):
        raise Reject(f"{keys.ENV_REMOTE} is {text[:200]!r}: allowed is {root}/[PATH/]{run}")
    return str(path.relative_to(root))


class PodWatch:
    """Keeps the newest picture of this node's pods."""

    def __init__(self, api: ApiServer, node: str, wake: Callable[[], None]) -> None:
        """Starts nothing yet; `wake` is called from the watch's thread when a pod changed."""
        self._api = api
        self._query = {
            "fieldSelector": f"spec.nodeName={node}",
            "labelSelector": keys.RUN_LABEL,
        }
        self._wake = wake
        self._lock = threading.Lock()
        self._pods: dict[str, Pod] | None = None
        self._failure = ""
        self._closing = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="pods", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread, an open watch included; waits for it for a moment only."""
        self._closing.set()
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):
                    # The plain method: that of a TLS socket would pull its state from under the
                    # thread that reads.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        self._thread.join(_CLOSE_SECONDS)

    def pods(self) -> tuple[Pod, ...] | None:
        """All pods of runs on this node; None until they were listed once."""
        with self._lock:
            return None if self._pods is None else tuple(self._pods.values())

    def _run(self) -> None:
        failures = 0
        jitter = random.Random()
        while not self._closing.is_set():
            try:
                version = self._list()
                failures = 0
                self._tell_failure("")
                while version and not self._closing.is_set():
                    version = self._follow(version)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                if self._closing.is_set():
                    return
                failures += 1
                self._tell_failure(str(error) or type(error).__name__)
            if failures:
                seconds = min(2.0**failures / 2, _MAX_BACKOFF_SECONDS)
                self._closing.wait(seconds * (0.5 + jitter.random()))

    def _list(self) -> str:
        with self._get(self._query) as response:
            answer = json.loads(response.read())
        pods = {}
        for item in answer.get("items") or ():
            pod = _parse(item)
            if pod is not None:
                pods[pod.uid] = pod
        with self._lock:
            self._pods = pods
        self._wake()
        return str(answer["metadata"]["resourceVersion"])

    def _follow(self, version: str) -> str:
        """Takes events until the API server ends the watch.

        Returns:
            The version to go on from; empty to list again.
        """
        query = self._query | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
            "resourceVersion": version,
        }
        with self._get(query) as response:
            while line := response.readline():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return ""
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    self._take(event["type"], event["object"])
        return version

    def _take(self, kind: str, item: Mapping[str, Any]) -> None:
        pod = None if kind == "DELETED" else _parse(item)
        with self._lock:
            if self._pods is None:
                return
            if pod is None:
                self._pods.pop(item["metadata"]["uid"], None)
            else:
                self._pods[pod.uid] = pod
        self._wake()

    @contextmanager
    def _get(self, query: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        context = ssl.create_default_context(cafile=str(self._api.ca_file))
        connection = http.client.HTTPSConnection(
            self._api.host, self._api.port, timeout=_TIMEOUT_SECONDS, context=context
        )
        try:
            connection.connect()
            with self._lock:
                self._socket = connection.sock
            if self._closing.is_set():  # `close` came while there was nothing to shut down
                raise ConnectionAbortedError("the watch is closed")
            token = self._api.token_file.read_text().strip()
            headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
            connection.request("GET", f"/api/v1/pods?{urlencode(query)}", headers=headers)
            with connection.getresponse() as response:
                if response.status != http.HTTPStatus.OK:
                    raise http.client.HTTPException(
                        f"{response.status} {response.reason} for the pods of this node"
                    )
                yield response
        finally:
            with self._lock:
                self._socket = None
            connection.close()

    def _tell_failure(self, failure: str) -> None:
        if failure != self._failure:
            self._failure = failure
            if failure:
                logger.warning("pods cannot be watched", extra={"error": failure})
            else:
                logger.info("pods are watched")


def _parse(item: Mapping[str, Any]) -> Pod | None:
    try:
        return parse_pod(item)
    except (Reject, KeyError, TypeError, ValueError) as error:
        name = (item.get("metadata") or {}).get("name")
        logger.warning("a pod is not understood", extra={"pod": name, "error": str(error)})
        return None
