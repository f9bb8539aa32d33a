"""The copy engine: one attempt's sealed files from the local tier to the remote one. I/O.

Called in a child process only (`tasks`). One read feeds both the hash and the write, so a bit that
flipped on the node's disk is found while it is copied and never gets its final name there. Every
error ends the whole copy; nothing here tries again.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

from tidegate_contract.digest import ContentHasher
from tidegate_contract.document import encode
from tidegate_contract.errors import Corrupt
from tidegate_contract.folder import Folder, NewFile
from tidegate_contract.layout import announced_file, parse_temp_file, seal_file
from tidegate_contract.publish import announce, write_seal
from tidegate_contract.seal import FileEntry, Seal
from tidegate_sidecar.faults import SourceError

_BUFFER_BYTES = 4 << 20
_MIN_BUFFER_BYTES = 64 << 10
_WINDOW_BYTES = 256 << 20
"""Between two fdatasync: large enough to stream, small enough for the rate to be real."""


class Cancelled(Exception):
    """The copy was told to stop; what it had begun is gone."""


class TokenBucket:
    """Shares one rate between threads; a reservation is a promise to write that much."""

    def __init__(self, bytes_per_second: int | None) -> None:
        """Starts full; None never makes anyone wait."""
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    @property
    def piece_bytes(self) -> int:
        """How much to reserve at once: an eighth of a second, so that the rate is smooth."""
        if self._rate is None:
            return _BUFFER_BYTES
        return min(_BUFFER_BYTES, max(_MIN_BUFFER_BYTES, self._rate // 8))

    def reserve(self, size: int, now: float) -> float:
        """Seconds to wait before writing `size` bytes; `now` is any steady clock."""
        if self._rate is None:
            return 0.0
        with self._lock:
            start = max(self._free_at, now)
            self._free_at = start + size / self._rate
            return start - now


@dataclass(slots=True)
class Meter:
    """What a copy reports to and is held back by; shared by its threads.

    Attributes:
        bucket: the node's rate.
        is_cancelled: set by another thread to end the copy.
        progress: called with the bytes just written, 0 for a sign of life.
    """

    bucket: TokenBucket
    is_cancelled: threading.Event
    progress: Callable[[int], None]

    def charge(self, size: int) -> None:
        """Waits until `size` bytes may be written.

        Raises:
            Cancelled: instead of going on.
        """
        left = self.bucket.reserve(size, time.monotonic())
        while left > 0:
            if self.is_cancelled.wait(min(left, 1.0)):
                break
            self.progress(0)
            left -= 1.0
        if self.is_cancelled.is_set():
            raise Cancelled


def announce_ranks(target: Folder, seals: Iterable[Seal]) -> None:
    """Tells the other nodes which ranks' files will come; what was told and is whole stays."""
    for seal in seals:
        if target.read(announced_file(seal.rank)) != encode(seal):
            announce(target, seal)


def copy_ranks(
    source: Folder, target: Folder, seals: Iterable[Seal], meter: Meter, files_at_once: int
) -> int:
    """Copies all files of these seals and then writes their receipts.

    A file that is there at its size is not copied again if its rank's receipt is there too; without
    the receipt nobody vouched for it.

    Args:
        source: the step's folder on the local tier.
        target: the step's folder on the remote tier.
        seals: of this node's ranks that are missing there.
        meter: rate, progress, cancellation.
        files_at_once: threads.

    Returns:
        Bytes written.

    Raises:
        SourceError: a local file cannot be read or does not match its seal.
        OSError: the remote tier failed.
        Cancelled: the meter said so.
    """
    seals = list(seals)
    announce_ranks(target, seals)
    files = [entry for seal in seals for entry in _missing_files(target, seal)]
    _remove_leftovers(target, {entry.name for entry in files})
    _copy_files(source, target, files, meter, files_at_once)
    for seal in seals:
        write_seal(target, seal)
    return sum(entry.size for entry in files)


def _copy_files(
    source: Folder, target: Folder, files: Iterable[FileEntry], meter: Meter, files_at_once: int
) -> None:
    # the longest copy starts first
    left = deque(sorted(files, key=lambda entry: entry.size, reverse=True))
    with ThreadPoolExecutor(files_at_once, thread_name_prefix="copy") as pool:
        # one job for each thread and not for each file: a waiting job takes more than a KiB
        copies = [
            pool.submit(_copy_in_thread, source, target, left, meter)
            for _ in range(min(files_at_once, len(left)))
        ]
        done, _ = wait(copies, return_when=FIRST_EXCEPTION)
        failed = next((error for copy in done if (error := copy.exception())), None)
        if failed is not None:
            left.clear()
            meter.is_cancelled.set()
            raise failed


def _missing_files(target: Folder, seal: Seal) -> list[FileEntry]:
    if target.size(seal_file(seal.rank)) is None:
        return list(seal.flushed_files)
    return [entry for entry in seal.flushed_files if _size(target, entry.name) != entry.size]


def _size(folder: Folder, name: str) -> int | None:
    try:
        return folder.size(name)
    except Corrupt:
        return None  # a link or a device in a file's place: the rename replaces it


def _remove_leftovers(target: Folder, finals: set[str]) -> None:
    """Unfinished files of a flusher of this node that died; its lock is ours, so it is gone."""
    for name in target.names():
        if parse_temp_file(name) in finals:
            target.remove(name)


def _copy_in_thread(source: Folder, target: Folder, left: deque[FileEntry], meter: Meter) -> None:
    with (
        source.below(()) as near,
        target.below(()) as far,
    ):
        while True:
            try:
                entry = left.popleft()
            except IndexError:
                return
            copy_file(near, far, entry, meter)


def copy_file(source: Folder, target: Folder, entry: FileEntry, meter: Meter) -> None:
    """Copies one file and publishes it if its bytes are those that were sealed.

    Both page caches are left clean: the trainer's memory is not ours to fill.

    Raises:
        SourceError, OSError, Cancelled: as `copy_ranks`; the target's name is then as it was.
    """
    fd = _open_source(source, entry)
    try:
        with target.new_file(entry.name) as file:
            content = _pump(fd, file, entry, meter)
            if content != entry.content:
                raise SourceError(
                    f"{source.path}/{entry.name}: its bytes are not those that were sealed",
                    damaged=entry,
                )
            os.fdatasync(file.fd)
            _forget(file.fd, 0, 0)
            file.publish(entry.size)
    finally:
        _forget(fd, 0, 0)
        os.close(fd)


def _open_source(source: Folder, entry: FileEntry) -> int:
    try:
        return source.open_file(entry.name)
    except (OSError, Corrupt) as error:
        raise SourceError(f"{source.path}/{entry.name}: cannot be read ({error})") from error


def _pump(fd: int, file: NewFile, entry: FileEntry, meter: Meter) -> object:
    hasher = ContentHasher(entry.block_size)
    buffer = memoryview(bytearray(meter.bucket.piece_bytes))
    done = synced = 0
    while size := _read(fd, buffer, entry):
        meter.charge(size)
        hasher.update(buffer[:size])
        file.write(buffer[:size])
        done += size
        meter.progress(size)
        if done > entry.size:
            break  # longer than sealed: the digest will not match
        if done - synced >= _WINDOW_BYTES:
            os.fdatasync(file.fd)
            _forget(file.fd, synced, done - synced)
            _forget(fd, synced, done - synced)
            synced = done
            meter.progress(0)
    return hasher.finish()


def _read(fd: int, buffer: memoryview, entry: FileEntry) -> int:
    try:
        return os.readv(fd, [buffer])
    except OSError as error:
        raise SourceError(f"{entry.name}: cannot be read ({error})") from error


def _forget(fd: int, offset: int, size: int) -> None:
    os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
