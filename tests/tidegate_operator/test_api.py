from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidegate_contract.errors import Reject
from tidegate_operator.api import PolicyRuns, PolicyStatus, parse_policy
from tidegate_operator.api_spec import DrainMode, LocalType, OnDeadline, RemoteType

SAMPLE = """
apiVersion: tidegate.io/v1alpha1
kind: CheckpointPolicy
metadata: {name: default, namespace: team-a}
spec:
  cadence: {by: Tokens, tokens: 50000000}
  remote: {type: Claim, claimName: pfs, every: 2, keep: 5, bandwidthPerNode: 800Mi}
  drain: {maxHold: 15m}
"""
REFUSED = yaml.safe_load(
    Path(__file__).with_name("refused_policies.yaml").read_text(encoding="utf-8")
)


def a_policy(**spec: Any) -> dict[str, Any]:
    """The smallest good policy with fields laid over it; None takes a field away."""
    merged: dict[str, Any] = {"remote": {"type": "Claim", "claimName": "pfs"}}
    for name, value in deepcopy(spec).items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = merged[name] | value if both else value
        if isinstance(merged[name], dict):
            merged[name] = {key: part for key, part in merged[name].items() if part is not None}
    return {"metadata": {"name": "default", "namespace": "team-a"}, "spec": merged}


def test_policy_sample_of_the_documentation_is_read() -> None:
    policy = parse_policy(yaml.safe_load(SAMPLE))

    assert (policy.metadata.namespace, policy.metadata.name) == ("team-a", "default")
    assert policy.spec.cadence.token_interval == 50_000_000
    assert policy.spec.remote.type is RemoteType.CLAIM
    assert policy.spec.remote.bandwidth_per_node == 800 * 2**20
    assert policy.spec.remote.every == 2
    assert policy.spec.drain.max_hold == timedelta(minutes=15)


def test_policy_with_only_a_remote_has_all_defaults() -> None:
    spec = parse_policy(a_policy()).spec

    assert spec.cadence.by == "Tokens"
    assert spec.local.type is LocalType.TIER
    assert spec.local.tier is None
    assert spec.drain.mode is DrainMode.ENFORCE
    assert spec.drain.freshness == timedelta(seconds=60)
    assert spec.drain.on_deadline is OnDeadline.RELEASE
    assert spec.recovery.wait_for_flush == timedelta(minutes=5)
    assert spec.sidecar.metrics_port == 9464
    assert spec.history_ttl == timedelta(days=30)


@pytest.mark.parametrize(
    ("cadence", "want"),
    [
        pytest.param({}, 50_000_000, id="default"),
        pytest.param({"by": "Tokens"}, 50_000_000, id="tokens-absent"),
        pytest.param({"by": "Tokens", "tokens": 7}, 7, id="tokens-given"),
        pytest.param({"by": "Steps", "steps": 7}, None, id="by-steps"),
        pytest.param({"by": "Interval", "interval": "10m"}, None, id="by-interval"),
        pytest.param({"by": "Auto", "auto": {"maxLoss": "10m"}}, None, id="by-auto"),
    ],
)
def test_token_interval_holds_only_for_tokens(cadence: dict[str, Any], want: int | None) -> None:
    assert parse_policy(a_policy(cadence=cadence)).spec.cadence.token_interval == want


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in REFUSED])
def test_bad_policy_is_refused_in_one_sentence_naming_the_field(case: dict[str, Any]) -> None:
    with pytest.raises(Reject) as refusal:
        parse_policy(a_policy(**case["spec"]))

    sentence = str(refusal.value)
    assert sentence.startswith("CheckpointPolicy team-a/default: ")
    field = sentence.removeprefix("CheckpointPolicy team-a/default: ").split(" ")[0]
    assert field.rstrip(":") == case["field"]
    assert case.get("says", "") in sentence
    assert "\n" not in sentence


def test_bad_value_is_quoted_shortened() -> None:
    with pytest.raises(Reject) as refusal:
        parse_policy(a_policy(remote={"path": "x" * 5000}))
    assert len(str(refusal.value)) < 200


def test_object_without_metadata_is_refused() -> None:
    with pytest.raises(Reject, match="CheckpointPolicy without a name: metadata is required"):
        parse_policy({"spec": {"remote": {"type": "Tier", "tier": "pfs"}}})


def test_fields_of_a_newer_minor_are_ignored() -> None:
    raw = a_policy(drain={"suspend": {"by": "Kueue"}, "maxHold": "15m"}, budget={"perDay": 3})
    raw["status"] = {"runs": {"active": 1, "paused": 2}}

    policy = parse_policy(raw)

    assert policy.spec.drain.max_hold == timedelta(minutes=15)
    assert policy.status.runs == PolicyRuns(active=1)


def test_status_writes_only_what_was_set() -> None:
    status = PolicyStatus(observed_generation=3, runs=PolicyRuns(active=1))
    assert status.to_wire() == {"observedGeneration": 3, "runs": {"active": 1}}


def test_policy_written_is_read_back() -> None:
    policy = parse_policy(yaml.safe_load(SAMPLE))
    assert parse_policy(policy.to_wire()) == policy


def test_policy_is_immutable() -> None:
    policy = parse_policy(a_policy())
    with pytest.raises(ValueError, match="frozen"):
        policy.spec.local.keep = 3
