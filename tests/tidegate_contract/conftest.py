"""Builders of the contract's records, and steps written for real into temp folders."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import tidegate_contract
from tidegate_contract.digest import ContentHasher
from tidegate_contract.folder import Folder
from tidegate_contract.layout import METADATA_REMOTE, Attempt, Part, data_file, step_folder
from tidegate_contract.publish import announce, write_seal
from tidegate_contract.seal import SaveReason, Seal, file_entry

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
NOW = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
SMALL_BLOCK = 1 << 12


def write_rank(step: Folder, seal: dict[str, Any], *, receipt: bool = True) -> Seal:
    """Writes one rank's files as a flusher would: announcement, files, receipt."""
    rank = seal["rank"]
    contents = {data_file(Part.WEIGHTS, rank): bytes([rank + 1]) * 10_000}
    if rank == 0:
        contents[METADATA_REMOTE] = b"metadata of the step"
    entries = []
    for name, data in contents.items():
        hasher = ContentHasher(SMALL_BLOCK)
        hasher.update(data)
        entries.append(file_entry(name, hasher.finish()))
    document = Seal(**{**seal, "files": tuple(entries)})
    announce(step, document)
    for name, data in contents.items():
        with step.new_file(name) as file:
            file.write(data)
            file.publish(len(data))
    if receipt:
        write_seal(step, document)
    return document


@pytest.fixture
def a_seal() -> Callable[..., dict[str, Any]]:
    """Fields of a seal; keyword arguments replace them."""

    def build(**changes: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "run_id": RUN_ID,
            "lineage": 1,
            "attempt": Attempt(step=100, nonce="00000000000000aa"),
            "tokens": 5000,
            "rank": 0,
            "world_size": 2,
            "sealed_at": NOW,
            "reason": SaveReason.CADENCE,
            "torch_version": "2.15.0",
            "files": (),
        }
        return fields | changes

    return build


@pytest.fixture(name="write_rank")
def write_rank_of_a_step() -> Callable[..., Seal]:
    """Writes one rank's files into an open remote step folder; see `write_rank`."""
    return write_rank


@pytest.fixture
def a_step(tmp_path: Path, a_seal: Callable[..., dict[str, Any]]) -> Callable[..., Folder]:
    """Writes a step of two ranks into a remote run folder and returns it open."""

    def build(ranks: tuple[int, ...] = (0, 1), **changes: Any) -> Folder:
        run = Folder.open(tmp_path)
        step = run.ensure_child(step_folder(a_seal(**changes)["attempt"]))
        for rank in ranks:
            write_rank(step, a_seal(rank=rank, **changes))
        run.close()
        return step

    return build


@pytest.fixture(scope="session")
def document_classes() -> dict[str, Any]:
    """Kind → document class, of all modules of the contract."""
    modules = [
        importlib.import_module(f"tidegate_contract.{module.name}")
        for module in pkgutil.iter_modules(tidegate_contract.__path__)
    ]
    return {
        value.KIND: value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and is_dataclass(value) and hasattr(value, "KIND")
    }
