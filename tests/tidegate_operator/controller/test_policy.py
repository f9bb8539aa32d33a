from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_operator.controller.facts import PolicyFacts, RunNote
from tidegate_operator.controller.policy import decide_policy_status, describe_miss
from tidegate_operator.kube.kinds import Key
from tidegate_operator.settings import Settings

Build = Callable[..., Any]


def reasons(wire: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in wire["conditions"]}


@pytest.fixture
def status(now: datetime, settings: Settings, a_policy: Build) -> Build:
    """The status of a policy on the wire; `spec` are fields of its spec."""

    def build(spec: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
        found = PolicyFacts(policy=a_policy(**(spec or {})), **facts)
        return decide_policy_status(found, settings, now).to_wire()

    return build


def test_policy_with_pods_and_runs_counts_the_live_ones(status: Build, a_pod: Build) -> None:
    policy = Key("team-a", "default")
    wire = status(
        pods=(a_pod("a"), a_pod("b", phase="Failed"), a_pod("c", injected=False)),
        runs=(RunNote(policy=policy, is_active=True), RunNote(policy=policy)),
    )
    assert wire["observedGeneration"] == 3
    assert wire["runs"] == {"active": 1, "total": 2}
    assert wire["pods"] == {"injected": 1, "missed": 1}
    assert [one["name"] for one in wire["missedPods"]] == ["c"]
    assert wire["effective"] == {
        "localTier": "nvme",
        "remote": "tier/pfs",
        "maxHold": "10m",
        "onDeadline": "Release",
    }


@pytest.mark.parametrize(
    ("pods", "injecting", "ready"),
    [
        ([], ("Unknown", "NoPods"), ("True", "NoPods")),
        ([{}], ("True", "AllInjected"), ("True", "AllInjected")),
        ([{}, {"injected": False}], ("False", "PodsMissed"), ("False", "PodsMissed")),
    ],
    ids=["none", "injected", "missed"],
)
def test_policy_injecting_and_ready_follow_its_pods(
    status: Build, a_pod: Build, pods: Any, injecting: Any, ready: Any
) -> None:
    found = tuple(a_pod(f"pod-{index}", **over) for index, over in enumerate(pods))
    got = reasons(status(pods=found))
    assert got == {"Accepted": ("True", "Valid"), "Injecting": injecting, "Ready": ready}


@pytest.mark.parametrize(
    ("spec", "claim", "want"),
    [
        ({"local": {"type": "Tier", "tier": "x"}}, None, "UnknownTier"),
        ({"remote": {"type": "Tier", "tier": "x"}}, None, "UnknownTier"),
        ({"remote": {"type": "Claim", "claimName": "c"}}, "c", "ClaimMissing"),
        ({"remote": {"type": "Claim", "claimName": "c"}}, None, "Valid"),
        ({"drain": {"onDeadline": "Block"}}, None, "NotAllowed"),
    ],
)
def test_policy_accepted_names_what_cannot_be_followed(
    status: Build, spec: Any, claim: str | None, want: str
) -> None:
    wire = status(spec, missing_claim=claim)
    is_valid = want == "Valid"
    assert reasons(wire)["Accepted"] == (str(is_valid), want)
    assert reasons(wire)["Ready"] == (str(is_valid), "NoPods" if is_valid else want)
    assert wire["effective"]["onDeadline"] == "Release"


def test_policy_lists_at_most_ten_missed_pods(status: Build, a_pod: Build) -> None:
    wire = status(pods=tuple(a_pod(f"pod-{n:02}", injected=False) for n in range(12)))
    assert wire["pods"]["missed"] == 12
    assert [one["name"] for one in wire["missedPods"]] == [f"pod-{n:02}" for n in range(10)]


@pytest.mark.parametrize(
    ("hour", "pod", "want"),
    [
        (12, {}, "created before the policy"),
        (10, {}, "the gate was not reachable when the pod was created, or refused it"),
        (
            10,
            {"metadata": {"generateName": "x-"}, "labels": {keys.RUN_LABEL: None}},
            "nothing named its run",
        ),
    ],
    ids=["older", "gate away", "nameless"],
)
def test_miss_is_described(a_pod: Build, hour: int, pod: Any, want: str) -> None:
    created = datetime(2026, 11, 29, hour, tzinfo=UTC)
    assert describe_miss(a_pod(injected=False, **pod), created).startswith(want)
