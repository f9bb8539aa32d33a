"""`python -m tidegate_sidecar flush | agent`: reads settings, sets up logging, runs one role."""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from tidegate_contract import keys
from tidegate_contract.errors import Reject, Retry, TidegateError
from tidegate_sidecar.agent import run_agent
from tidegate_sidecar.agent_settings import CONFIG_FILE, ENV_CONFIG, parse_agent_settings
from tidegate_sidecar.flush import Ending, Pass, flush, flush_once
from tidegate_sidecar.health import set_up_logging
from tidegate_sidecar.memory import limit_pass
from tidegate_sidecar.settings import (
    Settings,
    parse_policy,
    parse_settings,
    split_remote,
)

logger = logging.getLogger(__name__)

_LIMITED_FILES = 2
"""Copied at once where memory is short: each takes a buffer and a stack, 5 MiB."""


def main() -> int:
    """Runs the role that the command line names.

    Returns:
        The exit status: 0 done, 1 a single pass could not do everything or met damage, 2 wrong
        settings.
    """
    set_up_logging()
    os.umask(0o007)  # whatever is made here is its group's too
    words = _parser().parse_args()
    try:
        if words.role == "agent":
            text = Path(os.environ.get(ENV_CONFIG, CONFIG_FILE)).read_bytes()
            settings = parse_agent_settings(text, os.environ)
            return run_agent(settings, _ending(follows_parent=False))
        if words.once:
            return _once(words)
        flusher = parse_settings(os.environ)
        return flush(flusher, _ending(follows_parent=flusher.gate is None))
    except (Reject, OSError) as error:
        logger.error("cannot go on", extra={"error": str(error)})
        return 2
    except TidegateError as error:
        logger.error("cannot go on", extra={"error": str(error)})
        return 1


def _ending(*, follows_parent: bool) -> Ending:
    ending = Ending(follows_parent=follows_parent)
    ending.listen()
    return ending


def _once(words: argparse.Namespace) -> int:
    local = words.local or os.environ.get(keys.ENV_LOCAL)
    remote = words.remote or os.environ.get(keys.ENV_REMOTE)
    if not local or not remote:
        raise Reject("flush --once needs --local DIR and --remote DIR")
    root, path = split_remote(Path(remote).absolute())
    if words.remote_root:
        root = Path(words.remote_root).absolute()
        path = str(Path(remote).absolute().relative_to(root))
    elif words.remote and path == ".":
        root, path = _existing(root)
    settings = Settings(
        local=Path(local).absolute(),
        remote_root=root,
        remote=path,
        may_create=bool(words.remote) and not words.remote_root,
        policy=parse_policy(os.environ),
        is_single_pass=True,
    )
    done = _flush_within(settings, words.memory, partial(_beat, words.progress_fd))
    for line in done.lines:
        sys.stdout.write(f"{line}\n")
    return 0 if done.is_whole else 1


def _flush_within(
    settings: Settings, memory_mib: int | None, on_progress: Callable[[], None]
) -> Pass:
    if memory_mib is None:
        return flush_once(settings, on_progress)
    limit_pass(memory_mib)
    files = min(settings.policy.files_per_node, _LIMITED_FILES)
    policy = replace(settings.policy, files_per_node=files)
    with suppress(MemoryError):
        return flush_once(replace(settings, policy=policy), on_progress)
    # only here, where nothing holds what filled the memory any more
    raise Retry(
        f"{settings.local}: needs more memory than the {memory_mib} MiB that a copy may take; raise"
        " agent.resources.limits.memory, or run `tidegate flush --once` by hand"
    )


def _beat(fd: int | None) -> None:
    """Tells whoever started this pass that it gets on; a full pipe says so already."""
    if fd is not None:
        with suppress(OSError):
            os.write(fd, b".")


def _existing(path: Path) -> tuple[Path, str]:
    """The nearest folder above that exists, and the rest of the path."""
    root = path
    while not root.exists():
        root = root.parent
    return root, str(path.relative_to(root))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tidegate_sidecar")
    roles = parser.add_subparsers(dest="role", required=True)
    flusher = roles.add_parser("flush", help="take a run's sealed steps to the remote tier")
    flusher.add_argument("--once", action="store_true", help="flush what is sealed now, and end")
    flusher.add_argument("--local", metavar="DIR", help="the run's folder on this node")
    flusher.add_argument("--remote", metavar="DIR", help="the run's folder on the remote tier")
    flusher.add_argument(
        "--remote-root",
        metavar="DIR",
        help="folder above --remote below which no link is followed and nothing is made",
    )
    flusher.add_argument(
        "--progress-fd",
        metavar="FD",
        type=int,
        help="descriptor that takes a byte whenever --once gets on",
    )
    flusher.add_argument(
        "--memory",
        metavar="MIB",
        type=int,
        help="memory that --once and the process that it starts may take together",
    )
    roles.add_parser("agent", help="serve a node: run folders, and steps of pods that are gone")
    return parser


if __name__ == "__main__":
    sys.exit(main())
