import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.errors import Reject
from tidegate_operator.settings import load_settings, parse_settings

# What the chart renders from its default values, with one remote tier of each kind.
FULL = {
    "namespace": "tidegate-system",
    "gate": {"service": "tidegate-gate", "secret": "tidegate-gate-tls", "port": 8443},
    "anchor": "tidegate-anchor",
    "webhooks": {"mutating": "tidegate-inject", "validating": "tidegate-evict"},
    "lease": "tidegate-controller",
    "tiers": {
        "local": [
            {
                "name": "nvme",
                "path": "/var/lib/tidegate",
                "requireMountPoint": False,
                "maxUsePercent": 80,
                "gid": 64738,
                "orphanTTL": "168h",
            }
        ],
        "remote": [{"name": "pfs", "hostPath": "/mnt/pfs"}, {"name": "c", "claimName": "pfs"}],
    },
    "sidecar": {"image": "tidegate/sidecar:1", "pullPolicy": "IfNotPresent", "resources": {}},
    "drain": {
        "enabled": True,
        "maxHoldLimit": "30m",
        "allowBlock": False,
        "releaseTTL": "3m",
        "contactTimeout": "60s",
    },
    "certs": {"mode": "operator", "caDuration": "87600h", "duration": "2160h"},
    "nodeAnnotations": {"enabled": True},
}


def changed(path: str, value: Any) -> str:
    document = json.loads(json.dumps(FULL))
    *parents, last = path.split(".")
    place = document
    for part in parents:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    return json.dumps(document)


def test_settings_of_the_chart_are_read() -> None:
    settings = parse_settings(json.dumps(FULL), "config.json")
    assert settings.tiers.local[0].orphan_ttl == timedelta(days=7)
    assert settings.drain.release_ttl == timedelta(minutes=3)
    assert [tier.host_path for tier in settings.tiers.remote] == ["/mnt/pfs", None]


@pytest.mark.parametrize(
    ("path", "value", "want"),
    [
        ("gate.port", 0, "gate.port: must be greater than or equal to 1"),
        ("gate.prot", 1, "gate.prot: is not a known setting"),
        ("drain.releaseTTL", "3 minutes", "drain.releaseTTL: must be a duration such as 10m"),
        ("certs.mode", "magic", "certs.mode: must be 'operator', 'certManager' or"),
        ("certs.duration", "1m", "certs: must have a duration of at least 1h"),
        ("certs.caDuration", "3000h", "certs: must have a caDuration of at least twice"),
        ("tiers.local.0.path", "var", "tiers.local.0.path: must be an absolute path"),
        ("tiers.local.0.path", "/", "tiers.local.0.path: must be an absolute path"),
        ("tiers.local.0.path", "/a/../b", "tiers.local.0.path: must be an absolute path"),
        ("tiers.remote", [{"name": "x"}], "tiers.remote.0: must have exactly one of hostPath"),
        ("tiers.remote", [FULL["tiers"]["remote"][0]] * 2, "tiers: remote has two tiers"),  # type: ignore[index]
        ("namespace", None, "namespace: must be a valid string"),
    ],
)
def test_settings_bad_value_is_one_sentence(path: str, value: Any, want: str) -> None:
    with pytest.raises(Reject) as caught:
        parse_settings(changed(path, value), "config.json")
    assert str(caught.value).startswith(f"config.json: {want}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("{", "config.json: the document: Invalid JSON"),
        ("{}", "config.json: namespace: is required"),
        ("[]", "config.json: the document: must be an object"),
    ],
)
def test_settings_bad_document_is_one_sentence(text: str, want: str) -> None:
    with pytest.raises(Reject) as caught:
        parse_settings(text, "config.json")
    assert str(caught.value).startswith(want)


def test_settings_file_is_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    environment = {"TIDEGATE_CONFIG": str(file)}
    with pytest.raises(Reject, match=r"config\.json: No such file or directory; TIDEGATE_CONFIG"):
        load_settings(environment)
    file.write_text(json.dumps(FULL))
    assert load_settings(environment).lease == "tidegate-controller"
