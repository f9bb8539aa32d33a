"""One copy of one step: open it, verify what this rank needs, read it into the live state.

Every rank reads for itself, without collective calls; `restore` lets the ranks vote in between.
"""

import os
import pickle
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor

from tidegate.storage import StepStorage
from tidegate.trust import open_trusted
from tidegate_contract.digest import ContentHasher
from tidegate_contract.errors import Corrupt, DamagedFile, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.layout import METADATA, Attempt
from tidegate_contract.restore_point import Source
from tidegate_contract.scan import read_commit, scan_step, verify_file
from tidegate_contract.seal import FileEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCopy:
    """A copy that this rank may read.

    Attributes:
        folder: the open step folder; `close` it.
        source: its tier.
        sealed_at: UTC, of the newest seal that this rank sees.
        entries: name → what the seals declare.
        metadata: DCP's, verified and unpickled.
    """

    folder: Folder
    source: Source
    sealed_at: datetime
    entries: dict[str, FileEntry]
    metadata: Any


def open_copy(
    folder: Folder, attempt: Attempt, run_id: str, source: Source, trusted: Collection[int]
) -> OpenedCopy:
    """Opens a step folder for reading and takes it over.

    Args:
        folder: the open step folder.
        attempt: which it must be.
        run_id: whose it must be.
        source: `LOCAL` reads by the seals, `REMOTE` by the commit.
        trusted: owners whose files may be unpickled.

    Raises:
        DamagedFile: the metadata does not match its seal.
        Corrupt: seals or commit contradict the files.
        Reject: a stranger could have written the metadata.
        OSError: it cannot be read.
    """
    if source is Source.LOCAL:
        seals = scan_step(folder, attempt, folder.path, run_id).seals.values()
        sealed_at = max((seal.sealed_at for seal in seals), default=None)
        entries = {entry.name: entry for seal in seals for entry in seal.files}
    else:
        committed = read_commit(folder, attempt, run_id)
        sealed_at = committed.manifest.sealed_at if committed else None
        entries = {entry.name: entry for entry in committed.manifest.files} if committed else {}
    if sealed_at is None or METADATA not in entries:
        raise Corrupt(f"{folder.path}: is no whole copy any more")
    return OpenedCopy(
        folder=folder,
        source=source,
        sealed_at=sealed_at,
        entries=entries,
        metadata=_read_metadata(folder, entries[METADATA], trusted),
    )


def _read_metadata(folder: Folder, entry: FileEntry, trusted: Collection[int]) -> Any:
    with os.fdopen(open_trusted(folder, METADATA, trusted), "rb") as file:
        data = file.read(entry.size + 1)
    hasher = ContentHasher(entry.block_size)
    hasher.update(data)
    if hasher.finish() != entry.content:
        raise DamagedFile(f"{folder.path}/{METADATA}: does not match its seal", entry)
    return pickle.loads(data)


def find_tied(target: dict[str, Any]) -> list[tuple[str, str, torch.Tensor]]:
    """Pairs of flat names that are one tensor, and that tensor; the first name is the pair's first.

    Args:
        target: entries to fill.
    """
    names: dict[Any, str] = {}
    found = []
    for name, value in flatten_state_dict(target)[0].items():
        local = value.to_local() if isinstance(value, DTensor) else value
        # Other kinds of tensors may have no storage of their own.
        if type(local) not in (torch.Tensor, torch.nn.Parameter):
            continue
        start = local.untyped_storage().data_ptr()
        place = (local.device, start, local.storage_offset(), local.dtype, local.stride())
        # Without any memory, empty or on the meta device, all start at 0.
        first = names.setdefault((*place, local.size(), value.size()), name) if start else name
        if first != name:
            found.append((first, name, value))
    return found


def _like(live: torch.Tensor) -> torch.Tensor:
    """Empty, of the same shape; in host memory where no device mesh says another place."""
    if isinstance(live, DTensor):
        return torch.empty_like(live)
    return torch.empty(live.size(), dtype=live.dtype)


def _bits(value: torch.Tensor) -> torch.Tensor:
    """NaN is equal to NaN then."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.flatten().view(torch.uint8)


class StepReader(FileSystemReader):  # type: ignore[misc]  # torch is not typed here
    """DCP's reader on an open step folder."""

    def __init__(self, copy: OpenedCopy, trusted: Collection[int]) -> None:
        """Takes the opened copy."""
        super().__init__(copy.folder.path)
        self.fs = StepStorage(copy.folder, trusted, copy.entries)
        self.set_up_storage_reader(copy.metadata, False)


class Load:
    """What one rank reads from one copy; main thread."""

    def __init__(self, copy: OpenedCopy, target: dict[str, Any], trusted: Collection[int]) -> None:
        """Plans the reading.

        Args:
            copy: where from.
            target: entries to fill; its tensors are written in place.
            trusted: owners whose files may be unpickled.

        Raises:
            RuntimeError, ValueError: an entry is missing or has another shape.
        """
        self._copy = copy
        self._trusted = trusted
        self._tied = find_tied(target)
        self._planner = DefaultLoadPlanner()
        self._planner.set_up_planner(target, copy.metadata, False)
        plan = self._planner.finish_plan(self._planner.create_local_plan())
        # In the order of the files, as each block is read whole and only few are kept.
        self._plan = replace(plan, items=sorted(plan.items, key=self._place))
        self._names = sorted({self._place(item)[0] for item in plan.items})

    def _place(self, item: Any) -> tuple[str, int]:
        found = self._copy.metadata.storage_data[item.storage_index]
        return (found.relative_path, found.offset)

    @property
    def size_bytes(self) -> int:
        """Of the files that this rank needs."""
        return sum(self._copy.entries[name].size for name in self._names)

    def verify(self) -> None:
        """Compares every needed file with its seal, before anything live is written.

        Raises:
            DamagedFile: names the file.
            Reject: a stranger owns a file or may write it, or two entries differ that are one here.
            OSError: a file cannot be read.
        """
        self.check_owners()
        for name in self._names:
            try:
                verify_file(self._copy.folder, self._copy.entries[name])
            except Corrupt as error:
                raise DamagedFile(str(error), self._copy.entries[name]) from error
        self.check_tied()

    def check_tied(self) -> int:
        """Compares entries that are one tensor here, in memory of their own; writes nothing live.

        Returns:
            Bytes read.

        Raises:
            Reject: two of them differ, so that one of them would be lost.
            DamagedFile, OSError, RuntimeError: as of `read`.
        """
        size = 0
        for first, second, live in self._tied:
            pair = {first: _like(live), second: _like(live)}
            size += Load(self._copy, pair, self._trusted).read()
            if not torch.equal(_bits(pair[first]), _bits(pair[second])):
                raise Reject(
                    f"{second} and {first} are one tensor in the program and two in the "
                    "checkpoint, which differ; untie them, or load a checkpoint of tied ones"
                )
        return size

    def check_owners(self) -> None:
        """Looks whether all needed files may be unpickled; reads none.

        Raises:
            Corrupt: no seal declares a file.
            Reject: a stranger owns a file or may write it.
            OSError: a file cannot be opened.
        """
        for name in self._names:
            if name not in self._copy.entries:
                raise Corrupt(f"{self._copy.folder.path}/{name}: no seal declares it")
            os.close(open_trusted(self._copy.folder, name, self._trusted))

    def read(self) -> int:
        """Fills the target; each block is compared with its seal, verified before or not.

        Returns:
            Bytes read: the blocks that hold what is needed, not the whole files.

        Raises:
            DamagedFile: a file has changed since it was verified, or was read badly; as after all
                other errors, the target is partly overwritten, but by sealed bytes only.
            OSError, RuntimeError: a file cannot be read.
            Reject: a stranger could have written a file.
        """
        reader = StepReader(self._copy, self._trusted)
        reader.read_data(self._plan, self._planner).wait()
        return int(reader.fs.bytes_read)
