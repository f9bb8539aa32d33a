import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tidegate_contract import keys
from tidegate_sidecar.agent_settings import ApiServer
from tidegate_sidecar.pods import PodWatch

Build = Callable[..., Any]


@dataclass(slots=True)
class FakeApi:
    """An API server of pods only.

    Attributes:
        api: how to reach it.
        pods: what a list gives.
        events: lines that the open watch sends; None ends it.
        asked: query of each request.
        status: of its answers.
    """

    api: ApiServer
    pods: list[dict[str, Any]] = field(default_factory=list)
    events: "SimpleQueue[dict[str, Any] | None]" = field(default_factory=SimpleQueue)
    asked: list[dict[str, str]] = field(default_factory=list)
    status: int = 200


def a_pod(uid: str, phase: str = "Running") -> dict[str, Any]:
    return {
        "metadata": {
            "name": uid,
            "namespace": "team",
            "uid": uid,
            "resourceVersion": "7",
            "labels": {keys.RUN_LABEL: "bytelm"},
        },
        "spec": {
            "nodeName": "node-1",
            "initContainers": [
                {
                    "name": keys.SIDECAR_CONTAINER,
                    "env": [{"name": keys.ENV_REMOTE, "value": "/tidegate/remote/team/bytelm"}],
                }
            ],
            "volumes": [{"name": keys.LOCAL_VOLUME, "hostPath": {"path": "/nvme/team/bytelm"}}],
        },
        "status": {"phase": phase},
    }


@pytest.fixture
def fake(tmp_path: Path, a_certificate: Build) -> Iterator[FakeApi]:
    """A fake API server on loopback, with TLS and a token."""
    ca, chain = a_certificate(tmp_path, "kubernetes", "127.0.0.1")
    (tmp_path / "ca.crt").write_text(ca)
    (tmp_path / "token").write_text("secret\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    api = ApiServer(
        host="127.0.0.1",
        port=server.server_address[1],
        ca_file=tmp_path / "ca.crt",
        token_file=tmp_path / "token",
    )
    found = FakeApi(api=api)
    server.RequestHandlerClass = a_handler(found)
    server.daemon_threads = True
    server.block_on_close = False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield found
    found.status = 500
    found.events.put(None)
    server.shutdown()
    server.server_close()


def a_handler(fake: FakeApi) -> type[BaseHTTPRequestHandler]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Authorization"] == "Bearer secret"
            query = {k: v[0] for k, v in parse_qs(urlsplit(self.path).query).items()}
            fake.asked.append(query)
            self.send_response(fake.status)
            self.end_headers()
            if "watch" not in query:
                answer = {"metadata": {"resourceVersion": "5"}, "items": fake.pods}
                self.wfile.write(json.dumps(answer).encode())
                return
            while (event := fake.events.get()) is not None:
                self.wfile.write(json.dumps(event).encode() + b"\n")

        def log_message(self, *_: object) -> None:
            """Quiet."""

    return Answer


@pytest.fixture
def a_watch(fake: FakeApi) -> Iterator[Callable[[], PodWatch]]:
    """Makes watches that end with the test; the test starts them."""
    made = []

    def build() -> PodWatch:
        made.append(PodWatch(fake.api, "node-1", lambda: None))
        return made[-1]

    yield build
    for watch in made:
        watch.close()


@pytest.fixture
def watch(a_watch: Callable[[], PodWatch]) -> PodWatch:
    """A watch that was started."""
    found = a_watch()
    found.start()
    return found


def uids(watch: PodWatch) -> set[str] | None:
    pods = watch.pods()
    return None if pods is None else {pod.uid for pod in pods if pod.is_live}


def event(kind: str, pod: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "object": pod}


def test_watch_lists_and_then_follows(fake: FakeApi, a_watch: Build, wait_for: Build) -> None:
    fake.pods = [a_pod("a")]
    watch = a_watch()
    assert watch.pods() is None
    watch.start()
    wait_for(lambda: uids(watch) == {"a"})
    fake.events.put(event("ADDED", a_pod("b")))
    wait_for(lambda: uids(watch) == {"a", "b"})
    fake.events.put(event("MODIFIED", a_pod("b", phase="Succeeded")))
    wait_for(lambda: uids(watch) == {"a"})
    fake.events.put(event("DELETED", a_pod("a")))
    wait_for(lambda: uids(watch) == set())
    assert fake.asked[0] == {
        "fieldSelector": "spec.nodeName=node-1",
        "labelSelector": keys.RUN_LABEL,
    }
    assert fake.asked[1]["resourceVersion"] == "5"


def test_watch_that_ended_goes_on_where_it_was(
    fake: FakeApi, watch: PodWatch, wait_for: Build
) -> None:
    fake.events.put(event("ADDED", a_pod("b")))
    wait_for(lambda: uids(watch) == {"b"})
    fake.events.put(None)
    wait_for(lambda: len(fake.asked) == 3)
    assert fake.asked[2]["resourceVersion"] == "7"


def test_watch_that_is_too_old_lists_again(fake: FakeApi, watch: PodWatch, wait_for: Build) -> None:
    fake.events.put(event("ADDED", a_pod("b")))
    wait_for(lambda: uids(watch) == {"b"})
    fake.pods = [a_pod("c")]
    fake.events.put({"type": "ERROR", "object": {"code": 410}})
    wait_for(lambda: uids(watch) == {"c"})


def test_watch_keeps_the_last_picture_while_the_api_server_fails(
    fake: FakeApi, a_watch: Build, wait_for: Build, caplog: Any
) -> None:
    fake.pods = [a_pod("a")]
    watch = a_watch()
    watch.start()
    wait_for(lambda: uids(watch) == {"a"})
    fake.status = 500
    fake.events.put({"type": "ERROR", "object": {}})
    wait_for(lambda: "pods cannot be watched" in caplog.text)
    assert uids(watch) == {"a"}


def test_pod_that_is_not_understood_is_left_out_and_told(
    fake: FakeApi, watch: PodWatch, wait_for: Build, caplog: Any
) -> None:
    strange = a_pod("strange")
    strange["metadata"]["labels"][keys.RUN_LABEL] = "../etc"
    fake.events.put(event("ADDED", strange))
    fake.events.put(event("ADDED", a_pod("b")))
    wait_for(lambda: uids(watch) == {"b"})
    assert "a pod is not understood" in caplog.text


def test_watch_that_is_closed_ends_at_once(fake: FakeApi, watch: PodWatch, wait_for: Build) -> None:
    wait_for(lambda: len(fake.asked) == 2)
    watch.close()
    wait_for(lambda: not watch.is_running)
