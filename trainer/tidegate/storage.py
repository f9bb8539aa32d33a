"""DCP's file layer on one step folder: hashed while written, published durably, checked while read.

Nothing here decides what is written; `writer` and `reading` do. One instance per save or load, used
from one thread.
"""

import io
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from tidegate.trust import open_trusted
from tidegate_contract.digest import ContentHasher
from tidegate_contract.errors import Corrupt, DamagedFile
from tidegate_contract.folder import Folder, NewFile
from tidegate_contract.seal import FileEntry, Scope, file_entry

_KEPT_BLOCKS = 2
"""Of a file that is read: torch looks at the end of an item before it reads it from its start."""


class HashedStream(io.RawIOBase):
    """Write side of one data file; `flush` is called after each item and means nothing here."""

    def __init__(self, file: NewFile) -> None:
        """Takes an unfinished file."""
        super().__init__()
        self._file = file
        self.hasher = ContentHasher()
        self._size = 0

    def writable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Bytes written so far; DCP notes it as the offset of the next item."""
        return self._size

    def write(self, data: Any) -> int:
        """Hashes and writes all of `data`."""
        view = memoryview(data).cast("B")
        self.hasher.update(view)
        self._file.write(view)
        self._size += len(view)
        return len(view)


class VerifiedStream(io.RawIOBase):
    """Read side of one data file: no byte of a block is given unless the block matches its digest.

    So what is loaded is what was sealed, whatever happens to the file meanwhile. Memory for two
    blocks; a block that is needed again later is read and checked again.

    Attributes:
        bytes_read: so far.
    """

    def __init__(self, fd: int, path: str, entry: FileEntry) -> None:
        """Takes an open file that stays the caller's.

        Args:
            fd: of the file; its position is not used.
            path: for messages.
            entry: what the file should be.

        Raises:
            DamagedFile: it has another size.
        """
        super().__init__()
        size = os.fstat(fd).st_size
        if size != entry.size:
            raise DamagedFile(f"{path}: {size} bytes, declared {entry.size}", entry)
        self._fd = fd
        self._path = path
        self._entry = entry
        self._position = 0
        self._kept: dict[int, memoryview] = {}
        self.bytes_read = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Where the next byte is read, in bytes from the start."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """As for any file; behind its end there is nothing to read."""
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._entry.size}
        if starts[whence] + offset < 0:
            raise ValueError(f"{self._path}: negative position {starts[whence] + offset}")
        self._position = starts[whence] + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fills the buffer, up to the end of the file.

        Raises:
            DamagedFile: names the block that does not match; what was filled before it is sound.
            OSError: the file cannot be read.
        """
        view = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(view) and self._position < self._entry.size:
            count = self._read_some(view[filled:])
            filled += count
            self._position += count
        return filled

    def _read_some(self, view: memoryview) -> int:
        """Bytes of the block at the position, as many as the view takes."""
        index, start = divmod(self._position, self._entry.block_size)
        size = self._size_of(index)
        if start == 0 and len(view) >= size and index not in self._kept:
            self._fill(index, view[:size])  # without a copy between
            return size
        piece = self._block(index)[start : start + len(view)]
        view[: len(piece)] = piece
        return len(piece)

    def _size_of(self, index: int) -> int:
        block_size = self._entry.block_size
        return min(block_size, self._entry.size - index * block_size)

    def _block(self, index: int) -> memoryview:
        found = self._kept.pop(index, None)
        if found is None:
            found = self._free_memory()[: self._size_of(index)]
            self._fill(index, found)
        self._kept[index] = found  # behind all others: the first one is the longest unused
        return found

    def _free_memory(self) -> memoryview:
        if len(self._kept) < _KEPT_BLOCKS:
            return memoryview(bytearray(min(self._entry.block_size, self._entry.size)))
        unused = self._kept.pop(next(iter(self._kept)))
        return memoryview(unused.obj)

    def _fill(self, index: int, memory: memoryview) -> None:
        """Reads a block into memory of its size, and wipes it out again unless it matches."""
        is_sound = False
        try:
            is_sound = self._digest_into(index, memory) == self._entry.blocks[index]
        finally:
            if not is_sound:
                memory[:] = bytes(len(memory))
        if not is_sound:
            where = f"block {index} of {len(self._entry.blocks)}"
            raise DamagedFile(f"{self._path}: {where} is damaged", self._entry)

    def _digest_into(self, index: int, memory: memoryview) -> str | None:
        filled = 0
        begin = index * self._entry.block_size
        while filled < len(memory) and (
            count := os.preadv(self._fd, [memory[filled:]], begin + filled)
        ):
            filled += count
        self.bytes_read += filled
        hasher = ContentHasher(self._entry.block_size)
        hasher.update(memory[:filled])
        return next(iter(hasher.finish().blocks), None)


class StepStorage(FileSystem):  # type: ignore[misc]  # torch is not typed here
    """Files of one open step folder.

    Attributes:
        entries: of the files written so far, for the seal.
        bytes_read: of the files read so far; a block that was read twice counts twice.
    """

    def __init__(
        self,
        folder: Folder,
        trusted: Collection[int] = (),
        declared: Mapping[str, FileEntry] | None = None,
    ) -> None:
        """Takes an open folder.

        Args:
            folder: stays the caller's.
            trusted: owners whose files may be read.
            declared: name → what the seals say of the file; no other one is read.
        """
        super().__init__()
        self._folder = folder
        self._trusted = trusted
        self._declared = declared or {}
        self.entries: list[FileEntry] = []
        self.bytes_read = 0

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """DCP's hook: a stream of the file of this name in the folder.

        A written file appears, durably, when the block ends without an error, and not at all else.

        Raises:
            Corrupt: no seal declares the file that is to be read, or it is damaged.
            Reject: a stranger owns it or may write it.
        """
        name = os.path.basename(path)
        if mode == "wb":
            with self.new_stream(name, Scope.BOTH) as stream:
                yield stream
            return
        with self._open_verified(name) as stream:
            yield stream

    @contextmanager
    def _open_verified(self, name: str) -> Iterator[VerifiedStream]:
        path = f"{self._folder.path}/{name}"
        entry = self._declared.get(name)
        if entry is None:
            raise Corrupt(f"{path}: no seal declares it")
        fd = open_trusted(self._folder, name, self._trusted)
        try:
            stream = VerifiedStream(fd, path, entry)
            yield stream
            self.bytes_read += stream.bytes_read
        finally:
            os.close(fd)

    @contextmanager
    def new_stream(self, name: str, scope: Scope) -> Iterator[HashedStream]:
        """As `create_stream` for writing, with the scope that the seal declares."""
        with self._folder.new_file(name) as file:
            stream = HashedStream(file)
            yield stream
            content = stream.hasher.finish()
            file.publish(content.size)
            self.entries.append(file_entry(name, content, scope))

    def write_file(self, name: str, data: bytes, scope: Scope) -> None:
        """Writes one small file."""
        with self.new_stream(name, scope) as stream:
            stream.write(data)
