"""The two webhooks' endpoints: a review in, an answer from memory out; no call to the API server.

Whatever goes wrong inside, a pod is admitted with a warning: a broken gate must not stop others'
work. An eviction that cannot be judged passes here too, and meets the disruption budget.
"""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from tidegate_contract.errors import Reject
from tidegate_operator.gate.evict import (
    EvictionAnswer,
    Verdict,
    build_eviction_response,
    decide_eviction,
    parse_eviction,
)
from tidegate_operator.gate.inject import Patch, build_patch, build_refusal, build_response
from tidegate_operator.gate.metrics import Metrics
from tidegate_operator.gate.observe import Release, observe_eviction, observe_injection
from tidegate_operator.gate.world import World
from tidegate_operator.kube.kinds import Key
from tidegate_operator.settings import Settings

LEFT_ALONE = "Tidegate leaves this pod alone"
MAX_WARNING = 256
"""The API server may cut what is longer."""

logger = logging.getLogger(__name__)

Review = Mapping[str, Any]


class AdmissionEndpoints:
    """Answers reviews; one event loop."""

    def __init__(
        self, world: World, settings: Settings, release: Release, metrics: Metrics
    ) -> None:
        """Serves no one yet; the two `handle_…` are put into an application.

        Args:
            world: the caches, synced before the first review.
            settings: of the installation.
            release: what every injection needs of this release.
            metrics: counts.
        """
        self._world = world
        self._settings = settings
        self._release = release
        self._metrics = metrics

    async def handle_inject(self, request: web.Request) -> web.Response:
        """Answers a review of a pod's creation."""
        review = await _review(request)
        with self._metrics.review_seconds.labels("inject").time():
            return web.json_response(self.inject(review))

    async def handle_evict(self, request: web.Request) -> web.Response:
        """Answers a review of an eviction."""
        review = await _review(request)
        with self._metrics.review_seconds.labels("evict").time():
            return web.json_response(self.evict(review))

    def inject(self, review: Review) -> dict[str, Any]:
        """The answer to one review of a pod."""
        uid = str(review["request"]["uid"])
        try:
            result, answer = self._inject(uid, review["request"])
        except Reject as error:
            result, answer = "left_alone", _left_alone(uid, str(error))
        except Exception:  # a pod is worth more than our sidecar in it
            logger.exception("injection failed", extra={"review": uid})
            sentence = "an internal error; it will run without saves on its node"
            result, answer = "failed", _left_alone(uid, sentence)
        self._metrics.injections.labels(result).inc()
        return answer

    def _inject(self, uid: str, request: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        pod = request["object"]
        injection = observe_injection(
            self._world, self._settings, self._release, request["namespace"], pod
        )
        if injection.live_owner is not None:
            run = injection.source.run
            return "refused", build_refusal(
                uid,
                f"run {run} has live pods of another workload (uid {injection.live_owner}): two "
                "would write one checkpoint. Delete the other one, or give this one its own name "
                "by the label tidegate.io/run",
            )
        patch = build_patch(pod, injection)
        return "patched" if patch.operations else "unchanged", build_response(uid, patch)

    def evict(self, review: Review) -> dict[str, Any]:
        """The answer to one review of an eviction; a held pod's is remembered for the clocks."""
        uid = str(review["request"]["uid"])
        try:
            answer = self._evict(review)
        except Exception:  # the disruption budget judges what we cannot
            logger.exception("eviction not judged", extra={"review": uid})
            self._metrics.evictions.labels("Failed").inc()
            return build_eviction_response(uid, EvictionAnswer(verdict=Verdict.NOT_OURS))
        self._metrics.evictions.labels(answer.verdict).inc()
        return build_eviction_response(uid, answer)

    def _evict(self, review: Review) -> EvictionAnswer:
        request = parse_eviction(review)
        facts = observe_eviction(self._world, self._settings.drain, request.namespace, request.pod)
        answer = decide_eviction(request, facts, datetime.now(UTC))
        if answer.eviction is not None:
            _, _, run = facts.run.partition("/")
            self._world.take_eviction(Key(request.namespace, run), answer.eviction)
        return answer


def _left_alone(uid: str, sentence: str) -> dict[str, Any]:
    warning = f"{LEFT_ALONE}: {sentence}"[:MAX_WARNING]
    return build_response(uid, Patch(operations=(), warnings=(warning,)))


async def _review(request: web.Request) -> Review:
    try:
        review = json.loads(await request.read())
    except ValueError as error:
        raise web.HTTPBadRequest(text="not an AdmissionReview: no JSON") from error
    inner = review.get("request") if isinstance(review, dict) else None
    if not isinstance(inner, dict) or "uid" not in inner:
        raise web.HTTPBadRequest(text="not an AdmissionReview: no request with a uid")
    return dict(review)
