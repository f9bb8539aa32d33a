"""What a safe loader, `torch.load(weights_only=True)`, would refuse of a snapshot.

Asked at the first save, so that nobody learns it at a resume. Nothing is refused here: the restore
reads all types that the program can import. Main thread.
"""

import io
import logging
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_LOG = logging.getLogger(__name__)
_MOST_OBJECTS = 100_000
"""Looked at in all; tens of milliseconds."""
_LONG = 1 << 12
_PLAIN = (int, float, bool, str, type(None))
_MOST_NAMED = 10
_BULK = (torch.UntypedStorage, torch.TypedStorage)


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


def find_unsafe(entries: dict[str, Any], most_objects: int = _MOST_OBJECTS) -> dict[str, str]:
    """The entries that a safe loader would refuse.

    Args:
        entries: the snapshot; data of tensors is not touched.
        most_objects: pickled objects that are looked at, in all.

    Returns:
        Flat name → its types that are not on torch's safe list, or why it cannot be pickled.
    """
    found: dict[str, str] = {}
    asked: dict[Any, str] = {}
    for name, value in _objects(entries, ""):
        look = _Look(most_objects)
        try:
            look.dump(value)
        except _Enough:
            pass
        except Exception as error:  # noqa: BLE001  # objects of the user's program are pickled here
            found[name] = f"cannot be pickled: {error}"
            continue
        finally:
            most_objects = max(look.left, 0)
        refused = {_ask(one, asked) for one in look.named} - {""}
        if refused:
            found[name] = ", ".join(sorted(refused))
    return found


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
    except Exception as error:  # noqa: BLE001  # a word to the user never ends training
        _LOG.warning("not known whether a safe loader reads all entries: %r", error)
        return
    if not found:
        return
    told = [f"{name} ({why})" for name, why in list(found.items())[:_MOST_NAMED]]
    if len(found) > _MOST_NAMED:
        told.append(f"and {len(found) - _MOST_NAMED} more")
    _LOG.warning(
        "a safe loader (torch.load with weights_only=True) would refuse %s; keep plain values "
        "instead, or allow these types there by torch.serialization.add_safe_globals",
        ", ".join(told),
    )
