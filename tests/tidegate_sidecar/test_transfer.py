import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.folder import Folder
from tidegate_contract.layout import is_temp_file, seal_file, step_folder
from tidegate_contract.scan import scan_step
from tidegate_contract.seal import Scope
from tidegate_sidecar.faults import Reason, SourceError, fault_of
from tidegate_sidecar.transfer import Cancelled, Meter, TokenBucket, copy_ranks

Build = Callable[..., Any]


@pytest.fixture
def tiers(a_run: Build, a_sealed_step: Build) -> Any:
    """The folders of one sealed step of rank 0 on both tiers, its seal, and the run."""
    run = a_run()
    attempt = a_sealed_step(run.locals[0], 10, ranks=(0,))
    name = step_folder(attempt)
    with Folder.open(run.locals[0]) as near, Folder.open(run.remote) as far:
        source, target = near.child(name), far.ensure_child(name)
    with source, target:
        seal = scan_step(source, attempt, name, "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11").seals[0]
        yield source, target, seal


def a_meter(rate: int | None = None, progress: Callable[[int], None] = lambda _: None) -> Meter:
    return Meter(TokenBucket(rate), threading.Event(), progress)


def names(folder: Folder) -> set[str]:
    return set(folder.names())


def test_copy_brings_flushed_files_and_the_receipt(tiers: Any) -> None:
    source, target, seal = tiers
    seen: list[int] = []
    written = copy_ranks(source, target, [seal], a_meter(progress=seen.append), 2)
    want = {entry.name for entry in seal.files if entry.scope is Scope.BOTH}
    assert names(target) == want | {"announced-0.json", "seal-0.json"}
    for entry in seal.flushed_files:
        assert target.read(entry.name) == source.read(entry.name)
    assert written == sum(seen) == sum(entry.size for entry in seal.flushed_files)


@pytest.mark.parametrize("at", [0, 5_000, 9_999], ids=["first byte", "middle", "last byte"])
def test_copy_of_a_flipped_bit_is_never_published(tiers: Any, at: int) -> None:
    source, target, seal = tiers
    path = Path(source.path) / "weights-0.distcp"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError) as failure:
        copy_ranks(source, target, [seal], a_meter(), 1)
    assert failure.value.damaged is not None and failure.value.damaged.name == "weights-0.distcp"
    assert "weights-0.distcp" not in names(target)
    assert seal_file(0) not in names(target)
    assert not any(is_temp_file(name) for name in names(target))


@pytest.mark.parametrize("change", ["longer", "shorter", "link", "gone"])
def test_copy_of_a_file_that_is_not_what_was_sealed_fails(
    tiers: Any, change: str, tmp_path: Path
) -> None:
    source, target, seal = tiers
    path = Path(source.path) / "weights-0.distcp"
    data = path.read_bytes()
    path.unlink()
    if change == "longer":
        path.write_bytes(data + b"x")
    elif change == "shorter":
        path.write_bytes(data[:-1])
    elif change == "link":
        (tmp_path / "secret").write_bytes(data)
        path.symlink_to(tmp_path / "secret")
    with pytest.raises(SourceError):
        copy_ranks(source, target, [seal], a_meter(), 1)
    assert "weights-0.distcp" not in names(target)


def test_copy_without_a_receipt_copies_all_again_and_removes_leftovers(tiers: Any) -> None:
    source, target, seal = tiers
    torn = Path(target.path) / "weights-0.distcp"
    torn.write_bytes(b"\0" * 10_000)
    leftover = Path(target.path) / ".tmp-00000000000000aa-optim-0.distcp"
    stranger = Path(target.path) / ".tmp-00000000000000aa-optim-1.distcp"
    leftover.write_bytes(b"x")
    stranger.write_bytes(b"x")
    copy_ranks(source, target, [seal], a_meter(), 1)
    assert torn.read_bytes() == source.read("weights-0.distcp")
    assert not leftover.exists()
    assert stranger.exists()


def test_copy_with_a_receipt_copies_only_what_is_missing(tiers: Any) -> None:
    source, target, seal = tiers
    copy_ranks(source, target, [seal], a_meter(), 1)
    kept = os.stat("optim-0.distcp", dir_fd=target.fd).st_ino
    os.unlink("weights-0.distcp", dir_fd=target.fd)
    assert copy_ranks(source, target, [seal], a_meter(), 1) == 10_000
    assert os.stat("optim-0.distcp", dir_fd=target.fd).st_ino == kept


@pytest.mark.parametrize(
    ("number", "want"),
    [
        (errno.ENOSPC, Reason.NO_SPACE),
        (errno.EDQUOT, Reason.QUOTA),
        (errno.EIO, Reason.STALLED),
        (errno.ESTALE, Reason.STALLED),
        (errno.ENOTCONN, Reason.STALLED),
        (errno.EACCES, Reason.DENIED),
        (errno.EROFS, Reason.READ_ONLY),
    ],
    ids=["full", "quota", "I/O", "stale", "not connected", "denied", "read-only"],
)
@pytest.mark.parametrize("call", ["write", "fdatasync", "fsync"])
def test_copy_error_drops_the_file_and_has_its_reason(
    tiers: Any, number: int, want: Reason, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, seal = tiers
    real = getattr(os, call)

    def fail(fd: int, *rest: Any) -> Any:
        if "distcp" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        return real(fd, *rest)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError) as failure:
        copy_ranks(source, target, [seal], a_meter(), 2)
    assert fault_of(failure.value).reason is want
    assert names(target) <= {"announced-0.json", "metadata-remote"}


def test_copy_that_is_cancelled_leaves_no_file(tiers: Any) -> None:
    source, target, seal = tiers
    meter = a_meter()
    meter.is_cancelled.set()
    with pytest.raises(Cancelled):
        copy_ranks(source, target, [seal], meter, 1)
    assert names(target) == {"announced-0.json"}


def test_copy_leaves_the_page_cache_clean(tiers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, seal = tiers
    advised: list[tuple[str, int]] = []

    def note(fd: int, _offset: int, _size: int, advice: int) -> None:
        advised.append((os.readlink(f"/proc/self/fd/{fd}"), advice))

    monkeypatch.setattr(os, "posix_fadvise", note)
    copy_ranks(source, target, [seal], a_meter(), 1)
    assert {advice for _, advice in advised} == {os.POSIX_FADV_DONTNEED}
    for folder in (source, target):
        assert sum(path.startswith(folder.path) for path, _ in advised) == 3


@pytest.mark.parametrize("threads", [1, 4])
def test_bucket_promises_the_set_rate(threads: int) -> None:
    bucket = TokenBucket(1_000_000)
    waits = [bucket.reserve(100_000, now=50.0) for _ in range(10 * threads)]
    assert waits == pytest.approx([0.1 * i for i in range(10 * threads)])
    assert bucket.reserve(1, now=500.0) == 0.0


def test_copy_keeps_to_its_rate(tiers: Any) -> None:
    source, target, seal = tiers
    began = time.monotonic()
    copy_ranks(source, target, [seal], a_meter(rate=40_000), 2)
    assert time.monotonic() - began >= 0.2
