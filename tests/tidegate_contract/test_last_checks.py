"""Checks that stand last in a row, so that no other one would notice their absence."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tidegate_contract.digest import ContentHasher
from tidegate_contract.errors import Corrupt
from tidegate_contract.folder import Folder
from tidegate_contract.scan import verify_file
from tidegate_contract.seal import file_entry

BLOCK = 1 << 12


@pytest.mark.parametrize("block", [0, 1, 2], ids=["first", "middle", "last"])
def test_file_with_one_damaged_block_is_refused_naming_it(tmp_path: Path, block: int) -> None:
    data = bytearray(2 * BLOCK + 100)
    hasher = ContentHasher(BLOCK)
    hasher.update(data)
    entry = file_entry("weights-0.distcp", hasher.finish())
    data[block * BLOCK + 50] ^= 1
    (tmp_path / entry.name).write_bytes(data)
    with Folder.open(tmp_path) as step, pytest.raises(Corrupt, match=f"block {block} of 3"):
        verify_file(step, entry)


def test_file_that_lost_bytes_at_its_close_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close: Callable[[int], None] = os.close

    def lossy(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("-weights-0.distcp"):
            os.truncate(f"/proc/self/fd/{fd}", 5)
        close(fd)

    with Folder.open(tmp_path) as step:
        with pytest.raises(OSError, match="5 bytes after close, 8 written"):
            with step.new_file("weights-0.distcp") as file:
                file.write(b"8 bytes!")
                monkeypatch.setattr(os, "close", lossy)
                file.publish(8)
        assert step.names() == []
