"""Rules of the cluster API that a type alone cannot say.

Owns `Rule`: one CEL expression that the API server evaluates at every write, with the same rule in
Python for objects that reach us from an older or edited CRD. The models carry rules as metadata;
`tidegate_operator.crd` writes them out as ``x-kubernetes-validations``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from tidegate_operator.quantity import parse_duration, parse_size

VALIDATIONS = "x-kubernetes-validations"
LIST_TYPE = "x-kubernetes-list-type"
LIST_MAP_KEYS = "x-kubernetes-list-map-keys"

_INITIALISMS = {"id": "ID", "uid": "UID", "ttl": "TTL"}


def wire_name(field: str) -> str:
    """The name in YAML of a field: ``run_id`` is ``runID``, ``from_`` is ``from``.

    Args:
        field: The Python name; an underscore at its end only avoids a keyword.
    """
    first, *rest = field.rstrip("_").split("_")
    return first + "".join(_INITIALISMS.get(word, word.capitalize()) for word in rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule on a field or on a whole object, kept by the API server and by the models.

    Put it into ``Annotated`` for a field, or into `ApiModel.rules` for an object.

    Attributes:
        cel: The expression the API server evaluates; ``self`` is the field or object.
        message: What is wrong and what is allowed. It begins with ``must`` for a field, and with
            the member's name for an object.
        field_path: The member the API server names for a rule on an object, ``.drain.freshness``.
        holds: The same rule for the parsed value. None for a transition rule, which compares with
            the stored object, so only the API server can keep it.
    """

    cel: str
    message: str
    field_path: str | None = None
    # Any: each rule knows the value it stands on, the record holds rules of all of them.
    holds: Callable[[Any], bool] | None = None

    def check(self, value: Any) -> None:
        """Raises PydanticCustomError when the value breaks the rule."""
        if self.holds is not None and not self.holds(value):
            facts = {"message": self.message, "field_path": self.field_path or ""}
            raise PydanticCustomError("rule", "{message}", facts)

    def as_validation(self) -> dict[str, str]:
        """The entry of ``x-kubernetes-validations``."""
        entry: dict[str, str] = {"rule": self.cel, "message": self.message}
        if self.field_path is not None:
            entry["fieldPath"] = self.field_path
        return entry

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Checks the rule after the field was parsed; called by pydantic."""

        def keep(value: Any) -> Any:
            self.check(value)
            return value

        return core_schema.no_info_after_validator_function(keep, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Adds the rule to the field's schema; called by pydantic."""
        json_schema = handler(schema)
        json_schema.setdefault(VALIDATIONS, []).append(self.as_validation())
        return json_schema


@dataclass(frozen=True, slots=True, kw_only=True)
class ListMap:
    """Marks a list whose entries are told apart by keys; appliers share it entry by entry."""

    keys: tuple[str, ...]

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Adds the list's type and keys; called by pydantic."""
        return handler(schema) | {LIST_TYPE: "map", LIST_MAP_KEYS: list(self.keys)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSet:
    """Marks a list without an order whose scalar entries are unique."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Adds the list's type; called by pydantic."""
        return handler(schema) | {LIST_TYPE: "set"}


def between(low: str, high: str) -> Rule:
    """The rule that a duration lies within two durations, both allowed."""
    shortest, longest = parse_duration(low), parse_duration(high)
    return Rule(
        cel=f"duration(self) >= duration('{low}') && duration(self) <= duration('{high}')",
        message=f"must be between {low} and {high}",
        holds=lambda value: shortest <= value <= longest,
    )


def at_least(low: str) -> Rule:
    """The rule that a size is no smaller than another."""
    smallest = parse_size(low)
    return Rule(
        cel=f"quantity(self).compareTo(quantity('{low}')) >= 0",
        message=f"must be at least {low}",
        holds=lambda value: value >= smallest,
    )


def set_exactly_when(member: str, choice: str, value: str) -> Rule:
    """The rule that a union's member is set if, and only if, the choice selects it.

    Args:
        member: The optional field, by its Python name.
        choice: The field that chooses, by its Python name.
        value: The choice that selects the member.
    """
    return Rule(
        cel=f"(self.{wire_name(choice)} == '{value}') == has(self.{wire_name(member)})",
        message=f"{wire_name(member)} must be set exactly when {wire_name(choice)} is {value}",
        holds=lambda union: (
            (getattr(union, choice) == value) == (getattr(union, member) is not None)
        ),
    )


def allowed_only_when(member: str, choice: str, value: str) -> Rule:
    """The rule that a union's member may be set only when the choice selects it.

    Args:
        member: The optional field, by its Python name.
        choice: The field that chooses, by its Python name.
        value: The choice that allows the member.
    """
    return Rule(
        cel=f"!has(self.{wire_name(member)}) || self.{wire_name(choice)} == '{value}'",
        message=f"{wire_name(member)} is allowed only when {wire_name(choice)} is {value}",
        holds=lambda union: getattr(union, member) is None or getattr(union, choice) == value,
    )
