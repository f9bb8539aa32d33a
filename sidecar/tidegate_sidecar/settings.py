"""What a flusher works by: from the environment that the injector or the trainer set. Pure."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tidegate_contract import keys
from tidegate_contract.document import decode
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.layout import check_run_name
from tidegate_contract.wire import Policy

DEFAULT_METRICS_PORT = 9464


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Where the lead reports to.

    Attributes:
        url: with the Service's address, as pods on the host network resolve no names.
        server_name: what the gate's certificate is checked against.
        ca: PEM text.
        token_file: read anew for each report; its content is rotated.
    """

    url: str
    server_name: str
    ca: str
    token_file: str = keys.TOKEN_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of one flusher.

    Attributes:
        run: `namespace/name`; empty for a single pass by hand.
        local: the run's folder on this node.
        remote_root: existing folder, trusted; the tier's root in a pod.
        remote: the run's folder below it.
        may_create: make the remote folder where it is missing.
        policy: the values at admission; live ones come with the gate's replies.
        pod, pod_uid: of this sidecar; empty outside Kubernetes.
        gate: None where there is none.
        metrics_port: 0 serves nothing.
        is_single_pass: flush what is there and end; tells no trainer and deletes nothing.
    """

    run: str = ""
    local: Path
    remote_root: Path
    remote: str
    may_create: bool = False
    policy: Policy
    pod: str = ""
    pod_uid: str = ""
    gate: Gate | None = None
    metrics_port: int = 0
    is_single_pass: bool = False


def parse_settings(env: Mapping[str, str]) -> Settings:
    """Settings of `flush` in a pod, or as the child of a trainer.

    Raises:
        Reject: a value is missing or wrong; the sentence names it.
    """
    run = check_run_name(_required(env, keys.ENV_RUN))
    remote_root, remote = split_remote(Path(_required(env, keys.ENV_REMOTE)))
    return Settings(
        run=run,
        local=_absolute(keys.ENV_LOCAL, _required(env, keys.ENV_LOCAL)),
        remote_root=remote_root,
        remote=remote,
        policy=parse_policy(env),
        pod=env.get(keys.ENV_POD, ""),
        pod_uid=env.get(keys.ENV_POD_UID, ""),
        gate=_gate(env),
        metrics_port=parse_metrics_port(env),
    )


def split_remote(path: Path) -> tuple[Path, str]:
    """The part of a remote path that is trusted, and the rest.

    In a pod it is the tier's root: below it other tenants write. Elsewhere the path is the user's.

    Raises:
        Reject: the path is relative or holds `..`.
    """
    path = _absolute(keys.ENV_REMOTE, str(path))
    root = Path(keys.REMOTE_MOUNT)
    if path.is_relative_to(root):
        return root, str(path.relative_to(root))
    return path, "."


def parse_policy(env: Mapping[str, str]) -> Policy:
    """The injected policy; the defaults where there is none.

    Raises:
        Reject: it is not such a document.
    """
    text = env.get(keys.ENV_POLICY)
    if not text:
        return Policy()
    try:
        return decode(Policy, text.encode(), keys.ENV_POLICY)
    except Corrupt as error:
        raise Reject(str(error)) from error


def parse_metrics_port(env: Mapping[str, str]) -> int:
    """The port for metrics and health; 0 serves nothing.

    Raises:
        Reject: it is no port.
    """
    text = env.get(keys.ENV_METRICS_PORT, str(DEFAULT_METRICS_PORT))
    if not text.isdecimal() or int(text) > 65535:
        raise Reject(f"{keys.ENV_METRICS_PORT} is {text[:20]!r}: allowed is 0 to 65535")
    return int(text)


def _gate(env: Mapping[str, str]) -> Gate | None:
    url = env.get(keys.ENV_GATE_URL)
    if not url:
        return None
    if not url.startswith("https://"):
        raise Reject(f"{keys.ENV_GATE_URL} is {url[:80]!r}: allowed is https://HOST:PORT")
    return Gate(
        url=url,
        server_name=_required(env, keys.ENV_GATE_SERVER_NAME),
        ca=_required(env, keys.ENV_GATE_CA),
    )


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise Reject(f"{name} is not set")
    return value


def _absolute(name: str, value: str) -> Path:
    path = Path(value)
    if not path.is_absolute() or os.pardir in path.parts:
        raise Reject(f"{name} is {value[:200]!r}: allowed is an absolute path without '..'")
    return path
