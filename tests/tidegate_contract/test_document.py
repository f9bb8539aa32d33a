import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from tidegate_contract import document
from tidegate_contract.document import decode, encode, max_bytes
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.identity import Pin, RunIdentity
from tidegate_contract.layout import Attempt
from tidegate_contract.seal import Commit, Manifest, Seal
from tidegate_contract.wire import Policy, RestoreNote

NOW = datetime(2026, 1, 1, tzinfo=UTC)
COMMIT = Commit(manifest_sha256="ab" * 32, committed_at=NOW)
PIN = Pin(run_id="r", attempt=Attempt(step=7, nonce="0" * 16), pinned_at=NOW)


def signed(fields: dict[str, Any]) -> bytes:
    """A document of these fields with a digest that fits."""
    plain = {key: value for key, value in fields.items() if key != "sha256"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    plain["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def changed(whole: Any, **changes: Any) -> bytes:
    fields = json.loads(encode(whole)) | changes
    return signed({key: value for key, value in fields.items() if value is not ...})


def test_document_is_one_line_of_sorted_ascii_json() -> None:
    data = encode(replace(PIN, reason="Ünïcode\n"))
    assert data.isascii()
    assert data.count(b"\n") == 1
    assert data == signed(json.loads(data))
    assert decode(Pin, data, "x").reason == "Ünïcode\n"


def test_document_without_its_line_feed_is_taken() -> None:
    # an environment variable has none
    assert decode(Commit, encode(COMMIT).rstrip(b"\n"), "COMMIT") == COMMIT


def test_float_that_was_given_as_an_int_has_the_same_bytes() -> None:
    assert encode(Policy(save_timeout_seconds=600)) == encode(Policy(save_timeout_seconds=600.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_float_that_is_no_number_is_not_written(value: float) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        encode(Policy(save_timeout_seconds=value))


def test_text_that_is_no_unicode_is_written_readably() -> None:
    # a sentence that quotes a file's name as the system gave it
    data = encode(replace(PIN, reason="cannot read \udcff.bin"))
    assert decode(Pin, data, "x").reason == "cannot read ?.bin"


def test_document_that_no_reader_would_take_is_not_written(
    a_seal: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "MAX_VALUES", 9)
    with pytest.raises(Reject, match="allowed are"):
        encode(Seal(**a_seal()))
    monkeypatch.undo()
    with pytest.raises(Reject, match=r"pin document of .* bytes"):
        encode(replace(PIN, reason="x" * max_bytes(Pin)))


def test_only_documents_that_list_files_may_be_large(document_classes: dict[str, Any]) -> None:
    large = {cls for cls in document_classes.values() if max_bytes(cls) > 1 << 20}
    assert large == {Seal, Manifest}


@pytest.mark.parametrize(
    ("data", "error", "sentence"),
    [
        pytest.param(b"", Corrupt, r"not a JSON document \(empty\)", id="empty"),
        pytest.param(
            encode(COMMIT)[:-70], Corrupt, r"not a JSON document \(cut short\)", id="cut in a text"
        ),
        pytest.param(b'{"a":1', Corrupt, r"document \(cut short\)", id="cut in an object"),
        pytest.param(b'{"a":', Corrupt, r"document \(cut short\)", id="cut before a value"),
        pytest.param(b'{"a":1,', Corrupt, r"document \(cut short\)", id="cut after a comma"),
        pytest.param(b"{", Corrupt, r"document \(cut short\)", id="cut after a bracket"),
        pytest.param(b'{"a":tru', Corrupt, r"document \(cut short\)", id="cut in a word"),
        pytest.param(b'{"a":1 2}', Corrupt, r"document \(not JSON at byte 7\)", id="no comma"),
        pytest.param(b"x", Corrupt, r"document \(not JSON at byte 0\)", id="a word"),
        pytest.param(b"{}x", Corrupt, r"document \(not JSON at byte 2\)", id="something behind it"),
        pytest.param(b"[]", Corrupt, "not a JSON object", id="list"),
        pytest.param(b"{}", Corrupt, "kind is missing, expected 'commit'", id="no kind"),
        pytest.param(b'{"a":1,"a":2}', Corrupt, "a key twice", id="duplicate key"),
        pytest.param(b'{"a":NaN}', Corrupt, "the number NaN", id="NaN"),
        pytest.param(
            b'{"kind":"commit","version":1}', Corrupt, "sha256 does not match", id="no digest"
        ),
        pytest.param(b'{"kind":"\xc3\xa4"}', Corrupt, "not ASCII", id="not ASCII"),
        pytest.param(b"[" * 100_000, Corrupt, r"not a JSON document \(too deep\)", id="deep"),
        pytest.param(changed(COMMIT, version=2), Reject, "version 2 is not known", id="newer"),
        pytest.param(
            encode(COMMIT).replace(b'"version":1', b'"version":3'),
            Corrupt,
            "sha256 does not match",
            id="a flipped bit in the version is no newer release",
        ),
        pytest.param(changed(COMMIT, kind="seal"), Corrupt, "expected 'commit'", id="other kind"),
        pytest.param(changed(COMMIT, surprise=1), Reject, "'surprise' is not known", id="unknown"),
        pytest.param(changed(COMMIT, committed_at=...), Corrupt, "is missing", id="missing field"),
        pytest.param(
            changed(COMMIT, committed_at="2026-01-01T00:00:00"),
            Corrupt,
            "committed_at: '2026-01-01T00:00:00' is not allowed .a time without a zone",
            id="naive time",
        ),
        pytest.param(
            changed(COMMIT, committed_at="0001-01-01T00:00:00+23:59"),
            Corrupt,
            "not allowed",
            id="old time",
        ),
        pytest.param(changed(COMMIT, manifest_sha256=7), Corrupt, "7 is not a valid str", id="int"),
        pytest.param(
            changed(COMMIT, manifest_sha256="x" * 20_000), Corrupt, "not a valid str", id="long"
        ),
    ],
)
def test_decode_of_hostile_bytes_names_the_file(
    data: bytes, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence) as caught:
        decode(Commit, data, "step-1/COMMIT")
    assert str(caught.value).startswith("step-1/COMMIT: ")


@pytest.mark.parametrize(
    ("whole", "changes", "sentence"),
    [
        (PIN, {"attempt": {"nonce": "xyz", "step": 7}}, "pin: attempt: nonce 'xyz'"),
        (PIN, {"attempt": {"nonce": "0" * 16, "step": -1}}, "pin: attempt: step: -1"),
        (PIN, {"attempt": [7]}, "pin: attempt: expected an object"),
        (PIN, {"kind": "x" * 9000}, r"pin: kind is 'x+\.\.\.x+'"),
        (PIN, {"x" * 9000: 1}, r"pin: field 'x+\.\.\.x+' is not known"),
        (PIN, {"version": "x" * 9000}, r"pin: version 'x+\.\.\.x+' is not known"),
        (PIN, {"run_id": {"a": ["b"] * 9000}}, r"pin: run_id: {'a': \['b', .*\.\.\.\]}"),
    ],
    ids=["nonce", "step", "list", "kind", "field", "version", "huge value"],
)
def test_decode_names_the_place_in_few_words(
    whole: Any, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((Corrupt, Reject), match=f"^{sentence}") as caught:
        decode(type(whole), changed(whole, **changes), "pin")
    assert len(str(caught.value)) < 250


def test_run_name_that_leaves_its_folder_names_the_file() -> None:
    good = RunIdentity(run_id="r", name="team/run", uid=0, created_at=NOW)
    with pytest.raises(Corrupt, match=r"^run.json: run name '\.\./x'"):
        decode(RunIdentity, changed(good, name="../x"), "run.json")


@pytest.mark.parametrize("number", [-1, 2**63, 1.5, True, "7", None])
def test_decode_of_an_impossible_number_is_refused(
    number: Any, a_seal: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(Corrupt, match=r"seal-0.json: tokens: .* is not a valid int"):
        decode(Seal, changed(Seal(**a_seal()), tokens=number), "seal-0.json")


@pytest.mark.parametrize("number", [-0.5, 1e300, True, "7", None])
def test_decode_of_an_impossible_duration_is_refused(number: Any) -> None:
    with pytest.raises(Corrupt, match=r"save_timeout_seconds: .* is not a valid float"):
        decode(Policy, changed(Policy(), save_timeout_seconds=number), "policy")


def test_field_without_a_value_is_left_out() -> None:
    note = RestoreNote(reason="nothing to restore", lineage=1, seconds=0.5, at=NOW)
    assert note.attempt is None
    assert b"local_quota_bytes" not in encode(Policy())
    with pytest.raises(Corrupt, match="local_quota_bytes: None is not a valid int"):
        decode(Policy, changed(Policy(), local_quota_bytes=None), "policy")
