"""Applies what was decided about a run's hold budget, and remembers what the next decision needs.

Called by `controller.reconcile`. Decides nothing: `controller.pdb` does.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, assert_never

from tidegate_contract.errors import Retry
from tidegate_operator.controller.context import Context
from tidegate_operator.controller.decide import build_budget_facts
from tidegate_operator.controller.facts import RunFacts
from tidegate_operator.controller.objects import MANAGER, Owner, build_budget, build_budget_spec
from tidegate_operator.controller.pdb import (
    Budget,
    BudgetAction,
    BudgetDecision,
    BudgetReason,
    budget_name,
    decide_budget,
)
from tidegate_operator.kube.client import STRATEGIC_PATCH
from tidegate_operator.kube.errors import AlreadyExists, Conflict, NotFound
from tidegate_operator.kube.events import Event, EventType
from tidegate_operator.kube.kinds import CLUSTER_ROLES, PDBS, RUNS, Key

ANCHOR_RETRY_SECONDS = 5.0
_TOLD = frozenset({BudgetReason.CONFLICT, BudgetReason.DELETED_BY_HAND})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    excess_since: datetime | None
    reason: BudgetReason


class Budgets:
    """The hold budgets of all runs."""

    def __init__(self, context: Context) -> None:
        """Remembers nothing yet."""
        self._client = context.client
        self._settings = context.settings
        self._world = context.world
        self._metrics = context.metrics
        self._recorder = context.recorder
        self._memory: dict[Key, _Memory] = {}

    async def reconcile(self, facts: RunFacts, now: datetime) -> BudgetDecision:
        """Brings the budget of one run to what it should be.

        Args:
            facts: of the run.
            now: aware UTC.

        Returns:
            What was decided and done.

        Raises:
            Retry: the anchor is missing, or the API server refused for now.
        """
        memory = self._memory.get(facts.key)
        decision = decide_budget(
            build_budget_facts(
                facts,
                self._settings,
                excess_since=memory.excess_since if memory else None,
                deleted_at=self._world.deleted_at.get(facts.key),
            ),
            now,
        )
        await self._apply(facts, decision)
        await self._tell(facts, decision, memory)
        if facts.run is None and decision.reason is BudgetReason.NOTHING_TO_HOLD:
            self._memory.pop(facts.key, None)
            self._world.deleted_at.pop(facts.key, None)
        else:
            self._memory[facts.key] = _Memory(
                excess_since=decision.excess_since, reason=decision.reason
            )
        return decision

    async def _apply(self, facts: RunFacts, decision: BudgetDecision) -> None:
        match decision.action:
            case BudgetAction.KEEP:
                return
            case BudgetAction.CREATE:
                await self._create(facts.key, decision.min_available)
            case BudgetAction.UPDATE:
                await self._update(facts.key, decision.min_available)
            case BudgetAction.DELETE:
                await self._delete(_current(facts))
            case _:
                assert_never(decision.action)
        self._metrics.writes.labels("pdb").inc()

    async def _create(self, run: Key, min_available: int) -> None:
        # Read for each: a budget whose owner is gone would be collected at once.
        try:
            anchor = await self._client.get(CLUSTER_ROLES.path(name=self._settings.anchor))
        except NotFound as error:
            raise Retry(
                f"ClusterRole {self._settings.anchor} is missing: no hold PDB without its owner",
                ANCHOR_RETRY_SECONDS,
            ) from error
        owner = Owner(kind=CLUSTER_ROLES, name=self._settings.anchor, uid=anchor["metadata"]["uid"])
        try:
            await self._client.create(
                PDBS.path(run.namespace), build_budget(run, min_available, owner), manager=MANAGER
            )
        except AlreadyExists:
            # The watch lags behind an earlier create; its event brings the next pass.
            return

    async def _update(self, run: Key, min_available: int) -> None:
        # Strategic, so that a selector somebody edited is replaced and not merged with ours.
        await self._client.patch(
            PDBS.path(run.namespace, budget_name(run.name)),
            {"spec": build_budget_spec(run.name, min_available)},
            media_type=STRATEGIC_PATCH,
            manager=MANAGER,
        )

    async def _delete(self, budget: Budget) -> None:
        # Noted first: the watch may tell of the deletion before the answer comes.
        self._world.own_deletes.add(budget.key)
        try:
            await self._client.delete(
                PDBS.path(budget.key.namespace, budget.key.name), uid=budget.uid
            )
        except (NotFound, Conflict):
            self._world.own_deletes.discard(budget.key)

    async def _tell(
        self, facts: RunFacts, decision: BudgetDecision, memory: _Memory | None
    ) -> None:
        if memory is not None and memory.reason is decision.reason:
            return
        if decision.action is BudgetAction.KEEP and memory is None:
            return
        logger.info(
            "hold budget",
            extra={
                "run": f"{facts.key.namespace}/{facts.key.name}",
                "action": decision.action,
                "reason": decision.reason,
                "sentence": decision.message,
            },
        )
        if decision.reason in _TOLD and facts.run is not None:
            event = Event(
                type=EventType.WARNING,
                reason=f"Hold{decision.reason}",
                action="Hold",
                note=decision.message,
            )
            await self._recorder.record(RUNS, _regarding(facts), event)


def _current(facts: RunFacts) -> Budget:
    name = Key(facts.key.namespace, budget_name(facts.key.name))
    return next(one for one in facts.budgets if one.key == name)


def _regarding(facts: RunFacts) -> Mapping[str, Any]:
    uid = facts.run.metadata.uid if facts.run else ""
    return {"metadata": {"namespace": facts.key.namespace, "name": facts.key.name, "uid": uid}}
