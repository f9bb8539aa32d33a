"""The controller's loop: takes keys, observes, lets pure modules decide, applies, tries again.

Every retry of the controller is here. A pass is level-based: it starts from what is, never from
what an event said, so keys may be lost, doubled or reordered without harm. One event loop.
"""

import logging
import time
from collections.abc import Mapping, Set
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from tidegate_contract import keys
from tidegate_contract.errors import Retry, TidegateError
from tidegate_operator.api_run import parse_run
from tidegate_operator.controller.budgets import Budgets
from tidegate_operator.controller.context import Context
from tidegate_operator.controller.decide import (
    OWNED_RUN_FIELDS,
    decide_creation,
    decide_last_durable,
    decide_run_status,
)
from tidegate_operator.controller.installation import Installation
from tidegate_operator.controller.objects import MANAGER, build_run
from tidegate_operator.controller.policy import OWNED_POLICY_FIELDS, decide_policy_status
from tidegate_operator.controller.queue import Item, Subject
from tidegate_operator.kube.apply import apply_status, is_same_status
from tidegate_operator.kube.backoff import Backoff
from tidegate_operator.kube.client import Object
from tidegate_operator.kube.errors import AlreadyExists, NotFound
from tidegate_operator.kube.kinds import NODES, POLICIES, RUNS, Key, Kind

WORKERS = 4
RETRY = Backoff(first_seconds=0.5, longest_seconds=60.0)
REJECTED_SECONDS = 300.0
"""A change of the object comes as an event; this is for what changes elsewhere."""
NODE_PERIOD = timedelta(seconds=10)
"""A node's annotation is written at most this often: schedulers watch nodes."""
CLAIM_RECHECK_SECONDS = 60.0
"""Claims are not watched."""

logger = logging.getLogger(__name__)


class Reconciler:
    """Works on keys until cancelled; several `work` calls may run side by side."""

    def __init__(self, context: Context) -> None:
        """Begins with nothing failed."""
        self._client = context.client
        self._settings = context.settings
        self._world = context.world
        self._queue = context.queue
        self._metrics = context.metrics
        self._clock = context.clock
        self._budgets = Budgets(context)
        self._installation = Installation(context)
        self._failures: dict[Item, int] = {}
        self._node_written: dict[str, datetime] = {}

    async def work(self) -> None:
        """Takes keys until cancelled."""
        while True:
            item = await self._queue.take()
            try:
                delay = await self._attempt(item)
            finally:
                self._queue.done(item)
            if delay is not None:
                self._queue.add(item, delay)

    async def _attempt(self, item: Item) -> float | None:
        """One pass; gives the seconds after which to look again, None when only events tell."""
        began, result = time.monotonic(), "ok"
        try:
            recheck = await self._reconcile(item)
            self._failures.pop(item, None)
            return recheck.total_seconds() if recheck else None
        except Retry as error:
            result = "retry"
            return self._again(item, error)
        except TidegateError as error:
            result = "reject"
            self._again(item, error)
            return REJECTED_SECONDS
        except Exception as error:  # noqa: BLE001 - one odd object must not stop all the others
            result = "bug"
            return self._again(item, error, exc_info=True)
        finally:
            self._metrics.reconciles.labels(item.subject, result).inc()
            self._metrics.seconds.labels(item.subject).observe(time.monotonic() - began)

    def _again(self, item: Item, error: Exception, *, exc_info: bool = False) -> float:
        failures = self._failures.get(item, 0) + 1
        self._failures[item] = failures
        # The first try often meets a write of somebody else in between; that is no news.
        level = logging.INFO if failures == 1 and isinstance(error, Retry) else logging.WARNING
        logger.log(
            level,
            "pass failed",
            exc_info=exc_info,
            extra={
                "subject": item.subject,
                "key": f"{item.namespace}/{item.name}",
                "failures": failures,
                "error": str(error),
            },
        )
        return RETRY.delay(failures)

    async def _reconcile(self, item: Item) -> timedelta | None:
        match item.subject:
            case Subject.RUN:
                return await self._run(Key(item.namespace, item.name))
            case Subject.POLICY:
                return await self._policy(Key(item.namespace, item.name))
            case Subject.NODE:
                return await self._node(item.name)
            case Subject.INSTALLATION:
                return await self._installation.reconcile(self._clock())

    async def _run(self, key: Key) -> timedelta | None:
        facts, raw = await self._world.observe_run(key)
        if pod := decide_creation(facts):
            raw = await self._create_run(key, pod.policy.name)
            facts = replace(facts, run=parse_run(raw))
        now = self._clock()
        # The budget first: while it is too low, an eviction may slip through.
        budget = await self._budgets.reconcile(facts, now)
        if facts.run is None or raw is None:
            self._world.note_run(key, None)
            return budget.recheck_after
        self._world.note_run(key, self._world.build_note(key, facts.run))
        decision = decide_run_status(facts, budget, self._settings, now)
        await self._apply(RUNS, raw, decision.status.to_wire(), OWNED_RUN_FIELDS)
        return min(filter(None, (budget.recheck_after, decision.recheck_after)), default=None)

    async def _create_run(self, key: Key, policy: str) -> Object:
        try:
            created = await self._client.create(
                RUNS.path(key.namespace), build_run(key, policy), manager=MANAGER
            )
        except AlreadyExists:
            # A user was faster; theirs counts.
            return await self._client.get(RUNS.path(key.namespace, key.name))
        self._metrics.writes.labels("run").inc()
        logger.info("run created", extra={"run": f"{key.namespace}/{key.name}", "policy": policy})
        return created

    async def _policy(self, key: Key) -> timedelta | None:
        found = await self._world.observe_policy(key)
        if found is None:
            return None
        facts, raw = found
        status = decide_policy_status(facts, self._settings, self._clock())
        await self._apply(POLICIES, raw, status.to_wire(), OWNED_POLICY_FIELDS)
        return timedelta(seconds=CLAIM_RECHECK_SECONDS) if facts.missing_claim else None

    async def _apply(
        self, kind: Kind, raw: Object, wanted: Mapping[str, Any], owned: Set[str]
    ) -> None:
        if is_same_status(raw, wanted, owned):
            return
        await apply_status(self._client, kind, raw, wanted, manager=MANAGER)
        self._metrics.writes.labels(f"{kind.kind.lower()}-status").inc()

    async def _node(self, name: str) -> timedelta | None:
        node = self._world.nodes.cache.get(Key("", name))
        if node is None or not self._settings.node_annotations.enabled:
            self._node_written.pop(name, None)
            return None
        now = self._clock()
        soonest = self._node_written.get(name, now - NODE_PERIOD) + NODE_PERIOD
        if now < soonest:
            return soonest - now
        runs = self._world.observe_node(name)
        if runs is None:
            return NODE_PERIOD
        wanted = decide_last_durable(runs)
        if wanted != node.last_durable:
            await self._annotate(name, wanted)
            self._node_written[name] = now
        return None

    async def _annotate(self, name: str, value: str | None) -> None:
        patch = {"metadata": {"annotations": {keys.LAST_DURABLE_ANNOTATION: value}}}
        try:
            await self._client.patch(NODES.path(name=name), patch, manager=MANAGER)
        except NotFound:
            return
        self._metrics.writes.labels("node").inc()
