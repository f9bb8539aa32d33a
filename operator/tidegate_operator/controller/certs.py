"""The gate's certificate and the authority that signs it: when to renew, and how.

The bundle in `ca.crt` holds the newest authority first and older ones behind it until they expire.
A new authority is published alone for a while before it signs, so that the API server and running
sidecars trust it by the time they meet a certificate of it. No I/O; `reconcile` reads and writes
the Secret.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVING_CERT = "tls.crt"
SERVING_KEY = "tls.key"
BUNDLE = "ca.crt"
AUTHORITY_KEY = "ca.key"

PUBLISHED_BEFORE_USE = timedelta(minutes=10)
BACKDATED = timedelta(minutes=5)
"""Clocks of nodes differ; a certificate must not be refused as not yet valid."""


class CertsAction(StrEnum):
    """What to do with the Secret."""

    KEEP = "Keep"
    ISSUE = "Issue"
    NEW_AUTHORITY = "NewAuthority"
    NEW_BOTH = "NewBoth"


class CertsReason(StrEnum):
    """Why."""

    VALID = "Valid"
    MISSING = "Missing"
    NAMES_CHANGED = "NamesChanged"
    EXPIRING = "Expiring"
    AUTHORITY_EXPIRING = "AuthorityExpiring"
    SIGNED_BY_OLDER = "SignedByOlderAuthority"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """How long certificates live; each is renewed once a third of that is left."""

    authority: timedelta
    serving: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Certs:
    """A Secret that was read and fits together.

    Attributes:
        authorities: newest first; the first one's key is `authority_key`.
        authority_key: signs serving certificates.
        serving: the gate's certificate, signed by one of the authorities.
    """

    authorities: tuple[x509.Certificate, ...]
    authority_key: ec.EllipticCurvePrivateKey
    serving: x509.Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class CertsDecision:
    """What to do, and why."""

    action: CertsAction
    reason: CertsReason


def serving_names(service: str, namespace: str) -> tuple[str, ...]:
    """DNS names of the gate's certificate; the third is what the API server and sidecars check."""
    local = f"{service}.{namespace}"
    return (service, local, f"{local}.svc", f"{local}.svc.cluster.local")


def parse_certs(data: Mapping[str, str]) -> Certs | None:
    """The certificates of a Secret.

    Args:
        data: the Secret's `data`, base64 as the API server serves it.

    Returns:
        None when something is missing, damaged, or does not fit together.
    """
    try:
        pem = {name: base64.b64decode(text, validate=True) for name, text in data.items()}
        authorities = tuple(x509.load_pem_x509_certificates(pem[BUNDLE]))
        authority_key = serialization.load_pem_private_key(pem[AUTHORITY_KEY], None)
        serving_key = serialization.load_pem_private_key(pem[SERVING_KEY], None)
        serving = x509.load_pem_x509_certificate(pem[SERVING_CERT])
    except (KeyError, ValueError, TypeError):
        return None
    if not isinstance(authority_key, ec.EllipticCurvePrivateKey):
        return None
    fits = (
        serving_key.public_key() == serving.public_key()
        and authority_key.public_key() == authorities[0].public_key()
        and any(_is_signed_by(serving, one) for one in authorities)
    )
    if not fits:
        return None
    return Certs(authorities=authorities, authority_key=authority_key, serving=serving)


def decide_certs(
    certs: Certs | None, names: tuple[str, ...], lifetimes: Lifetimes, now: datetime
) -> CertsDecision:
    """Whether to renew, and what.

    Args:
        certs: as stored; None when there is nothing usable.
        names: wanted DNS names.
        lifetimes: wanted durations.
        now: aware UTC.
    """
    if certs is None:
        return CertsDecision(action=CertsAction.NEW_BOTH, reason=CertsReason.MISSING)
    newest = certs.authorities[0]
    if now >= newest.not_valid_after_utc:
        return CertsDecision(action=CertsAction.NEW_BOTH, reason=CertsReason.AUTHORITY_EXPIRING)
    if _is_due(newest, lifetimes.authority, now):
        return CertsDecision(
            action=CertsAction.NEW_AUTHORITY, reason=CertsReason.AUTHORITY_EXPIRING
        )
    reason = _why_issue(certs, names, lifetimes, now)
    action = CertsAction.KEEP if reason is CertsReason.VALID else CertsAction.ISSUE
    return CertsDecision(action=action, reason=reason)


def _why_issue(
    certs: Certs, names: tuple[str, ...], lifetimes: Lifetimes, now: datetime
) -> CertsReason:
    if _names(certs.serving) != set(names):
        return CertsReason.NAMES_CHANGED
    if _is_due(certs.serving, lifetimes.serving, now):
        return CertsReason.EXPIRING
    published = certs.authorities[0].not_valid_before_utc + BACKDATED
    is_older = not _is_signed_by(certs.serving, certs.authorities[0])
    if is_older and now >= published + PUBLISHED_BEFORE_USE:
        return CertsReason.SIGNED_BY_OLDER
    return CertsReason.VALID


def build_certs(
    decision: CertsDecision,
    certs: Certs | None,
    names: tuple[str, ...],
    lifetimes: Lifetimes,
    now: datetime,
) -> dict[str, str]:
    """The keys of the Secret's `data` to change, base64.

    Args:
        decision: not Keep.
        certs: as stored; None when there is nothing usable.
        names: DNS names of the serving certificate.
        lifetimes: of what is made.
        now: aware UTC.
    """
    data: dict[str, bytes] = {}
    authorities = [
        one for one in (certs.authorities if certs else ()) if now < one.not_valid_after_utc
    ]
    if decision.action is CertsAction.ISSUE and certs is not None:
        key, newest = certs.authority_key, authorities[0]
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        newest = _build_authority(key, lifetimes.authority, now)
        data[BUNDLE] = b"".join(map(_pem, [newest, *authorities]))
        data[AUTHORITY_KEY] = _key_pem(key)
    if decision.action is not CertsAction.NEW_AUTHORITY:
        serving_key = ec.generate_private_key(ec.SECP256R1())
        until = min(now + lifetimes.serving, newest.not_valid_after_utc)
        serving = _build_serving(serving_key, names, newest, key, (now, until))
        data |= {SERVING_KEY: _key_pem(serving_key), SERVING_CERT: _pem(serving)}
    return {name: base64.b64encode(content).decode() for name, content in data.items()}


def _build_authority(
    key: ec.EllipticCurvePrivateKey, lifetime: timedelta, now: datetime
) -> x509.Certificate:
    # The number makes the name of each authority its own: verifiers choose an issuer by name.
    serial = x509.random_serial_number()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"tidegate-ca-{serial:x}"[:64])])
    usage = x509.KeyUsage(**(_NO_USAGE | {"key_cert_sign": True, "crl_sign": True}))
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _build_serving(
    key: ec.EllipticCurvePrivateKey,
    names: tuple[str, ...],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    validity: tuple[datetime, datetime],
) -> x509.Certificate:
    usage = x509.KeyUsage(**(_NO_USAGE | {"digital_signature": True}))
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[-2][:64])]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(validity[0] - BACKDATED)
        .not_valid_after(validity[1])
        .add_extension(x509.SubjectAlternativeName(map(x509.DNSName, names)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .sign(authority_key, hashes.SHA256())
    )


_NO_USAGE = {
    "digital_signature": False,
    "content_commitment": False,
    "key_encipherment": False,
    "data_encipherment": False,
    "key_agreement": False,
    "key_cert_sign": False,
    "crl_sign": False,
    "encipher_only": False,
    "decipher_only": False,
}


def _is_due(certificate: x509.Certificate, lifetime: timedelta, now: datetime) -> bool:
    # Also what was made to live much longer than is wanted now.
    end = certificate.not_valid_after_utc
    return now >= end - lifetime / 3 or end > now + lifetime + timedelta(hours=1)


def _is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _names(certificate: x509.Certificate) -> set[str]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return set()
    return set(extension.value.get_values_for_type(x509.DNSName))


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
