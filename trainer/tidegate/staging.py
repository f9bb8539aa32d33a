"""Snapshots in host memory: a ring of slots that are warm after their first use.

A snapshot is complete when `take` returns, so training may change its tensors at once. Main thread
takes slots; the writer thread gives them back.
"""

import threading
from typing import Any

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

_PLAIN_COPY = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)


class Slot:
    """One snapshot's memory; one stager each, as a shared one would overwrite an older save."""

    def __init__(self) -> None:
        """Allocates nothing yet."""
        self._stager = DefaultStager(_PLAIN_COPY)

    def copy(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Copies all tensors to host memory and everything else by value.

        Raises:
            Exception: whatever an object's copy raises; the slot starts cold the next time.
        """
        try:
            copied: dict[str, Any] = self._stager.stage(entries)
        except BaseException:
            self._stager = DefaultStager(_PLAIN_COPY)  # a resized storage fails for ever after
            raise
        return copied


class Ring:
    """The slots of one trainer."""

    def __init__(self, slots: int) -> None:
        """Makes `slots` empty slots."""
        self._free = [Slot() for _ in range(slots)]
        self._changed = threading.Condition()

    @property
    def has_free(self) -> bool:
        """A save may begin now."""
        return bool(self._free)

    def take(self) -> Slot:
        """A free slot, which belongs to the caller; there must be one."""
        with self._changed:
            return self._free.pop()

    def give_back(self, slot: Slot) -> None:
        """Ends the use of a slot; any thread."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def wait_free(self, seconds: float) -> bool:
        """Waits until a slot is free; False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._free), timeout=seconds)

    def warm(self, entries: dict[str, Any]) -> None:
        """Copies into every free slot once: first use of memory costs several times a copy."""
        for slot in self._free:
            slot.copy(entries)
