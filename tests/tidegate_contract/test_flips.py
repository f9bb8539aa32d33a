"""Ten thousand flips of one bit, over every file of both tiers of a small run: none passes."""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.digest import ContentHasher
from tidegate_contract.errors import Corrupt
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, Pin, RunIdentity, TierState, Trained
from tidegate_contract.layout import (
    CONTROL_DOCUMENT,
    LINEAGES,
    METADATA,
    METADATA_REMOTE,
    PINS,
    ROOT_ID,
    RUN_DOCUMENT,
    TIER_DOCUMENT,
    TRASH,
    Attempt,
    parse_lineage_file,
    parse_pin_file,
    parse_state_file,
    parse_step_folder,
    parse_target_file,
    parse_trained_file,
    state_file,
    step_folder,
    target_file,
)
from tidegate_contract.publish import (
    announce,
    claim_lineage,
    commit_step,
    ensure_identity,
    note_trained,
    write_document,
    write_pin,
    write_seal,
)
from tidegate_contract.run_documents import (
    read_document,
    read_identity,
    scan_claims,
    scan_pins,
    scan_trained,
)
from tidegate_contract.seal import FileEntry, SaveReason, Scope, Seal, file_entry
from tidegate_contract.verify import verify_step
from tidegate_contract.wire import Control, Phase, Policy, StepNote, Target, TrainerState

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
OLD = Attempt(step=100, nonce="00000000000000aa")
NEW = Attempt(step=200, nonce="00000000000000bb")
FLIPS = 10_000


def write_data(step: Folder, name: str, data: bytes, scope: Scope) -> FileEntry:
    hasher = ContentHasher(1 << 12)
    hasher.update(data)
    with step.new_file(name) as file:
        file.write(data)
        file.publish(len(data))
    return file_entry(name, hasher.finish(), scope)


def write_local(run: Folder, attempt: Attempt, rank: int) -> Seal:
    """One rank's copy on its node, as a trainer leaves it."""
    drawn = random.Random(f"{attempt}{rank}")
    both = [f"weights-{rank}.distcp", *([METADATA_REMOTE] * (rank == 0))]
    local = [f"replica-{rank}.distcp", METADATA]
    with run.ensure_child(step_folder(attempt)) as step:
        files = [
            write_data(step, name, drawn.randbytes(drawn.randrange(1, 9000)), scope)
            for names, scope in ((both, Scope.BOTH), (local, Scope.LOCAL))
            for name in names
        ]
        seal = Seal(
            run_id=RUN_ID,
            lineage=1,
            attempt=attempt,
            tokens=attempt.step * 50,
            rank=rank,
            world_size=2,
            sealed_at=NOW,
            reason=SaveReason.CADENCE,
            torch_version="2.15.0",
            files=tuple(files),
        )
        write_seal(step, seal)
    return seal


def flush(local: Folder, remote: Folder, seal: Seal) -> None:
    name = step_folder(seal.attempt)
    with local.child(name) as near, remote.ensure_child(name) as far:
        announce(far, seal)
        for entry in seal.flushed_files:
            write_data(far, entry.name, near.read(entry.name) or b"", entry.scope)
        write_seal(far, seal)


def write_node(root: Path, rank: int, remote: Folder) -> None:
    """A local tier with one rank's run folder; its steps are flushed."""
    (root / "team" / "run").mkdir(parents=True)
    identity = RunIdentity(run_id=RUN_ID, name="team/run", uid=0, created_at=NOW)
    note = StepNote(step=200, tokens=10_000, at=NOW, attempt=NEW)
    root_id = f"{rank + 7:032x}"
    with Folder.open(root) as tier, Folder.open(root / "team") as namespace:
        state = TierState(root_id=root_id, usable=True, reason="OK", checked_at=NOW)
        write_document(tier, TIER_DOCUMENT, state)
        target = Target(tier="pfs", path="team/run", uid=0, gid=0, policy=Policy())
        write_document(namespace, target_file("run"), target)
    with Folder.open(root / "team" / "run") as run:
        ensure_identity(run, identity)
        ensure_identity(remote, identity)
        for folder in (root, root / "team" / "run"):
            (folder / ROOT_ID).write_text(f"{root_id}\n")
        write_document(run, CONTROL_DOCUMENT, Control(policy=Policy()))
        write_document(
            run,
            state_file(rank),
            TrainerState(
                run_id=RUN_ID,
                rank=rank,
                world_size=2,
                pod_uid="",
                phase=Phase.TRAINING,
                progress=note,
                sealed=note,
                written_at=NOW,
            ),
        )
        for attempt in (OLD, NEW):
            flush(run, remote, write_local(run, attempt, rank))


def write_run(base: Path) -> None:
    """Two nodes and a remote tier with two commits, the older one in `.trash`."""
    (base / "remote" / "team" / "run").mkdir(parents=True)
    with Folder.open(base / "remote" / "team" / "run") as remote:
        for rank in (0, 1):
            write_node(base / f"node{rank}", rank, remote)
        for attempt in (OLD, NEW):
            with remote.child(step_folder(attempt)) as step:
                assert commit_step(step, attempt, RUN_ID, NOW) is not None
        with remote.ensure_child(TRASH) as trash:
            remote.rename(step_folder(OLD), step_folder(OLD), trash)
        for number, restored in ((1, None), (2, OLD)):
            claim = LineageClaim(
                run_id=RUN_ID, number=number, restored=restored, explicit=True, claimed_at=NOW
            )
            assert claim_lineage(remote, claim)
            assert note_trained(remote, Trained(run_id=RUN_ID, number=number, trained_at=NOW))
        write_pin(remote, Pin(run_id=RUN_ID, attempt=NEW, reason="keep", pinned_at=NOW))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One file of the run and the open folder that its reader starts from."""

    path: Path
    folder: Folder

    @property
    def name(self) -> str:
        return self.path.name

    def is_found_in_step(self) -> bool:
        attempt = parse_step_folder(self.path.parent.name)
        assert attempt is not None
        problems = verify_step(self.folder, attempt, RUN_ID, stops_at_first=True)
        return bool(problems) and self.name in problems[0]

    def is_found_in_lineages(self) -> bool:
        # a damaged claim keeps its number, a damaged word was never said; these words are of an
        # early release and tell nothing of their claims
        word, number = parse_trained_file(self.name), parse_lineage_file(self.name)
        if word is not None:
            return scan_trained(self.folder, RUN_ID) == {1, 2} - {word}
        claims = {claim.number: claim for claim in scan_claims(self.folder, RUN_ID)}
        return number is not None and set(claims) == {1, 2} and claims[number].is_lost

    def is_found_in_pins(self) -> bool:
        return scan_pins(self.folder) == {parse_pin_file(self.name): None}

    def is_refused(self, read: Callable[[], Any]) -> bool:
        try:
            read()
        except Corrupt as error:
            return self.name in str(error)
        return False

    def is_found_in_run(self) -> bool:
        kinds: dict[str, Any] = {CONTROL_DOCUMENT: Control, TIER_DOCUMENT: TierState}
        if self.name == RUN_DOCUMENT:
            return self.is_refused(lambda: read_identity(self.folder))
        if parse_state_file(self.name) is not None:
            kinds[self.name] = TrainerState
        if parse_target_file(self.name) is not None:
            kinds[self.name] = Target
        return self.is_refused(lambda: read_document(self.folder, kinds[self.name], self.name))

    def is_found(self) -> bool:
        """The production reader notices that this file is not what was written."""
        match self.path.parent.name:
            case name if parse_step_folder(name) is not None:
                return self.is_found_in_step()
            case folder if folder == LINEAGES:
                return self.is_found_in_lineages()
            case folder if folder == PINS:
                return self.is_found_in_pins()
        return self.is_found_in_run()


def places_of(base: Path) -> Iterator[Place]:
    opened: dict[Path, Folder] = {}
    for path in sorted(base.rglob("*")):
        if not path.is_file():
            continue
        inside = path.parent
        start = inside.parent if inside.name in (LINEAGES, PINS) else inside
        yield Place(path=path, folder=opened.setdefault(start, Folder.open(start)))


@pytest.fixture
def run_places(tmp_path: Path) -> Iterator[list[Place]]:
    write_run(tmp_path)
    places = list(places_of(tmp_path))
    yield places
    for place in places:
        place.folder.close()


def flip(fd: int, bit: int) -> None:
    (byte,) = os.pread(fd, 1, bit // 8)
    os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), bit // 8)


def count_passing(places: list[Place], flips: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Flips one random bit at a time, in each file about as often; each is undone."""
    drawn = random.Random(seed)
    done: Counter[str] = Counter()
    passed = []
    for turn in range(flips):
        place = places[turn % len(places)]
        fd = os.open(place.path, os.O_RDWR)
        bit = drawn.randrange(os.fstat(fd).st_size * 8)
        flip(fd, bit)
        if not place.is_found():
            passed.append(f"{place.path}: bit {bit}")
        flip(fd, bit)
        os.close(fd)
        done[place.name] += 1
    return done, passed


@pytest.mark.long
def test_no_flipped_bit_passes(
    run_places: list[Place], record_property: Callable[[str, object], None]
) -> None:
    places = [place for place in run_places if place.name != ROOT_ID]
    assert not [place.path for place in places if place.is_found()], "found where nothing is"
    done, passed = count_passing(places, FLIPS, seed=4)
    assert passed == []
    assert sum(done.values()) == FLIPS
    record_property("counts", f"{FLIPS:,} flips in {len(places)} files, {len(passed)} passed")


def test_flipped_root_id_changes_no_topology(run_places: list[Place]) -> None:
    # it is plain text and only compared: any other id of the disk groups the ranks alike
    for place in run_places:
        if place.name != ROOT_ID:
            continue
        others = {p.path.read_bytes() for p in run_places if p.name == ROOT_ID} - {
            place.path.read_bytes()
        }
        for bit in range(len(place.path.read_bytes()) * 8):
            flipped = bytearray(place.path.read_bytes())
            flipped[bit // 8] ^= 1 << bit % 8
            assert bytes(flipped).strip()
            assert bytes(flipped).strip() not in {other.strip() for other in others}


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_flips(
    run_places: list[Place], write_result: Callable[[dict[str, Any]], None]
) -> None:
    places = [place for place in run_places if place.name != ROOT_ID]
    done, passed = count_passing(places, 10 * FLIPS, seed=5)
    assert passed == []
    write_result({"flips": sum(done.values()), "files": len(places), "passed": 0})
