"""Documents that somebody made to hurt: each is refused in a sentence that names the file.

The samples are those of docs/format.md, so a new document is attacked as soon as it is described.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_contract.digest import digest_of_blocks, sha256_hex
from tidegate_contract.document import MAX_KEYS, MAX_TEXT, decode, encode, max_bytes
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.seal import Manifest, Seal

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
SAMPLES = {
    json.loads(text)["kind"]: text.encode()
    for text in re.findall(r"^```json\n(.*?)^```$", PAGE, re.M | re.S)
}
WHERE = "team/run/the-file"
all_kinds = pytest.mark.parametrize("kind", sorted(SAMPLES))


def signed(body: dict[str, Any]) -> bytes:
    """A document with a digest that fits, whatever its fields are."""
    return sign(json.dumps(body | {"sha256": ""}, sort_keys=True, separators=(",", ":")))


def sign(text: str) -> bytes:
    """The same for a document's text, which may be no JSON at all."""
    member = re.compile(r',"sha256":"[0-9a-f]*"')
    digest = sha256_hex(member.sub("", text).encode())
    return member.sub(f',"sha256":"{digest}"', text).encode() + b"\n"


def resigned(kind: str, **changes: Any) -> bytes:
    return signed(json.loads(SAMPLES[kind]) | changes)


def refusal(cls: Any, data: bytes) -> str | None:
    """The sentence; None if the document was taken. Any other exception is a failure."""
    try:
        decode(cls, data, WHERE)
    except (Corrupt, Reject) as error:
        assert str(error).startswith(f"{WHERE}: ")
        assert len(str(error)) < 1000
        str(error).encode()
        return str(error)
    return None


def test_signing_like_this_makes_real_documents(document_classes: dict[str, Any]) -> None:
    for kind, text in SAMPLES.items():
        assert resigned(kind) == text
        assert refusal(document_classes[kind], text) is None


@all_kinds
def test_truncated_document_is_refused(kind: str, document_classes: dict[str, Any]) -> None:
    text = SAMPLES[kind]
    taken = [n for n in range(len(text)) if not refusal(document_classes[kind], text[:n])]
    assert taken == [len(text) - 1]  # the line feed alone says nothing


@all_kinds
def test_document_with_a_flipped_bit_is_refused(
    kind: str, document_classes: dict[str, Any]
) -> None:
    for index in range(len(SAMPLES[kind])):
        bad = bytearray(SAMPLES[kind])
        bad[index] ^= 1 << index % 8
        assert refusal(document_classes[kind], bytes(bad)), index


@all_kinds
def test_document_is_taken_in_its_own_bytes_only(
    kind: str, document_classes: dict[str, Any]
) -> None:
    cls, body = document_classes[kind], json.loads(SAMPLES[kind])
    for other in (
        json.dumps(body).encode(),
        json.dumps(body, indent=1).encode(),
        b"\xef\xbb\xbf" + SAMPLES[kind],
        SAMPLES[kind] + b"\n",
        SAMPLES[kind].decode().encode("utf-16"),
        SAMPLES[kind] + SAMPLES[kind],
    ):
        assert refusal(cls, other)


@all_kinds
def test_document_of_another_kind_or_version_is_refused(
    kind: str, document_classes: dict[str, Any]
) -> None:
    cls = document_classes[kind]
    for other, text in SAMPLES.items():
        assert (refusal(cls, text) is None) == (other == kind)
    for version in (0, 2, 2**80, -1, 1.0, True, "1", None, [1]):
        with pytest.raises(Reject, match="is not known here"):
            decode(cls, resigned(kind, version=version), WHERE)
    assert "sha256" in (refusal(cls, SAMPLES[kind].replace(b'"version":1', b'"version":2')) or "")


@all_kinds
def test_unknown_field_at_any_depth_is_refused(kind: str, document_classes: dict[str, Any]) -> None:
    for path, _ in walk(json.loads(SAMPLES[kind])):
        body = json.loads(SAMPLES[kind])
        inner = reach(body, path[:-1])
        if isinstance(inner, dict):
            inner["surprise"] = 1
            with pytest.raises(Reject, match="'surprise' is not known"):
                decode(document_classes[kind], signed(body), WHERE)


@all_kinds
def test_missing_field_is_refused_or_has_a_default(
    kind: str, document_classes: dict[str, Any]
) -> None:
    for path, _ in walk(json.loads(SAMPLES[kind])):
        body = json.loads(SAMPLES[kind])
        inner = reach(body, path[:-1])
        if isinstance(inner, dict) and path[0] not in ("kind", "version", "sha256"):
            del inner[path[-1]]
            sentence = refusal(document_classes[kind], signed(body))
            assert sentence is None or f"{path[-1]!r} is missing" in sentence or path[-1] == "by"


HOSTILE: list[Any] = [
    -1,
    2**63,
    10**400,
    1.5,
    -0.5,
    1e300,
    True,
    None,
    "",
    "x",
    "../../etc/passwd",
    "/etc/passwd",
    "a\0b",
    "\ud800",
    "x" * (MAX_TEXT + 1),
    "2026-11-29T12:00:00",
    "9999-12-31T23:59:59-23:59",
    [],
    [[]],
    {},
    {"step": 1, "nonce": "A" * 16},
    [{"name": "a"}],
]


@all_kinds
def test_hostile_value_in_any_place_is_refused_or_means_itself(
    kind: str, document_classes: dict[str, Any]
) -> None:
    cls = document_classes[kind]
    for path, _ in walk(json.loads(SAMPLES[kind])):
        for value in HOSTILE:
            body = json.loads(SAMPLES[kind])
            reach(body, path[:-1])[path[-1]] = value
            data = signed(body)
            if refusal(cls, data) is None:
                # whatever was taken is an ordinary document
                again = decode(cls, data, WHERE)
                assert decode(cls, encode(again), WHERE) == again


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ("NaN", "the number NaN"),
        ("Infinity", "the number Infinity"),
        ("-Infinity", "the number -Infinity"),
        ("1e999", "not a valid"),
        ("9" * 5000, "not a JSON document"),
        ("[" * 100_000, "not a JSON document"),
        ("[" * 900 + "]" * 900, "not a valid"),
        ('{"a":' * 20_000, "not a JSON document"),
        ('{"a":1,"a":1}', "a key twice"),
        (json.dumps({f"k{n}": 1 for n in range(MAX_KEYS + 1)}), "keys in one object"),
    ],
    ids=lambda value: str(value)[:12],
)
@all_kinds
def test_hostile_number_or_nesting_is_refused(
    kind: str, raw: str, sentence: str, document_classes: dict[str, Any]
) -> None:
    text = SAMPLES[kind].decode().rstrip("\n")
    for name in set(re.findall(r'"([a-z_]+)":[0-9.]+[,}]', text)) - {"version"}:
        bad = sign(re.sub(rf'"{name}":[0-9.]+', f'"{name}":{raw}', text, count=1))
        assert sentence in (refusal(document_classes[kind], bad) or "")


@all_kinds
def test_key_twice_is_refused_although_it_says_the_same(
    kind: str, document_classes: dict[str, Any]
) -> None:
    text = SAMPLES[kind].decode().rstrip("\n")
    bad = sign(text.replace(f'"kind":"{kind}"', f'"kind":"{kind}","kind":"{kind}"'))
    assert "a key twice" in (refusal(document_classes[kind], bad) or "")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


@given(data=st.data())
def test_arbitrary_values_in_arbitrary_places_never_surprise(
    data: st.DataObject, document_classes: dict[str, Any]
) -> None:
    kind = data.draw(st.sampled_from(sorted(SAMPLES)))
    body = json.loads(SAMPLES[kind])
    path = data.draw(st.sampled_from([path for path, _ in walk(body)]))
    reach(body, path[:-1])[path[-1]] = data.draw(json_values)
    refusal(document_classes[kind], signed(body))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_surprise(data: bytes) -> None:
    assert refusal(Seal, data)


def walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place of a JSON value, but for the value itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner:
        yield (*path, key), item
        if isinstance(item, dict | list):
            yield from walk(item, (*path, key))


def reach(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def with_files(kind: str, change: Callable[[list[dict[str, Any]]], object]) -> bytes:
    body = json.loads(SAMPLES[kind])
    change(body["files"])
    return signed(body)


@pytest.mark.parametrize(
    "name",
    [
        "../seal-0.json",
        "..",
        ".",
        "",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "a\0",
        "a\n",
        "weights-\u0660.distcp",
        "\ufb01le",
        "x" * 201,
        ".tmp-0123456789abcdef-weights-0.distcp",
        "COMMIT",
        "commit",
        "manifest.json",
        "Manifest.JSON",
        "seal-0.json",
        "SEAL-7.json",
        "announced-12.json",
    ],
    ids=lambda name: ascii(name)[:30],
)
def test_file_name_that_could_hurt_is_refused(name: str) -> None:
    for cls in (Seal, Manifest):
        data = with_files(cls.KIND, lambda files: files[0].update(name=name))
        sentence = refusal(cls, data)
        assert sentence is not None
        assert "files: [0]: file name" in sentence


@pytest.mark.parametrize(
    "second",
    ["weights-0.distcp", "Weights-0.distcp", "WEIGHTS-0.DISTCP"],
    ids=["same", "capital", "all capitals"],
)
def test_two_files_of_one_name_are_refused(second: str) -> None:
    for cls in (Seal, Manifest):
        data = with_files(
            cls.KIND,
            lambda files: (
                files[0].update(name="weights-0.distcp"),
                files[1].update(name=second),
            ),
        )
        assert "is named twice" in (refusal(cls, data) or "")


BLOCK = "0" * 32


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"size": -1}, "not a valid int"),
        ({"size": 2**62}, "size 4611686018427387904 is over"),
        ({"size": 2**63}, "not a valid int"),
        ({"size": 1e3}, "not a valid int"),
        ({"size": 2**50}, "blocks do not cover"),
        ({"size": 0}, "blocks do not cover"),
        ({"block_size": 0}, "block size 0 is not known"),
        ({"block_size": 1}, "block size 1 is not known"),
        ({"blocks": []}, "blocks do not cover"),
        ({"blocks": [BLOCK]}, "digest does not match its blocks"),
        ({"blocks": ["A" * 32], "digest": digest_of_blocks(["A" * 32])}, "not 32 hex digits"),
        ({"blocks": ["00"], "digest": digest_of_blocks(["00"])}, "not 32 hex digits"),
        ({"blocks": ["zz" * 16]}, "not 32 hex digits"),
        ({"digest": ""}, "digest does not match its blocks"),
        ({"scope": "Everywhere"}, "is not allowed"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_file_that_cannot_be_true_is_refused(change: dict[str, Any], sentence: str) -> None:
    for cls in (Seal, Manifest):
        found = refusal(cls, with_files(cls.KIND, lambda files: files[1].update(change)))
        assert found is not None
        assert found.startswith(f"{WHERE}: files: [1]: ")
        assert sentence in found


@pytest.mark.parametrize("world_size", [0, 2**20 + 1, 2**62])
def test_world_that_no_set_could_hold_is_refused(world_size: int) -> None:
    for kind, cls in (("seal", Seal), ("manifest", Manifest)):
        assert "world size" in (refusal(cls, resigned(kind, world_size=world_size)) or "")


def test_document_that_is_too_large_is_refused_unparsed(document_classes: dict[str, Any]) -> None:
    for kind, cls in document_classes.items():
        if max_bytes(cls) > 1 << 20:
            continue
        data = SAMPLES[kind] + b" " * (max_bytes(cls) - len(SAMPLES[kind]) + 1)
        assert "bytes, allowed are" in (refusal(cls, data) or "")
