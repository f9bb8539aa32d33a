"""What both kinds of the cluster API are made of: base model, scalar types, conditions, parsing.

Owns how a model maps to YAML names and how a bad object becomes one sentence. Knows no single kind
and talks to no API server. Called by `tidegate_operator.api`, `tidegate_operator.api_run` and
`tidegate_operator.crd`.
"""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails

from tidegate_contract.errors import Reject
from tidegate_operator.api_rules import VALIDATIONS, Rule, wire_name
from tidegate_operator.quantity import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)


class ApiModel(BaseModel):
    """Base of every object in a spec or status: immutable, YAML names, unknown fields ignored.

    Fields are documented by the string below each; those strings become the descriptions that
    ``kubectl explain`` prints. Build with the Python names, parse with the YAML names.
    """

    model_config = ConfigDict(
        alias_generator=wire_name,
        validate_by_name=True,
        frozen=True,
        extra="ignore",
        validate_default=True,
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        for rule in self.rules:
            rule.check(self)
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Adds the object's rules to its schema; called by pydantic."""
        json_schema = handler.resolve_ref_schema(handler(schema))
        if cls.rules:
            json_schema[VALIDATIONS] = [rule.as_validation() for rule in cls.rules]
        return json_schema

    def to_wire(self) -> dict[str, Any]:
        """The fields that were set, as JSON values under their YAML names.

        Defaults and None stay out: in a server-side apply each field that is named becomes the
        applier's own.
        """
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)


def yaml_default(value: str | dict[str, str]) -> Any:
    """A field's default as a user would write it; it goes to the schema so, and is parsed here.

    Args:
        value: Text of a duration, or the object; the defaults inside it apply on top.
    """
    return Field(default=value)


class ObjectMeta(ApiModel):
    """The part of an object's metadata that Tidegate reads."""

    name: str
    """Name of the object."""
    namespace: str
    """Namespace of the object."""
    uid: str = ""
    """Identity of the object across deletion and creation under the same name."""
    resource_version: str = ""
    """Version the object was read at; opaque."""
    generation: int = 0
    """Number of the spec's version; grows at every change of the spec."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the object."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the object."""


READY_STATUS = ".status.conditions[?(@.type=='Ready')].status"
READY_REASON = ".status.conditions[?(@.type=='Ready')].reason"
CREATED = ".metadata.creationTimestamp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of ``kubectl get``.

    Attributes:
        name: Heading.
        type: OpenAPI type of the cell, or ``date`` for an age.
        path: JSONPath of the cell within the object.
        wide: Whether only ``-o wide`` prints it.
    """

    name: str
    type: str
    path: str
    wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """How the API server names one kind, and what ``kubectl get`` prints of it."""

    kind: str
    plural: str
    singular: str
    short_name: str
    columns: tuple[Column, ...]


class ServedObject(ApiModel):
    """Base of the kinds themselves: what the API server stores under a name."""

    RESOURCE: ClassVar[Resource]

    metadata: ObjectMeta
    """Standard metadata."""


def _read_duration(value: object) -> timedelta:
    match value:
        case timedelta():
            return value
        case str():
            return parse_duration(value)
        case _:
            raise ValueError(f"must be a duration in text such as '10m', not {value!r}")


def _read_size(value: object) -> int:
    match value:
        case bool():
            raise ValueError(f"must be a size in text such as '800Mi', not {value!r}")
        case int():
            return value
        case str():
            return parse_size(value)
        case _:
            raise ValueError(f"must be a size in text such as '800Mi', not {value!r}")


_QUANTITY_PATTERN = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
    r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)


def _read_quantity(value: object) -> str:
    text = str(value) if isinstance(value, int) else value
    if not isinstance(text, str) or not re.match(_QUANTITY_PATTERN, text):
        raise ValueError(f"must be a quantity such as 100m or 512Mi, not {value!r}")
    return text


Duration = Annotated[
    timedelta,
    BeforeValidator(_read_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "maxLength": 16, "pattern": DURATION_PATTERN}),
]
Size = Annotated[
    int,
    BeforeValidator(_read_size),
    PlainSerializer(format_size, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "maxLength": 24, "pattern": SIZE_PATTERN}),
]
Quantity = Annotated[
    str,
    BeforeValidator(_read_quantity),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": _QUANTITY_PATTERN,
        }
    ),
]
Int32 = Annotated[int, Field(strict=True, json_schema_extra={"format": "int32"})]
Int64 = Annotated[int, Field(strict=True, json_schema_extra={"format": "int64"})]
Count32 = Annotated[Int32, Field(ge=0)]
Count64 = Annotated[Int64, Field(ge=0)]
Label = Annotated[
    str,
    StringConstraints(min_length=1, max_length=63, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
]
Text16 = Annotated[str, StringConstraints(max_length=16)]
Text24 = Annotated[str, StringConstraints(max_length=24)]
Text32 = Annotated[str, StringConstraints(max_length=32)]
Text36 = Annotated[str, StringConstraints(max_length=36)]
Text63 = Annotated[str, StringConstraints(max_length=63)]
Text64 = Annotated[str, StringConstraints(max_length=64)]
Text128 = Annotated[str, StringConstraints(max_length=128)]
Text253 = Annotated[str, StringConstraints(max_length=253)]
Text256 = Annotated[str, StringConstraints(max_length=256)]
Text1024 = Annotated[str, StringConstraints(max_length=1024)]


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One thing that is true or false of the object now, with the reason."""

    type: Annotated[str, StringConstraints(max_length=316)]
    """What the condition tells, unique in the list."""
    status: ConditionStatus
    """Whether it holds: True, False or Unknown. A condition that is absent is Unknown."""
    reason: Annotated[
        str,
        StringConstraints(
            min_length=1, max_length=128, pattern="^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
        ),
    ]
    """Why, in one CamelCase word of 1 to 128 characters that programs may compare."""
    message: Annotated[str, StringConstraints(max_length=2048)]
    """Why, in one sentence for people of at most 2048 characters."""
    last_transition_time: AwareDatetime
    """When the status changed last; a change of reason or message leaves it."""
    observed_generation: Count64 | None = None
    """Generation of the spec that the condition was derived from."""


Served = TypeVar("Served", bound=ServedObject)


def parse_object(model: type[Served], raw: Mapping[str, Any]) -> Served:
    """Reads one object as the API server serves it.

    Fields that this version does not know are ignored, so objects of a newer minor can be read.

    Args:
        model: The model of its kind.
        raw: The decoded JSON object.

    Raises:
        Reject: A field is missing or bad; one sentence names the object, the first such field by
            its YAML path, and what is allowed.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        sentence = _sentence(error.errors(include_url=False)[0])
        raise Reject(f"{model.RESOURCE.kind} {_name(raw)}: {sentence}") from error


def _name(raw: Mapping[str, Any]) -> str:
    metadata = raw.get("metadata")
    if not isinstance(metadata, Mapping):
        return "without a name"
    return f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"


_PHRASES = {
    "missing": "is required",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "tuple_type": "must be a list",
    "string_type": "must be text",
    "int_type": "must be a whole number",
}


def _sentence(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    path = _path(error["loc"]) + context.get("field_path", "")
    phrase = _PHRASES.get(error["type"]) or _phrase(error["msg"])
    if not phrase.startswith(("must", "is ")):
        return f"{path}: {phrase}"
    value = error["input"]
    if error["type"] == "missing" or " not " in phrase or not isinstance(value, str | int | float):
        return f"{path} {phrase}"
    return f"{path} {phrase}, not {reprlib.repr(value)}"


def _path(location: tuple[int | str, ...]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".")


def _phrase(message: str) -> str:
    """Turns pydantic's English into the rest of a sentence that began with the field's path."""
    message = message.removeprefix("Value error, ").partition(" after validation")[0]
    return re.sub(r"^(Input|String|Value|Tuple|Dictionary) should", "must", message)
