"""A node's own disk with a bad block: what is read there costs its step, and no other."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.folder import Folder
from tidegate_contract.layout import TRASH, Attempt, step_folder
from tidegate_contract.scan import scan_steps

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
ATTEMPT = Attempt(step=100, nonce="00000000000000aa")
OTHER = Attempt(step=100, nonce="00000000000000bb")

Break = Callable[[str, str], None]


@pytest.fixture
def run(tmp_path: Path, a_step: Callable[..., Folder]) -> Folder:
    """A run's folder with two steps and an empty `.trash`."""
    for attempt in (ATTEMPT, OTHER):
        a_step(attempt=attempt).close()
    folder = Folder.open(tmp_path)
    folder.ensure_child(TRASH).close()
    return folder


@pytest.fixture
def break_folder(monkeypatch: pytest.MonkeyPatch) -> Break:
    """A method of `Folder` fails in, or for, the folder of this name."""

    def install(name: str, method: str) -> None:
        whole = getattr(Folder, method)

        def refuse(folder: Folder, *rest: Any) -> Any:
            if Path(folder.path).name == name or rest == (name,):
                raise OSError(errno.EIO, os.strerror(errno.EIO), *rest)
            return whole(folder, *rest)

        monkeypatch.setattr(Folder, method, refuse)

    return install


@pytest.mark.parametrize("method", ["read", "size", "names"])
def test_step_of_a_node_that_cannot_be_read_is_a_problem_of_its_own(
    run: Folder, break_folder: Break, method: str
) -> None:
    name = step_folder(OTHER)
    break_folder(name, method)
    records = {record.attempt: record for record in scan_steps(run, RUN_ID, is_local=True)}
    assert records[ATTEMPT].is_sealed_by_all
    assert not records[OTHER].seals
    assert f"{name}: cannot be read (Input/output error)" in records[OTHER].problems[0]
    with pytest.raises(OSError, match="Input/output error"):
        scan_steps(run, RUN_ID)


@pytest.mark.parametrize("method", ["child", "names"])
def test_trash_of_a_node_that_cannot_be_read_hides_no_step(
    run: Folder, break_folder: Break, method: str
) -> None:
    break_folder(TRASH, method)
    records = scan_steps(run, RUN_ID, is_local=True)
    assert [record.is_sealed_by_all for record in records] == [True, True]
    with pytest.raises(OSError, match="Input/output error"):
        scan_steps(run, RUN_ID)
