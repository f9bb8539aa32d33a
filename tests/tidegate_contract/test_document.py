import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_contract.cadence import Cadence
from tidegate_contract.document import decode, encode
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.identity import LineageClaim, RunIdentity
from tidegate_contract.layout import Attempt
from tidegate_contract.seal import Commit, Seal
from tidegate_contract.wire import (
    Control,
    Phase,
    Policy,
    Reply,
    Report,
    SaveRequest,
    StepNote,
    TrainerState,
)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
times = st.integers(0, 2**62 // 1000).map(lambda us: EPOCH + timedelta(microseconds=us))
counts = st.integers(min_value=0, max_value=2**63 - 1)
attempts = st.builds(
    Attempt, step=counts, nonce=st.integers(0, 2**64 - 1).map(lambda n: f"{n:016x}")
)
cadences = st.builds(Cadence, tokens=st.integers(1, 2**63 - 1), by=st.just(Cadence().by))
policies = st.builds(
    Policy,
    cadence=cadences,
    bandwidth_bytes_per_second=st.none() | counts,
    local_quota_bytes=st.none() | counts,
    save_timeout_seconds=st.floats(0, 1e6),
)
notes = st.builds(StepNote, step=counts, tokens=counts, at=times, attempt=st.none() | attempts)
requests = st.builds(SaveRequest, request_id=counts, deadline=times)
states = st.builds(
    TrainerState,
    run_id=st.uuids().map(str),
    rank=counts,
    world_size=counts,
    pod_uid=st.text(max_size=40),
    phase=st.sampled_from(Phase),
    progress=notes,
    sealed=st.none() | notes,
    written_at=times,
    answer=st.none(),
    restore=st.none(),
)
documents = st.one_of(
    st.builds(
        RunIdentity,
        run_id=st.uuids().map(str),
        name=st.just("team-a/llama"),
        owner_uid=st.none() | st.text(max_size=40),
        uid=counts,
        created_at=times,
    ),
    st.builds(
        LineageClaim,
        run_id=st.uuids().map(str),
        number=counts,
        restored=st.none() | attempts,
        explicit=st.booleans(),
        tries=counts,
        claimed_at=times,
    ),
    st.builds(Commit, manifest_sha256=st.text(max_size=64), committed_at=times),
    policies,
    states,
    st.builds(Control, policy=st.none() | policies, request=st.none() | requests),
    st.builds(Reply, policy=st.none() | policies, request=st.none() | requests),
    st.builds(
        Report,
        namespace=st.text(max_size=9),
        run=st.text(max_size=9),
        pod=st.text(max_size=9),
        pod_uid=st.text(max_size=9),
        run_id=st.text(max_size=9),
        state=st.none() | states,
        durable=st.none(),
    ),
)


@given(documents)
def test_document_of_every_kind_survives_the_round_trip(document: Any) -> None:
    data = encode(document)
    assert decode(type(document), data, "x") == document
    assert encode(decode(type(document), data, "x")) == data


@given(st.data())
def test_document_with_any_flipped_bit_is_refused(data: st.DataObject) -> None:
    good = encode(Commit(manifest_sha256="ab" * 32, committed_at=datetime(2026, 1, 1, tzinfo=UTC)))
    bit = data.draw(st.integers(0, len(good) * 8 - 9))  # not the final newline
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    with pytest.raises((Corrupt, Reject), match="COMMIT"):
        decode(Commit, bytes(bad), "COMMIT")


def resigned(**changes: Any) -> bytes:
    """A commit document with changed fields and a digest that fits them."""
    from tidegate_contract.digest import sha256_hex
    from tidegate_contract.document import _canonical

    body = json.loads(encode(Commit(manifest_sha256="ab", committed_at=datetime.now(UTC))))
    del body["sha256"]
    body = {key: value for key, value in (body | changes).items() if value is not ...}
    return _canonical(body | {"sha256": sha256_hex(_canonical(body))})


@pytest.mark.parametrize(
    ("data", "error", "sentence"),
    [
        pytest.param(b"", Corrupt, "not a JSON document", id="empty"),
        pytest.param(b"[]", Corrupt, "not a JSON object", id="list"),
        pytest.param(b'{"a":1,"a":2}', Corrupt, "a key twice", id="duplicate key"),
        pytest.param(b'{"a":NaN}', Corrupt, "the number NaN", id="NaN"),
        pytest.param(b'{"a":1e999}', Corrupt, "kind is None", id="endless number"),
        pytest.param(
            b'{"kind":"commit","version":1,"a":1e999}', Corrupt, "not a document", id="infinity"
        ),
        pytest.param(
            resigned(committed_at="0001-01-01T00:00:00+23:59"),
            Corrupt,
            "not allowed",
            id="old time",
        ),
        pytest.param(b"[" * 100_000, Corrupt, "not a JSON document", id="deep"),
        pytest.param(resigned(version=2), Reject, "version 2 is not known", id="newer version"),
        pytest.param(resigned(kind="seal"), Corrupt, "expected 'commit'", id="other kind"),
        pytest.param(resigned(surprise=1), Reject, "'surprise' is not known", id="unknown field"),
        pytest.param(resigned(committed_at=...), Corrupt, "is missing", id="missing field"),
        pytest.param(
            resigned(committed_at="2026-01-01T00:00:00"), Corrupt, "without a zone", id="naive time"
        ),
        pytest.param(resigned(manifest_sha256=7), Corrupt, "not a valid str", id="wrong type"),
        pytest.param(
            resigned(manifest_sha256="x" * 20_000), Corrupt, "not a valid str", id="long text"
        ),
    ],
)
def test_decode_of_hostile_bytes_names_the_file(
    data: bytes, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence) as caught:
        decode(Commit, data, "step-1/COMMIT")
    assert "step-1/COMMIT" in str(caught.value)


@pytest.mark.parametrize("size", [-1, 2**63, 1.5, True, "7"])
def test_decode_of_an_impossible_number_is_refused(
    size: Any, a_seal: Callable[..., dict[str, Any]]
) -> None:
    body = json.loads(encode(Seal(**a_seal())))
    body["tokens"] = size
    with pytest.raises(Corrupt):
        decode(Seal, json.dumps(body).encode(), "seal-0.json")
