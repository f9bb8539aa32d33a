"""Area 6 of the bank: whose data a start finds, and what it may take for its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tidegate.staging import Slot
from tidegate_contract import keys
from tidegate_contract.errors import Reject, Retry
from tidegate_contract.layout import QUARANTINE, step_folder

Build = Callable[..., Any]
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_sync")]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_c127_steps_of_a_former_run_on_the_disk_are_set_aside_and_never_loaded(
    make: Any, a_trainer: Build, tmp_path: Path
) -> None:
    (tmp_path / "pfs").mkdir()
    former = a_trainer(node="used")
    want = contents(former.save({"note": 5000.0}, make.attempt_of(5000)))
    former.remote.rename(tmp_path / "former")
    a_trainer(node="other")  # begins the new run of this name

    trainer = a_trainer(node="used")
    state = {"note": 0.0}
    outcome = trainer.restore(state)

    assert trainer.run_id != former.run_id
    assert outcome.candidate is None
    assert state["note"] == 0.0
    aside = trainer.local / QUARANTINE / former.run_id / step_folder(make.attempt_of(5000))
    assert contents(aside) == want
    trainer.save({"note": 1.0}, make.attempt_of(1))
    assert trainer.flush().lines == ("step 1: durable",)
    assert trainer.restore(state).candidate.attempt.step == 1


@pytest.mark.parametrize("node", ["used", "fresh"])
def test_c128_job_made_again_under_a_derived_name_is_refused_until_a_person_decides(
    make: Any, a_trainer: Build, tmp_path: Path, node: str
) -> None:
    (tmp_path / "pfs").mkdir()
    first = a_trainer(node="used", environment={keys.ENV_RUN_DERIVED_OWNER: "uid-1"})
    folder = first.save({"note": 5000.0}, make.attempt_of(5000))
    first.flush()
    want = contents(folder)

    with pytest.raises(Reject, match=r"another owner \(uid-1\).*\(uid-2\).*label.*onNewOwner"):
        a_trainer(node=node, environment={keys.ENV_RUN_DERIVED_OWNER: "uid-2"})

    assert contents(folder) == want
    state = {"note": 0.0}
    again = a_trainer(node=node, environment={keys.ENV_RUN_DERIVED_OWNER: "uid-1"})
    assert again.restore(state).candidate.attempt.step == 5000
    named = a_trainer(node=node)  # a person named the run: the same name resumes
    assert named.restore(state).candidate.attempt.step == 5000


def test_c128_disk_with_an_old_step_beside_an_empty_remote_tier_begins_nothing(
    make: Any, a_trainer: Build, tmp_path: Path
) -> None:
    (tmp_path / "pfs").mkdir()
    first = a_trainer(environment={keys.ENV_RUN_DERIVED_OWNER: "uid-1"})
    folder = first.save({"note": 5000.0}, make.attempt_of(5000))
    want = contents(folder)
    (tmp_path / "pfs" / "team").rename(tmp_path / "away")

    with pytest.raises(Retry, match="is the remote tier mounted"):
        a_trainer(environment={keys.ENV_RUN_DERIVED_OWNER: "uid-2"})

    assert contents(folder) == want
    assert list((tmp_path / "pfs").iterdir()) == []


def test_c136_snapshot_lies_in_the_memory_of_its_process_alone() -> None:
    copied = Slot().copy({"w": torch.ones(100_000), "nested": {"m": torch.ones(10)}})
    assert not copied["w"].is_shared()
    assert not copied["nested"]["m"].is_shared()
    maps = Path("/proc/self/maps").read_text().splitlines()
    address = copied["w"].data_ptr()
    spans = [(line, [int(end, 16) for end in line.split(" ")[0].split("-")]) for line in maps]
    (span,) = [line for line, (low, high) in spans if low <= address < high]
    assert span.split()[1].endswith("p")  # private, and no file behind it
    assert "/" not in span
