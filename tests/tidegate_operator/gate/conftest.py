"""Pods as five kinds of creators send them to admission, and builders of the gate's records."""

import copy
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tidegate_contract import keys
from tidegate_operator.effective import find_places
from tidegate_operator.gate.inject import Injection
from tidegate_operator.gate.records import slim_policy
from tidegate_operator.gate.runname import parse_run_name
from tidegate_operator.gate.sidecar import GateAddress, SidecarSource
from tidegate_operator.gate.tls import Certificate
from tidegate_operator.settings import Settings

NOW = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
JOB_UID = "0d5c2f0e-1111-4000-8000-000000000001"

Fields = dict[str, Any]

SHAPES: dict[str, Fields] = {
    "indexed-job": {
        "generateName": "train-0-",
        "labels": {
            keys.JOB_UID_LABEL: JOB_UID,
            keys.JOB_INDEX_LABEL: "0",
            keys.JOB_NAME_LABEL: "train",
            "job-name": "train",
        },
        "annotations": {keys.JOB_INDEX_LABEL: "0"},
        "ownerReferences": [
            {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": JOB_UID}
            | {"controller": True, "blockOwnerDeletion": True}
        ],
    },
    "replicaset": {
        "generateName": "web-5d4f-",
        "labels": {"app": "web", "pod-template-hash": "5d4f"},
        "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-5d4f", "uid": "rs-uid"}
            | {"controller": True}
        ],
    },
    "statefulset": {
        "name": "sts-0",
        "generateName": "sts-",
        "labels": {"app": "sts", "apps.kubernetes.io/pod-index": "0"},
        "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "sts", "uid": "sts-uid"}
            | {"controller": True}
        ],
    },
    "bare": {"name": "solo", "labels": {}},
    "bare-generatename": {"generateName": "gen-", "labels": {}},
}
"""Metadata as the API server sends it for pods of these creators."""


def build_pod(shape: str = "indexed-job", **spec: Any) -> Fields:
    metadata = copy.deepcopy(SHAPES[shape])
    metadata["labels"][keys.POLICY_LABEL] = "default"
    token = {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}}
    trainer = {
        "name": "trainer",
        "image": "trainer:1",
        "env": [{"name": "LANG", "value": "C"}],
        "resources": {"requests": {"cpu": "10m"}},
        "volumeMounts": [{"name": "api-access", "mountPath": "/var/run/secrets/account"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "volumes": [{"name": "api-access", "projected": {"sources": [token]}}],
            "containers": [trainer],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 30,
            "securityContext": {},
            **spec,
        },
        "status": {},
    }


def build_settings(**changes: Any) -> Settings:
    fields: Fields = {
        "namespace": "tidegate-system",
        "tiers": {
            "local": [{"name": "nvme", "path": "/var/lib/tidegate"}],
            "remote": [{"name": "pfs", "hostPath": "/mnt/pfs/tidegate"}],
        },
        "sidecar": {
            "image": "tidegate/sidecar:1",
            "resources": {
                "requests": {"cpu": "100m", "memory": "128Mi"},
                "limits": {"memory": "512Mi"},
            },
        },
    }
    return Settings.model_validate(fields | changes)


def build_policy(**spec: Any) -> Fields:
    return {
        "metadata": {"name": "default", "namespace": "team-a", "uid": "p", "generation": 3},
        "spec": {"remote": {"type": "Tier", "tier": "pfs"}} | spec,
    }


def build_injection(pod: Fields, policy: Fields | None = None, **changes: Any) -> Injection:
    record, settings = slim_policy(policy or build_policy()), build_settings()
    run = parse_run_name(pod, "team-a")
    source = SidecarSource(
        run=run,
        places=find_places(record.policy, run.name, settings.tiers),
        policy_document=record.document,
        spec=record.policy.spec.sidecar,
        settings=settings.sidecar,
        gate=GateAddress(url="https://10.96.0.9:443", server_name="gate.svc", authority="PEM"),
    )
    fields: Fields = {
        "source": source,
        "policy_name": "default",
        "generation": 3,
        "version": "0.1.0",
        "is_held": True,
        "grace_period": timedelta(minutes=2),
    }
    return Injection(**fields | changes)


def apply_json_patch(document: Any, operations: Any) -> Any:
    """RFC 6902, as far as the gate uses it; each path must exist as the standard demands."""
    document = copy.deepcopy(document)
    for operation in operations:
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~")
            for part in operation["path"].removeprefix("/").split("/")
        ]
        target = document
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        match operation["op"], target:
            case "add", list():
                assert last == "-"
                target.append(copy.deepcopy(operation["value"]))
            case "add", dict():
                target[last] = copy.deepcopy(operation["value"])
            case "replace", dict():
                assert last in target
                target[last] = operation["value"]
            case "remove", dict():
                del target[last]
            case other:
                raise AssertionError(f"not an operation of the gate: {other}")
    return document


def check_only_adds(before: Any, after: Any, path: str = "") -> None:
    """Everything of `before` is in `after`, where it was, but for the two changes by design."""
    if path == "/spec/terminationGracePeriodSeconds":
        assert after >= before
    elif isinstance(before, dict):
        for name, value in before.items():
            if name != keys.JOB_IGNORED_FAILURES_ANNOTATION:
                check_only_adds(value, after[name], f"{path}/{name}")
    elif isinstance(before, list):
        for position, value in enumerate(before):
            check_only_adds(value, after[position], f"{path}/{position}")
    else:
        assert after == before, path


def build_certificate(common_name: str = "gate.svc") -> Certificate:
    """A self-signed serving certificate, its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    made = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(made - timedelta(hours=1))
        .not_valid_after(made + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("gate.svc")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    return Certificate(
        chain=pem,
        authority=pem.decode(),
        _key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


@pytest.fixture(scope="session")
def a_certificate() -> Callable[..., Certificate]:
    """A new certificate for `gate.svc`; the argument is its subject's common name."""
    return build_certificate


@pytest.fixture(scope="session")
def trusting() -> Callable[[Certificate], ssl.SSLContext]:
    """A client's context that trusts one certificate."""
    return lambda certificate: ssl.create_default_context(cadata=certificate.authority)


@pytest.fixture(scope="session")
def a_pod() -> Callable[..., Fields]:
    """A pod at admission; the first argument names its creator, keywords replace spec fields."""
    return build_pod


@pytest.fixture(scope="session")
def an_injection() -> Callable[..., Injection]:
    """The facts of a pod's injection; keywords replace its fields."""
    return build_injection


@pytest.fixture(scope="session")
def a_policy() -> Callable[..., Fields]:
    """A raw CheckpointPolicy; keywords replace spec fields."""
    return build_policy


@pytest.fixture(scope="session")
def some_settings() -> Callable[..., Settings]:
    """The installation's settings; keywords replace top fields."""
    return build_settings


@pytest.fixture(scope="session")
def apply_patch() -> Callable[[Any, Any], Any]:
    """Applies a JSON patch to a copy of a document."""
    return apply_json_patch


@pytest.fixture(scope="session")
def assert_only_adds() -> Callable[[Any, Any], None]:
    """Fails unless the second document holds all of the first, but for what changes by design."""
    return check_only_adds
