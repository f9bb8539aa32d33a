from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_contract.digest import ContentHasher
from tidegate_contract.document import encode
from tidegate_contract.errors import Corrupt
from tidegate_contract.layout import METADATA, METADATA_REMOTE, Attempt
from tidegate_contract.seal import FileEntry, Scope, Seal, build_manifest, file_entry

BLOCK = 1 << 12


def an_entry(name: str, data: bytes = b"x", scope: Scope = Scope.BOTH) -> FileEntry:
    hasher = ContentHasher(BLOCK)
    hasher.update(data)
    return file_entry(name, hasher.finish(), scope)


@given(st.binary(max_size=3 * BLOCK), st.lists(st.integers(1, BLOCK * 2), max_size=6))
def test_hasher_gives_the_same_digest_for_any_chunking(data: bytes, cuts: list[int]) -> None:
    whole = ContentHasher(BLOCK)
    whole.update(data)
    pieces = ContentHasher(BLOCK)
    rest = data
    for cut in cuts:
        pieces.update(rest[:cut])
        rest = rest[cut:]
    pieces.update(rest)
    assert pieces.finish() == whole.finish()


@pytest.fixture
def two_seals(a_seal: Callable[..., dict[str, Any]]) -> dict[int, Seal]:
    files = {
        0: (an_entry("weights-0.distcp"), an_entry(METADATA_REMOTE, b"meta")),
        1: (an_entry("weights-1.distcp"), an_entry("replica-1.distcp", scope=Scope.LOCAL)),
    }
    return {rank: Seal(**a_seal(rank=rank, files=files[rank])) for rank in (0, 1)}


def test_manifest_is_the_same_whoever_builds_it(two_seals: dict[int, Seal]) -> None:
    backwards = dict(reversed(two_seals.items()))
    assert encode(build_manifest(two_seals)) == encode(build_manifest(backwards))


def test_manifest_holds_metadata_and_no_local_file(two_seals: dict[int, Seal]) -> None:
    names = {entry.name for entry in build_manifest(two_seals).files}
    assert names == {METADATA, METADATA_REMOTE, "weights-0.distcp", "weights-1.distcp"}


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": Attempt(step=100, nonce="00000000000000bb")},
        {"run_id": "another"},
        {"lineage": 2},
        {"tokens": 1},
        {"world_size": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_manifest_of_mixed_seals_is_refused(
    two_seals: dict[int, Seal], change: dict[str, Any]
) -> None:
    mixed = two_seals | {1: replace(two_seals[1], **change)}
    with pytest.raises(Corrupt, match=next(iter(change))):
        build_manifest(mixed)


def test_manifest_of_missing_ranks_or_metadata_is_refused(two_seals: dict[int, Seal]) -> None:
    with pytest.raises(Corrupt, match="not a whole attempt"):
        build_manifest({0: two_seals[0]})
    bare = replace(two_seals[0], files=two_seals[0].files[:1])
    with pytest.raises(Corrupt, match=METADATA_REMOTE):
        build_manifest(two_seals | {0: bare})
    foreign = {rank: replace(seal, torch_version="") for rank, seal in two_seals.items()}
    foreign[0] = replace(foreign[0], files=two_seals[0].files[:1])
    with pytest.raises(Corrupt, match=f"{METADATA_REMOTE} is rank 0's alone"):
        build_manifest(foreign | {1: replace(foreign[1], files=two_seals[0].files[1:])})
    twice = replace(two_seals[1], files=two_seals[0].files)
    with pytest.raises(Corrupt, match="same file"):
        build_manifest(two_seals | {1: twice})


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../x"},
        {"size": 2},
        {"size": 1 << 60},
        {"block_size": 7},
        {"blocks": ()},
        {"digest": "00" * 16},
    ],
    ids=str,
)
def test_entry_that_cannot_be_true_is_refused(change: dict[str, Any]) -> None:
    good = an_entry("weights-0.distcp", b"x" * (BLOCK + 1))
    with pytest.raises(ValueError, match=r"weights-0|not allowed"):
        replace(good, **change)
