"""Forks rank processes from one interpreter that has imported torch once.

Reads one JSON object a line from stdin, `{"folder", "program", "ranks": [{"env", "arguments"}],
"timeout"}`, runs `rank_programs.<program>` in one fork per rank, and answers with their exit codes.
A rank's result is in `<folder>/result-<rank>.json`, its output in `<folder>/output-<rank>.txt`.
"""

import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import rank_loop
import rank_programs


def run_rank(folder: Path, rank: int, world_size: int, program: str, order: dict) -> int:
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(order["env"])
    warnings.simplefilter("error")
    rank_loop.prepare(folder, rank, world_size)
    result = getattr(rank_programs, program)(rank, world_size, **order["arguments"])
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    return 0


def exit_code_of(folder: Path, rank: int, world_size: int, program: str, order: dict) -> int:
    try:
        return run_rank(folder, rank, world_size, program, order)
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:  # noqa: BLE001  # a fork must not return into the host's loop
        traceback.print_exc()
        return 1


def fork_rank(*arguments) -> int:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = exit_code_of(*arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return pid


def await_ranks(pids: list[int], timeout: float) -> list[int | None]:
    """Exit codes; None for a rank that had to be killed."""
    codes: dict[int, int | None] = {}
    until = time.monotonic() + timeout
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > until:
            for left in set(pids) - set(codes):
                os.kill(left, signal.SIGKILL)
                os.waitpid(left, 0)
                codes[left] = None
        else:
            time.sleep(0.01)
    return [codes[pid] for pid in pids]


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        orders = request["ranks"]
        pids = [
            fork_rank(folder, rank, len(orders), request["program"], order)
            for rank, order in enumerate(orders)
        ]
        sys.stdout.write(json.dumps(await_ranks(pids, request["timeout"])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
