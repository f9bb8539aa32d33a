"""The report endpoint: checks who speaks, keeps the report, and holds the poll until there is news.

Only a run's lead reports, with the projected token of its own pod. The answer is `wire.Reply`: at
once when the sidecar lacks the current request or policy, else at the end of the poll. Writes
nothing to the API server; the clocks do.
"""

import asyncio
import logging
from datetime import UTC, datetime

from aiohttp import web
from pydantic import ValidationError

from tidegate_contract.document import decode, encode
from tidegate_contract.errors import Corrupt, Reject, Retry
from tidegate_contract.wire import Reply, Report
from tidegate_operator.api_run_status import RunStatus
from tidegate_operator.gate.metrics import Metrics
from tidegate_operator.gate.observe import policy_of
from tidegate_operator.gate.report_status import build_report_status
from tidegate_operator.gate.tokens import PodIdentity, Reviewer, parse_bearer
from tidegate_operator.gate.world import World
from tidegate_operator.kube.kinds import Key

MAX_BODY = 1 << 20
BODY_SECONDS = 10.0
POLL_SECONDS = 20.0

logger = logging.getLogger(__name__)


class _Refused(Exception):
    """An answer other than 200, with its sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


class ReportEndpoint:
    """Takes reports; one event loop."""

    def __init__(
        self,
        world: World,
        reviewer: Reviewer,
        metrics: Metrics,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """Serves no one yet; `handle` is put into an application.

        Args:
            world: keeps the reports.
            reviewer: tells a token's pod.
            metrics: counts.
            poll_seconds: how long a poll without news is held.
        """
        self._world = world
        self._reviewer = reviewer
        self._metrics = metrics
        self._poll_seconds = poll_seconds
        self._is_stopping = False

    def stop(self) -> None:
        """Answers every held poll now, and each later one at once."""
        self._is_stopping = True
        self._world.tell_all()

    async def handle(self, request: web.Request) -> web.Response:
        """Answers one POST."""
        try:
            report = await self._take(request)
        except _Refused as refused:
            self._metrics.reports.labels(str(refused.status)).inc()
            return web.json_response({"message": refused.sentence}, status=refused.status)
        with self._metrics.polls.track_inprogress():
            reply = await self._reply(report)
        self._metrics.reports.labels("200").inc()
        return web.Response(body=encode(reply), content_type="application/json")

    async def _take(self, request: web.Request) -> Report:
        body = await _read(request)
        try:
            token = parse_bearer(request.headers.get("Authorization", ""))
            identity = await self._reviewer.review(token)
        except Reject as error:
            raise _Refused(401, str(error)) from error
        except Retry as error:
            raise _Refused(503, f"the token cannot be reviewed now: {error}") from error
        try:
            report = decode(Report, body, "report")
        except (Corrupt, Reject) as error:
            raise _Refused(400, str(error)) from error
        self._check_speaker(report, identity)
        run, now = Key(report.namespace, report.run), datetime.now(UTC)
        self._check_values(run, report, now)
        self._world.take_report(run, report, now)
        return report

    def _check_speaker(self, report: Report, identity: PodIdentity) -> None:
        told = PodIdentity(namespace=report.namespace, pod=report.pod, uid=report.pod_uid)
        if told != identity:
            raise _Refused(403, "the report speaks for another pod than its token was made for")
        pod = self._world.pods.get(Key(identity.namespace, identity.pod))
        if pod is None or pod.facts.uid != identity.uid:
            raise _Refused(503, f"pod {identity.pod} is not known here yet")
        if pod.run is None or pod.run.name != report.run:
            own = pod.run.name if pod.run else "none"
            raise _Refused(
                403, f"the report speaks for run {report.run!r}, its pod's run is {own!r}"
            )
        state = report.state
        if state is not None and state.pod_uid != identity.uid:
            raise _Refused(403, "only the sidecar beside rank 0 reports")
        if state is not None and state.run_id != report.run_id:
            raise _Refused(400, "run_id is not the one of the trainer's state")

    def _check_values(self, run: Key, report: Report, now: datetime) -> None:
        """What the schema of status would refuse is refused here, where the sender hears of it."""
        record = self._world.runs.get(run)
        before = record.run.status if record else RunStatus()
        try:
            build_report_status(report, before, "", now)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise _Refused(400, f"report: {where}: {first['msg']}") from error

    async def _reply(self, report: Report) -> Reply:
        run = Key(report.namespace, report.run)
        loop = asyncio.get_running_loop()
        end = loop.time() + self._poll_seconds
        while True:
            reply = self._current(run, report)
            left = end - loop.time()
            if self._is_stopping or has_news(reply, report) or left <= 0:
                return reply
            await self._world.wait_news(run, left)

    def _current(self, run: Key, report: Report) -> Reply:
        policy = policy_of(self._world, run)
        is_stale = policy is not None and policy.digest != report.known_policy_digest
        return Reply(
            policy=policy.wire if policy is not None and is_stale else None,
            request=self._world.asks.get(run),
            poll_seconds=self._poll_seconds,
        )


def has_news(reply: Reply, report: Report) -> bool:
    """Whether a reply tells what its report did not know."""
    is_asked = reply.request is not None and reply.request.request_id != report.known_request_id
    return reply.policy is not None or is_asked


async def _read(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            # Its own limit: the application's is that of the API server's reviews.
            return await request.clone(client_max_size=MAX_BODY).read()
    except TimeoutError as error:
        raise _Refused(408, f"the report took more than {BODY_SECONDS:.0f} s to arrive") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _Refused(413, f"a report has at most {MAX_BODY} bytes") from error
