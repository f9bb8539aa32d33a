"""Claims that are damaged or cannot be read: what is still known of them, and of which folder."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_contract.document import decode
from tidegate_contract.folder import ENTRY_ERRORS, Folder
from tidegate_contract.identity import UNTOLD, LineageClaim, Trained
from tidegate_contract.layout import LINEAGES, Attempt, lineage_file, step_folder, trained_file
from tidegate_contract.publish import claim_lineage, note_trained
from tidegate_contract.restore_point import (
    Copy,
    World,
    decide_restore_point,
    find_failed_tries,
    find_lost,
    merge_claims,
    next_lineage,
    order_key,
)
from tidegate_contract.run_documents import scan_claims, scan_trained

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
FIVE, SEVEN = (Attempt(step=step, nonce=f"{step:016x}") for step in (5, 7))
OF_TIER = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT)
OLD_WORD = (
    b'{"kind":"trained","number":2,"run_id":"6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11","sha256":'
    b'"29f696e92acb803fe73d95cf0b7a882ce7d80c1545b81674d1eb7be3e1ca304e","trained_at":'
    b'"2026-11-29T12:00:00.000000Z","version":1}\n'
)


def a_claim(number: int = 2, restored: Attempt | None = FIVE, **changes: Any) -> LineageClaim:
    fields = {"run_id": RUN_ID, "number": number, "restored": restored, "claimed_at": NOW}
    return LineageClaim(**(fields | changes))


def a_word(**changes: Any) -> Trained:
    fields = {"run_id": RUN_ID, "number": 2, "restored": FIVE, "explicit": True, "trained_at": NOW}
    return Trained(**(fields | changes))


def a_lost_claim(number: int) -> LineageClaim:
    return a_claim(number, None, claimed_at=UNTOLD)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"explicit") + 11] ^= 1
    path.write_bytes(data)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def another_number(path: Path) -> None:
    path.write_bytes((path.parent / "1.json").read_bytes())


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run's folder that is open, with a fresh start as claim 1 and an explicit one as claim 2."""
    with Folder.open(tmp_path) as found:
        assert claim_lineage(found, a_claim(1, None))
        assert claim_lineage(found, a_claim(explicit=True))
        yield found


def place_of(run: Folder, name: str) -> Path:
    return Path(run.path, LINEAGES, name)


@pytest.mark.parametrize("damage", [cut, flip, folder, another_number])
@pytest.mark.parametrize(
    ("word", "want"),
    [
        (a_word(), (FIVE, True)),
        (a_word(explicit=False), (FIVE, False)),
        (a_word(restored=None, explicit=False), (None, False)),
        (a_word(restored=None, explicit=None), None),
        (a_word(run_id="another"), None),
        (a_word(number=3), None),
        (None, None),
    ],
    ids=["named", "newest", "fresh", "of an earlier release", "another run's", "of 3", "no word"],
)
def test_damaged_claim_is_what_its_word_tells_or_lost(
    run: Folder, damage: Callable[[Path], None], word: Trained | None, want: Any
) -> None:
    if word is not None:
        assert note_trained(run, replace(word, number=2))
        if word.number != 2:
            note_trained(run, word)
            place_of(run, trained_file(3)).rename(place_of(run, trained_file(2)))
    damage(place_of(run, lineage_file(2)))

    first, second = scan_claims(run, RUN_ID)

    assert first == a_claim(1, None)
    assert (second.number, second.is_lost) == (2, want is None)
    assert (second.restored, second.explicit) == (want or (None, False))
    assert next_lineage([], [first, second]) == 3


def test_rollback_holds_though_its_claim_is_damaged(run: Folder) -> None:
    note_trained(run, a_word())
    cut(place_of(run, lineage_file(2)))
    world = a_world(FIVE, SEVEN, claims=tuple(scan_claims(run, RUN_ID)))
    assert decide_restore_point(world).candidates[0].attempt == FIVE


def test_word_of_an_earlier_release_is_read_and_tells_nothing_of_its_claim() -> None:
    word = decode(Trained, OLD_WORD, "")
    assert (word.number, word.restored, word.explicit) == (2, None, None)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Reading one name of `lineages/` fails with an error number."""
    whole = Folder.read

    def install(name: str, number: int) -> None:
        def read(folder: Folder, asked: str, *rest: int) -> bytes | None:
            if asked == name:
                raise OSError(number, os.strerror(number), asked)
            return whole(folder, asked, *rest)

        monkeypatch.setattr(Folder, "read", read)

    return install


@pytest.mark.parametrize("number", sorted(ENTRY_ERRORS), ids=errno.errorcode.get)
@pytest.mark.parametrize("name", [lineage_file(2), trained_file(2)])
def test_document_that_alone_cannot_be_read_is_a_damaged_one(
    run: Folder, refuse: Callable[[str, int], None], name: str, number: int
) -> None:
    note_trained(run, a_word())
    refuse(name, number)
    assert [(c.number, c.is_lost) for c in scan_claims(run, RUN_ID)] == [(1, False), (2, False)]
    assert scan_trained(run, RUN_ID) == ({2} if name == lineage_file(2) else set())


@pytest.mark.parametrize("number", OF_TIER, ids=errno.errorcode.get)
def test_tier_that_fails_is_no_damaged_claim(
    run: Folder, refuse: Callable[[str, int], None], number: int
) -> None:
    note_trained(run, a_word())
    refuse(lineage_file(2), number)
    with pytest.raises(OSError, match=os.strerror(number)):
        scan_claims(run, RUN_ID)
    refuse(trained_file(2), number)
    with pytest.raises(OSError, match=os.strerror(number)):
        scan_trained(run, RUN_ID)


@pytest.mark.parametrize("number", OF_TIER, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", [lineage_file(2), trained_file(2)])
def test_document_of_a_node_that_cannot_be_read_is_a_damaged_one_whatever_the_error(
    run: Folder, refuse: Callable[[str, int], None], name: str, number: int
) -> None:
    note_trained(run, a_word())
    refuse(name, number)
    claims = scan_claims(run, RUN_ID, is_local=True)
    assert [(c.number, c.is_lost) for c in claims] == [(1, False), (2, False)]
    words = {2} if name == lineage_file(2) else set()
    assert scan_trained(run, RUN_ID, is_local=True) == words


def test_claim_of_a_node_that_cannot_be_read_and_has_no_word_is_lost(
    run: Folder, refuse: Callable[[str, int], None]
) -> None:
    refuse(lineage_file(2), errno.EIO)
    claims = scan_claims(run, RUN_ID, is_local=True)
    assert [(c.number, c.is_lost) for c in claims] == [(1, False), (2, True)]


NAMED, OTHER, LOST = a_claim(explicit=True), a_claim(restored=SEVEN), a_lost_claim(2)


@pytest.mark.parametrize(
    ("places", "want"),
    [
        ([], ()),
        ([[a_claim(3), a_claim(1)], [a_claim(2)]], (a_claim(1), a_claim(2), a_claim(3))),
        ([[NAMED], [NAMED], [NAMED]], (NAMED,)),
        ([[LOST], [NAMED]], (NAMED,)),
        ([[NAMED], [LOST]], (NAMED,)),
        ([[LOST], [LOST]], (LOST,)),
        ([[OTHER], [NAMED]], (OTHER,)),
    ],
    ids=["none", "by number", "mirrors", "mended", "damaged mirror", "lost", "first one holds"],
)
def test_claims_of_several_folders_become_one_for_each_number(
    places: list[list[LineageClaim]], want: tuple[LineageClaim, ...]
) -> None:
    assert merge_claims(*places) == want


@given(
    told=st.sets(st.integers(1, 6)),
    seen=st.lists(st.dictionaries(st.integers(1, 6), st.booleans()), max_size=3),
)
def test_mirrors_tell_the_same_in_whatever_order_they_are_read(
    told: set[int], seen: list[dict[int, bool]]
) -> None:
    """Each node has some of the claims, some of those damaged."""
    nodes = [
        [a_lost_claim(n) if is_lost else a_claim(n) for n, is_lost in node.items() if n in told]
        for node in seen
    ]
    merged = {merge_claims(*order) for order in permutations(nodes)}
    assert len(merged) == 1
    (claims,) = merged
    assert [claim.number for claim in claims] == sorted({c.number for n in nodes for c in n})
    whole = {c.number for node in nodes for c in node if not c.is_lost}
    assert {claim.number for claim in claims if not claim.is_lost} == whole


@pytest.mark.parametrize(
    ("claims", "newest", "want"),
    [
        ([], None, None),
        ([a_claim(2)], None, None),
        ([a_lost_claim(2)], None, 2),
        ([a_lost_claim(2)], 1, 2),
        ([a_lost_claim(2)], 2, None),
        ([a_lost_claim(2)], 3, None),
        ([a_lost_claim(2), a_claim(3)], 1, 2),
        ([a_lost_claim(2), a_lost_claim(4), a_claim(5)], 2, 4),
    ],
    ids=[
        "no claim",
        "whole",
        "no commit",
        "older commits only",
        "its lineage has a commit",
        "a newer one has",
        "a later claim is whole",
        "two",
    ],
)
def test_lost_claim_matters_until_its_lineage_or_a_newer_one_has_a_commit(
    claims: list[LineageClaim], newest: int | None, want: int | None
) -> None:
    lost = find_lost(claims, newest)
    assert (lost.number if lost else None) == want


@given(st.data())
def test_once_a_lost_claim_does_not_matter_the_newest_step_is_newest_whatever_it_held(
    data: st.DataObject,
) -> None:
    """Steps of a lineage are greater than what its restore began from."""
    number = data.draw(st.integers(2, 4))
    steps = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1))
    held, _ = data.draw(st.sampled_from(steps))
    known = [(a_step(step, n), n) for step, n in steps if n != number or step > held]
    older = [attempt for attempt, lineage in known if lineage < number and attempt.step == held]
    truth = a_claim(number, data.draw(st.sampled_from(older)), explicit=True) if older else None
    lost = [a_lost_claim(number)]
    newest = max((order_key(attempt, n, lost) for attempt, n in known), default=None)
    if truth is None or newest is None or find_lost(lost, newest[0]) is not None:
        return
    assert max(order_key(attempt, n, [truth]) for attempt, n in known) == newest


def a_step(step: int, lineage: int) -> Attempt:
    return Attempt(step=step, nonce=f"{lineage:08x}{step:08x}")


def a_world(*commits: Attempt, **changes: Any) -> World:
    copies = tuple(
        Copy(
            attempt=attempt,
            lineage=1,
            tokens=1,
            world_size=1,
            ranks=frozenset({0}),
            is_committed=True,
            is_announced=True,
            folder=step_folder(attempt),
        )
        for attempt in commits
    )
    return World(**({"nodes": (frozenset({0}),), "local": ((),), "remote": copies} | changes))


def test_tries_are_not_counted_while_the_words_may_lie_where_nobody_can_read() -> None:
    later = [a_claim(n, claimed_at=NOW + timedelta(hours=n)) for n in (2, 3, 4)]
    world = a_world(FIVE, claims=tuple(later), max_tries=3)
    assert find_failed_tries(world) == {FIVE: 3}
    away = replace(world, local=(world.remote,), remote=None)
    assert find_failed_tries(away) == {}
    assert decide_restore_point(away).candidates[0].attempt == FIVE
