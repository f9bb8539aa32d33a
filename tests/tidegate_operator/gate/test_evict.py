import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_contract.keys import DrainState
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.effective import HoldLimits
from tidegate_operator.gate.evict import (
    EvictionFacts,
    Verdict,
    build_eviction_response,
    decide_eviction,
    parse_eviction,
)
from tidegate_operator.gate.facts import Drain, Eviction, PodFacts

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
LIMITS = HoldLimits(
    max_hold=timedelta(minutes=10),
    freshness=timedelta(seconds=60),
    contact_timeout=timedelta(seconds=60),
    release_ttl=timedelta(minutes=3),
    blocks_at_deadline=False,
)
REVIEW: dict[str, Any] = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "u",
        "namespace": "team-a",
        "name": "p0",
        "operation": "CREATE",
        "userInfo": {"username": "admin"},
        "object": {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p0"}},
        "dryRun": False,
        "options": {"kind": "CreateOptions"},
    },
}
POD = PodFacts(
    name="p0",
    uid="u0",
    node="node-17",
    is_running=True,
    is_over=False,
    is_terminating=False,
    has_hold=True,
)
HELD = EvictionFacts(
    pod=POD, run="team-a/llama", is_known=True, mode=DrainMode.ENFORCE, limits=LIMITS
)
FLUSHING = Drain(
    node="node-17",
    node_uid="n",
    state=DrainState.FLUSHING,
    reason="Sealed",
    requested_at=NOW - timedelta(minutes=1),
    deadline=NOW + timedelta(minutes=9, seconds=5),
    message="step 120 is sealed and is copied to the remote tier",
)


def a_review(**changes: Any) -> dict[str, Any]:
    review = copy.deepcopy(REVIEW)
    review["request"] |= changes
    return review


@pytest.mark.parametrize(
    ("facts", "want"),
    [
        pytest.param(EvictionFacts(), Verdict.NOT_OURS, id="unknown-pod"),
        pytest.param(
            replace(HELD, pod=replace(POD, is_running=False)), Verdict.NOT_RUNNING, id="pending"
        ),
        pytest.param(
            replace(HELD, pod=replace(POD, is_terminating=True)), Verdict.NOT_RUNNING, id="leaving"
        ),
        pytest.param(replace(HELD, is_known=False), Verdict.NO_RUN, id="no-run"),
        pytest.param(replace(HELD, mode=DrainMode.OFF), Verdict.NOT_ENFORCED, id="off"),
        pytest.param(replace(HELD, mode=DrainMode.OBSERVE), Verdict.NOT_ENFORCED, id="observe"),
        pytest.param(
            replace(HELD, drain=replace(FLUSHING, state=DrainState.RELEASED)),
            Verdict.RELEASED,
            id="released",
        ),
        pytest.param(HELD, Verdict.HELD, id="held"),
        pytest.param(replace(HELD, drain=FLUSHING), Verdict.HELD, id="flushing"),
        pytest.param(
            replace(HELD, drain=replace(FLUSHING, state=DrainState.EXPOSED)),
            Verdict.HELD,
            id="exposed",
        ),
    ],
)
def test_eviction_passes_unless_its_pod_is_held(facts: EvictionFacts, want: Verdict) -> None:
    answer = decide_eviction(parse_eviction(REVIEW), facts, NOW)
    response = build_eviction_response("u", answer)["response"]
    assert answer.verdict is want
    assert response["allowed"] is (want is not Verdict.HELD)


def test_eviction_of_a_held_pod_is_refused_so_that_drain_comes_again() -> None:
    answer = decide_eviction(parse_eviction(REVIEW), HELD, NOW)
    response = build_eviction_response("u", answer)["response"]
    # no reason and no details: the API server would make a Retry-After of them
    assert response == {
        "uid": "u",
        "allowed": False,
        "status": {
            "code": 429,
            "message": "run team-a/llama is held on node node-17, state Requested: waiting until "
            "the trainer begins a save; released at the latest at 2026-11-29T12:10:00Z (in 10m)",
        },
    }
    assert answer.eviction == Eviction(node="node-17", requested_by="admin", at=NOW)


def test_eviction_again_tells_what_is_awaited_and_counts_from_the_first() -> None:
    facts = replace(HELD, drain=FLUSHING, backlog="41Gi")
    answer = decide_eviction(parse_eviction(REVIEW), facts, NOW)
    assert answer.eviction is None
    assert answer.message == (
        "run team-a/llama is held on node node-17, state Flushing: step 120 is sealed and is "
        "copied to the remote tier, 41Gi left to copy; released at the latest at "
        "2026-11-29T12:09:05Z (in 9m5s)"
    )


def test_eviction_before_the_first_is_recorded_keeps_the_first_ones_clock() -> None:
    first = Eviction(node="node-17", requested_by="other", at=NOW - timedelta(seconds=5))
    answer = decide_eviction(parse_eviction(REVIEW), replace(HELD, pending=first), NOW)
    assert answer.eviction == first
    assert "2026-11-29T12:09:55Z (in 9m55s)" in answer.message


def test_eviction_of_a_blocking_policy_promises_no_release() -> None:
    facts = replace(HELD, limits=replace(LIMITS, blocks_at_deadline=True), drain=FLUSHING)
    later = NOW + timedelta(hours=1)
    answer = decide_eviction(parse_eviction(REVIEW), facts, later)
    assert "held until it is done" in answer.message
    assert "at the latest" not in answer.message


def test_eviction_without_a_known_run_passes_with_a_warning() -> None:
    answer = decide_eviction(parse_eviction(REVIEW), replace(HELD, is_known=False), NOW)
    response = build_eviction_response("u", answer)["response"]
    assert response["warnings"] == [
        "no CheckpointRun team-a/llama is known: nothing was saved for this eviction"
    ]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"dryRun": True}, id="request"),
        pytest.param({"object": {"deleteOptions": {"dryRun": ["All"]}}}, id="body"),
        pytest.param({"options": {"dryRun": ["All"]}}, id="options"),
    ],
)
def test_eviction_dry_run_is_refused_and_records_nothing(changes: Any) -> None:
    answer = decide_eviction(parse_eviction(a_review(**changes)), HELD, NOW)
    assert answer.verdict is Verdict.HELD
    assert answer.eviction is None
    assert "would ask for a save" in answer.message


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"object": {"apiVersion": "policy/v1beta1", "kind": "Eviction"}}, id="v1beta1"
        ),
        pytest.param({"object": None, "options": None, "userInfo": None}, id="almost-empty"),
        pytest.param({"object": {"deleteOptions": {"preconditions": {"uid": "x"}}}}, id="options"),
    ],
)
def test_eviction_of_any_form_is_understood(changes: Any) -> None:
    request = parse_eviction(a_review(**changes))
    assert (request.namespace, request.pod, request.is_dry_run) == ("team-a", "p0", False)


@given(left=st.integers(-600, 90_000))
def test_eviction_message_always_names_run_node_state_and_latest_release(left: int) -> None:
    drain = replace(FLUSHING, deadline=NOW + timedelta(seconds=left))
    message = decide_eviction(parse_eviction(REVIEW), replace(HELD, drain=drain), NOW).message
    for part in ("team-a/llama", "node-17", "Flushing", "step 120", "latest at 2026-"):
        assert part in message
