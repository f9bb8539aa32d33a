"""What a safe loader, `torch.load(weights_only=True)`, would refuse of a snapshot.

Asked at the first save, so that nobody learns it at a resume. Nothing is refused here: the restore
reads all types that the program can import. Main thread.
"""

import io
import logging
import pickle
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_LOG = logging.getLogger(__name__)
_MOST_OF_ENTRY = 100_000
"""Objects of one entry that are looked at; tens of milliseconds."""
_MOST_IN_ALL = 500_000
"""Of all entries; some tenths of a second, once."""
_LONG = 1 << 12
_PLAIN = (int, float, bool, str, type(None))
_MOST_NAMED = 10
_BULK = (torch.UntypedStorage, torch.TypedStorage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is known of a snapshot's entries, by their flat names.

    Attributes:
        refused: name → its types that are not on torch's safe list, or why it cannot be pickled.
        unfinished: not looked at to their end.
    """

    refused: dict[str, str]
    unfinished: tuple[str, ...]


class _Enough(Exception):
    """So many objects were looked at that the rest is left."""


class _Look(pickle.Pickler):
    """Pickles a value without its bulk, and notes what the pickle calls by name.

    Long texts, what arrays hold and tensors are left out: no loader refuses them for their content.
    """

    def __init__(self, most_objects: int) -> None:
        super().__init__(io.BytesIO(), protocol=2)  # torch.save's
        self.left = most_objects
        self.named: dict[Any, None] = {}

    def persistent_id(self, value: Any) -> str | None:
        """Hook for every object; anything but None is written in its place."""
        self.left -= 1
        if self.left < 0:
            raise _Enough
        kind = type(value)
        is_long = kind in (str, bytes, bytearray) and len(value) > _LONG
        is_plain_tensor = kind in (torch.Tensor, torch.nn.Parameter)
        return "" if is_long or is_plain_tensor or isinstance(value, _BULK) else None

    def reducer_override(self, value: Any) -> Any:
        """Hook for all but the simplest types; classes and functions are what goes by name."""
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            self.named[value] = None
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject:
            return numpy.zeros(1, value.dtype).__reduce_ex__(2)
        return NotImplemented


def find_unsafe(
    entries: dict[str, Any],
    most_of_entry: int | None = None,
    most_in_all: int = _MOST_IN_ALL,
) -> Found:
    """The entries that a safe loader would refuse.

    Args:
        entries: the snapshot; data of tensors is not touched.
        most_of_entry: pickled objects of one entry that are looked at; None means 100,000.
        most_in_all: of all entries.
    """
    refused: dict[str, str] = {}
    unfinished: list[str] = []
    asked: dict[Any, str] = {}
    most = _MOST_OF_ENTRY if most_of_entry is None else most_of_entry
    for name, value in _objects(entries, ""):
        allowed = min(most, most_in_all)
        look = _Look(allowed)
        why = _dump(look, value)
        most_in_all -= allowed - max(look.left, 0)
        if look.left < 0:
            unfinished.append(name)
        if not why:
            why = ", ".join(sorted({_ask(one, asked) for one in look.named} - {""}))
        if why:
            refused[name] = why
    return Found(refused=refused, unfinished=tuple(unfinished))


def _dump(look: _Look, value: Any) -> str:
    """Pickles as far as is allowed; says why it cannot be pickled, nothing if it can."""
    try:
        look.dump(value)
    except _Enough:
        pass
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  # other languages' panics are no Exception
        return f"cannot be pickled: {error}"
    return ""


def _objects(entries: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """What is no tensor and no plain value, by the name that its entry has; lists stay whole."""
    for key, value in entries.items():
        if isinstance(value, Mapping):
            yield from _objects(value, f"{prefix}{key}.")
        elif not isinstance(value, torch.Tensor) and type(value) not in _PLAIN:
            yield f"{prefix}{key}", value


def _ask(named: Any, asked: dict[Any, str]) -> str:
    """Name of a class or function if torch does not hold it for safe; empty if it does."""
    if named not in asked:
        file = io.BytesIO()
        torch.save([named], file)
        file.seek(0)
        asked[named] = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    return asked[named]


def warn_of_unsafe(entries: dict[str, Any]) -> None:
    """Logs one warning if a safe loader would refuse something; never raises."""
    try:
        found = find_unsafe(entries)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  # a word to the user never ends training
        _LOG.warning("not known whether a safe loader reads all entries: %s", type(error).__name__)
        return
    sentences = []
    if found.refused:
        refused = _list([f"{name} ({why})" for name, why in found.refused.items()])
        sentences.append(
            f"a safe loader (torch.load with weights_only=True) would refuse {refused}; keep plain "
            "values instead, or allow these types there by torch.serialization.add_safe_globals"
        )
    if found.unfinished:
        sentences.append(
            "whether a safe loader refuses more is not known of "
            f"{_list(found.unfinished)}: too many objects, not looked at to the end"
        )
    if sentences:
        _LOG.warning("%s", "; ".join(sentences))


def _list(names: Sequence[str]) -> str:
    more = [f"and {len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *more])
