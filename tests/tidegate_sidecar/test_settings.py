from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tidegate_contract import keys
from tidegate_contract.document import encode
from tidegate_contract.errors import Reject
from tidegate_contract.wire import Policy
from tidegate_sidecar import health as health_module
from tidegate_sidecar.faults import Reason, backoff_seconds
from tidegate_sidecar.health import Health, serve
from tidegate_sidecar.settings import parse_settings

ENV = {
    keys.ENV_RUN: "team/bytelm",
    keys.ENV_LOCAL: "/tidegate/local",
    keys.ENV_REMOTE: "/tidegate/remote/x/team/bytelm",
    keys.ENV_POD_UID: "uid-0",
}


def test_settings_in_a_pod_trust_only_the_tiers_root() -> None:
    settings = parse_settings(ENV | {keys.ENV_POLICY: encode(Policy(local_keep=9)).decode()})
    assert (settings.remote_root, settings.remote) == (Path("/tidegate/remote"), "x/team/bytelm")
    assert settings.policy.local_keep == 9
    assert settings.gate is None
    assert settings.metrics_port == 9464


def test_settings_name_the_gate() -> None:
    gate = {
        keys.ENV_GATE_URL: "https://10.0.0.1:443",
        keys.ENV_GATE_SERVER_NAME: "gate.svc",
        keys.ENV_GATE_CA: "PEM",
    }
    found = parse_settings(ENV | gate).gate
    assert found is not None
    assert (found.url, found.server_name, found.ca) == ("https://10.0.0.1:443", "gate.svc", "PEM")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (keys.ENV_RUN, ""),
        (keys.ENV_RUN, "bytelm"),
        (keys.ENV_RUN, "team/../x"),
        (keys.ENV_LOCAL, ""),
        (keys.ENV_LOCAL, "relative"),
        (keys.ENV_REMOTE, "/tidegate/remote/../x"),
        (keys.ENV_POLICY, "{}"),
        (keys.ENV_GATE_URL, "http://10.0.0.1"),
        (keys.ENV_GATE_URL, "https://10.0.0.1"),
        (keys.ENV_METRICS_PORT, "70000"),
        (keys.ENV_METRICS_PORT, "-1"),
    ],
)
def test_settings_that_are_wrong_name_the_variable(name: str, value: str) -> None:
    with pytest.raises(Reject, match=r"TIDEGATE_|run name"):
        parse_settings(ENV | {name: value})


@pytest.mark.parametrize(
    ("reason", "failures", "want"),
    [
        (Reason.STALLED, 1, 1.0),
        (Reason.STALLED, 2, 10.0),
        (Reason.STALLED, 3, 20.0),
        (Reason.STALLED, 50, 300.0),
        (Reason.NO_SPACE, 1, 10.0),
        (Reason.NO_SPACE, 50, 60.0),
        (Reason.QUOTA, 50, 60.0),
        (Reason.DENIED, 1, 30.0),
        (Reason.READ_ONLY, 50, 300.0),
    ],
)
def test_backoff(reason: Reason, failures: int, want: float) -> None:
    assert backoff_seconds(reason, failures, 0.5) == pytest.approx(want)
    assert backoff_seconds(reason, failures, 0.0) == pytest.approx(0.8 * want)


@pytest.fixture
def a_server() -> Iterator[Callable[[Health], str]]:
    """Serves a health on a port that is free and gives its address."""
    servers: list[Any] = []

    def build(health: Health) -> str:
        for port in range(19464, 19564):
            server = serve(health, port)
            if server is not None:
                servers.append(server)
                return f"http://127.0.0.1:{port}"
        raise AssertionError("no free port")

    yield build
    for server in servers:
        server.shutdown()
        server.server_close()


def test_health_is_good_while_the_loop_beats_whatever_the_remote_tier_does(
    a_server: Callable[[Health], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    health = Health()
    address = a_server(health)
    health.beat(remote="Stalled", message="no progress for 120 s")
    with urlopen(f"{address}/healthz") as answer:
        assert b"no progress for 120 s" in answer.read()
    monkeypatch.setattr(health_module, "SILENT_SECONDS", -1.0)
    with pytest.raises(HTTPError) as failure:
        urlopen(f"{address}/healthz")
    failure.value.close()
    assert failure.value.code == 503


def test_metrics_are_served(a_server: Callable[[Health], str]) -> None:
    health = Health()
    health.metrics.backlog_bytes.set(1234)
    with urlopen(f"{a_server(health)}/metrics") as answer:
        text = answer.read().decode()
    assert "tidegate_backlog_bytes 1234.0" in text
    for name in (
        "backlog_steps",
        "flush_seconds",
        "seconds_since_durable",
        "verify_failures",
        "leaked_children",
    ):
        assert f"tidegate_{name}" in text


def test_port_that_is_taken_ends_nothing(a_server: Callable[[Health], str]) -> None:
    address = a_server(Health())
    assert serve(Health(), int(address.rsplit(":", 1)[1])) is None
    assert serve(Health(), 0) is None
