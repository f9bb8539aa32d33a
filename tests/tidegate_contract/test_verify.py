"""Everything that a copy consists of is read, and each damage is named."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.digest import ContentHasher, sha256_hex
from tidegate_contract.document import decode, encode
from tidegate_contract.folder import Folder
from tidegate_contract.layout import COMMIT, MANIFEST, METADATA, Attempt, announced_file
from tidegate_contract.publish import commit_step, write_document, write_seal
from tidegate_contract.scan import hash_file
from tidegate_contract.seal import Commit, FileEntry, Manifest, Scope, Seal, file_entry
from tidegate_contract.verify import size_to_verify, verify_step

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
NOW = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
ATTEMPT = Attempt(step=100, nonce="00000000000000aa")
BLOCK = 1 << 12


@pytest.fixture
def committed(a_step: Callable[..., Folder]) -> Folder:
    step = a_step()
    assert commit_step(step, ATTEMPT, RUN_ID, NOW) is not None
    return step


def problems_of(step: Folder, **options: Any) -> list[str]:
    return verify_step(step, ATTEMPT, RUN_ID, **options)


def damage(step: Folder, name: str, *positions: int) -> None:
    path = Path(step.path, name)
    data = bytearray(path.read_bytes())
    for position in positions:
        data[position] ^= 1
    path.write_bytes(data)


def a_local_step(tmp_path: Path, a_seal: Callable[..., dict[str, Any]], **sizes: int) -> Folder:
    """A local copy of one rank; each file has this many bytes."""
    with Folder.open(tmp_path) as run:
        step = run.ensure_child("step-00000000000000000100.00000000000000aa")
    entries: list[FileEntry] = []
    for name, size in sizes.items():
        data = os.urandom(size)
        hasher = ContentHasher(BLOCK)
        hasher.update(data)
        Path(step.path, f"{name}-0.distcp").write_bytes(data)
        scope = Scope.LOCAL if name == "replica" else Scope.BOTH
        entries.append(file_entry(f"{name}-0.distcp", hasher.finish(), scope))
    write_seal(step, Seal(**a_seal(files=tuple(entries))))
    return step


def test_sound_commit_has_no_problem_and_is_read_once(committed: Folder) -> None:
    pieces: list[int] = []
    with committed as step:
        assert problems_of(step, on_bytes=pieces.append) == []
        assert sum(pieces) == size_to_verify(step, ATTEMPT, RUN_ID) == 2 * 10_000 + 2 * 20


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("weights-1.distcp", "weights-1.distcp: block 0 of 3 is damaged"),
        (METADATA, f"{METADATA}: block 0 of 1 is damaged"),
        (COMMIT, f"/{COMMIT}: "),
        (MANIFEST, f"{MANIFEST}: does not match {COMMIT}"),
        ("seal-0.json", "/seal-0.json: "),
        ("announced-1.json", "/announced-1.json: "),
    ],
    ids=["data", "metadata", "COMMIT", "manifest", "seal", "announcement"],
)
def test_damage_anywhere_is_named(committed: Folder, name: str, sentence: str) -> None:
    with committed as step:
        size = step.size(name)
        assert size is not None
        damage(step, name, min(60, size - 1))
        (problem,) = problems_of(step)
        assert sentence in problem
        assert step.path in problem


def test_damage_of_several_files_is_named_whole_or_first(committed: Folder) -> None:
    with committed as step:
        damage(step, "weights-0.distcp", 5, 9000)
        damage(step, "weights-1.distcp", 5000)
        step.remove(METADATA)
        all_of_it = problems_of(step)
        assert [problem.split("/")[-1] for problem in all_of_it] == [
            f"{METADATA}: missing (20 bytes)",
            "weights-0.distcp: block 0 of 3 is damaged",
            "weights-0.distcp: block 2 of 3 is damaged",
            "weights-1.distcp: block 1 of 3 is damaged",
        ]
        pieces: list[int] = []
        assert problems_of(step, stops_at_first=True, on_bytes=pieces.append) == all_of_it[:1]
        assert not pieces


def test_neighbouring_blocks_are_one_sentence(
    tmp_path: Path, a_seal: Callable[..., dict[str, Any]]
) -> None:
    with a_local_step(tmp_path, a_seal, weights=10 * BLOCK) as step:
        damage(step, "weights-0.distcp", *(block * BLOCK for block in (1, 2, 3, 5, 8, 9)))
        assert [problem.split(": ")[1] for problem in problems_of(step)] == [
            "blocks 1 to 3 of 10 are damaged",
            "block 5 of 10 is damaged",
            "blocks 8 to 9 of 10 are damaged",
        ]


def test_local_copy_is_judged_by_its_seal_replicas_included(
    tmp_path: Path, a_seal: Callable[..., dict[str, Any]]
) -> None:
    with a_local_step(tmp_path, a_seal, weights=5000, replica=5000) as step:
        assert problems_of(step) == []
        damage(step, "replica-0.distcp", 4999)
        (problem,) = problems_of(step)
        assert "replica-0.distcp: block 1 of 2 is damaged" in problem


@pytest.mark.parametrize(
    ("size", "told"), [(0, "0 bytes, declared 5000"), (6000, "6000 bytes, declared 5000")]
)
def test_file_of_another_size_is_not_read(
    tmp_path: Path, a_seal: Callable[..., dict[str, Any]], size: int, told: str
) -> None:
    with a_local_step(tmp_path, a_seal, weights=5000) as step:
        os.truncate(Path(step.path, "weights-0.distcp"), size)
        pieces: list[int] = []
        (problem,) = problems_of(step, on_bytes=pieces.append)
        assert told in problem
        assert not pieces


def test_file_that_cannot_be_read_is_a_problem(
    tmp_path: Path, a_seal: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Folder.open_file

    def broken(folder: Folder, name: str) -> int:
        if name == "weights-0.distcp":
            raise OSError(errno.EIO, "Input/output error", name)
        return real(folder, name)

    with a_local_step(tmp_path, a_seal, weights=5000) as step:
        monkeypatch.setattr(Folder, "open_file", broken)
        (problem,) = problems_of(step)
        assert "weights-0.distcp: cannot be read (Input/output error)" in problem


def test_file_that_grows_while_it_is_read_ends(
    tmp_path: Path, a_seal: Callable[..., dict[str, Any]]
) -> None:
    with a_local_step(tmp_path, a_seal, weights=5000) as step:
        (entry,) = decode(Seal, Path(step.path, "seal-0.json").read_bytes(), "").files

        def lengthen(_: int) -> None:
            with Path(step.path, entry.name).open("ab") as file:
                file.write(b"more" * 5000)

        assert hash_file(step, entry, lengthen) == entry.content


def test_announced_files_that_may_still_come_are_no_problem(
    a_step: Callable[..., Folder],
    a_seal: Callable[..., dict[str, Any]],
    write_rank: Callable[..., Seal],
) -> None:
    with a_step(ranks=(0,)) as step:
        write_rank(step, a_seal(rank=1), receipt=False)
        step.remove("weights-1.distcp")
        assert problems_of(step) == []


def test_missing_receipt_of_a_commit_is_a_problem(committed: Folder) -> None:
    with committed as step:
        step.remove("seal-1.json")
        (problem,) = problems_of(step)
        assert "seal-1.json: missing, but the step is committed" in problem


def test_announcement_that_differs_from_its_receipt_is_a_problem(committed: Folder) -> None:
    with committed as step:
        seal = decode(Seal, step.read("seal-1.json") or b"", "")
        write_document(step, announced_file(1), replace(seal, files=()))
        (problem,) = problems_of(step)
        assert "announced-1.json: differs from seal-1.json" in problem


def test_manifest_that_does_not_follow_from_the_seals_is_a_problem(committed: Folder) -> None:
    with committed as step:
        manifest = decode(Manifest, step.read(MANIFEST) or b"", "")
        forged = replace(manifest, files=manifest.files[:1])
        write_document(step, MANIFEST, forged)
        digest = sha256_hex(encode(forged))
        write_document(step, COMMIT, Commit(manifest_sha256=digest, committed_at=NOW))
        (problem,) = problems_of(step)
        assert f"{MANIFEST}: is not what the seals give" in problem


def test_documents_of_another_run_or_attempt_are_problems(committed: Folder) -> None:
    with committed as step:
        for problem in verify_step(step, ATTEMPT, "another-run"):
            assert "belongs to another" in problem
        other = Attempt(step=100, nonce="00000000000000bb")
        assert len(verify_step(step, other, RUN_ID)) == 5
