"""The lead's word to the gate: a long poll that also carries news at once. I/O in its own thread.

The gate holds each POST until it has news for us, or its poll is over. News of ours cut the poll
short: the waiting connection is shut and a new POST sent; what the gate was about to say it says
again, as it compares what we know. Nothing here can hold up the flush.
"""

import http.client
import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from tidegate_contract import keys
from tidegate_contract.digest import sha256_hex
from tidegate_contract.document import decode, encode
from tidegate_contract.errors import TidegateError
from tidegate_contract.layout import step_folder
from tidegate_contract.wire import Backlog, DurableNote, Reply, Report
from tidegate_sidecar.decide import Facts, Queued
from tidegate_sidecar.faults import Reason
from tidegate_sidecar.retention import explain_wait
from tidegate_sidecar.settings import Gate, Settings
from tidegate_sidecar.trouble import Trouble
from tidegate_sidecar.view import StepView

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_MARGIN_SECONDS = 10.0
_FIRST_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 15.0
_APPLY_SECONDS = 1.0
_PROGRESS_SECONDS = 5.0
_MAX_REPLY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """Who reports.

    Attributes:
        settings: of this process.
        run_id: UUID of the run.
        request_id: of the newest save request it has; 0 before any.
    """

    settings: Settings
    run_id: str
    request_id: int


def build_backlog(facts: Facts, queue: tuple[Queued, ...]) -> Backlog:
    """What this node sealed and is not durable; pure."""
    waiting = {item.attempt for item in queue}
    sealed_at = [
        step.sealed_at
        for step in facts.local
        if step.attempt in waiting and step.sealed_at is not None
    ]
    return Backlog(
        steps=len(queue),
        size_bytes=sum(item.missing_bytes for item in queue),
        oldest_at=min(sealed_at, default=None),
    )


def build_durable(newest: StepView | None, remote: str) -> DurableNote | None:
    """The note of the newest commit; pure.

    Args:
        newest: confirmed; None while there is none.
        remote: the run's folder, relative to the tier's root.
    """
    if newest is None or newest.commit is None:
        return None
    folder = step_folder(newest.attempt)
    return DurableNote(
        step=newest.attempt.step,
        tokens=newest.tokens,
        attempt=newest.attempt,
        committed_at=newest.commit.committed_at,
        path=folder if remote == "." else f"{remote}/{folder}",
        size_bytes=newest.commit.size_bytes,
        manifest_sha256=newest.commit.manifest_sha256,
    )


def build_report(
    who: Speaker,
    facts: Facts,
    queue: tuple[Queued, ...],
    flushed_bytes: int,
    trouble: Trouble | None,
) -> Report:
    """The lead's report; pure.

    Args:
        who: speaks.
        facts: of this beat.
        queue: decided from them.
        flushed_bytes: of the step being copied.
        trouble: the worst that fails now; None when all is well.
    """
    newest = facts.remote.newest if facts.remote else None
    namespace, _, name = who.settings.run.partition("/")
    return Report(
        namespace=namespace,
        run=name,
        pod=who.settings.pod,
        pod_uid=who.settings.pod_uid,
        run_id=who.run_id,
        state=facts.states.get(0),
        durable=build_durable(newest, who.settings.remote),
        backlog=build_backlog(facts, queue),
        flushed_bytes=flushed_bytes,
        remote_reason=trouble.reason if trouble else Reason.OK,
        remote_message=trouble.message if trouble else explain_wait(facts.remote),
        known_request_id=who.request_id,
        known_policy_digest=sha256_hex(encode(facts.policy)),
    )


def is_news(old: Report | None, new: Report) -> bool:
    """Whether `new` cannot wait for the next poll; mere progress can. Pure."""
    if old is None:
        return True
    if old.state is None or new.state is None:
        return old.state is not new.state
    return (
        _without_progress(old) != _without_progress(new)
        or old.state.phase is not new.state.phase
        or old.state.sealed != new.state.sealed
        or old.state.answer != new.state.answer
        or old.state.restore != new.state.restore
        or old.state.saves.failed != new.state.saves.failed
    )


def _without_progress(report: Report) -> tuple[object, ...]:
    return (
        report.pod_uid,
        report.run_id,
        report.durable,
        report.backlog.steps,
        report.remote_reason,
        report.known_request_id,
        report.known_policy_digest,
    )


class Reporter:
    """Posts the newest report for as long as there is one; `offer` and `take` never wait."""

    def __init__(self, gate: Gate, wake: Callable[[], None]) -> None:
        """Starts nothing yet; `wake` is called from the reporter's thread when a reply came."""
        self._gate = gate
        self._wake = wake
        self._changed = threading.Condition()
        self._report: Report | None = None
        self._posted: Report | None = None
        self._posted_at = 0.0
        self._post: _Post | None = None
        self._reply: Reply | None = None
        self._is_ending = False
        self._poll_seconds = 20.0
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def offer(self, report: Report | None) -> None:
        """The newest report; None while this process is not the lead."""
        with self._changed:
            self._report = report
            if report is not None and self._post is not None and self._cannot_wait(report):
                self._post.interrupt()
            self._changed.notify_all()

    def take(self) -> Reply | None:
        """The newest reply that was not taken yet."""
        with self._changed:
            reply, self._reply = self._reply, None
            return reply

    def finish(self, report: Report | None, seconds: float) -> None:
        """Ends the thread with a last word.

        Args:
            report: None for none. It claims to know no policy, so that the gate answers at once.
            seconds: how long to wait for that.
        """
        with self._changed:
            self._is_ending = True
            self._report = replace(report, known_policy_digest="") if report else None
            if self._post is not None:
                self._post.interrupt()
            self._changed.notify_all()
        self._thread.join(seconds)

    def _cannot_wait(self, report: Report) -> bool:
        posted = self._posted
        if posted is None or is_news(posted, report):
            return True
        is_moving = posted.flushed_bytes != report.flushed_bytes
        return is_moving and time.monotonic() - self._posted_at > _PROGRESS_SECONDS

    def _run(self) -> None:
        failures = 0
        while (post := self._next()) is not None:
            try:
                reply = post.send(self._poll_seconds + _MARGIN_SECONDS)
            except (OSError, http.client.HTTPException, TidegateError) as error:
                if post.is_interrupted:
                    continue
                failures += 1
                self._tell_failure(str(error) or type(error).__name__)
                self._pause(failures)
                continue
            failures = 0
            self._tell_failure("")
            self._give(reply)

    def _next(self) -> "_Post | None":
        """Waits for a report; None once the last one is out."""
        with self._changed:
            if self._is_ending and self._post is not None and not self._post.is_interrupted:
                return None
            self._post = None
            self._changed.wait_for(lambda: self._report is not None or self._is_ending)
            if self._report is None:
                return None
            self._posted, self._posted_at = self._report, time.monotonic()
            self._post = _Post(self._gate, self._report)
            return self._post

    def _give(self, reply: Reply) -> None:
        with self._changed:
            self._reply = reply
            self._poll_seconds = reply.poll_seconds
            posted = self._posted
        self._wake()
        with self._changed:  # the next poll must know what this reply said
            self._changed.wait_for(
                lambda: self._report is not posted or self._is_ending, _APPLY_SECONDS
            )

    def _pause(self, failures: int) -> None:
        jitter = random.Random().random()
        seconds = min(_FIRST_BACKOFF_SECONDS * 2 ** min(failures - 1, 8), _MAX_BACKOFF_SECONDS)
        with self._changed:
            self._changed.wait_for(lambda: self._is_ending, seconds * (0.5 + jitter))

    def _tell_failure(self, failure: str) -> None:
        if failure != self._failure:
            self._failure = failure
            if failure:
                logger.warning("the gate cannot be reached", extra={"error": failure})
            else:
                logger.info("the gate answers")


class _Post:
    """One POST on a connection of its own; another thread may cut it short."""

    def __init__(self, gate: Gate, report: Report) -> None:
        self._gate = gate
        self._body = encode(report)
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self.is_interrupted = False

    def interrupt(self) -> None:
        """Makes `send` fail soon."""
        with self._lock:
            self.is_interrupted = True
            if self._socket is not None:
                with suppress(OSError):
                    # The class's own method: that of a TLS socket would pull its state from under
                    # the thread that reads.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def send(self, seconds: float) -> Reply:
        """Posts the report and waits for the reply.

        Raises:
            OSError, http.client.HTTPException: the gate cannot be reached or refuses.
            TidegateError: the reply is no such document.
        """
        where = urlsplit(self._gate.url)
        token = Path(self._gate.token_file).read_text().strip()
        connection = http.client.HTTPSConnection(where.hostname or "", where.port or 443)
        connection.sock = self._connect(where.hostname or "", where.port or 443)
        try:
            connection.sock.settimeout(seconds)
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", keys.REPORT_PATH, self._body, headers)
            with connection.getresponse() as response:
                data = response.read(_MAX_REPLY_BYTES)
        finally:
            with self._lock:
                self._socket = None
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(
                f"{response.status} {response.reason}: {data[:200].decode(errors='replace')}"
            )
        return decode(Reply, data, "the gate's reply")

    def _connect(self, host: str, port: int) -> ssl.SSLSocket:
        context = ssl.create_default_context(cadata=self._gate.ca)
        plain = socket.create_connection((host, port), _CONNECT_SECONDS)
        try:
            wrapped = context.wrap_socket(plain, server_hostname=self._gate.server_name)
        except BaseException:
            plain.close()
            raise
        with self._lock:
            self._socket = wrapped
            if self.is_interrupted:
                wrapped.close()
                self._socket = None
                raise ConnectionAbortedError("interrupted")
        return wrapped
