"""The only place that hashes: xxh3-128 for data, SHA-256 for documents.

Data files are hashed in blocks so that a bad block can be named and a copy can be checked while it
runs. The file's digest is the hash over the concatenated raw block digests, in order. Pure.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

BLOCK_SIZE = 16 << 20
"""Bytes per block: one O_DIRECT buffer of the writer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentDigest:
    """What identifies the bytes of one file.

    Attributes:
        size: bytes.
        block_size: bytes per block; the last block may be shorter.
        blocks: xxh3-128 of each block, 32 hex digits each.
        digest: xxh3-128 over the raw bytes of `blocks`, 32 hex digits.
    """

    size: int
    block_size: int
    blocks: tuple[str, ...]
    digest: str


class ContentHasher:
    """Hashes a stream of any chunking into a `ContentDigest`; one thread at a time."""

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        """Starts an empty stream."""
        self._block_size = block_size
        self._block = xxhash.xxh3_128()
        self._filled = 0
        self._size = 0
        self._blocks: list[str] = []

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Takes the next bytes of the stream."""
        view = memoryview(data).cast("B")
        while view:
            piece = view[: self._block_size - self._filled]
            self._block.update(piece)
            self._filled += len(piece)
            self._size += len(piece)
            view = view[len(piece) :]
            if self._filled == self._block_size:
                self._close_block()

    def finish(self) -> ContentDigest:
        """Closes the last block; the hasher must not be used afterwards."""
        if self._filled:
            self._close_block()
        return ContentDigest(
            size=self._size,
            block_size=self._block_size,
            blocks=tuple(self._blocks),
            digest=digest_of_blocks(self._blocks),
        )

    def _close_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block = xxhash.xxh3_128()
        self._filled = 0


def digest_of_blocks(blocks: Iterable[str]) -> str:
    """The file digest that belongs to these block digests."""
    return xxhash.xxh3_128_hexdigest(bytes.fromhex("".join(blocks)))


def sha256_hex(*pieces: bytes | memoryview) -> str:
    """SHA-256 of a document's bytes, given in one or several pieces; 64 hex digits."""
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(piece)
    return whole.hexdigest()
