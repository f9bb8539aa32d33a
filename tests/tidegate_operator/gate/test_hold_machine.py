"""The hold under any order of events: no drain without an end, no release without a reason."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidegate_contract.keys import DrainState, ReleaseReason
from tidegate_contract.layout import Attempt
from tidegate_contract.wire import AnswerResult, Phase, SaveAnswer
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.effective import HoldLimits
from tidegate_operator.gate.facts import (
    ACTIVE,
    Drain,
    Durable,
    Eviction,
    LeadReport,
    NodeFacts,
    PodFacts,
    RunFacts,
)
from tidegate_operator.gate.hold import Decision, decide

START = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
LIMITS = HoldLimits(
    max_hold=timedelta(minutes=10),
    freshness=timedelta(seconds=60),
    contact_timeout=timedelta(seconds=60),
    release_ttl=timedelta(minutes=3),
    blocks_at_deadline=False,
)
NODES = st.sampled_from(["a", "b"])


class HoldMachine(RuleBasedStateMachine):
    """One run on two nodes: a trainer, its sidecar, a person who drains, a gate that may sleep."""

    @initialize()
    def begin(self) -> None:
        self.now = START
        self.step = 10
        self.pods = {"a": "Running", "b": "Running"}
        self.labels = {"a": True, "b": True}
        self.cordons: dict[str, datetime] = {}
        self.drains: tuple[Drain, ...] = ()
        self.evictions: dict[str, Eviction] = {}
        self.durable: Durable | None = None
        self.sealed: Attempt | None = None
        self.answer: SaveAnswer | None = None
        self.known = 0
        self.report: LeadReport | None = None
        self.last_report_at: datetime | None = None
        self.ask_id = 0

    def facts(self) -> RunFacts:
        return RunFacts(
            name="team-a/llama",
            mode=DrainMode.ENFORCE,
            limits=LIMITS,
            drains=self.drains,
            nodes={
                name: NodeFacts(name=name, uid=f"u-{name}", draining_since=self.cordons.get(name))
                for name in self.pods
            },
            pods=tuple(
                PodFacts(
                    name=f"p-{name}",
                    uid=f"p-{name}",
                    node=name,
                    is_running=state == "Running",
                    is_over=False,
                    is_terminating=state == "Terminating",
                    has_hold=self.labels[name],
                )
                for name, state in self.pods.items()
                if state != "Gone"
            ),
            evictions=self.evictions,
            durable=self.durable,
            report=self.report,
            last_report_at=self.last_report_at,
        )

    @rule(seconds=st.sampled_from([0.2, 1, 7, 31, 61, 200]))
    def time_passes(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(steps=st.integers(1, 5))
    def trains(self, steps: int) -> None:
        self.step += steps

    @rule(node=NODES)
    def cordons_node(self, node: str) -> None:
        self.cordons.setdefault(node, self.now)

    @rule(node=NODES)
    def uncordons_node(self, node: str) -> None:
        self.cordons.pop(node, None)

    @rule(node=NODES)
    def evicts(self, node: str) -> None:
        held = {drain.node: drain.state for drain in self.drains}.get(node)
        if self.pods[node] != "Running":
            return
        if held is DrainState.RELEASED:
            self.pods[node] = "Terminating"
        elif held in (None, DrainState.EXPOSED):
            self.evictions.setdefault(node, Eviction(node=node, requested_by="x", at=self.now))

    @rule(node=NODES)
    def pod_goes(self, node: str) -> None:
        if self.pods[node] == "Terminating":
            self.pods[node] = "Gone"

    @rule(node=NODES)
    def pod_comes(self, node: str) -> None:
        if self.pods[node] == "Gone" and node not in self.cordons:
            self.pods[node], self.labels[node] = "Running", True

    @rule(phase=st.sampled_from([Phase.TRAINING, Phase.TRAINING, Phase.RESTORING]))
    def lead_reports(self, phase: Phase) -> None:
        self.report = LeadReport(
            received_at=self.now,
            phase=phase,
            step=self.step,
            stated_at=self.now,
            answer=self.answer,
            known_request_id=self.known,
        )
        self.last_report_at = self.now
        self.known = self.ask_id or self.known

    @precondition(lambda self: self.known)
    @rule(result=st.sampled_from(["Acknowledged", "Sealed", "Failed1", "Failed2"]))
    def trainer_answers(self, result: str) -> None:
        attempt = None
        if result == "Sealed":
            attempt = self.sealed = Attempt(step=self.step, nonce=f"{self.step:016x}")
        self.answer = SaveAnswer(
            request_id=self.known,
            result=AnswerResult(result.rstrip("12")),
            attempt=attempt,
            failures=int(result[-1]) if result[-1].isdigit() else 0,
        )

    @precondition(lambda self: self.sealed)
    @rule()
    def copy_is_committed(self) -> None:
        assert self.sealed is not None
        self.durable = Durable(step=self.sealed.step, nonce=self.sealed.nonce, at=self.now)

    @rule()
    def gate_passes(self) -> None:
        facts = self.facts()
        decision = decide(facts, self.now)
        self.check_clock(decision)
        for change in decision.transitions:
            if change.new is DrainState.RELEASED:
                self.check_release(facts, decision, change.node, change.reason)
        self.drains = decision.drains
        entered = {drain.node for drain in decision.drains if drain.state in ACTIVE}
        self.evictions = {n: e for n, e in self.evictions.items() if n not in entered}
        for label in decision.labels:
            self.labels[label.pod.removeprefix("p-")] = label.hold
        self.ask_id = decision.ask.request_id if decision.ask else 0

    def check_clock(self, decision: Decision) -> None:
        before = {drain.node: drain for drain in self.drains}
        for drain in decision.drains:
            old = before.get(drain.node)
            if old is not None and old.state is not DrainState.EXPOSED:
                assert drain.deadline <= old.deadline

    def check_release(self, facts: RunFacts, decision: Decision, node: str, reason: str) -> None:
        (since,) = [drain.requested_at for drain in decision.drains if drain.node == node]
        match ReleaseReason(reason):
            case ReleaseReason.DURABLE:
                assert facts.durable is not None
                asked = facts.report.answer if facts.report else None
                assert asked is not None
                assert asked.attempt is not None
                assert facts.durable.step >= asked.attempt.step
            case ReleaseReason.FRESH:
                assert facts.durable is not None
                assert self.now - facts.durable.at <= LIMITS.freshness
            case ReleaseReason.SILENT:
                assert self.now - since >= LIMITS.contact_timeout
            case ReleaseReason.DEADLINE_EXCEEDED:
                assert self.now - since >= LIMITS.max_hold or self.has_short_clock(node)
            case ReleaseReason.SAVE_FAILED:
                assert facts.report is not None
                assert facts.report.answer is not None
                assert facts.report.answer.failures >= 2
            case ReleaseReason.NOTHING_TO_LOSE:
                assert self.has_nothing_to_lose(facts, node)
            case ReleaseReason.OFF:
                raise AssertionError("the run is enforced")

    def has_short_clock(self, node: str) -> bool:
        """A second request of a release goes on with the clock of the first."""
        return any(one.node == node and one.deadline <= self.now for one in self.drains)

    @staticmethod
    def has_nothing_to_lose(facts: RunFacts, node: str) -> bool:
        report, durable = facts.report, facts.durable
        if not facts.stays_on(node):
            return True
        if report is None:
            return facts.last_report_at is None
        is_saved = durable is not None and report.step == durable.step
        return report.phase is not Phase.TRAINING or is_saved

    @invariant()
    def every_drain_ends_though_everybody_dies(self) -> None:
        """Gate passes alone, and time, free each node by its deadline."""
        facts = self.facts() if hasattr(self, "now") else None
        if facts is None or not any(drain.state in ACTIVE for drain in facts.drains):
            return
        latest = max(drain.deadline for drain in facts.drains if drain.state in ACTIVE)
        later = decide(replace(facts, report=None), max(latest, self.now))
        assert not [
            drain.node
            for drain in later.drains
            if drain.state in ACTIVE and drain.requested_at < max(latest, self.now)
        ]

    @invariant()
    def released_pods_carry_no_hold_after_a_pass(self) -> None:
        if not hasattr(self, "now"):
            return
        decision = decide(self.facts(), self.now)
        lifted = {change.pod for change in decision.labels if not change.hold}
        for drain in decision.drains:
            if drain.state is DrainState.RELEASED and self.pods[drain.node] == "Running":
                assert not self.labels[drain.node] or f"p-{drain.node}" in lifted


TestHoldMachine = HoldMachine.TestCase
TestHoldMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
