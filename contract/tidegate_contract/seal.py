"""Seal, manifest and COMMIT: the documents that make files count. Pure.

A seal declares what one rank wrote. A manifest is a function of all seals of one attempt, so it is
identical whoever builds it. COMMIT holds the manifest's SHA-256 and makes the step a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from tidegate_contract.digest import BLOCK_SIZE, ContentDigest, digest_of_blocks
from tidegate_contract.errors import Corrupt
from tidegate_contract.layout import METADATA, METADATA_REMOTE, Attempt, check_file_name

MAX_FILE_BYTES = 1 << 50


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
        torch_version: of the writer; the same or a newer torch loads the step.
        files: what this rank wrote, local-only ones included.
    """

    KIND: ClassVar[str] = "seal"

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
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not below world size {self.world_size}")
        names = [entry.name for entry in self.files]
        if len(set(names)) != len(names):
            raise ValueError("a file is named twice")

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

    run_id: str
    lineage: int
    attempt: Attempt
    tokens: int
    world_size: int
    sealed_at: datetime
    reason: SaveReason
    torch_version: str
    files: tuple[FileEntry, ...]

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


def build_manifest(seals: Mapping[int, Seal]) -> Manifest:
    """The manifest of one attempt.

    Args:
        seals: rank → seal, all ranks of the attempt.

    Raises:
        Corrupt: the seals are not those of ranks 0…N-1 of one attempt, two ranks claim one file,
            or no rank sealed the metadata.
    """
    first = seals.get(0)
    if first is None or set(seals) != set(range(first.world_size)):
        raise Corrupt(f"seals of ranks {sorted(seals)} are not a whole attempt")
    for rank, seal in seals.items():
        _check_same_attempt(first, rank, seal)
    entries = [entry for rank in sorted(seals) for entry in seals[rank].flushed_files]
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        raise Corrupt(f"attempt {first.attempt}: two ranks sealed the same file")
    source = next((entry for entry in first.files if entry.name == METADATA_REMOTE), None)
    if source is None:
        raise Corrupt(f"attempt {first.attempt}: rank 0 sealed no {METADATA_REMOTE}")
    metadata = file_entry(METADATA, source.content)
    return Manifest(
        run_id=first.run_id,
        lineage=first.lineage,
        attempt=first.attempt,
        tokens=first.tokens,
        world_size=first.world_size,
        sealed_at=max(seal.sealed_at for seal in seals.values()),
        reason=first.reason,
        torch_version=first.torch_version,
        files=(*sorted(entries, key=lambda entry: entry.name), metadata),
    )


def _check_same_attempt(first: Seal, rank: int, seal: Seal) -> None:
    if seal.rank != rank:
        raise Corrupt(f"the seal of rank {rank} says rank {seal.rank}")
    for field in ("run_id", "lineage", "attempt", "tokens", "world_size"):
        if getattr(seal, field) != getattr(first, field):
            raise Corrupt(
                f"seal of rank {rank}: {field} is {getattr(seal, field)!r}, "
                f"rank 0 has {getattr(first, field)!r}"
            )
