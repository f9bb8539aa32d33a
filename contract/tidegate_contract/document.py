"""The envelope of every JSON document: kind, version, fields, and a SHA-256 of itself.

A document is a frozen dataclass; its fields are the JSON's fields. `decode(encode(x)) == x`.
Reading is hostile-safe: what a document costs is bounded before it is parsed (bytes, values), then
its depth, no NaN, no duplicate or unknown keys, every number within [0, 2^63), every text within
`MAX_TEXT`. Pure. Called by whoever reads or writes a document of `identity`, `seal` or `wire`.

The digest is that of the document's own bytes, without the digest's member and without the line
feed at the end, so a flipped bit is found wherever it is, also one that no parser would notice.
"""

import json
import reprlib
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from tidegate_contract.digest import sha256_hex
from tidegate_contract.errors import Corrupt, Reject

FORMAT_VERSION = 1
MAX_BYTES = 160 << 20
"""Of the documents that list files (`LISTS_FILES`): `MAX_VALUES` block digests fit into it."""
MAX_SMALL_BYTES = 1 << 20
"""Of every other document; the largest real ones have a few KiB."""
MAX_VALUES = 4 << 20
"""Values in one document: half a million files, or 60 TiB in blocks of 16 MiB.

A parsed value costs up to 200 bytes of memory whatever its bytes are (`[]` is two), so this and
not the size bounds what a hostile document takes: below 1 GiB.
"""
MAX_TEXT = 16 << 10
MAX_KEYS = 64
"""Of one object; no document has half as many fields."""
_MAX_INT = 2**63 - 1
_MEMBER = b',"sha256":"'
_DIGITS = 64
_WORDS = (b"true", b"false", b"null")

D = TypeVar("D")
Reader = Callable[[Any], Any]


class _Refused(Exception):
    """A verdict on its way to `decode`: collects the value's path; `decode` names the file."""

    def __init__(self, sentence: str, verdict: type[Corrupt | Reject] = Corrupt) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.verdict = verdict

    def inside(self, name: str) -> "_Refused":
        self.sentence = f"{name}: {self.sentence}"
        return self


def encode(document: Any) -> bytes:
    """Bytes of one document: the same document always gives the same bytes.

    Args:
        document: a frozen dataclass with a class attribute `KIND`.

    Raises:
        Reject: it is larger than any reader takes.
        ValueError: a float is not finite.
    """
    body = {"kind": document.KIND, "version": FORMAT_VERSION, **_to_fields(document)}
    # keys are sorted, so the digest's place is fixed: "kind" is before it, "version" behind
    head = _canonical({key: value for key, value in body.items() if key < "sha256"})
    tail = _canonical({key: value for key, value in body.items() if key > "sha256"})
    first, last = memoryview(head)[:-1], memoryview(tail)[1:]  # a copy may have 160 MiB
    digest = sha256_hex(first, b",", last)
    data = b"".join((first, _MEMBER, digest.encode(), b'",', last, b"\n"))
    if len(data) > max_bytes(type(document)) or _count_values(data) > MAX_VALUES:
        raise Reject(
            f"{document.KIND} document of {len(data)} bytes with {_count_values(data)} values: "
            f"allowed are {max_bytes(type(document))} bytes and {MAX_VALUES} values"
        )
    return data


def decode(cls: type[D], data: bytes, where: str) -> D:
    """The document in `data`.

    Args:
        cls: the expected document class.
        data: the file's or message's bytes.
        where: name of the file or message, for the sentence.

    Raises:
        Corrupt: the bytes are damaged, or are not such a document.
        Reject: the document is whole but of a version that this release does not read.
    """
    shape: Any = cls
    try:
        body = _load(data, max_bytes(cls))
        _check_envelope(body, data, shape.KIND)
        fields_only = {k: v for k, v in body.items() if k not in ("kind", "version", "sha256")}
        document: D = _reader(shape)(fields_only)
    except _Refused as error:
        raise error.verdict(f"{where}: {error.sentence}") from error
    return document


def max_bytes(cls: type) -> int:
    """Bytes that a document of this class may have; what a file is read up to."""
    return MAX_BYTES if getattr(cls, "LISTS_FILES", False) else MAX_SMALL_BYTES


def _check_envelope(body: dict[str, Any], data: bytes, kind: str) -> None:
    if body.get("kind") != kind:
        found = _short(body["kind"]) if "kind" in body else "missing"
        raise _Refused(f"kind is {found}, expected {kind!r}")
    # before the version: a flipped bit in that must not look like a newer release
    if body.get("sha256") != _find_digest(data):
        raise _Refused("sha256 does not match the document")
    version = body.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise _Refused(
            f"version {_short(version)} is not known here; this release reads {FORMAT_VERSION}",
            Reject,
        )


def _find_digest(data: bytes) -> str:
    """The digest that the document's bytes should carry; empty where no document can be."""
    at = data.rfind(_MEMBER)
    end = at + len(_MEMBER) + _DIGITS + 1
    if at < 0:
        return ""
    view = memoryview(data)
    return sha256_hex(view[:at], view[end : len(data) - data.endswith(b"\n")])


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _count_values(data: bytes) -> int:
    """At least the values in `data`: each stands behind a bracket or behind a comma."""
    return sum(data.count(mark) for mark in (b",", b"[", b"{"))


def _load(data: bytes, limit: int) -> dict[str, Any]:
    if len(data) > limit:
        raise _Refused(f"{len(data)} bytes, allowed are {limit}")
    if not data.isascii():
        raise _Refused("not a JSON document (a byte that is not ASCII)")
    if _count_values(data) > MAX_VALUES:
        raise _Refused(f"{_count_values(data)} values, allowed are {MAX_VALUES}")
    try:
        body = json.loads(
            data.decode("ascii"),  # bytes could be taken for UTF-16
            parse_constant=_refuse_constant,
            object_pairs_hook=_to_object,
        )
    except (ValueError, RecursionError) as error:
        raise _Refused(f"not a JSON document ({_explain(error, data)})") from error
    if not isinstance(body, dict):
        raise _Refused("not a JSON object")
    return body


def _explain(error: ValueError | RecursionError, data: bytes) -> str:
    if isinstance(error, RecursionError):
        return "too deep"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    rest = data[error.pos :].strip()
    if not data.strip():
        return "empty"
    is_begun = any(word.startswith(rest) for word in _WORDS)
    if is_begun or error.msg.startswith("Unterminated"):
        return "cut short"
    return f"not JSON at byte {error.pos}"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}")


def _to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ValueError(f"{len(pairs)} keys in one object")
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key twice")
    return result


def _to_fields(value: Any) -> dict[str, Any]:
    cls: Any = type(value)
    found = ((name, wants, getattr(value, name)) for name, wants in _shape(cls))
    return {name: _to_json(given, wants) for name, wants, given in found if given is not None}


@cache
def _shape(cls: Any) -> tuple[tuple[str, Any], ...]:
    """Names and bare types of a document's fields."""
    return tuple((field.name, _inner(_hints(cls)[field.name])) for field in fields(cls))


def _to_json(value: Any, wants: Any = None) -> Any:
    if isinstance(value, str):
        # a sentence may quote a file name that is no text; the document must still be readable
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, int):
        # 600 and 600.0 are one document, so they have the same bytes
        return float(value) if wants is float else value
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return _to_fields(value) if is_dataclass(value) else value


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _inner(hint: Any) -> Any:
    """The type without NewType and `| None`."""
    hint = getattr(hint, "__supertype__", hint)
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    return hint


@cache
def _reader(hint: Any) -> Reader:
    """What makes a value of this type from its JSON; raises `_Refused`."""
    hint = _inner(hint)
    if get_origin(hint) is tuple:
        (item, _) = get_args(hint)
        return _list_reader(_reader(item))
    if is_dataclass(hint):
        return _object_reader(hint)
    readers: dict[Any, Reader] = {
        bool: _read_bool,
        int: _read_int,
        float: _read_float,
        str: _read_text,
        datetime: _read_time,
    }
    if hint in readers:
        return readers[hint]
    assert issubclass(hint, StrEnum), f"{hint} has no place in a document"
    return lambda value: _read_member(hint, value)


def _object_reader(cls: Any) -> Reader:
    readers = {name: _reader(wants) for name, wants in _shape(cls)}
    required = {
        field.name
        for field in fields(cls)
        if field.default is MISSING and field.default_factory is MISSING
    }

    def read(body: Any) -> Any:
        if not isinstance(body, dict):
            raise _Refused("expected an object")
        if not body.keys() <= readers.keys():
            unknown = min(body.keys() - readers.keys())
            raise _Refused(
                f"field {_short(unknown)} is not known here; a newer release wrote it", Reject
            )
        if not required <= body.keys():
            raise _Refused(f"field {min(required - body.keys())!r} is missing")
        values = {}
        for name, value in body.items():
            try:
                values[name] = readers[name](value)
            except _Refused as error:
                raise error.inside(name) from None
        try:
            return cls(**values)
        except (ValueError, Reject) as error:
            raise _Refused(str(error)) from error

    return read


def _list_reader(read_item: Reader) -> Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Refused("expected a list")
        items = []
        for index, item in enumerate(value):
            value[index] = None  # of a long list, both forms at once are most of what it takes
            try:
                items.append(read_item(item))
            except _Refused as error:
                raise error.inside(f"[{index}]") from None
        return tuple(items)

    return read


def _read_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise _Refused(f"{_short(value)} is not a valid bool")


def _read_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT:
        return value
    raise _Refused(f"{_short(value)} is not a valid int")


def _read_float(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MAX_INT:
        return float(value)
    raise _Refused(f"{_short(value)} is not a valid float")


def _read_text(value: Any) -> str:
    if isinstance(value, str) and len(value) <= MAX_TEXT and _is_unicode(value):
        return value
    raise _Refused(f"{_short(value)} is not a valid str")


def _is_unicode(value: str) -> bool:
    """Half of a surrogate pair can be written in JSON, but neither printed nor stored."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_time(value: Any) -> datetime:
    try:
        when = datetime.fromisoformat(_read_text(value))
        if when.tzinfo is None:
            raise ValueError("a time without a zone")
        return when.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise _Refused(f"{_short(value)} is not allowed ({error})") from error


def _read_member(enum: type[StrEnum], value: Any) -> StrEnum:
    try:
        return enum(_read_text(value))
    except ValueError as error:
        raise _Refused(f"{_short(value)} is not allowed ({error})") from error


def _short(value: Any) -> str:
    """For a sentence: bounded, whatever somebody put there."""
    return reprlib.repr(value)
