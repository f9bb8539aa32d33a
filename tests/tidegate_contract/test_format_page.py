"""docs/format.md: every document has a sample, as `encode` writes it; the tree is complete."""

import hashlib
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract import document, layout
from tidegate_contract.document import decode, encode
from tidegate_contract.identity import LineageClaim, Pin, Trained
from tidegate_contract.layout import Attempt
from tidegate_contract.seal import Commit, Manifest, SaveReason, Scope, Seal, build_manifest

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


SAMPLES = {re.search(r'"kind":"([a-z]+)"', text)[1]: text for text in blocks("json")}  # type: ignore[index]


def sample(cls: Any) -> Any:
    return decode(cls, SAMPLES[cls.KIND].encode(), cls.KIND)


def test_every_document_has_a_sample(document_classes: dict[str, Any]) -> None:
    assert set(SAMPLES) == set(document_classes)


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_sample_is_what_encode_writes(kind: str, document_classes: dict[str, Any]) -> None:
    assert encode(sample(document_classes[kind])).decode() == SAMPLES[kind]


def test_optional_fields_that_no_sample_shows_are_named(document_classes: dict[str, Any]) -> None:
    # of documents that are files; the messages' are in their module's docstrings
    for name in ("run", "lineage", "control", "state"):
        text = SAMPLES[name]
        absent = {field.name for field in fields(document_classes[name])} - set(
            re.findall(r'"([a-z_]+)":', text)
        )
        assert all(f"`{field}?`" in PAGE for field in absent), (name, absent)


def test_samples_belong_together() -> None:
    seal, manifest, commit = sample(Seal), sample(Manifest), sample(Commit)
    assert commit.manifest_sha256 == hashlib.sha256(SAMPLES["manifest"].encode()).hexdigest()
    assert set(seal.flushed_files) < set(manifest.files)
    assert {entry.scope for entry in seal.files} == set(Scope)
    assert (seal.attempt, seal.run_id) == (manifest.attempt, manifest.run_id)
    assert sample(Pin).attempt == seal.attempt
    word, claim = sample(Trained), sample(LineageClaim)
    assert word.number == claim.number == seal.lineage
    assert (word.restored, word.explicit) == (claim.restored, claim.explicit)


def test_manifest_of_the_page_follows_the_rule_of_the_page() -> None:
    mine, whole = sample(Seal), sample(Manifest)
    other = set(whole.files) - set(mine.files)
    (data,) = (entry for entry in other if entry.name != layout.METADATA)
    theirs = Seal(
        **{f.name: getattr(mine, f.name) for f in fields(Seal)}
        | {"rank": 1, "files": (data,), "sealed_at": whole.sealed_at}
    )
    assert build_manifest({1: theirs, 0: mine}) == whole


def test_digest_of_the_page_is_over_the_bytes_of_the_page() -> None:
    (hashed,) = blocks("text")
    (told,) = re.findall(r"their SHA-256 is `([0-9a-f]{64})`", PAGE)
    assert hashlib.sha256(hashed.rstrip("\n").encode()).hexdigest() == told
    whole = hashed.replace(',"version"', f',"sha256":"{told}","version"')
    assert whole == SAMPLES["commit"]


def tree_paths() -> list[tuple[str, ...]]:
    """Paths of the layout, as they are indented."""
    (tree,) = blocks("layout")
    paths: list[tuple[str, ...]] = []
    stack: list[str] = []
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 4
        stack = [*stack[:depth], name.rstrip("/")]
        paths.append(tuple(stack))
    return paths


def constants() -> set[str]:
    return {
        value
        for name, value in vars(layout).items()
        if name.isupper() and not name.startswith("_") and isinstance(value, str)
    }


def parsers() -> dict[str, Any]:
    found = inspect.getmembers(layout, inspect.isfunction)
    return {name: parse for name, parse in found if name.startswith("parse_")}


def test_layout_names_all_that_the_format_knows() -> None:
    names = {path[-1] for path in tree_paths()}
    assert constants() <= names
    for parser, parse in parsers().items():
        assert any(parse(name) is not None for name in names), parser
    parts = {found[0] for name in names if (found := layout.parse_data_file(name))}
    assert parts == set(layout.Part)


def test_layout_holds_no_name_that_the_format_does_not_know() -> None:
    for path in tree_paths():
        is_known = path[-1] in constants() | {"LOCAL", "REMOTE", "team-a", "llama"} or any(
            parse(path[-1]) is not None for parse in parsers().values()
        )
        assert is_known, path


def test_layout_keeps_each_tier_its_own() -> None:
    local = {path[-1] for path in tree_paths() if path[0] == "LOCAL"}
    remote = {path[-1] for path in tree_paths() if path[0] == "REMOTE"}
    assert not local & {layout.COMMIT, layout.MANIFEST, layout.PINS}
    assert not remote & {layout.ROOT_ID, layout.TIER_DOCUMENT, layout.CONTROL_DOCUMENT}
    step = layout.step_folder(Attempt(step=1200, nonce="9c41b0a2d7e55f03"))
    assert step in local & remote


def test_limits_and_words_of_the_page_are_those_of_the_code() -> None:
    assert f"{document.MAX_SMALL_BYTES >> 20} MiB, and for seals and manifests" in PAGE
    assert f"{document.MAX_BYTES >> 20} MiB; {document.MAX_VALUES:,} values" in PAGE
    assert f"{document.MAX_TEXT:,} characters" in PAGE
    assert f"Version {document.FORMAT_VERSION}." in PAGE
    assert all(f"`{reason}`" in PAGE for reason in SaveReason)
