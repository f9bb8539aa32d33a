import base64
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tidegate_operator.controller import certs as subject
from tidegate_operator.controller.certs import (
    CertsAction,
    CertsDecision,
    CertsReason,
    Lifetimes,
    build_certs,
    decide_certs,
    parse_certs,
    serving_names,
)

NAMES = serving_names("tidegate-gate", "tidegate-system")
LIVES = Lifetimes(authority=timedelta(days=3650), serving=timedelta(days=90))
START = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
FIRST = CertsDecision(action=CertsAction.NEW_BOTH, reason=CertsReason.MISSING)

Data = dict[str, str]


@pytest.fixture(scope="module")
def data() -> Data:
    return build_certs(FIRST, None, NAMES, LIVES, START)


def renewed(data: Data, now: datetime) -> tuple[CertsDecision, Data]:
    """One pass: what is decided, and the Secret afterwards."""
    certs = parse_certs(data)
    decision = decide_certs(certs, NAMES, LIVES, now)
    if decision.action is CertsAction.KEEP:
        return decision, data
    return decision, data | build_certs(decision, certs, NAMES, LIVES, now)


def bundle_size(data: Data) -> int:
    return base64.b64decode(data["ca.crt"]).count(b"BEGIN CERTIFICATE")


def test_certs_of_an_empty_secret_are_made_and_then_kept(data: Data) -> None:
    assert decide_certs(parse_certs({}), NAMES, LIVES, START) == FIRST
    assert set(data) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}
    decision, _ = renewed(data, START)
    assert (decision.action, decision.reason) == (CertsAction.KEEP, CertsReason.VALID)


def handshake(tmp_path: Path, data: Data, name: str) -> None:
    """A TLS handshake in memory: a client that trusts the bundle checks the name."""
    for file in ("tls.crt", "tls.key"):
        (tmp_path / file).write_bytes(base64.b64decode(data[file]))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    client = ssl.create_default_context(cadata=base64.b64decode(data["ca.crt"]).decode())
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(back, there, server_hostname=name)
    other = server.wrap_bio(there, back, server_side=True)
    for _ in range(4):
        for side in (one, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue


def test_certs_serve_tls_for_each_name_and_no_other(tmp_path: Path) -> None:
    fresh = build_certs(FIRST, None, NAMES, LIVES, datetime.now(UTC))
    for name in ("tidegate-gate.tidegate-system.svc", NAMES[0]):
        handshake(tmp_path, fresh, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, fresh, "another.tidegate-system.svc")


@pytest.mark.parametrize(
    ("days", "want"),
    [(59.9, CertsReason.VALID), (60, CertsReason.EXPIRING), (200, CertsReason.EXPIRING)],
    ids=["two thirds not over", "due", "expired"],
)
def test_certs_serving_is_renewed_with_a_third_left(
    data: Data, days: float, want: CertsReason
) -> None:
    decision, after = renewed(data, START + timedelta(days=days))
    assert decision.reason is want
    is_renewed = want is not CertsReason.VALID
    assert (after["tls.crt"] != data["tls.crt"]) is is_renewed
    assert after["ca.crt"] == data["ca.crt"]


def test_certs_other_names_are_issued_anew(data: Data) -> None:
    names = serving_names("other", "tidegate-system")
    decision = decide_certs(parse_certs(data), names, LIVES, START)
    assert (decision.action, decision.reason) == (CertsAction.ISSUE, CertsReason.NAMES_CHANGED)


def test_certs_new_authority_is_published_before_it_signs(data: Data) -> None:
    due = START + LIVES.authority * 2 / 3
    # The serving certificate of that day, by the authority of the first.
    certs = parse_certs(data)
    issue = CertsDecision(action=CertsAction.ISSUE, reason=CertsReason.EXPIRING)
    data = data | build_certs(issue, certs, NAMES, LIVES, due - timedelta(days=1))
    decision, published = renewed(data, due)
    assert decision.action is CertsAction.NEW_AUTHORITY
    assert published["tls.crt"] == data["tls.crt"]
    assert bundle_size(published) == 2
    decision, _ = renewed(published, due + timedelta(minutes=9))
    assert decision.action is CertsAction.KEEP
    decision, used = renewed(published, due + subject.PUBLISHED_BEFORE_USE)
    assert decision.reason is CertsReason.SIGNED_BY_OLDER
    assert used["ca.crt"] == published["ca.crt"]
    decision, _ = renewed(used, due + timedelta(days=1))
    assert decision.action is CertsAction.KEEP


def test_certs_expired_authority_leaves_the_bundle(data: Data) -> None:
    decision, after = renewed(data, START + LIVES.authority)
    assert (decision.action, bundle_size(after)) == (CertsAction.NEW_BOTH, 1)


@pytest.mark.parametrize("name", ["ca.crt", "ca.key", "tls.crt", "tls.key"])
def test_certs_damaged_or_foreign_part_is_replaced(data: Data, name: str) -> None:
    other = build_certs(FIRST, None, NAMES, LIVES, START)
    missing = {key: value for key, value in data.items() if key != name}
    for broken in (missing, data | {name: "AAAA"}, data | {name: "%"}, data | {name: other[name]}):
        assert parse_certs(broken) is None
