"""The operator's settings: one JSON file that the chart makes from its values.

Read once at start by both commands; the file is `/etc/tidegate/config.json`, or what
TIDEGATE_CONFIG names. A wrong file is one sentence that names the field.
"""

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from tidegate_contract.errors import Reject
from tidegate_operator.api_rules import wire_name
from tidegate_operator.api_types import Duration

ENV_CONFIG = "TIDEGATE_CONFIG"
CONFIG_FILE = Path("/etc/tidegate/config.json")

Name = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"),
]


def _check_path(path: str) -> str:
    if not re.fullmatch(r"(/[^/\x00]+)+", path) or {".", ".."} & set(path.split("/")):
        raise ValueError("must be an absolute path below / without . and .. parts")
    return path


AbsolutePath = Annotated[str, AfterValidator(_check_path), Field(max_length=1024)]


class _Model(BaseModel):
    model_config = ConfigDict(
        alias_generator=wire_name,
        validate_by_name=True,
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
    )


class GateSettings(_Model):
    """The gate's names and its port."""

    service: Name = "tidegate-gate"
    secret: Name = "tidegate-gate-tls"
    port: Annotated[int, Field(ge=1, le=65535)] = 8443


class WebhookSettings(_Model):
    """Names of the two webhook configurations."""

    mutating: Name = "tidegate-inject"
    validating: Name = "tidegate-evict"


class LocalTier(_Model):
    """A folder on every node."""

    name: Name
    path: AbsolutePath
    require_mount_point: bool = False
    max_use_percent: Annotated[int, Field(ge=1, le=100)] = 80
    gid: Annotated[int, Field(ge=1, le=2**31 - 1)] = 64738
    """Group of every folder on the tier; trainer and sidecar get it as a supplemental group."""
    orphan_ttl: Duration = timedelta(hours=168)


class RemoteTier(_Model):
    """A file system that all nodes share: mounted on each node, or a claim."""

    name: Name
    host_path: AbsolutePath | None = None
    claim_name: Name | None = None

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if (self.host_path is None) == (self.claim_name is None):
            raise ValueError("must have exactly one of hostPath and claimName")
        return self


class TierSettings(_Model):
    """The admin's tiers; the first local one is the default."""

    local: tuple[LocalTier, ...] = ()
    remote: tuple[RemoteTier, ...] = ()

    @model_validator(mode="after")
    def _has_unique_names(self) -> Self:
        for kind, tiers in (("local", self.local), ("remote", self.remote)):
            names = [tier.name for tier in tiers]
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{kind} has two tiers of the name {name!r}")
        return self


class SidecarSettings(_Model):
    """The injected container."""

    image: Annotated[str, Field(min_length=1)]
    pull_policy: Annotated[str, Field(pattern="^(Always|IfNotPresent|Never)$")] = "IfNotPresent"
    resources: dict[str, Any] = Field(default_factory=dict)


class DrainSettings(_Model):
    """The admin's bounds on what drains meet."""

    enabled: bool = True
    max_hold_limit: Duration = timedelta(minutes=30)
    allow_block: bool = False
    release_ttl: Duration = timedelta(minutes=3)
    contact_timeout: Duration = timedelta(seconds=60)


class CertsMode(StrEnum):
    """Who makes the gate's certificate."""

    OPERATOR = "operator"
    CERT_MANAGER = "certManager"
    EXISTING_SECRET = "existingSecret"


class CertsSettings(_Model):
    """The gate's certificate."""

    mode: CertsMode = CertsMode.OPERATOR
    ca_duration: Duration = timedelta(hours=87600)
    duration: Duration = timedelta(hours=2160)

    @model_validator(mode="after")
    def _has_room_for_rotation(self) -> Self:
        if self.duration < timedelta(hours=1):
            raise ValueError("must have a duration of at least 1h")
        if self.ca_duration < 2 * self.duration:
            raise ValueError("must have a caDuration of at least twice the duration")
        return self


class NodeAnnotationSettings(_Model):
    """Whether nodes carry the time of their newest durable step."""

    enabled: bool = True


class Settings(_Model):
    """All of the file."""

    namespace: Name
    """The release's namespace."""
    gate: GateSettings = GateSettings()
    anchor: Name = "tidegate-anchor"
    """ClusterRole that owns every hold PDB."""
    webhooks: WebhookSettings = WebhookSettings()
    lease: Name = "tidegate-controller"
    tiers: TierSettings = TierSettings()
    sidecar: SidecarSettings
    drain: DrainSettings = DrainSettings()
    certs: CertsSettings = CertsSettings()
    node_annotations: NodeAnnotationSettings = NodeAnnotationSettings()


def parse_settings(text: str | bytes, where: str) -> Settings:
    """Reads settings from JSON.

    Args:
        text: the file's content.
        where: name of the file, for the sentence.

    Raises:
        Reject: it is no JSON, or a field is missing, unknown or bad; one sentence names it.
    """
    try:
        return Settings.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"]) or "the document"
        raise Reject(f"{where}: {path}: {_allowed(first['type'], first['msg'])}") from error


def load_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Reads the settings file.

    Raises:
        Reject: the file cannot be read, or is wrong; one sentence says what to change.
    """
    path = Path(environment.get(ENV_CONFIG) or CONFIG_FILE)
    try:
        text = path.read_bytes()
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise Reject(f"{path}: {reason}; {ENV_CONFIG} names another file") from error
    return parse_settings(text, str(path))


def _allowed(kind: str, message: str) -> str:
    match kind:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "is not a known setting"
        case _:
            return (
                message.removeprefix("Value error, ")
                .replace("Input should", "must")
                .replace("String should", "must")
            )
