import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import Field

from tidegate_operator import crd
from tidegate_operator.api import CheckpointPolicy, parse_policy
from tidegate_operator.api_run import CheckpointRun
from tidegate_operator.api_types import ApiModel, Quantity, ServedObject

REPOSITORY = Path(__file__).parents[2]
FIELDS = Path(__file__).with_name("fields")
KINDS = [pytest.param(kind, id=kind.RESOURCE.kind) for kind in crd.KINDS]
# The API server documents these itself.
UNDOCUMENTED = {"apiVersion", "kind", "metadata"}
NOT_LISTED = {"description", "properties", "items", "additionalProperties"}


def schema_of(kind: type[ServedObject]) -> dict[str, Any]:
    version = crd.build_crd(kind)["spec"]["versions"][0]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def walk(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field and every entry of a list or map, with its path."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}".removeprefix("."))
    for keyword in ("items", "additionalProperties"):
        if keyword in node:
            yield from walk(node[keyword], f"{path}[]")


def listing(kind: type[ServedObject]) -> list[str]:
    """One line a fact: field, keyword, value, in alphabetical order. Prose is left out."""
    document = crd.build_crd(kind)["spec"]
    version = document["versions"][0]
    lines = [f"names {json.dumps(document['names'], sort_keys=True)}"]
    for column in version["additionalPrinterColumns"]:
        lines.append(f"column {' '.join(str(fact) for fact in column.values())}")
    for path, node in walk(schema_of(kind)):
        for keyword in sorted(node.keys() - NOT_LISTED):
            facts = node[keyword] if keyword == "x-kubernetes-validations" else [node[keyword]]
            lines += [f"{path or '.'} {keyword} {json.dumps(f, sort_keys=True)}" for f in facts]
    return sorted(lines)


def with_defaults(schema: dict[str, Any], value: Any) -> Any:
    """What the API server stores: defaults of absent fields, from the outside in."""
    if not isinstance(value, dict):
        return value
    value = dict(value)
    for name, child in schema.get("properties", {}).items():
        if name not in value and "default" in child:
            value[name] = child["default"]
        if name in value:
            value[name] = with_defaults(child, value[name])
    return value


def spoken_facts(node: dict[str, Any]) -> list[str]:
    """What a person must be told of a field: its default and its bounds, as they are written."""
    facts = [node.get(keyword) for keyword in ("default", "maximum", "maxItems")]
    facts += [node["minimum"]] if node.get("minimum", 0) > 0 else []
    for rule in node.get("x-kubernetes-validations", []):
        if rule["message"].startswith("must be between "):
            facts += rule["message"].removeprefix("must be between ").split(" and ")
    return [str(fact) for fact in facts if isinstance(fact, str | int)]


@pytest.mark.parametrize("folder", ["crds", "charts/tidegate/files/crds"])
def test_generated_files_are_up_to_date(folder: str) -> None:
    assert crd.stale_files(REPOSITORY / folder) == []
    names = {path.name for path in (REPOSITORY / folder).iterdir()}
    assert names == set(crd.build_files())


@pytest.mark.parametrize("kind", KINDS)
def test_schema_facts_are_the_reviewed_ones(kind: type[ServedObject]) -> None:
    """A change of the API shows here as one changed line to review."""
    want = (FIELDS / f"{kind.RESOURCE.plural}.txt").read_text(encoding="utf-8")
    assert listing(kind) == sorted(want.splitlines())


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_and_entry_says_what_it_is(kind: type[ServedObject]) -> None:
    silent = [
        path
        for path, node in walk(schema_of(kind))
        if path not in UNDOCUMENTED
        and not node.get("description")
        and not (path.endswith("[]") and node.get("type") != "object")
    ]
    assert silent == []


@pytest.mark.parametrize("kind", KINDS)
def test_spec_descriptions_name_the_default_and_the_bounds(kind: type[ServedObject]) -> None:
    missing = [
        f"{path}: {fact}"
        for path, node in walk(schema_of(kind)["properties"]["spec"])
        for fact in spoken_facts(node)
        if fact not in node.get("description", "")
    ]
    assert missing == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_list_is_bounded_and_says_how_it_merges(kind: type[ServedObject]) -> None:
    for path, node in walk(schema_of(kind)):
        if node.get("type") != "array":
            continue
        assert node["maxItems"] >= 1, path
        assert node["x-kubernetes-list-type"] in {"map", "set"}, path
        if node["x-kubernetes-list-type"] == "map":
            assert set(node["x-kubernetes-list-map-keys"]) <= set(node["items"]["required"]), path


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_and_map_is_bounded(kind: type[ServedObject]) -> None:
    """Without a bound the API server cannot estimate what a rule costs, and refuses the schema."""
    unbounded = [
        path
        for path, node in walk(schema_of(kind))
        if path not in UNDOCUMENTED
        and (
            (node.get("type") == "string" and not node.keys() & {"maxLength", "enum", "format"})
            or ("additionalProperties" in node and "maxProperties" not in node)
        )
    ]
    assert unbounded == []


@pytest.mark.parametrize("kind", KINDS)
def test_schema_is_structural(kind: type[ServedObject]) -> None:
    for path, node in walk(schema_of(kind)):
        assert "type" in node or node.get("x-kubernetes-int-or-string") is True, path
        assert not node.keys() & {"$ref", "title", "allOf", "oneOf", "not", "nullable"}, path
        assert node.get("additionalProperties") is not False, path
        assert node.get("default", ...) is not None, path
        assert node.get("type") != "integer" or node["format"] in {"int32", "int64"}, path


@pytest.mark.parametrize("kind", KINDS)
def test_union_members_have_no_default(kind: type[ServedObject]) -> None:
    """A stored default of one member would make every switch to another one refused."""
    for path, node in walk(schema_of(kind)):
        rules = [rule["rule"] for rule in node.get("x-kubernetes-validations", [])]
        for name, child in node.get("properties", {}).items():
            if any(f"has(self.{name})" in rule for rule in rules):
                assert "default" not in child, f"{path}.{name}"


def test_defaults_of_schema_and_model_are_the_same() -> None:
    bare = {
        "metadata": {"name": "default", "namespace": "team-a"},
        "spec": {"remote": {"type": "Claim", "claimName": "pfs"}},
    }
    stored = with_defaults(schema_of(CheckpointPolicy), bare)

    assert stored["spec"]["local"]["highWatermarkPercent"] == 85
    assert parse_policy(stored) == parse_policy(bare)


def test_write_then_check_finds_nothing_stale(tmp_path: Path) -> None:
    folders = [str(tmp_path / "a"), str(tmp_path / "b" / "c")]

    assert crd.main(folders) == 0

    assert crd.main(["--check", *folders]) == 0
    name = "checkpointruns.yaml"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / "c" / name).read_bytes()
    first_line = (tmp_path / "a" / name).read_text(encoding="utf-8").splitlines()[0]
    assert first_line.startswith("# Generated by `make crds`")


def test_check_names_edited_and_absent_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crd.main([str(tmp_path)])
    edited, absent = tmp_path / "checkpointpolicies.yaml", tmp_path / "checkpointruns.yaml"
    edited.write_text(edited.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    absent.unlink()

    assert crd.main(["--check", str(tmp_path)]) == 1

    assert capsys.readouterr().err.splitlines() == [
        f"{path} differs from the models; run `make crds`." for path in (edited, absent)
    ]
    assert not absent.exists()


def test_generated_yaml_reads_back_as_the_document() -> None:
    for kind in crd.KINDS:
        text = crd.build_files()[f"{kind.RESOURCE.plural}.yaml"]
        assert yaml.safe_load(text) == crd.build_crd(kind)
        assert "&id" not in text


class Inner(ApiModel):
    """An inner object,
    described over two lines."""

    size: Annotated[int, Field(ge=1)] = 3
    """How many."""


class Outer(ApiModel):
    """An outer object."""

    first: Inner
    """The first."""
    second: Inner | None = None
    amount: Quantity | None = None
    """Either kind."""


class Exclusive(ApiModel):
    """An object with a bound that has another form in structural schemas."""

    size: Annotated[int, Field(gt=0)] = 1
    """How many."""


class Mixed(ApiModel):
    """An object with a member of two types."""

    amount: int | list[int] = 0
    """How many."""


def test_reference_is_inlined_and_the_field_describes_it() -> None:
    properties = crd.build_schema(Outer)["properties"]

    assert properties["first"]["description"] == "The first."
    assert properties["first"]["properties"]["size"] == {
        "description": "How many.",
        "type": "integer",
        "default": 3,
        "minimum": 1,
    }


def test_optional_field_may_be_absent_and_never_null() -> None:
    schema = crd.build_schema(Outer)

    assert schema["required"] == ["first"]
    assert schema["properties"]["second"]["type"] == "object"
    assert "anyOf" not in schema["properties"]["second"]
    assert "default" not in schema["properties"]["second"]
    want = "An inner object, described over two lines."
    assert schema["properties"]["second"]["description"] == want


def test_quantity_may_be_an_integer_or_text() -> None:
    amount = crd.build_schema(Outer)["properties"]["amount"]
    assert amount["x-kubernetes-int-or-string"] is True
    assert amount["anyOf"] == [{"type": "integer"}, {"type": "string"}]
    assert "type" not in amount


@pytest.mark.parametrize(
    ("model", "want"),
    [
        pytest.param(Exclusive, r"^Exclusive\.size: .* exclusiveMinimum$", id="exclusive-bound"),
        pytest.param(Mixed, r"^Mixed\.amount: this anyOf", id="two-types"),
    ],
)
def test_model_without_structural_form_is_refused_by_path(model: type[ApiModel], want: str) -> None:
    with pytest.raises(ValueError, match=want):
        crd.build_schema(model)


def test_run_status_rule_keeps_durable_time_from_going_back() -> None:
    status = schema_of(CheckpointRun)["properties"]["status"]["properties"]
    rules = status["lastDurable"]["x-kubernetes-validations"]
    assert [rule["message"] for rule in rules] == ["lastDurable.time never goes back"]
    assert "x-kubernetes-validations" not in status["lastSealed"]
