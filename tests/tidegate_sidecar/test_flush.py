import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tidegate_contract import keys
from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import (
    CONTROL_DOCUMENT,
    QUARANTINE,
    RUN_DOCUMENT,
    is_temp_file,
    seal_file,
    step_folder,
)
from tidegate_contract.publish import write_document
from tidegate_contract.scan import verify_file
from tidegate_contract.wire import Policy
from tidegate_sidecar.flush import Ending
from tidegate_sidecar.lock import FlushLock
from tidegate_sidecar.loop import Beat

Build = Callable[..., Any]
pytestmark = pytest.mark.long


def assert_whole(run: Any, step: int) -> None:
    """The step is durable and each of its bytes is the one that was sealed."""
    record = run.records()[step]
    assert record.committed is not None, record.problems
    with Folder.open(run.remote) as folder, folder.child(record.folder) as opened:
        for entry in record.committed.manifest.files:
            verify_file(opened, entry)


def test_flush_of_one_node_makes_the_newest_step_durable(
    a_run: Build, a_sealed_step: Build
) -> None:
    run = a_run()
    a_sealed_step(run.locals[0], 10)
    a_sealed_step(run.locals[0], 20)
    done = run.flush_once()
    assert done.is_whole
    assert done.lines == ("step 20: durable", "step 10: superseded by step 20")
    assert_whole(run, 20)


def test_flush_of_two_nodes_commits_once_the_second_is_there(
    a_run: Build, a_sealed_step: Build
) -> None:
    run = a_run(nodes=2)
    for node in (0, 1):
        a_sealed_step(run.locals[node], 10, ranks=(node,))
    assert run.flush_once(0).lines == ("step 10: copied; not durable before ranks [1] are",)
    assert run.durable() == []
    assert run.flush_once(1).lines == ("step 10: durable",)
    assert_whole(run, 10)


def test_two_flushers_at_once_end_with_exactly_one_whole_commit(
    a_run: Build, a_sealed_step: Build, wait_for: Build
) -> None:
    run = a_run(nodes=2)
    for node in (0, 1):
        run.start(node)
        a_sealed_step(run.locals[node], 10, ranks=(node,), size=200_000)
    wait_for(run.durable)
    assert_whole(run, 10)
    assert list(run.records()) == [10]


def test_flush_again_changes_nothing(a_run: Build, a_sealed_step: Build) -> None:
    run = a_run()
    attempt = a_sealed_step(run.locals[0], 10)
    run.flush_once()
    folder = run.remote / step_folder(attempt)
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    assert run.flush_once().lines == ("step 10: durable",)
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before


def test_flush_of_a_flipped_bit_writes_no_receipt_and_sets_the_file_aside(
    a_run: Build, a_sealed_step: Build
) -> None:
    run = a_run()
    a_sealed_step(run.locals[0], 10)
    attempt = a_sealed_step(run.locals[0], 20)
    path = run.locals[0] / step_folder(attempt) / "optim-1.distcp"
    data = bytearray(path.read_bytes())
    data[123] ^= 4
    path.write_bytes(data)
    done = run.flush_once()
    assert not done.is_whole
    assert not (run.remote / step_folder(attempt) / seal_file(1)).exists()
    (aside,) = (run.locals[0] / QUARANTINE).glob(f"{step_folder(attempt)}.optim-1.distcp.*")
    assert aside.read_bytes() == data
    assert run.durable() == [10]


def test_attempt_that_was_copied_is_not_copied_again_before_it_was_seen(
    a_run: Build, a_sealed_step: Build, a_loop: Build, beat_until: Build, caplog: Any
) -> None:
    run = a_run()
    flusher = a_loop(run)
    with caplog.at_level(logging.INFO, "tidegate_sidecar.loop"):
        for step in (10, 20, 30):
            a_sealed_step(run.locals[0], step)
            beat_until(flusher, lambda step=step: step in run.durable())
    assert [record.message for record in caplog.records].count("copied") == 3


def test_flush_once_refuses_a_folder_that_another_process_flushes(
    a_run: Build, a_sealed_step: Build
) -> None:
    run = a_run()
    a_sealed_step(run.locals[0], 10)
    with Folder.open(run.locals[0]) as folder:
        lock = FlushLock(folder)
        assert lock.try_take()
        with pytest.raises(Reject, match="another process flushes"):
            run.flush_once()
        lock.release()
    assert run.durable() == []


@pytest.mark.parametrize("remote", ["unmounted", "another run"])
def test_flush_refuses_a_remote_tier_that_is_not_the_runs(
    a_run: Build, a_sealed_step: Build, remote: str
) -> None:
    run = a_run()
    a_sealed_step(run.locals[0], 10)
    (run.remote / RUN_DOCUMENT).unlink()
    if remote == "another run":
        with Folder.open(run.remote) as folder:
            write_document(
                folder, RUN_DOCUMENT, an_identity("11111111-0000-0000-0000-000000000000")
            )
    done = run.flush_once()
    want = "is it mounted?" if remote == "unmounted" else "belongs to run"
    assert not done.is_whole
    assert want in done.lines[0]
    assert [path.name for path in run.remote.iterdir() if path.name.startswith("step-")] == []


def an_identity(run_id: str) -> RunIdentity:
    return RunIdentity(run_id=run_id, name="team/bytelm", uid=0, created_at=datetime.now(UTC))


@pytest.mark.parametrize("after", ["announced", "temp", "file", "receipt"])
def test_flusher_killed_at_any_moment_is_continued_by_the_next(
    a_run: Build, a_sealed_step: Build, wait_for: Build, after: str
) -> None:
    run = a_run()
    attempt = a_sealed_step(run.locals[0], 10, size=400_000)
    folder = run.remote / step_folder(attempt)
    signs: dict[str, Callable[[str], bool]] = {
        "announced": lambda name: name == "announced-0.json",
        "temp": is_temp_file,
        "file": lambda name: name.endswith(".distcp") and not is_temp_file(name),
        "receipt": lambda name: name == "seal-0.json",
    }
    first = run.start(policy=Policy(bandwidth_bytes_per_second=2_000_000))
    wait_for(lambda: folder.exists() and any(signs[after](p.name) for p in folder.iterdir()))
    first.send_signal(signal.SIGKILL)
    first.wait()
    run.start()
    wait_for(run.durable)
    assert_whole(run, 10)
    assert not [p.name for p in folder.iterdir() if is_temp_file(p.name) and "distcp" in p.name]


def a_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def words_of(port: int) -> dict[str, Any]:
    """What a flusher says of itself; nothing before it serves."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2) as answer:
            return dict(json.load(answer))
    except OSError:
        return {}


def test_second_flusher_waits_and_takes_over_when_the_first_dies(
    a_run: Build, a_sealed_step: Build, wait_for: Build
) -> None:
    run = a_run()
    first = run.start()
    a_sealed_step(run.locals[0], 10)
    wait_for(run.durable)
    port = a_free_port()
    run.start(**{keys.ENV_METRICS_PORT: str(port)})
    first.send_signal(signal.SIGSTOP)  # alive and useless: the lock is still its own
    a_sealed_step(run.locals[0], 20)
    wait_for(lambda: words_of(port).get("backlog_steps") == 1)
    assert words_of(port)["flusher"] is False
    assert run.durable() == [10]
    first.send_signal(signal.SIGKILL)
    wait_for(lambda: run.durable() == [10, 20])


def test_flusher_told_to_end_finishes_what_is_sealed(
    a_run: Build, a_sealed_step: Build, wait_for: Build
) -> None:
    run = a_run()
    a_sealed_step(run.locals[0], 10)
    process = run.start(policy=Policy(remote_every=100))
    wait_for(run.durable)
    a_sealed_step(run.locals[0], 20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert run.durable() == [10, 20]


def test_flusher_told_to_end_before_the_run_began_ends(a_run: Build, wait_for: Build) -> None:
    run = a_run()
    (run.locals[0] / RUN_DOCUMENT).unlink()
    process = run.start()
    wait_for(lambda: b"SigCgt" in status_of(process.pid) and catches_term(process.pid))
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0


def status_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/status").read_bytes()


def catches_term(pid: int) -> bool:
    line = next(line for line in status_of(pid).splitlines() if line.startswith(b"SigCgt"))
    return bool(int(line.split()[1], 16) & 1 << (signal.SIGTERM - 1))


def test_flusher_of_a_dead_parent_finishes_and_ends(
    a_run: Build, a_sealed_step: Build, wait_for: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = Ending(follows_parent=True)
    assert not ending.is_due
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert ending.is_due


@pytest.mark.parametrize(
    ("parent", "want"), [(os.getppid(), False), (os.getppid() + 1, True)], ids=["alive", "gone"]
)
def test_flusher_is_told_its_parent_that_may_be_gone_already(
    monkeypatch: pytest.MonkeyPatch, parent: int, want: bool
) -> None:
    monkeypatch.setenv(keys.ENV_PARENT, str(parent))
    assert Ending(follows_parent=True).is_due is want
    assert not Ending(follows_parent=False).is_due


def test_flusher_without_a_gate_tells_its_trainer_the_policy(a_run: Build, wait_for: Build) -> None:
    run = a_run()
    run.start(policy=Policy(local_keep=7))
    wait_for((run.locals[0] / CONTROL_DOCUMENT).exists)
    assert b'"local_keep":7' in (run.locals[0] / CONTROL_DOCUMENT).read_bytes()


def test_c041_hung_child_is_given_up_and_the_copy_is_done_by_another(
    a_run: Build, a_sealed_step: Build, a_loop: Build, beat_until: Build
) -> None:
    run = a_run()
    policy = Policy(stall_timeout_seconds=1.5, bandwidth_bytes_per_second=300_000)
    loop = a_loop(run, policy=policy)
    a_sealed_step(run.locals[0], 10, size=100_000)
    beat_until(loop, lambda: loop.child_pid)
    hung = loop.child_pid
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)
    beat_until(loop, lambda: loop.troubles.worst is not None)
    assert loop.troubles.worst is not None
    assert loop.troubles.worst.reason == "Stalled"
    beat_until(loop, run.durable)
    assert loop.child_pid != hung
    beat_until(loop, lambda: loop.troubles.worst is None)


def test_child_that_dies_is_replaced(
    a_run: Build, a_sealed_step: Build, a_loop: Build, beat_until: Build
) -> None:
    run = a_run()
    loop = a_loop(run, policy=Policy(bandwidth_bytes_per_second=300_000))
    a_sealed_step(run.locals[0], 10, size=100_000)
    beat_until(loop, lambda: loop.child_pid)
    assert loop.child_pid is not None
    os.kill(loop.child_pid, signal.SIGKILL)
    beat_until(loop, run.durable)


def test_loop_notices_that_another_run_took_the_folder(a_run: Build, a_loop: Build) -> None:
    run = a_run()
    loop = a_loop(run)
    assert loop.beat() is Beat.ON
    with Folder.open(run.locals[0]) as folder:
        write_document(folder, RUN_DOCUMENT, an_identity("22222222-0000-0000-0000-000000000000"))
    assert loop.beat() is Beat.RUN_CHANGED


def test_loop_of_the_lead_keeps_what_the_policy_says_on_both_tiers(
    a_run: Build, a_sealed_step: Build, a_loop: Build, beat_until: Build
) -> None:
    run = a_run()
    stranger = run.remote / "notes"
    stranger.mkdir()
    loop = a_loop(run, policy=Policy(remote_keep=2, local_keep=1))
    for step in (10, 20, 30, 40):
        a_sealed_step(run.locals[0], step)
        beat_until(loop, lambda step=step: step in run.durable())
    beat_until(loop, lambda: len(list((run.remote / ".trash").glob("step-*"))) == 2)
    outside = [step for step in (10, 20, 30, 40) if list(run.remote.glob(f"step-{step:020d}.*"))]
    assert outside == [30, 40]
    assert run.durable() == [10, 20, 30, 40]  # those in .trash can still be restored
    beat_until(loop, lambda: len(list(run.locals[0].glob("step-*"))) == 1)
    assert list(run.locals[0].glob(f"step-{40:020d}.*"))
    assert stranger.exists()


def test_loop_keeps_local_copies_while_its_trainer_restores(
    a_run: Build, a_sealed_step: Build, a_loop: Build, beat_until: Build
) -> None:
    run = a_run()
    run.write_state(phase="Restoring")
    loop = a_loop(run, policy=Policy(local_keep=1))
    for step in (10, 20):
        a_sealed_step(run.locals[0], step)
        beat_until(loop, lambda step=step: step in run.durable())
    beat_until(loop, lambda: loop.remote and loop.remote.newest)
    assert len(list(run.locals[0].glob("step-*"))) == 2


def test_urgent_attempt_stops_a_running_copy(
    a_run: Build, a_sealed_step: Build, a_loop: Build, beat_until: Build
) -> None:
    run = a_run()
    loop = a_loop(run, policy=Policy(bandwidth_bytes_per_second=1_000_000))
    slow = a_sealed_step(run.locals[0], 10, size=4_000_000)
    beat_until(loop, lambda: list((run.remote / step_folder(slow)).glob(".tmp-*distcp")))
    a_sealed_step(run.locals[0], 20, size=1_000, reason="Request")
    beat_until(loop, lambda: run.durable() == [20])
