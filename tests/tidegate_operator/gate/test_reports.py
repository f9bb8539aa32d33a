"""The report endpoint in process, over real TLS.

The token's review is faked here: which pod a token belongs to only an API server can say, and that
is tested on the ground.
"""

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tidegate_contract import keys
from tidegate_contract.document import decode, encode
from tidegate_contract.errors import Reject, Retry
from tidegate_contract.layout import Attempt
from tidegate_contract.wire import DurableNote, Phase, Reply, Report, SaveRequest, StepNote
from tidegate_contract.wire import TrainerState as State
from tidegate_operator.gate.admission import AdmissionEndpoints
from tidegate_operator.gate.metrics import Metrics
from tidegate_operator.gate.observe import Release
from tidegate_operator.gate.records import slim_pod, slim_policy, slim_run
from tidegate_operator.gate.reports import MAX_BODY, ReportEndpoint
from tidegate_operator.gate.server import build_app
from tidegate_operator.gate.sidecar import GateAddress
from tidegate_operator.gate.tls import Identity
from tidegate_operator.gate.tokens import PodIdentity
from tidegate_operator.gate.world import World
from tidegate_operator.kube.kinds import Key
from tidegate_operator.kube.watch import Change, ChangeType
from tidegate_operator.settings import Settings

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
RUN = Key("team-a", "llama")
RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
STATE = State(
    run_id=RUN_ID,
    rank=0,
    world_size=1,
    pod_uid="u0",
    phase=Phase.TRAINING,
    progress=StepNote(step=1, tokens=1, at=NOW),
    written_at=NOW,
)
ASK = SaveRequest(request_id=77, deadline=NOW + timedelta(minutes=10))
Post = Callable[..., Awaitable[tuple[int, bytes]]]


class FakeReviewer:
    """Takes `good` for pod p0, and any other token for what its text says."""

    async def review(self, token: str) -> PodIdentity:
        match token:
            case "good":
                return PodIdentity(namespace="team-a", pod="p0", uid="u0")
            case "unknown":
                return PodIdentity(namespace="team-a", pod="p9", uid="u9")
            case "later":
                raise Retry("the API server does not answer")
            case _:
                raise Reject("the token was refused by the API server")


def added(key: Key, record: Any) -> Change[Any]:
    return Change(type=ChangeType.ADDED, key=key, old=None, new=record)


@pytest.fixture
def world(a_policy: Any) -> World:
    """One run with one injected pod, under the default policy."""
    world = World()
    policy = slim_policy(a_policy())
    world.on_policy(added(Key("team-a", "default"), policy))
    note = '{"version":"1","policy":"default","generation":3,"containers":["t"],"marks":[]}'
    metadata: dict[str, Any] = {"name": "p0", "namespace": "team-a", "uid": "u0"}
    metadata["labels"] = {keys.RUN_LABEL: "llama", keys.POLICY_LABEL: "default"}
    metadata["annotations"] = {keys.INJECTED_ANNOTATION: note}
    pod = slim_pod({"metadata": metadata, "spec": {"nodeName": "a"}, "status": {}})
    world.on_pod(added(pod.key, pod))
    run = {"name": "llama", "namespace": "team-a", "uid": "r", "resourceVersion": "5"}
    world.on_run(added(RUN, slim_run({"metadata": run})))
    return world


@pytest.fixture
def a_report(world: World) -> Callable[..., Report]:
    """A report that knows everything; keywords replace its fields."""
    digest = world.policies[Key("team-a", "default")].digest

    def build(**changes: Any) -> Report:
        fields: dict[str, Any] = {"namespace": "team-a", "run": "llama", "pod": "p0"}
        fields |= {"pod_uid": "u0", "run_id": RUN_ID, "state": STATE}
        return Report(**fields | {"known_policy_digest": digest} | changes)

    return build


@asynccontextmanager
async def listening(
    world: World, settings: Settings, identity: Identity, poll_seconds: float
) -> AsyncIterator[tuple[int, ReportEndpoint]]:
    """A gate's TLS application on a free port."""
    metrics = Metrics()
    endpoint = ReportEndpoint(world, FakeReviewer(), metrics, poll_seconds)
    address = GateAddress(url="", server_name="", authority="")
    release = Release(version="1", gate=address)
    app = build_app(AdmissionEndpoints(world, settings, release, metrics), endpoint)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=identity.context).start()
    yield runner.addresses[0][1], endpoint
    await runner.cleanup()


@pytest.fixture
def serve(
    world: World, a_certificate: Any, trusting: Any, some_settings: Any
) -> Callable[..., None]:
    """Runs a test body against a listening gate; the body gets `post` and the endpoint."""
    certificate = a_certificate()

    async def whole(body: Any, poll_seconds: float) -> None:
        identity = Identity()
        identity.load(certificate)
        async with (
            asyncio.timeout(10),
            listening(world, some_settings(), identity, poll_seconds) as (port, endpoint),
            aiohttp.ClientSession() as session,
        ):

            async def post(report: Any, token: str = "good") -> tuple[int, bytes]:
                data = encode(report) if isinstance(report, Report) else report
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                async with session.post(
                    f"https://127.0.0.1:{port}{keys.REPORT_PATH}",
                    data=io.BytesIO(data),
                    headers=headers,
                    ssl=trusting(certificate),
                    server_hostname="gate.svc",
                ) as response:
                    return response.status, await response.read()

            await body(post, endpoint)

    return lambda body, poll_seconds=5.0: asyncio.run(whole(body, poll_seconds))


async def reply_of(post: Post, report: Report) -> Reply:
    status, body = await post(report)
    assert status == 200, body
    return decode(Reply, body, "reply")


async def until_polling(world: World) -> None:
    while RUN not in world.reports or RUN not in world._news:
        await asyncio.sleep(0)


def test_report_is_kept_and_answered_at_the_end_of_its_poll(
    serve: Any, world: World, a_report: Any
) -> None:
    async def body(post: Post, _: Any) -> None:
        reply = await reply_of(post, a_report())
        assert reply == Reply(poll_seconds=0.05)
        assert world.reports[RUN].report == a_report()

    serve(body, poll_seconds=0.05)


@pytest.mark.parametrize("known", [0, 76], ids=["no-request", "another-request"])
def test_report_that_lacks_the_current_request_is_answered_at_once(
    known: int, serve: Any, world: World, a_report: Any
) -> None:
    world.set_ask(RUN, ASK)

    async def body(post: Post, _: Any) -> None:
        assert (await reply_of(post, a_report(known_request_id=known))).request == ASK

    serve(body, poll_seconds=60)


def test_report_that_lacks_the_current_policy_is_answered_at_once(
    serve: Any, world: World, a_report: Any
) -> None:
    async def body(post: Post, _: Any) -> None:
        reply = await reply_of(post, a_report(known_policy_digest="old"))
        assert reply.policy == world.policies[Key("team-a", "default")].wire

    serve(body, poll_seconds=60)


def test_report_poll_ends_when_a_save_is_asked_for(serve: Any, world: World, a_report: Any) -> None:
    async def body(post: Post, _: Any) -> None:
        poll = asyncio.create_task(reply_of(post, a_report()))
        await until_polling(world)
        world.set_ask(RUN, ASK)
        assert (await poll).request == ASK

    serve(body, poll_seconds=60)


def test_report_poll_ends_when_the_policy_changes(
    serve: Any, world: World, a_report: Any, a_policy: Any
) -> None:
    async def body(post: Post, _: Any) -> None:
        poll = asyncio.create_task(reply_of(post, a_report()))
        await until_polling(world)
        policy = slim_policy(a_policy(cadence={"by": "Steps", "steps": 3}))
        world.on_policy(added(Key("team-a", "default"), policy))
        assert (await poll).policy == policy.wire

    serve(body, poll_seconds=60)


def test_report_poll_ends_when_the_gate_stops(serve: Any, world: World, a_report: Any) -> None:
    async def body(post: Post, endpoint: ReportEndpoint) -> None:
        poll = asyncio.create_task(reply_of(post, a_report()))
        await until_polling(world)
        endpoint.stop()
        assert (await poll).request is None

    serve(body, poll_seconds=60)


REFUSED: list[Any] = [
    pytest.param({}, "", (401, "Authorization: Bearer TOKEN"), id="no-token"),
    pytest.param({}, "bad", (401, "refused by the API server"), id="bad-token"),
    pytest.param({}, "later", (503, "cannot be reviewed now"), id="api-server-away"),
    pytest.param({}, "unknown", (403, "speaks for another pod"), id="token-of-another-pod"),
    pytest.param({"namespace": "team-b"}, "good", (403, "another pod"), id="other-namespace"),
    pytest.param({"pod_uid": "u1"}, "good", (403, "another pod"), id="pod-before-of-that-name"),
    pytest.param({"run": "moe"}, "good", (403, "its pod's run is 'llama'"), id="other-run"),
    pytest.param(
        {"state": replace(STATE, pod_uid="u1")}, "good", (403, "beside rank 0"), id="not-the-lead"
    ),
    pytest.param({"run_id": "x"}, "good", (400, "run_id is not"), id="other-run-id"),
    pytest.param(
        {"run_id": "x" * 40, "state": None}, "good", (400, "run_id"), id="run-id-too-long"
    ),
    pytest.param(
        {
            "durable": DurableNote(
                step=1,
                tokens=1,
                attempt=Attempt(step=1, nonce="0" * 16),
                committed_at=NOW,
                path="p" * 2000,
                size_bytes=1,
                manifest_sha256="",
            )
        },
        "good",
        (400, "path"),
        id="path-too-long",
    ),
]


@pytest.mark.parametrize(("changes", "token", "want"), REFUSED)
def test_report_that_is_not_the_leads_own_is_refused(
    changes: Any, token: str, want: tuple[int, str], serve: Any, world: World, a_report: Any
) -> None:
    async def body(post: Post, _: Any) -> None:
        status, text = await post(a_report(**changes), token)
        assert (status, want[1] in text.decode()) == (want[0], True), text
        assert world.reports == {}

    serve(body)


@pytest.mark.parametrize(
    ("data", "status", "sentence"),
    [
        pytest.param(b"", 400, "report: not a JSON document", id="empty"),
        pytest.param(b"[]", 400, "report: not a JSON object", id="list"),
        pytest.param(b'{"kind":"reply"}', 400, "kind is 'reply', expected 'report'", id="kind"),
        pytest.param(b"x" * (MAX_BODY + 1), 413, "at most 1048576 bytes", id="oversize"),
    ],
)
def test_report_body_that_is_none_is_refused_with_a_sentence(
    data: bytes, status: int, sentence: str, serve: Any
) -> None:
    async def body(post: Post, _: Any) -> None:
        got, text = await post(data)
        assert (got, sentence in text.decode()) == (status, True), text

    serve(body)


def test_report_changed_on_its_way_is_refused(serve: Any, a_report: Any) -> None:
    async def body(post: Post, _: Any) -> None:
        status, text = await post(
            encode(a_report()).replace(b'"flushed_bytes":0', b'"flushed_bytes":9')
        )
        assert (status, b"sha256 does not match" in text) == (400, True), text

    serve(body)


def test_report_of_a_pod_not_watched_yet_may_come_again(
    serve: Any, world: World, a_report: Any
) -> None:
    async def body(post: Post, _: Any) -> None:
        status, text = await post(a_report(pod="p9", pod_uid="u9"), "unknown")
        assert (status, b"not known here yet" in text) == (503, True), text

    serve(body)


def test_report_outlives_changes_of_its_pod_but_not_its_pod(world: World, a_report: Any) -> None:
    world.take_report(RUN, a_report(), NOW)
    (pod,) = world.pods.values()
    changed = replace(pod, facts=replace(pod.facts, has_hold=True))
    world.on_pod(Change(type=ChangeType.MODIFIED, key=pod.key, old=pod, new=changed))
    assert RUN in world.reports
    world.on_pod(Change(type=ChangeType.DELETED, key=pod.key, old=changed, new=None))
    assert RUN not in world.reports
    assert world.pods_of(RUN) == {}
