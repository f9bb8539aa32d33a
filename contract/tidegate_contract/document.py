"""The envelope of every JSON document: kind, version, fields, and a SHA-256 of itself.

A document is a frozen dataclass; its fields are the JSON's fields. `decode(encode(x)) == x`.
Reading is hostile-safe: bounded size and depth, no NaN, no duplicate or unknown keys, every
number within [0, 2^63), every text within `MAX_TEXT`. Pure. Called by whoever reads or writes a
document of `identity`, `seal` or `wire`.
"""

import json
import types
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from tidegate_contract.digest import sha256_hex
from tidegate_contract.errors import Corrupt, Reject

FORMAT_VERSION = 1
MAX_BYTES = 256 << 20
"""A manifest of a million files with block digests stays below this."""
MAX_TEXT = 16 << 10
MAX_ITEMS = 4_000_000
_MAX_INT = 2**63 - 1

D = TypeVar("D")


def encode(document: Any) -> bytes:
    """Bytes of one document: the same document always gives the same bytes.

    Args:
        document: a frozen dataclass with a class attribute `KIND`.
    """
    body = {"kind": document.KIND, "version": FORMAT_VERSION, **_to_fields(document)}
    body["sha256"] = sha256_hex(_canonical(body))
    return _canonical(body) + b"\n"


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
    body = _load(data, where)
    kind = getattr(cls, "KIND")  # noqa: B009  # documents carry it by convention, not by a base
    if body.get("kind") != kind:
        raise Corrupt(f"{where}: kind is {body.get('kind')!r}, expected {kind!r}")
    if body.get("version") != FORMAT_VERSION:
        raise Reject(
            f"{where}: version {body.get('version')!r} is not known here; "
            f"this release reads {FORMAT_VERSION}"
        )
    told = body.pop("sha256", None)
    try:
        is_whole = told == sha256_hex(_canonical(body))
    except (ValueError, RecursionError) as error:  # a number without end, or nested too deep
        raise Corrupt(f"{where}: not a document ({error})") from error
    if not is_whole:
        raise Corrupt(f"{where}: sha256 does not match the document")
    del body["kind"], body["version"]
    document: D = _from_fields(cls, body, where)
    return document


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _load(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise Corrupt(f"{where}: {len(data)} bytes, a document has at most {MAX_BYTES}")

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"the number {name}")

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key twice")
        return result

    try:
        body = json.loads(data, parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where}: not a JSON document ({error})") from error
    if not isinstance(body, dict):
        raise Corrupt(f"{where}: not a JSON object")
    return body


def _to_fields(value: Any) -> dict[str, Any]:
    return {
        field.name: _to_json(getattr(value, field.name))
        for field in fields(value)
        if getattr(value, field.name) is not None
    }


def _to_json(value: Any) -> Any:
    if is_dataclass(value):
        return _to_fields(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return value


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _from_fields(cls: Any, body: Any, where: str) -> Any:
    if not isinstance(body, dict):
        raise Corrupt(f"{where}: expected an object")
    known = {field.name: field for field in fields(cls)}
    unknown = sorted(set(body) - set(known))
    if unknown:
        raise Reject(f"{where}: field {unknown[0]!r} is not known here; a newer release wrote it")
    hints = _hints(cls)
    values = {
        name: _from_json(hints[name], body[name], f"{where}: {name}")
        for name, field in known.items()
        if name in body or _is_required(field, where)
    }
    try:
        return cls(**values)
    except ValueError as error:
        raise Corrupt(f"{where}: {error}") from error


def _is_required(field: Field[Any], where: str) -> bool:
    if field.default is MISSING and field.default_factory is MISSING:
        raise Corrupt(f"{where}: field {field.name!r} is missing")
    return False


def _from_json(hint: Any, value: Any, where: str) -> Any:
    hint = getattr(hint, "__supertype__", hint)  # NewType
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        return _from_json(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise Corrupt(f"{where}: expected a list of at most {MAX_ITEMS} items")
        (inner, _) = get_args(hint)
        return tuple(_from_json(inner, item, f"{where}[{i}]") for i, item in enumerate(value))
    if is_dataclass(hint):
        return _from_fields(hint, value, where)
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT:
            return value
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, str) and len(value) <= MAX_TEXT:
        return _text(hint, value, where)
    raise Corrupt(f"{where}: {str(value)[:40]!r} is not a valid {hint.__name__}")


def _text(hint: Any, value: str, where: str) -> Any:
    try:
        if hint is datetime:
            when = datetime.fromisoformat(value)
            if when.tzinfo is None:
                raise ValueError("a time without a zone")
            return when.astimezone(UTC)
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            return hint(value)
    except (ValueError, OverflowError) as error:
        raise Corrupt(f"{where}: {value[:40]!r} is not allowed ({error})") from error
    return value
