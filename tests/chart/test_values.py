import re
from typing import Any

import pytest

NVME = {"name": "nvme", "path": "/mnt/nvme"}
PFS = {"name": "pfs", "hostPath": "/mnt/pfs"}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key at the top": ({"gates": {}}, "gates"),
    "unknown key below": ({"drain": {"maxHold": "5m"}}, "/drain.*maxHold"),
    "key of a feature that is not there": ({"metrics": {}}, "metrics"),
    "relative local path": ({"tiers": {"local": [NVME | {"path": "mnt/nvme"}]}}, "/local/0/path"),
    "root as local path": ({"tiers": {"local": [NVME | {"path": "/"}]}}, "/tiers/local/0/path"),
    "path that climbs": ({"tiers": {"local": [NVME | {"path": "/mnt/../etc"}]}}, "/local/0/path"),
    "path with a dot": ({"tiers": {"local": [NVME | {"path": "/mnt/./x"}]}}, "/local/0/path"),
    "path with an end slash": ({"tiers": {"local": [NVME | {"path": "/mnt/"}]}}, "/local/0/path"),
    "path with an empty part": ({"tiers": {"local": [NVME | {"path": "//mnt"}]}}, "/local/0/path"),
    "relative remote path": (
        {"tiers": {"remote": [PFS, {"name": "b", "hostPath": "pfs"}]}},
        "/tiers/remote/1/hostPath",
    ),
    "tier without a name": ({"tiers": {"local": [{"path": "/mnt/nvme"}]}}, "/local/0.*name"),
    "tier name in capitals": ({"tiers": {"local": [NVME | {"name": "NVMe"}]}}, "/local/0/name"),
    "group of root": ({"tiers": {"local": [NVME | {"gid": 0}]}}, "/tiers/local/0/gid"),
    "local tier with a full disk": (
        {"tiers": {"local": [NVME | {"maxUsePercent": 100}]}},
        "/tiers/local/0/maxUsePercent",
    ),
    "local name twice": (
        {"tiers": {"local": [NVME, NVME | {"path": "/mnt/b"}]}},
        'tiers.local: the name "nvme" is given twice',
    ),
    "local path twice": (
        {"tiers": {"local": [NVME, NVME | {"name": "b"}]}},
        'tiers.local: the path "/mnt/nvme" is given twice',
    ),
    "remote name twice": (
        {"tiers": {"remote": [PFS, {"name": "pfs", "claimName": "pfs"}]}},
        'tiers.remote: the name "pfs" is given twice',
    ),
    "remote tier of two kinds": (
        {"tiers": {"remote": [PFS | {"claimName": "pfs"}]}},
        'tiers.remote: tier "pfs" must have exactly one of hostPath and claimName',
    ),
    "remote tier of no kind": (
        {"tiers": {"remote": [{"name": "pfs"}]}},
        'tiers.remote: tier "pfs" must have exactly one of hostPath and claimName',
    ),
    "duration without a unit": ({"drain": {"maxHoldLimit": "30"}}, "/drain/maxHoldLimit"),
    "digest without its method": ({"image": {"digest": "abc"}}, "/image/digest"),
    "unknown pull policy": ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
    "no gate": ({"gate": {"replicas": 0}}, "/gate/replicas"),
    "webhook that waits too long": (
        {"webhooks": {"injection": {"timeoutSeconds": 30}}},
        "/webhooks/injection/timeoutSeconds",
    ),
    "eviction webhook that blocks": (
        {"webhooks": {"eviction": {"failurePolicy": "Fail"}}},
        "/webhooks/eviction.*failurePolicy",
    ),
    "agent update of nothing": ({"agent": {"maxUnavailable": "0%"}}, "/agent/maxUnavailable"),
    "secret as plain text": ({"global": {"imagePullSecrets": ["s"]}}, "/imagePullSecrets/0"),
}


@pytest.mark.parametrize(("values", "want"), REFUSED.values(), ids=REFUSED.keys())
def test_values_that_are_wrong_are_refused_by_path(
    render: Any, values: dict[str, Any], want: str
) -> None:
    assert re.search(want, render(**values).error)


ACCEPTED: dict[str, dict[str, Any]] = {
    "two tiers of each kind": {
        "tiers": {
            "local": [NVME, {"name": "scratch", "path": "/local/.scratch-1"}],
            "remote": [PFS, {"name": "archive", "claimName": "archive.v1"}],
        }
    },
    "no tiers": {"tiers": {"local": [], "remote": []}},
    "resources taken away": {"gate": {"resources": None}, "agent": {"resources": {}}},
    "numbers as quantities": {"controller": {"resources": {"limits": {"cpu": 1}}}},
    "agents updated one by one": {"agent": {"maxUnavailable": 1}},
    "nothing but the gate and the controller": {
        "agent": {"enabled": False},
        "rbac": {"create": False},
        "serviceAccounts": {"create": False},
        "admissionPolicies": {"enabled": False},
        "crds": {"enabled": False},
    },
}


@pytest.mark.parametrize("values", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_values_that_are_right_are_rendered(render: Any, values: dict[str, Any]) -> None:
    assert render(**values).objects


def test_chart_lints_without_a_warning(lint: Any) -> None:
    assert not lint.error
    assert "[WARNING]" not in lint.text
