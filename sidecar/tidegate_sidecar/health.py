"""What others can see of a sidecar or agent: `/healthz`, `/metrics`, log lines. I/O.

`/healthz` says whether the loop beats, never whether the remote tier is well: a restart would not
heal that, and it would forget nothing, but cost the copy that is under way.
"""

import json
import logging
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from tidegate_contract.wire import Report
from tidegate_sidecar.faults import Reason

logger = logging.getLogger(__name__)

SILENT_SECONDS = 30.0
"""A loop that has not beaten for so long is stuck in a defect of ours."""
_BUCKETS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """The figures of one flusher, in a registry of their own."""

    def __init__(self) -> None:
        """Registers all figures."""
        self.registry = CollectorRegistry()
        self.backlog_bytes = self._gauge("backlog_bytes", "Sealed here and not on the remote tier")
        self.backlog_steps = self._gauge("backlog_steps", "Sealed here and not durable")
        self.since_durable = self._gauge(
            "seconds_since_durable", "Age of the newest durable step, NaN before the first"
        )
        self.leaked = self._gauge(
            "leaked_children", "Copying processes that were killed and still exist"
        )
        self.holds_lock = self._gauge("flusher", "1 while this process is the node's flusher")
        self.local_used = self._gauge("local_used_ratio", "Fill of the local tier's file system")
        self.remote_ok = self._gauge("remote_healthy", "1 while the remote tier takes data")
        self.flush_seconds = Histogram(
            "tidegate_flush_seconds",
            "Time to copy this node's files of one step",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.flushed = self._counter("flushed_bytes", "Bytes copied to the remote tier")
        self.commits = self._counter("commits_seen", "Steps that became durable")
        self.verify_failures = self._counter(
            "verify_failures", "Local files whose bytes did not match their seal"
        )
        self.remote_failures = self._counter("remote_failures", "Failed tasks on the remote tier")
        self.since_durable.set(float("nan"))

    def show(self, report: Report, now: datetime) -> None:
        """Shows what a report says."""
        self.backlog_bytes.set(report.backlog.size_bytes)
        self.backlog_steps.set(report.backlog.steps)
        self.remote_ok.set(report.remote_reason == Reason.OK)
        if report.durable is not None:
            self.since_durable.set((now - report.durable.committed_at).total_seconds())

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"tidegate_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"tidegate_{name}", text, registry=self.registry)


@dataclass(slots=True)
class Health:
    """What the loop last said of itself; written by the loop, read by the server's threads.

    Attributes:
        metrics: the figures.
        words: shown as JSON by `/healthz`.
    """

    metrics: Metrics = field(default_factory=Metrics)
    words: dict[str, Any] = field(default_factory=dict)
    _beat: float = field(default_factory=time.monotonic)

    def beat(self, **words: Any) -> None:
        """The loop is alive and says this."""
        self.words = words
        self._beat = time.monotonic()

    @property
    def is_alive(self) -> bool:
        """The loop has beaten lately."""
        return time.monotonic() - self._beat < SILENT_SECONDS


def serve(health: Health, port: int) -> ThreadingHTTPServer | None:
    """Serves `/healthz` and `/metrics` from a thread.

    Args:
        health: what to show.
        port: 0 serves nothing; a taken port is logged and left alone, as pods on the host network
            share ports and nothing depends on this one.
    """
    if port == 0:
        return None
    try:
        server = ThreadingHTTPServer(("", port), _handler(health))
    except OSError as error:
        logger.warning("no metrics are served", extra={"port": port, "error": str(error)})
        return None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server


def _handler(health: Health) -> type[BaseHTTPRequestHandler]:
    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/healthz":
                status = 200 if health.is_alive else 503
                self._answer(status, "application/json", json.dumps(health.words).encode())
            elif self.path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(health.metrics.registry))
            else:
                self._answer(404, "text/plain", b"/healthz or /metrics\n")

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Probes are not news."""

    return Pages


class _Line(logging.Formatter):
    _own = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        fields |= {k: v for k, v in record.__dict__.items() if k not in self._own}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def set_up_logging() -> None:
    """One JSON object a line on stderr: a constant message and its fields."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
