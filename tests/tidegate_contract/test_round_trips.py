"""Every name and every document parses back to what it was built from; new ones are found here."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidegate_contract
from tidegate_contract import layout
from tidegate_contract.cadence import Cadence
from tidegate_contract.digest import digest_of_blocks
from tidegate_contract.document import decode, encode
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import Attempt, Part
from tidegate_contract.seal import FileEntry, Manifest, Scope, Seal
from tidegate_contract.wire import Target

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BLOCK = 1 << 12

counts = st.integers(0, 2**63 - 1)
ranks = st.integers(0, 999_999_999)
lineages = st.integers(1, 10**18 - 1)
nonces = st.integers(0, 2**64 - 1).map(lambda drawn: f"{drawn:016x}")
attempts = st.builds(Attempt, step=counts, nonce=nonces)
labels = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
file_names = st.from_regex(r"[A-Za-z0-9._-]{1,200}", fullmatch=True).filter(
    lambda name: name not in (".", "..") and not layout.is_step_document(name)
)
final_names = file_names.filter(lambda name: not layout.is_temp_file(name))

NAMES: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "step_folder": (attempts,),
    "data_file": (st.sampled_from(Part), ranks),
    "seal_file": (ranks,),
    "announced_file": (ranks,),
    "state_file": (ranks,),
    "lineage_file": (lineages,),
    "trained_file": (lineages,),
    "pin_file": (attempts,),
    "temp_file": (final_names, nonces),
    "target_file": (labels,),
    "quarantined_file": (attempts, final_names, nonces),
    "hidden_folder": (attempts, nonces),
    "removed_folder": (attempts, nonces),
}
"""Arguments of each builder of `layout`."""
TELL_THE_FIRST = {"temp_file", "quarantined_file"}
"""Parsers that give back what the name is about, not the token or file that makes it unique."""


def public_functions(prefix: str) -> set[str]:
    """Functions of `layout` whose names start so, without that prefix."""
    return {
        name.removeprefix(prefix)
        for name, found in inspect.getmembers(layout, inspect.isfunction)
        if found.__module__ == layout.__name__ and name.startswith(prefix)
    }


def test_every_builder_has_its_parser_and_its_strategy() -> None:
    parsed = public_functions("parse_")
    asked = {f"{kind}_{name}" for kind in ("is", "check") for name in public_functions(f"{kind}_")}
    private = {f"_{name}" for name in public_functions("_")}
    built = public_functions("") - {f"parse_{name}" for name in parsed} - asked - private
    assert built == parsed == set(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
@settings(max_examples=50)
@given(data=st.data())
def test_name_parses_back(name: str, data: st.DataObject) -> None:
    arguments = tuple(data.draw(strategy) for strategy in NAMES[name])
    want = arguments[0] if name in TELL_THE_FIRST or len(arguments) == 1 else arguments
    assert getattr(layout, f"parse_{name}")(getattr(layout, name)(*arguments)) == want


@pytest.mark.parametrize("name", sorted(set(NAMES) - TELL_THE_FIRST))
@settings(max_examples=100)
@given(data=st.data())
def test_name_that_parses_is_the_one_that_is_built(name: str, data: st.DataObject) -> None:
    # a digit of another script, a leading zero, another case: two names must never mean one thing
    built = getattr(layout, name)(*(data.draw(strategy) for strategy in NAMES[name]))
    at = data.draw(st.integers(0, len(built)))
    other = built[:at] + data.draw(st.text(max_size=1)) + built[at + data.draw(st.booleans()) :]
    found = getattr(layout, f"parse_{name}")(other)
    if found is not None:
        arguments = found if isinstance(found, tuple) else (found,)
        assert getattr(layout, name)(*arguments) == other


@pytest.mark.parametrize("digits", ["٠", "०", "０"], ids=["arabic", "devanagari", "full width"])  # noqa: RUF001
def test_digits_of_another_script_are_no_number(digits: str) -> None:
    for name in ("seal-0.json", "announced-0.json", "state-0.json", "weights-0.distcp"):
        assert layout.parse_seal_file(name.replace("0", digits)) is None
        assert layout.parse_data_file(name.replace("0", digits)) is None
    step = layout.step_folder(Attempt(step=0, nonce="a" * 16))
    assert layout.parse_step_folder(step.replace("0", digits)) is None


def document_classes() -> list[Any]:
    """Every document class of the contract, in whatever module it is."""
    found = {
        value
        for module in pkgutil.iter_modules(tidegate_contract.__path__)
        for value in vars(importlib.import_module(f"tidegate_contract.{module.name}")).values()
        if isinstance(value, type) and is_dataclass(value) and hasattr(value, "KIND")
    }
    return sorted(found, key=lambda cls: cls.__name__)


@st.composite
def entries(draw: Callable[[Any], Any]) -> FileEntry:
    blocks = tuple(f"{n:032x}" for n in draw(st.lists(st.integers(0, 2**128 - 1), max_size=3)))
    rest = draw(st.integers(1, BLOCK)) if blocks else 0
    return FileEntry(
        name=draw(final_names),
        size=max(0, len(blocks) - 1) * BLOCK + rest,
        block_size=BLOCK,
        blocks=blocks,
        digest=digest_of_blocks(blocks),
        scope=draw(st.sampled_from(Scope)),
    )


file_lists = st.lists(entries(), max_size=3, unique_by=lambda entry: entry.name.lower()).map(tuple)
SPECIAL: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
    # what a class refuses at construction, its type hints do not tell
    Attempt: lambda: attempts,
    FileEntry: entries,
    Cadence: lambda: of_fields(Cadence, tokens=st.integers(1, 2**63 - 1), by=st.just(Cadence().by)),
    RunIdentity: lambda: of_fields(
        RunIdentity, name=st.tuples(labels, labels).map(lambda pair: "/".join(pair))
    ),
    Target: lambda: of_fields(Target, path=st.lists(labels, min_size=1, max_size=3).map("/".join)),
    Seal: lambda: of_fields(
        Seal, files=file_lists, rank=st.integers(0, 7), world_size=st.integers(8, 9)
    ),
    Manifest: lambda: of_fields(Manifest, files=file_lists, world_size=st.integers(1, 9)),
}
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: counts,
    # an int is allowed where a float is declared; it must not give other bytes
    float: st.floats(0, 2**62) | st.integers(0, 2**53),
    str: st.text(max_size=40),
    datetime: st.integers(0, 2**62 // 1000).map(lambda us: EPOCH + timedelta(microseconds=us)),
}


@cache
def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    if hint in SPECIAL:
        return SPECIAL[hint]()
    if hint in SCALARS:
        return SCALARS[hint]
    if type(None) in get_args(hint):
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        return st.none() | of_type(inner)
    if get_origin(hint) is tuple:
        return st.lists(of_type(get_args(hint)[0]), max_size=3).map(tuple)
    if is_dataclass(hint):
        return of_fields(hint)
    assert issubclass(hint, StrEnum), f"no strategy for {hint}"
    return st.sampled_from(hint)


def of_fields(cls: Any, **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of a dataclass, by the types of its fields."""
    hints = get_type_hints(cls)
    known = {f.name: of_type(hints[f.name]) for f in fields(cls) if f.name not in special}
    return st.builds(cls, **known, **special)


@pytest.mark.parametrize("cls", document_classes(), ids=lambda cls: cls.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_document_of_every_kind_survives_the_round_trip(cls: Any, data: st.DataObject) -> None:
    document = data.draw(of_type(cls))
    written = encode(document)
    read = decode(cls, written, "x")
    assert read == document
    assert encode(read) == written


def test_kinds_are_told_apart() -> None:
    kinds = [cls.KIND for cls in document_classes()]
    assert len(set(kinds)) == len(kinds) >= 13


def test_no_document_has_a_field_of_the_envelope() -> None:
    # the digest's place in the bytes is found by its name
    for cls in document_classes():
        assert {"kind", "version", "sha256"}.isdisjoint(field.name for field in fields(cls))
