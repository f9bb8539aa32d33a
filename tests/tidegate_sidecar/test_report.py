import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_contract.digest import sha256_hex
from tidegate_contract.document import decode, encode
from tidegate_contract.layout import CONTROL_DOCUMENT
from tidegate_contract.wire import (
    AnswerResult,
    Control,
    Policy,
    Reply,
    Report,
    SaveAnswer,
    SaveRequest,
    StepNote,
)
from tidegate_sidecar.decide import Facts, decide_queue
from tidegate_sidecar.report import Reporter, build_backlog, build_durable, is_news
from tidegate_sidecar.settings import Gate

Build = Callable[..., Any]
SERVER_NAME = "tidegate-gate.tidegate-system.svc"


@dataclass(slots=True)
class FakeGate:
    """What a gate does with reports: notes them, answers what is stale at once, else holds.

    Attributes:
        gate: how to reach it.
        reports: all that came, with the token of each.
        times: when each came, on the steady clock.
        policy, request: what it wants sidecars to know.
        status: of its answers.
    """

    gate: Gate
    reports: list[tuple[str, Report]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    policy: Policy = field(default_factory=Policy)
    request: SaveRequest | None = None
    status: int = 200
    changed: threading.Condition = field(default_factory=threading.Condition)

    def tell(self, **changes: Any) -> None:
        with self.changed:
            for name, value in changes.items():
                setattr(self, name, value)
            self.changed.notify_all()

    def take(self, token: str, report: Report) -> tuple[int, Reply]:
        """The status and the reply of one moment."""

        def is_stale() -> bool:
            wanted = self.request.request_id if self.request else 0
            return (
                report.known_policy_digest != sha256_hex(encode(self.policy))
                or report.known_request_id != wanted
                or self.status != 200
            )

        with self.changed:
            self.reports.append((token, report))
            self.times.append(time.monotonic())
            self.changed.notify_all()
            self.changed.wait_for(is_stale, 20)
            reply = Reply(policy=self.policy, request=self.request, poll_seconds=20.0)
            return self.status, reply

    def newest(self) -> Report:
        return self.reports[-1][1]


@pytest.fixture
def a_gate(tmp_path: Path, a_certificate: Build) -> Iterator[Callable[..., FakeGate]]:
    """Starts gates that speak TLS on loopback."""
    servers: list[tuple[ThreadingHTTPServer, FakeGate]] = []

    def build(name: str = SERVER_NAME) -> FakeGate:
        ca, chain = a_certificate(tmp_path, name)
        token = tmp_path / "token"
        token.write_text("first\n")
        server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
        fake = FakeGate(
            gate=Gate(
                url=f"https://127.0.0.1:{server.server_address[1]}",
                server_name=SERVER_NAME,
                ca=ca,
                token_file=str(token),
            )
        )
        server.RequestHandlerClass = a_handler(fake)
        server.daemon_threads = True
        server.block_on_close = False
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain)
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append((server, fake))
        return fake

    yield build
    for server, fake in servers:
        fake.tell(status=500)
        server.shutdown()
        server.server_close()


def a_handler(fake: FakeGate) -> type[BaseHTTPRequestHandler]:
    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == keys.REPORT_PATH
            body = self.rfile.read(int(self.headers["Content-Length"]))
            token = self.headers["Authorization"].removeprefix("Bearer ")
            status, answer = fake.take(token, decode(Report, body, "report"))
            reply = encode(answer)
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)
            except OSError:
                return  # the sidecar has cut the poll short

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                return

        def log_message(self, *_: object) -> None:
            """Quiet."""

    return Answer


@pytest.fixture
def a_reporter() -> Iterator[Callable[[Gate], Reporter]]:
    """Starts reporters and ends them with the test."""
    started = []

    def build(gate: Gate) -> Reporter:
        reporter = Reporter(gate, lambda: None)
        reporter.start()
        started.append(reporter)
        return reporter

    yield build
    for reporter in started:
        reporter.finish(None, 0.5)


@pytest.fixture
def a_report(a_state: Build) -> Callable[..., Report]:
    """A lead's report; keyword arguments replace its fields."""

    def build(**changes: Any) -> Report:
        fields: dict[str, Any] = {
            "namespace": "team",
            "run": "bytelm",
            "pod": "bytelm-0",
            "pod_uid": "uid-0",
            "run_id": "r",
            "state": a_state(),
            "known_policy_digest": sha256_hex(encode(Policy())),
        }
        return Report(**(fields | changes))

    return build


def test_report_reaches_the_gate_with_the_token(
    a_gate: Build, a_reporter: Build, a_report: Build, wait_for: Build
) -> None:
    fake = a_gate()
    a_reporter(fake.gate).offer(a_report())
    wait_for(lambda: fake.reports)
    assert fake.reports == [("first", a_report())]


def test_report_reads_the_token_anew(
    a_gate: Build, a_reporter: Build, a_report: Build, wait_for: Build
) -> None:
    fake = a_gate()
    reporter = a_reporter(fake.gate)
    reporter.offer(a_report())
    wait_for(lambda: fake.reports)
    Path(fake.gate.token_file).write_text("second")
    reporter.offer(a_report(remote_reason="NoSpace"))
    wait_for(lambda: [token for token, _ in fake.reports] == ["first", "second"])


def test_request_of_the_gate_arrives_while_the_poll_is_held(
    a_gate: Build, a_reporter: Build, a_report: Build, wait_for: Build
) -> None:
    fake = a_gate()
    reporter = a_reporter(fake.gate)
    reporter.offer(a_report())
    wait_for(lambda: fake.reports)
    request = SaveRequest(request_id=77, deadline=datetime.now(UTC))
    fake.tell(request=request)
    reply = wait_for(reporter.take, 2.0)
    assert reply.request == request
    assert reporter.take() is None


def test_news_cut_a_held_poll_short_and_progress_does_not(
    a_gate: Build, a_reporter: Build, a_report: Build, a_state: Build, wait_for: Build
) -> None:
    fake = a_gate()
    reporter = a_reporter(fake.gate)
    reporter.offer(a_report())
    wait_for(lambda: fake.reports)
    progress = StepNote(step=11, tokens=550, at=datetime.now(UTC))
    reporter.offer(a_report(state=a_state(progress=progress)))
    answer = SaveAnswer(request_id=7, result=AnswerResult.ACKNOWLEDGED)
    reporter.offer(a_report(state=a_state(progress=progress, answer=answer)))
    wait_for(lambda: len(fake.reports) == 2, 2.0)
    assert fake.newest().state.answer == answer


def test_reply_is_not_asked_for_again_before_it_can_have_been_applied(
    a_gate: Build, a_reporter: Build, a_report: Build, wait_for: Build
) -> None:
    fake = a_gate()
    fake.policy = Policy(remote_every=5)
    a_reporter(fake.gate).offer(a_report())
    wait_for(lambda: len(fake.times) == 2)
    assert fake.times[1] - fake.times[0] >= 0.9


@pytest.mark.parametrize("fault", ["refuses", "another name", "another authority", "not there"])
def test_gate_that_cannot_be_trusted_or_reached_gets_no_further(
    a_gate: Build, a_reporter: Build, a_report: Build, wait_for: Build, fault: str, caplog: Any
) -> None:
    fake = a_gate("someone-else.svc" if fault == "another name" else SERVER_NAME)
    gate = fake.gate
    if fault == "refuses":
        fake.status = 403
    elif fault == "another authority":
        gate = replace(gate, ca=a_gate().gate.ca)
    elif fault == "not there":
        gate = replace(gate, url="https://127.0.0.1:1")
    reporter = a_reporter(gate)
    reporter.offer(a_report())
    wait_for(lambda: "the gate cannot be reached" in caplog.text)
    assert reporter.take() is None
    if fault != "refuses":
        assert fake.reports == []


def test_reporter_recovers_once_the_gate_answers(
    a_gate: Build, a_reporter: Build, a_report: Build, wait_for: Build
) -> None:
    fake = a_gate()
    fake.status = 503
    reporter = a_reporter(fake.gate)
    reporter.offer(a_report())
    wait_for(lambda: fake.reports)
    fake.tell(status=200, policy=Policy(remote_every=3))
    assert wait_for(reporter.take).policy == Policy(remote_every=3)


def test_last_word_is_delivered_before_the_end(
    a_gate: Build, a_reporter: Build, a_report: Build, wait_for: Build
) -> None:
    fake = a_gate()
    reporter = a_reporter(fake.gate)
    reporter.offer(a_report())
    wait_for(lambda: fake.reports)
    reporter.finish(a_report(remote_reason="Quota"), 3.0)
    assert fake.newest().remote_reason == "Quota"


def test_lead_tells_its_trainer_what_the_gate_wants_and_the_gate_what_is_durable(
    a_gate: Build, a_run: Build, a_loop: Build, a_sealed_step: Build, beat_until: Build
) -> None:
    fake = a_gate()
    run = a_run()
    run.write_state(pod_uid="uid-0")
    loop = a_loop(run, gate=fake.gate, pod_uid="uid-0", pod="bytelm-0", remote_root=run.remote)
    beat_until(loop, lambda: fake.reports)
    request = SaveRequest(request_id=5, deadline=datetime(2026, 11, 29, 13, tzinfo=UTC))
    fake.tell(policy=Policy(remote_every=9), request=request)
    path = run.locals[0] / CONTROL_DOCUMENT

    def control() -> Control:
        return decode(Control, path.read_bytes(), "control")

    beat_until(loop, lambda: path.exists() and control().request == request)
    assert control().policy == Policy(remote_every=9)
    attempt = a_sealed_step(run.locals[0], 10)
    beat_until(loop, lambda: fake.newest().durable)
    report = fake.newest()
    assert report.durable.attempt == attempt
    assert (report.namespace, report.run, report.pod) == ("team", "bytelm", "bytelm-0")
    assert report.known_request_id == 5


def test_sidecar_beside_another_rank_does_not_report(
    a_gate: Build, a_run: Build, a_loop: Build, a_sealed_step: Build, beat_until: Build
) -> None:
    fake = a_gate()
    run = a_run()
    run.write_state(pod_uid="uid-0")
    loop = a_loop(run, gate=fake.gate, pod_uid="uid-1")
    a_sealed_step(run.locals[0], 10)
    beat_until(loop, run.durable)
    assert fake.reports == []
    assert not (run.locals[0] / CONTROL_DOCUMENT).exists()


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, False),
        ({"flushed_bytes": 5}, False),
        ({"remote_message": "words"}, False),
        ({"remote_reason": "Quota"}, True),
        ({"known_request_id": 3}, True),
        ({"state": None}, True),
    ],
    ids=["same", "bytes moved", "other words", "remote fails", "took a request", "no state"],
)
def test_news(changes: dict[str, Any], want: bool, a_report: Build) -> None:
    assert is_news(a_report(), a_report(**changes)) is want
    assert is_news(None, a_report())


def test_backlog_counts_what_is_sealed_and_not_durable(
    a_view: Build, a_commit: Build, a_remote: Build
) -> None:
    half = replace(a_view(30), announced=frozenset({0, 1}), sealed={0: 100})
    facts = Facts(
        policy=Policy(),
        local=(a_view(10), a_view(20), a_view(30)),
        remote=a_remote(a_commit(10), half),
    )
    backlog = build_backlog(facts, decide_queue(facts))
    assert (backlog.steps, backlog.size_bytes) == (1, 100)
    assert backlog.oldest_at == a_view(30).sealed_at


@pytest.mark.parametrize(
    ("remote", "want"),
    [("team/bytelm", "team/bytelm/"), (".", "")],
    ids=["below the tier's root", "the root itself"],
)
def test_durable_note_names_the_folder(remote: str, want: str, a_commit: Build) -> None:
    note = build_durable(a_commit(20), remote)
    assert note is not None
    assert note.path == f"{want}{a_commit(20).folder}"
    assert build_durable(None, remote) is None
