"""Area 1 of the bank: bytes that calls move short, that are very many, or that are not ours."""

import io
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tidegate_contract.digest import ContentHasher
from tidegate_contract.folder import Folder
from tidegate_contract.layout import METADATA_REMOTE, step_folder
from tidegate_contract.publish import write_seal
from tidegate_contract.seal import file_entry

Build = Callable[..., Any]
pytestmark = pytest.mark.long


class ShortRead(io.RawIOBase):
    """Gives at most a few bytes a call, as a file system under pressure may."""

    def __init__(self, fd: int, limit: int) -> None:
        super().__init__()
        self._fd, self._limit = fd, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return os.readv(self._fd, [memoryview(buffer)[: self._limit]])

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return os.lseek(self._fd, offset, whence)

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


def shorten_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read and write of this process moves less than it was asked for."""
    chance = random.Random(8)
    write, readv, preadv = os.write, os.readv, os.preadv

    def short_fdopen(fd: int, mode: str = "r", buffering: int = -1) -> Any:
        assert mode == "rb"
        raw = ShortRead(fd, 1013)
        return raw if buffering == 0 else io.BufferedReader(raw)

    def part(view: Any) -> Any:
        return view[: max(1, chance.randrange(len(view)) % 4099)]

    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, part(memoryview(data))))
    monkeypatch.setattr(os, "readv", lambda fd, to: readv(fd, [part(memoryview(to[0]))]))
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: preadv(fd, [part(memoryview(to[0]))], at))
    monkeypatch.setattr(os, "fdopen", short_fdopen)


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("tier", ["Local", "Remote"])
def test_c008_short_reads_and_writes_lose_nothing(
    make: Any, a_trainer: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tier: str
) -> None:
    (tmp_path / "pfs").mkdir()
    trainer = a_trainer()
    want = torch.randn(50_000, generator=torch.Generator().manual_seed(1))
    shorten_calls(monkeypatch)
    trainer.save({"big": want.clone()}, make.attempt_of(10))
    if tier == "Remote":
        make.copy_here(trainer.places(), make.attempt_of(10), [0])
        trainer = a_trainer(node="another")
    state = {"big": torch.zeros(50_000)}

    outcome = trainer.restore(state)

    assert outcome.tier == tier
    assert torch.equal(state["big"], want)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("gib", [2.5, 4.5])
def test_c008_file_over_the_limits_of_32_bits_is_flushed_bit_by_bit(
    make: Any, a_run: Build, gib: float
) -> None:
    run = a_run()
    attempt, size = make.attempt_of(10), int(gib * 2**30)
    mark = bytes(range(64))
    with Folder.open(run.locals[0]) as folder, folder.ensure_child(step_folder(attempt)) as step:
        hasher = ContentHasher()
        with step.new_file("weights-0.distcp") as file:
            for offset in (0, size - 64):
                os.pwrite(file.fd, mark, offset)
            with open(f"/proc/self/fd/{file.fd}", "rb") as sparse:
                while data := sparse.read(16 << 20):
                    hasher.update(data)
            file.publish(size)
        files = (
            file_entry("weights-0.distcp", hasher.finish()),
            make.an_entry(step, METADATA_REMOTE, b"plain"),
        )
        write_seal(step, make.a_seal(0, attempt, files, world_size=1))

    assert run.flush_once().is_whole

    make.assert_whole(run.remote, run.records()[attempt])
    copy = run.remote / step_folder(attempt) / "weights-0.distcp"
    with open(copy, "rb") as file:
        assert file.read(64) == mark
        assert file.seek(-64, os.SEEK_END) == size - 64
        assert file.read() == mark
    copy.unlink()  # pytest would keep it


@pytest.mark.usefixtures("no_sync")
def test_c013_views_of_a_large_storage_are_saved_at_their_own_size(
    make: Any, a_trainer: Build
) -> None:
    flat = torch.arange(4_000_000, dtype=torch.float32)
    state = {"view": flat[1000:2000], "a": flat[:50_000], "b": flat.narrow(0, 50_000, 50_000)}
    want = {name: tensor.clone() for name, tensor in state.items()}
    trainer = a_trainer()

    folder = trainer.save(state, make.attempt_of(10))

    size = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    elements = sum(tensor.numel() * 4 for tensor in want.values())
    assert elements <= size < 1.1 * elements
    for tensor in state.values():
        tensor.zero_()
    trainer.restore(state)
    assert all(torch.equal(state[name], want[name]) for name in want)
