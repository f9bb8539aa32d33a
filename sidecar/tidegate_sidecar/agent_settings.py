"""What the agent works by: the operator's settings file, read with the standard library. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate_contract import keys
from tidegate_contract.errors import Reject
from tidegate_sidecar.settings import parse_metrics_port

ENV_CONFIG = "TIDEGATE_CONFIG"
CONFIG_FILE = "/etc/tidegate/config.json"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTier:
    """A local tier of the admin.

    Attributes:
        name: of the tier.
        host_path: its root, as pods' volumes name it.
        root: its root, as this process sees it.
        gid: group of everything on it.
        require_mount_point: refuse it while it is no mount of its own.
    """

    name: str
    host_path: str
    root: Path
    gid: int
    require_mount_point: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTier:
    """A remote tier of the admin.

    Attributes:
        name: of the tier.
        host_path: its root, as pods' volumes name it; None for a claim.
        root: its root, as this process sees it.
    """

    name: str
    host_path: str | None
    root: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """How the API server is reached.

    Attributes:
        host, port: of its Service.
        ca_file, token_file: of the service account; the token is read anew for each request.
    """

    host: str
    port: int
    ca_file: Path
    token_file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Of one agent.

    Attributes:
        node: name of the node.
        local, remote: the admin's tiers.
        api: the API server.
        metrics_port: 0 serves nothing.
    """

    node: str
    local: tuple[LocalTier, ...]
    remote: tuple[RemoteTier, ...]
    api: ApiServer
    metrics_port: int


def parse_agent_settings(config: bytes, env: Mapping[str, str]) -> AgentSettings:
    """Settings from the operator's file and the pod's environment.

    Raises:
        Reject: a value is missing or wrong; the sentence names it.
    """
    try:
        tiers = json.loads(config)["tiers"]
        local = tuple(_local(tier) for tier in tiers.get("local", ()))
        remote = tuple(_remote(tier) for tier in tiers.get("remote", ()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Reject(f"settings: tiers are not as they must be ({error!r})") from error
    node = env.get(keys.ENV_NODE, "")
    host = env.get("KUBERNETES_SERVICE_HOST", "")
    port = env.get("KUBERNETES_SERVICE_PORT", "443")
    if not node:
        raise Reject(f"{keys.ENV_NODE} is not set")
    if not host or not port.isdecimal():
        raise Reject("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT name no API server")
    return AgentSettings(
        node=node,
        local=local,
        remote=remote,
        api=ApiServer(
            host=host,
            port=int(port),
            ca_file=SERVICE_ACCOUNT / "ca.crt",
            token_file=SERVICE_ACCOUNT / "token",
        ),
        metrics_port=parse_metrics_port(env),
    )


def _local(tier: Mapping[str, Any]) -> LocalTier:
    return LocalTier(
        name=str(tier["name"]),
        host_path=str(tier["path"]),
        root=Path(keys.AGENT_LOCAL_TIERS, tier["name"]),
        gid=int(tier["gid"]),
        require_mount_point=bool(tier.get("requireMountPoint", False)),
    )


def _remote(tier: Mapping[str, Any]) -> RemoteTier:
    host_path = tier.get("hostPath")
    return RemoteTier(
        name=str(tier["name"]),
        host_path=None if host_path is None else str(host_path),
        root=Path(keys.AGENT_REMOTE_TIERS, tier["name"]),
    )
