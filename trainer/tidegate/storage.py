"""DCP's file layer on one step folder: hashed while written, published durably, read without links.

Nothing here decides what is written; `writer` and `reading` do. One instance per save or load, used
from one thread.
"""

import io
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from tidegate_contract.digest import ContentHasher
from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder, NewFile
from tidegate_contract.seal import FileEntry, Scope, file_entry

_WORLD_WRITABLE = 0o002


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


class StepStorage(FileSystem):  # type: ignore[misc]  # torch is not typed here
    """Files of one open step folder.

    Attributes:
        entries: of the files written so far, for the seal.
    """

    def __init__(self, folder: Folder, trusted: Collection[int] = ()) -> None:
        """Takes an open folder; `trusted` are the owners whose files may be read."""
        super().__init__()
        self._folder = folder
        self._trusted = trusted
        self.entries: list[FileEntry] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """DCP's hook: a stream of the file of this name in the folder.

        A written file appears, durably, when the block ends without an error, and not at all else.
        """
        name = os.path.basename(path)
        if mode == "wb":
            with self.new_stream(name, Scope.BOTH) as stream:
                yield stream
            return
        with os.fdopen(open_trusted(self._folder, name, self._trusted), "rb") as file:
            yield file

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


def open_trusted(folder: Folder, name: str, trusted: Collection[int]) -> int:
    """A descriptor of a file that may be unpickled; the caller closes it.

    Raises:
        Reject: a stranger owns it or may write it: loading it could run a stranger's code.
        Corrupt: it is a link or no regular file.
    """
    fd = folder.open_file(name)
    found = os.fstat(fd)
    if found.st_uid in trusted and not found.st_mode & _WORLD_WRITABLE:
        return fd
    os.close(fd)
    raise Reject(
        f"{folder.path}/{name}: owner {found.st_uid}, mode {found.st_mode & 0o7777:o}; read are "
        f"only files of uid {sorted(trusted)} that others may not write"
    )
