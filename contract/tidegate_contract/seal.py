"""Seal, manifest and COMMIT: the documents that make files count. Pure.

A seal declares what one rank wrote. A manifest is a function of all seals of one attempt, so it is
identical whoever builds it. COMMIT holds the manifest's SHA-256 and makes the step a checkpoint.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from tidegate_contract.digest import BLOCK_SIZE, ContentDigest, digest_of_blocks
from tidegate_contract.errors import Corrupt
from tidegate_contract.layout import (
    METADATA,
    METADATA_REMOTE,
    Attempt,
    check_file_name,
    step_folder,
)

MAX_FILE_BYTES = 1 << 50
MAX_RANKS = 1 << 20
"""Readers make sets of all ranks; a seal must not be able to ask for a set without end."""
_DIGEST = re.compile(r"[0-9a-f]{32}")


class Scope(StrEnum):
    """Where a file of a seal belongs."""

    BOTH = "Both"
    LOCAL = "Local"


class SaveReason(StrEnum):
    """Why a save was made."""

    CADENCE = "Cadence"
    REQUEST = "Request"
    TERMINATION = "Termination"
    CLOSE = "Close"
    CALL = "Call"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One sealed file.

    Attributes:
        name: file name inside the step folder.
        size: bytes.
        block_size: bytes per digest block.
        blocks: xxh3-128 of each block, hex.
        digest: xxh3-128 over the blocks, hex.
        scope: `LOCAL` files are never flushed.
    """

    name: str
    size: int
    block_size: int
    blocks: tuple[str, ...]
    digest: str
    scope: Scope = Scope.BOTH

    def __post_init__(self) -> None:
        """Refuses names, sizes and digests that cannot be true."""
        check_file_name(self.name)
        if self.size > MAX_FILE_BYTES:
            raise ValueError(f"{self.name}: size {self.size} is over {MAX_FILE_BYTES}")
        if self.block_size not in (BLOCK_SIZE, 1 << 12):  # the small one keeps tests fast
            raise ValueError(f"{self.name}: block size {self.block_size} is not known")
        if len(self.blocks) != -(-self.size // self.block_size):
            raise ValueError(
                f"{self.name}: {len(self.blocks)} blocks do not cover {self.size} bytes"
            )
        if not all(_DIGEST.fullmatch(block) for block in self.blocks):
            raise ValueError(f"{self.name}: a block's digest is not 32 hex digits")
        if digest_of_blocks(self.blocks) != self.digest:
            raise ValueError(f"{self.name}: digest does not match its blocks")

    @property
    def content(self) -> ContentDigest:
        """The digest in the form that `digest.ContentHasher` gives."""
        return ContentDigest(
            size=self.size, block_size=self.block_size, blocks=self.blocks, digest=self.digest
        )


def file_entry(name: str, content: ContentDigest, scope: Scope = Scope.BOTH) -> FileEntry:
    """The entry of a file whose bytes were hashed while they were written."""
    return FileEntry(
        name=name,
        size=content.size,
        block_size=content.block_size,
        blocks=content.blocks,
        digest=content.digest,
        scope=scope,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """`seal-<rank>.json`: this rank's files are complete; written last.

    Attributes:
        run_id: UUID of the run.
        lineage: raised at every restore.
        attempt: step and nonce.
        tokens: globally agreed tokens since the run began.
        rank: of the writer; 0 … world_size-1.
        world_size: ranks that take part in this attempt.
        sealed_at: UTC.
        reason: why the save was made.
        torch_version: of the writer; the same or a newer torch loads the step. Empty for a folder
            that another framework wrote.
        files: what this rank wrote, local-only ones included.
    """

    KIND: ClassVar[str] = "seal"
    LISTS_FILES: ClassVar[bool] = True

    run_id: str
    lineage: int
    attempt: Attempt
    tokens: int
    rank: int
    world_size: int
    sealed_at: datetime
    reason: SaveReason
    torch_version: str
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        """Refuses a rank out of range and a file named twice."""
        if not 0 <= self.rank < self.world_size <= MAX_RANKS:
            raise ValueError(
                f"rank {self.rank} is not below world size {self.world_size}, or that is over "
                f"{MAX_RANKS}"
            )
        twice = find_name_twice(self.files)
        if twice is not None:
            raise ValueError(f"{twice} is named twice")

    @property
    def flushed_files(self) -> tuple[FileEntry, ...]:
        """The entries that belong on the remote tier."""
        return tuple(entry for entry in self.files if entry.scope is Scope.BOTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`manifest.json`: every file of a committed step, `.metadata` included.

    Attributes are those of `Seal`, over all ranks; `sealed_at` is the newest seal's.
    """

    KIND: ClassVar[str] = "manifest"
    LISTS_FILES: ClassVar[bool] = True

    run_id: str
    lineage: int
    attempt: Attempt
    tokens: int
    world_size: int
    sealed_at: datetime
    reason: SaveReason
    torch_version: str
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        """Refuses a world size out of range and a file named twice."""
        if not 0 < self.world_size <= MAX_RANKS:
            raise ValueError(f"world size {self.world_size} is not in 1…{MAX_RANKS}")
        twice = find_name_twice(self.files)
        if twice is not None:
            raise ValueError(f"{twice} is named twice")

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """`COMMIT`: the step counts, if `manifest_sha256` is that of the manifest beside it.

    Attributes:
        manifest_sha256: SHA-256 of `manifest.json`, 64 hex digits.
        committed_at: UTC, by the committer's clock.
    """

    KIND: ClassVar[str] = "commit"

    manifest_sha256: str
    committed_at: datetime


def find_name_twice(entries: Iterable[FileEntry]) -> str | None:
    """The first name that another entry has as well; a tier may take two cases for one name."""
    known: set[str] = set()
    for entry in entries:
        folded = entry.name.lower()  # names are ASCII
        if folded in known:
            return entry.name
        known.add(folded)
    return None


def build_manifest(seals: Mapping[int, Seal]) -> Manifest:
    """The manifest of one attempt.

    Rank 0's `metadata-remote` becomes `.metadata`. A folder that another framework wrote is taken
    as it is.

    Args:
        seals: rank → seal, all ranks of the attempt.

    Raises:
        Corrupt: the seals are not those of ranks 0…N-1 of one attempt, two ranks claim one file,
            or rank 0 sealed no metadata although torch wrote the step.
    """
    first = seals.get(0)
    if first is None or not covers_all_ranks(seals):
        raise Corrupt(f"seals of {len(seals)} ranks are not a whole attempt")
    for rank, seal in seals.items():
        _check_same_attempt(first, rank, seal)
    entries = [entry for rank in sorted(seals) for entry in seals[rank].flushed_files]
    twice = find_name_twice(entries)
    if twice is not None:
        raise Corrupt(f"{step_folder(first.attempt)}: two ranks sealed the same file, {twice}")
    return Manifest(
        run_id=first.run_id,
        lineage=first.lineage,
        attempt=first.attempt,
        tokens=first.tokens,
        world_size=first.world_size,
        sealed_at=max(seal.sealed_at for seal in seals.values()),
        reason=first.reason,
        torch_version=first.torch_version,
        files=(*sorted(entries, key=lambda entry: entry.name), *_build_metadata(first, entries)),
    )


def _build_metadata(first: Seal, entries: list[FileEntry]) -> list[FileEntry]:
    """The entry of `.metadata`, unless the step has none or brings its own."""
    folder = step_folder(first.attempt)
    source = next((entry for entry in first.files if entry.name == METADATA_REMOTE), None)
    if source is None:
        if any(entry.name == METADATA_REMOTE for entry in entries):
            raise Corrupt(f"{folder}: {METADATA_REMOTE} is rank 0's alone, another rank sealed it")
        if first.torch_version:
            raise Corrupt(f"{folder}: rank 0 sealed no {METADATA_REMOTE}")
        return []
    if any(entry.name == METADATA for entry in entries):
        raise Corrupt(f"{folder}: {METADATA} and {METADATA_REMOTE} are both to be it")
    return [file_entry(METADATA, source.content)]


def covers_all_ranks(seals: Mapping[int, Seal]) -> bool:
    """These are the ranks of a whole attempt, by the world size of one of them."""
    if not seals:
        return False
    world_size = next(iter(seals.values())).world_size
    return len(seals) == world_size and all(rank in seals for rank in range(world_size))


def has_own_metadata(manifest: Manifest) -> bool:
    """The committer makes `.metadata` from rank 0's `metadata-remote`."""
    return any(entry.name == METADATA_REMOTE for entry in manifest.files)


def _check_same_attempt(first: Seal, rank: int, seal: Seal) -> None:
    if seal.rank != rank:
        raise Corrupt(f"the seal of rank {rank} says rank {seal.rank}")
    for field in ("run_id", "lineage", "attempt", "tokens", "world_size"):
        if getattr(seal, field) != getattr(first, field):
            raise Corrupt(
                f"seal of rank {rank}: {field} is {getattr(seal, field)!r}, "
                f"rank 0 has {getattr(first, field)!r}"
            )
