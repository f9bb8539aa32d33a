"""What the controller sees: watches of pods, nodes and budgets, and reads of its own two kinds.

The watches' callbacks enqueue what a change may concern; the `observe_` functions gather the facts
of one decision. Runs and policies are read anew for each decision, so that a decision never
starts from what it wrote itself a moment ago and has not seen yet. One event loop.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar

from tidegate_contract import keys
from tidegate_contract.errors import Reject
from tidegate_operator.api import CheckpointPolicy, parse_policy
from tidegate_operator.api_run import CheckpointRun, parse_run
from tidegate_operator.api_types import ServedObject
from tidegate_operator.controller.decide import decide_policy
from tidegate_operator.controller.facts import (
    Node,
    Pod,
    PolicyFacts,
    RunFacts,
    RunNote,
    slim_budget,
    slim_node,
    slim_pod,
)
from tidegate_operator.controller.index import PodIndex
from tidegate_operator.controller.pdb import Budget
from tidegate_operator.controller.queue import Item, Queue, Subject
from tidegate_operator.kube.client import Client, Object
from tidegate_operator.kube.errors import ApiError, NotFound
from tidegate_operator.kube.kinds import CLAIMS, NODES, PDBS, PODS, POLICIES, RUNS, Key, Kind
from tidegate_operator.kube.times import parse_time
from tidegate_operator.kube.watch import Change, ChangeType, Reflector, Selection

POLICY_DELAY_SECONDS = 1.0
"""Pods come and go in crowds; a policy counts them once."""
RESYNC_SECONDS = 300.0
SYNC_RETRY_SECONDS = 2.0

INSTALLATION = Item(Subject.INSTALLATION)

logger = logging.getLogger(__name__)

Served = TypeVar("Served", bound=ServedObject)


class World:
    """The cluster as the controller sees it.

    Attributes:
        pods, nodes, budgets: the watches; `tasks` runs them.
        index: pods by run, policy and node.
        policies: as read last.
        notes: of every run that has an object.
        deleted_at: when somebody else deleted a run's budget, by run.
        own_deletes: budgets that this process is deleting.
        is_synced: whether all of the above is complete.
    """

    def __init__(
        self,
        client: Client,
        queue: Queue,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Opens nothing yet; `clock` gives aware UTC."""
        self._client = client
        self._queue = queue
        self._clock = clock
        self.index = PodIndex()
        self.policies: dict[Key, CheckpointPolicy] = {}
        self.notes: dict[Key, RunNote] = {}
        self.deleted_at: dict[Key, datetime] = {}
        self.own_deletes: set[Key] = set()
        self.is_synced = False
        self.pods: Reflector[Pod] = Reflector(
            client,
            PODS,
            slim=slim_pod,
            on_change=self._pod_changed,
            selection=Selection(labels=keys.POLICY_LABEL),
        )
        self.nodes: Reflector[Node] = Reflector(
            client, NODES, slim=slim_node, on_change=self._node_changed
        )
        self.budgets: Reflector[Budget] = Reflector(
            client, PDBS, slim=slim_budget, on_change=self._budget_changed
        )

    async def sync(self) -> None:
        """Returns once everything is seen and enqueued; the watches must be running."""
        for reflector in (self.pods, self.nodes, self.budgets):
            await reflector.wait_synced()
        while True:
            try:
                await self._list()
                break
            except ApiError as error:
                logger.warning("cannot list yet, trying again", extra={"error": str(error)})
                await asyncio.sleep(SYNC_RETRY_SECONDS)
        self.is_synced = True
        self._queue.add(INSTALLATION)
        for key in self.nodes.cache:
            self._queue.add(Item(Subject.NODE, "", key.name))

    async def resync(self) -> None:
        """Looks at every run and policy again from time to time, until cancelled.

        What the framework's watch of them misses across a relist is healed here.
        """
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            try:
                await self._list()
            except ApiError as error:
                logger.warning("cannot list, trying later", extra={"error": str(error)})

    async def observe_run(self, key: Key) -> tuple[RunFacts, Object | None]:
        """The facts of a run, and its object as read; None when there is none.

        Raises:
            Reject: the object cannot be read.
        """
        raw = await self._read(RUNS, key)
        facts = RunFacts(
            key=key,
            run=parse_run(raw) if raw else None,
            pods=self.index.of_run(key),
            budgets=tuple(
                budget for found, budget in self.budgets.cache.items() if found[0] == key.namespace
            ),
        )
        policy = decide_policy(facts)
        return replace(facts, policy=self.policies.get(policy) if policy else None), raw

    async def observe_policy(self, key: Key) -> tuple[PolicyFacts, Object] | None:
        """The facts of a policy, and its object as read; None when there is none.

        Tells the runs under it when it changed.

        Raises:
            Reject: the object cannot be read.
        """
        raw = await self._read(POLICIES, key)
        if raw is None:
            self._store_policy(key, None)
            return None
        policy = parse_policy(raw)
        self._store_policy(key, policy)
        facts = PolicyFacts(
            policy=policy,
            created=parse_time(raw["metadata"].get("creationTimestamp")),
            pods=self.index.of_policy(key),
            runs=tuple(note for note in self.notes.values() if note.policy == key),
            missing_claim=await self._missing_claim(policy),
        )
        return facts, raw

    def observe_node(self, name: str) -> list[RunNote] | None:
        """What is known of the runs on a node; None until something is known of each."""
        runs = self.index.runs_on(name)
        if not runs <= self.notes.keys():
            return None
        return [self.notes[run] for run in runs]

    def note_run(self, key: Key, note: RunNote | None) -> None:
        """Remembers a run, or forgets it, and enqueues what its change concerns."""
        old = self.notes.get(key)
        if note is None:
            self.notes.pop(key, None)
        else:
            self.notes[key] = note
        if old == note:
            return
        for one in filter(None, (old, note)):
            self._enqueue_policy(one.policy)
        for pod in self.index.of_run(key):
            if pod.node:
                self._queue.add(Item(Subject.NODE, "", pod.node))

    async def _list(self) -> None:
        policies = {_key(raw): raw for raw in await self._list_kind(POLICIES)}
        runs = {_key(raw): raw for raw in await self._list_kind(RUNS)}
        for key, raw in policies.items():
            policy = _parsed(parse_policy, raw)
            # One that cannot be read is not one that is gone: its last good values stay.
            if policy is not None:
                self._store_policy(key, policy)
        for key, raw in runs.items():
            run = _parsed(parse_run, raw)
            if run is not None and key not in self.notes:
                self.notes[key] = self.build_note(key, run)
        for key in {*policies, *self.policies}:
            self._queue.add(Item(Subject.POLICY, *key))
        for key in {*runs, *self.notes, *self.index.runs()}:
            self._queue.add(Item(Subject.RUN, *key))

    def build_note(self, key: Key, run: CheckpointRun) -> RunNote:
        """What to remember of a run that was just read."""
        facts = RunFacts(key=key, run=run, pods=self.index.of_run(key))
        durable = run.status.last_durable
        return RunNote(
            policy=decide_policy(facts) or Key(key.namespace, ""),
            durable_time=durable.time if durable else None,
            is_active=bool(facts.live_pods),
        )

    async def _list_kind(self, kind: Kind) -> list[Object]:
        try:
            return await self._client.list_all(kind)
        except NotFound:
            # The kinds are installed later; events will tell.
            return []

    async def _read(self, kind: Kind, key: Key) -> Object | None:
        try:
            return await self._client.get(kind.path(key.namespace, key.name))
        except NotFound:
            return None

    async def _missing_claim(self, policy: CheckpointPolicy) -> str | None:
        name = policy.spec.remote.claim_name
        if name is None or await self._read(CLAIMS, Key(policy.metadata.namespace, name)):
            return None
        return name

    def _store_policy(self, key: Key, policy: CheckpointPolicy | None) -> None:
        old = self.policies.get(key)
        if policy is None:
            self.policies.pop(key, None)
        else:
            self.policies[key] = policy
        if (old is None) != (policy is None):
            self._queue.add(INSTALLATION)
        if old is None or policy is None or old.spec != policy.spec:
            runs = {pod.run for pod in self.index.of_policy(key) if pod.run}
            runs |= {run for run, note in self.notes.items() if note.policy == key}
            for run in runs:
                self._queue.add(Item(Subject.RUN, *run))

    def _enqueue_policy(self, key: Key) -> None:
        # The label may be there without a value, and a run may know no policy.
        if key.name:
            self._queue.add(Item(Subject.POLICY, *key), POLICY_DELAY_SECONDS)

    def _pod_changed(self, change: Change[Pod]) -> None:
        self.index.update(change.old, change.new)
        for pod in filter(None, (change.old, change.new)):
            if pod.run:
                self._queue.add(Item(Subject.RUN, *pod.run))
            if _counted(change.old) != _counted(change.new):
                self._enqueue_policy(pod.policy)
            if pod.node and _placed(change.old) != _placed(change.new):
                self._queue.add(Item(Subject.NODE, "", pod.node))

    def _node_changed(self, change: Change[Node]) -> None:
        self._queue.add(Item(Subject.NODE, "", change.key.name))

    def _budget_changed(self, change: Change[Budget]) -> None:
        budgets = [one for one in (change.old, change.new) if one]
        if not any(one.run for one in budgets):
            # Which pods it selects is decided per run.
            for run in self.index.runs_in(change.key.namespace):
                self._queue.add(Item(Subject.RUN, *run))
            return
        for run in {Key(change.key.namespace, one.run) for one in budgets if one.run}:
            if change.type is not ChangeType.DELETED:
                self.deleted_at.pop(run, None)
            elif change.key in self.own_deletes:
                self.own_deletes.discard(change.key)
            else:
                self.deleted_at[run] = self._clock()
            self._queue.add(Item(Subject.RUN, *run))


def _key(raw: Object) -> Key:
    return Key(raw["metadata"]["namespace"], raw["metadata"]["name"])


def _parsed(parse: Callable[[Object], Served], raw: Object) -> Served | None:
    try:
        return parse(raw)
    except Reject as error:
        logger.error("object cannot be read", extra={"error": str(error)})
        return None
    except Exception:  # users write these: an odd one must not end the list of the others
        logger.exception("object cannot be read", extra={"key": "/".join(_key(raw))})
        return None


def _counted(pod: Pod | None) -> tuple[Key, bool, bool] | None:
    """What of a pod its policy counts."""
    return (pod.policy, pod.is_injected, pod.is_live) if pod else None


def _placed(pod: Pod | None) -> tuple[Key | None, str, bool] | None:
    """What of a pod its node's annotation depends on."""
    return (pod.run, pod.node, pod.is_live) if pod else None
