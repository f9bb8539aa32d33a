"""Gangs of rank processes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the modules beside this one are shared by tests and rank processes


@dataclass(frozen=True)
class RankEnd:
    code: int | None
    result: dict
    output: str


class Gang:
    """Runs programs of `rank_programs` on one process per rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._host = subprocess.Popen(
            [sys.executable, str(HERE / "ranks_host.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, program: str, ranks: list[dict], env: dict | None = None, timeout: float = 40
    ) -> list[RankEnd]:
        """One dictionary of arguments per rank; all ranks end within `timeout` or are killed."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        orders = [{"env": env or {}, "arguments": arguments} for arguments in ranks]
        request = {"folder": str(folder), "program": program, "ranks": orders, "timeout": timeout}
        self._host.stdin.write(json.dumps(request) + "\n")
        self._host.stdin.flush()
        codes = json.loads(self._host.stdout.readline())
        return [self._end(folder, rank, code) for rank, code in enumerate(codes)]

    def _end(self, folder: Path, rank: int, code: int | None) -> RankEnd:
        result = folder / f"result-{rank}.json"
        output = (folder / f"output-{rank}.txt").read_text()
        print(f"--- rank {rank}: {code}\n{output}")  # noqa: T201  # shown by pytest on failure
        return RankEnd(
            code=code,
            result=json.loads(result.read_text()) if result.exists() else {},
            output=output,
        )

    def close(self) -> None:
        self._host.stdin.close()
        self._host.terminate()
        self._host.wait(10)
        self._host.stdout.close()


@pytest.fixture(scope="session")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    host = Gang(tmp_path_factory.mktemp("gang"))
    yield host
    host.close()
