from datetime import timedelta
from typing import Any

import pytest

from tidegate_contract.cadence import Cadence, CadenceKind
from tidegate_contract.document import decode, encode
from tidegate_contract.errors import Reject
from tidegate_contract.wire import OnBusy, Policy
from tidegate_operator.api import CheckpointPolicy, parse_policy
from tidegate_operator.api_run import RunDrainMode
from tidegate_operator.api_run_status import RunTiers
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.effective import (
    LocalPlace,
    RemotePlace,
    build_hold_limits,
    build_run_tiers,
    build_wire_policy,
    decide_mode,
    find_places,
)
from tidegate_operator.settings import DrainSettings, TierSettings

TIERS = TierSettings.model_validate(
    {
        "local": [
            {"name": "nvme", "path": "/var/lib/tidegate", "gid": 700},
            {"name": "ram", "path": "/mnt/ram", "gid": 701},
        ],
        "remote": [{"name": "pfs", "hostPath": "/mnt/pfs"}, {"name": "nfs", "claimName": "nfs"}],
    }
)
PFS = {"type": "Tier", "tier": "pfs"}


def a_policy(**spec: Any) -> CheckpointPolicy:
    return parse_policy(
        {"metadata": {"name": "p", "namespace": "ns"}, "spec": {"remote": PFS} | spec}
    )


def test_wire_policy_of_defaults_is_the_contracts_default() -> None:
    policy = build_wire_policy(a_policy().spec)
    assert policy == Policy()
    assert decode(Policy, encode(policy), "policy") == policy


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        pytest.param({"by": "Tokens", "tokens": 7}, Cadence(tokens=7), id="tokens"),
        pytest.param(
            {"by": "Steps", "steps": 5}, Cadence(by=CadenceKind.STEPS, steps=5), id="steps"
        ),
        pytest.param(
            {"by": "Interval", "interval": "90s", "minInterval": "1m"},
            Cadence(by=CadenceKind.INTERVAL, interval_seconds=90.0, min_interval_seconds=60.0),
            id="interval",
        ),
        pytest.param(
            {"by": "Auto", "auto": {"maxLoss": "10m", "mtbf": "36h"}},
            Cadence(by=CadenceKind.AUTO, max_loss_seconds=600.0, mtbf_seconds=129600.0),
            id="auto",
        ),
    ],
)
def test_wire_policy_takes_the_cadence_as_it_is_written(spec: Any, want: Cadence) -> None:
    assert build_wire_policy(a_policy(cadence=spec).spec).cadence == want


def test_wire_policy_takes_every_value_in_its_unit() -> None:
    spec = a_policy(
        local={"type": "Tier", "quota": "1Gi", "keep": 9, "highWatermarkPercent": 60},
        remote=PFS | {"every": 4, "keep": 5, "bandwidthPerNode": "2Mi", "stallTimeout": "30s"},
        save={"onBusy": "Skip", "timeout": "1m"},
        drain={"freshness": "5s"},
        recovery={"onRemoteUnreachable": "LocalOnly", "onUnrestorable": "StartFresh"},
    ).spec
    policy = build_wire_policy(spec)
    assert policy == Policy(
        local_quota_bytes=2**30,
        local_keep=9,
        high_watermark_percent=60,
        remote_every=4,
        remote_keep=5,
        bandwidth_bytes_per_second=2**21,
        stall_timeout_seconds=30.0,
        on_busy=OnBusy.SKIP,
        save_timeout_seconds=60.0,
        freshness_seconds=5.0,
        remote_unreachable_is_error=False,
        start_fresh_when_unrestorable=True,
    )


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        pytest.param({}, ("nvme", "/var/lib/tidegate", 700), id="first-tier-by-default"),
        pytest.param({"type": "Tier", "tier": "ram"}, ("ram", "/mnt/ram", 701), id="named-tier"),
        pytest.param({"type": "EmptyDir", "emptyDir": {}}, ("EmptyDir", None, None), id="emptydir"),
    ],
)
def test_places_local_follows_the_policy(spec: Any, want: tuple[str, str, int]) -> None:
    policy = a_policy(local=spec) if spec else a_policy()
    local = find_places(policy, "run", TIERS).local
    assert (local.name, local.path, local.gid) == want


@pytest.mark.parametrize(
    ("spec", "want", "path"),
    [
        pytest.param(PFS, RemotePlace(name="tier/pfs", host_path="/mnt/pfs"), "ns/run", id="tier"),
        pytest.param(
            {"type": "Tier", "tier": "nfs", "path": "llm/a"},
            RemotePlace(name="tier/nfs", claim_name="nfs"),
            "llm/a/ns/run",
            id="tier-by-claim-below-a-path",
        ),
        pytest.param(
            {"type": "Claim", "claimName": "mine"},
            RemotePlace(name="claim/mine", claim_name="mine"),
            "ns/run",
            id="claim",
        ),
    ],
)
def test_places_remote_follows_the_policy(spec: Any, want: RemotePlace, path: str) -> None:
    places = find_places(a_policy(remote=spec), "run", TIERS)
    assert (places.remote, places.remote_path) == (want, path)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"remote": PFS | {"path": "deep"}}, id="tiers"),
        pytest.param({"local": {"type": "EmptyDir", "emptyDir": {}}}, id="emptydir"),
        pytest.param({"remote": {"type": "Claim", "claimName": "mine"}}, id="claim"),
    ],
)
def test_places_pinned_read_back_whatever_the_policy_says_now(spec: Any) -> None:
    places = find_places(a_policy(**spec), "run", TIERS)
    changed = a_policy(
        local={"type": "Tier", "tier": "ram"}, remote={"type": "Tier", "tier": "nfs"}
    )
    assert find_places(changed, "run", TIERS, build_run_tiers(places)) == places


@pytest.mark.parametrize(
    ("spec", "pinned", "sentence"),
    [
        pytest.param(
            {"local": {"type": "Tier", "tier": "gone"}},
            None,
            "policy ns/p: spec.local.tier 'gone' is no tier of this installation; it has nvme, ram",
            id="local",
        ),
        pytest.param(
            {"remote": {"type": "Tier", "tier": "gone"}},
            None,
            "policy ns/p: spec.remote.tier 'gone' is no tier of this installation; it has pfs, nfs",
            id="remote",
        ),
        pytest.param(
            {},
            RunTiers(local="nvme", remote="tier/gone", path="ns/run"),
            "run ns/run: status.tiers.remote 'gone' is no tier of this installation; "
            "it has pfs, nfs",
            id="pinned",
        ),
    ],
)
def test_places_unknown_tier_is_refused_by_name(
    spec: Any, pinned: RunTiers | None, sentence: str
) -> None:
    with pytest.raises(Reject) as caught:
        find_places(a_policy(**spec), "run", TIERS, pinned)
    assert str(caught.value) == sentence


def test_places_without_any_local_tier_is_refused() -> None:
    with pytest.raises(Reject, match="this installation has no local tier"):
        find_places(a_policy(), "run", TierSettings())


def test_place_of_an_emptydir_carries_its_limit() -> None:
    policy = a_policy(local={"type": "EmptyDir", "emptyDir": {"sizeLimit": "1Gi"}})
    want = LocalPlace(name="EmptyDir", size_limit_bytes=2**30)
    assert find_places(policy, "run", TIERS).local == want


@pytest.mark.parametrize(
    ("drain", "settings", "hold", "blocks"),
    [
        pytest.param({"maxHold": "10m"}, {}, 600, False, id="policy-below-limit"),
        pytest.param({"maxHold": "2h"}, {}, 1800, False, id="clamped-to-limit"),
        pytest.param({"onDeadline": "Block"}, {}, 600, False, id="block-not-allowed"),
        pytest.param({"onDeadline": "Block"}, {"allowBlock": True}, 600, True, id="block-allowed"),
    ],
)
def test_hold_limits_stay_within_the_installations(
    drain: Any, settings: Any, hold: int, blocks: bool
) -> None:
    limits = build_hold_limits(
        a_policy(drain=drain).spec.drain, DrainSettings.model_validate(settings)
    )
    assert (limits.max_hold, limits.blocks_at_deadline) == (timedelta(seconds=hold), blocks)


@pytest.mark.parametrize(
    ("policy", "run", "enabled", "want"),
    [
        ("Enforce", "Inherit", True, DrainMode.ENFORCE),
        ("Enforce", "Observe", True, DrainMode.OBSERVE),
        ("Observe", "Inherit", True, DrainMode.OBSERVE),
        ("Observe", "Off", True, DrainMode.OFF),
        ("Off", "Observe", True, DrainMode.OFF),
        ("Enforce", "Inherit", False, DrainMode.OFF),
    ],
)
def test_mode_is_the_mildest_of_policy_run_and_installation(
    policy: str, run: str, enabled: bool, want: DrainMode
) -> None:
    drain = a_policy(drain={"mode": policy}).spec.drain
    assert decide_mode(drain, RunDrainMode(run), DrainSettings(enabled=enabled)) is want
