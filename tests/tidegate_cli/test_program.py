"""What only a process of its own shows: signals, pipes, terminals, the help."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.digest import BLOCK_SIZE, ContentDigest, ContentHasher, digest_of_blocks
from tidegate_contract.document import decode
from tidegate_contract.folder import Folder
from tidegate_contract.publish import write_seal
from tidegate_contract.seal import Seal, file_entry

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
VERBS = ("ls", "verify", "restore-point", "seal", "flush", "pin", "unpin", "rm")


def start(*words: object, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tidegate_cli", *(str(word) for word in words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


def hear_interrupts() -> None:
    """What a shell starts in the background is deaf to SIGINT, and so are its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def huge_run(a_run: Any, a_step: Any, an_attempt: Any) -> Path:
    """A step with a sparse file that takes longer to read than a test may last."""
    run: Path = a_run()
    step = a_step(run, 1, tier="local")
    count = 4096
    with (step / "huge").open("wb") as file:
        file.truncate(count * BLOCK_SIZE)
    hasher = ContentHasher()
    hasher.update(bytes(BLOCK_SIZE))
    blocks = hasher.finish().blocks * count
    content = ContentDigest(
        size=count * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        blocks=blocks,
        digest=digest_of_blocks(blocks),
    )
    with Folder.open(step) as folder:
        data = folder.read("seal-0.json")
        assert data is not None
        seal = decode(Seal, data, "seal-0.json")
        write_seal(folder, replace(seal, files=(file_entry("huge", content),)))
    return run


def has_open(process: subprocess.Popen[bytes], name: str) -> bool:
    folder = Path(f"/proc/{process.pid}/fd")
    for link in folder.iterdir():
        try:
            if os.readlink(link).endswith(name):
                return True
        except FileNotFoundError:
            continue
    return False


def test_verify_interrupted_ends_with_130_and_no_traceback(huge_run: Path) -> None:
    process = start("verify", huge_run, stdout=subprocess.PIPE, preexec_fn=hear_interrupts)
    until = time.monotonic() + 30
    while not has_open(process, "/huge"):
        assert time.monotonic() < until
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["text", "json"])
def test_ls_into_a_closed_pipe_is_quiet(a_run: Any, a_step: Any, words: tuple[str, ...]) -> None:
    run = a_run()
    a_step(run, 1)
    reader, writer = os.pipe()
    os.close(reader)
    process = start("ls", run, *words, stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (141, b""), "as if SIGPIPE had ended it; 1 is damage"


def on_a_terminal(*words: object, **env: str) -> tuple[int, str]:
    """What a terminal of 80 columns gets."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "tidegate_cli", *(str(word) for word in words)]
    size = {"COLUMNS": "80", "TERM": "xterm-256color", **env}
    process = subprocess.Popen(
        command, stdout=follower, stderr=follower, env={**os.environ, **size}
    )
    os.close(follower)
    pieces = []
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(leader)
    return process.wait(), b"".join(pieces).decode()


def test_ls_on_a_terminal_has_colours_that_are_ours_alone(a_run: Any, a_step: Any) -> None:
    run = a_run()
    a_step(run, 1)
    (run / "a\x1b[5mblink").write_bytes(b"")
    code, text = on_a_terminal("ls", run)
    assert code == 0
    assert "\x1b[32mdurable" in text
    assert "\x1b[5m" not in text
    assert r"a\x1b[5mblink" in text
    _, plain = on_a_terminal("ls", run, NO_COLOR="1")
    assert "\x1b[32m" not in plain


def test_verify_on_a_terminal_shows_a_bar(a_run: Any, a_step: Any) -> None:
    run = a_run()
    a_step(run, 1)
    code, text = on_a_terminal("verify", run)
    assert code == 0
    assert "step 1" in text
    assert "1 of 1 step is sound" in text
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines()) <= 80


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_has_an_example_and_the_exit_status(call: Any, verb: str) -> None:
    answer = call(verb, "--help")
    assert answer.code == 0
    assert f"Example:\n    tidegate {verb} " in answer.out
    assert "Exit status: 0 all well; 1 " in answer.out
    assert "--json" in answer.out
    assert f"## tidegate {verb}\n" in DOCS.read_text()


def test_help_names_every_verb_and_offers_completion(call: Any) -> None:
    answer = call("--help")
    assert [verb for verb in VERBS if f"\n  {verb} " not in answer.out] == []
    assert "..." not in answer.out.split("Commands:")[1], "no verb's line is cut at 80 columns"
    assert "--install-completion" in answer.out


def test_seal_leaves_what_it_makes_to_its_group(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model").write_bytes(b"weights")
    words = ("--run", "team-a/bert", "--step", 1, "--local", tmp_path / "node0/team-a/bert")
    process = start("seal", tmp_path / "out", *words, stdout=subprocess.PIPE, umask=0o077)
    out, _ = process.communicate(timeout=30)
    step = Path(out.decode().splitlines()[1])
    modes = [oct(path.stat().st_mode & 0o7777) for path in (step.parent, step, step / "model")]
    assert modes == ["0o2770", "0o2770", "0o640"]


def test_version_is_one_line(call: Any) -> None:
    assert re.fullmatch(r"tidegate \d+\.\d+\.\d+\S*\n", call("--version").out)


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["text", "json"])
def test_ls_onto_a_full_disk_names_stdout(a_run: Any, a_step: Any, words: tuple[str, ...]) -> None:
    run = a_run()
    a_step(run, 1)
    with open("/dev/full", "w") as full:
        _, err = (process := start("ls", run, *words, stdout=full)).communicate(timeout=30)
    assert (process.returncode, err) == (1, b"stdout: No space left on device\n")


@pytest.mark.parametrize("verb", ["ls", "--help"])
def test_stdout_that_is_closed_is_one_sentence(a_run: Any, verb: str) -> None:
    words = (verb, a_run()) if verb == "ls" else (verb,)
    _, err = (process := start(*words, preexec_fn=lambda: os.close(1))).communicate(timeout=30)
    assert (process.returncode, err) == (1, b"stdout is closed: there is nowhere to answer\n")


def test_help_onto_a_full_disk_names_stdout() -> None:
    with open("/dev/full", "w") as full:
        _, err = (process := start("--help", stdout=full)).communicate(timeout=30)
    assert (process.returncode, err) == (1, b"stdout: No space left on device\n")
