"""What a training loop's state is: user's objects → entries of a checkpoint, and back.

Weights and optimizers go through `torch.distributed.checkpoint.state_dict`, so sharded and wrapped
models are saved under their plain names. Anything else is kept exactly as it was, also where DCP's
flattening would change it. Rank state lies under `rank.<rank>.<name>`. Main thread only.
"""

import logging
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _get_fqns,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tidegate.rng import put_rng, take_rng
from tidegate.settings import WorldChange
from tidegate_contract.errors import Reject
from tidegate_contract.layout import Part

_LOG = logging.getLogger(__name__)
RANK_KEY = "rank"
RNG_KEY = "rng"
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_MOST_NAMED = 10


class TrainingState:
    """The user's objects under their names.

    Plain values are read from the mapping at each save and written back into it by a restore, so
    the mapping that was passed is kept, not copied.
    """

    def __init__(
        self,
        state: MutableMapping[str, Any],
        rank_state: MutableMapping[str, Any] | None,
        *,
        rank: int,
        keeps_rng: bool,
        on_world_change: WorldChange | None,
    ) -> None:
        """Checks names and kinds.

        Raises:
            Reject: a name is not allowed, or an optimizer comes without its model.
        """
        self._state = state
        self._rank_state = rank_state if rank_state is not None else {}
        self._rank = rank
        self._keeps_rng = keeps_rng
        self._on_world_change = on_world_change
        self._frozen: list[str] = []
        for name in [*state, *self._rank_state]:
            _check_name(name)
        if keeps_rng and RNG_KEY in self._rank_state:
            raise Reject(f"rank_state: {RNG_KEY!r} is kept by Tidegate; use another name")
        if self._optimizers() and not self._modules():
            raise Reject("state: an optimizer needs the model whose parameters it has beside it")

    @property
    def has_rank_state(self) -> bool:
        """Something is private to each rank, so a change of the number of ranks needs a rule."""
        return self._keeps_rng or bool(self._rank_state)

    def part_of(self, entry: str) -> Part:
        """The file that an entry's flat name belongs into."""
        value = self._state.get(entry.split(".", 1)[0])
        if isinstance(value, torch.nn.Module):
            return Part.WEIGHTS
        return Part.OPTIM if isinstance(value, torch.optim.Optimizer) else Part.REST

    def capture(self) -> dict[str, Any]:
        """The entries as they are now; tensors are the live ones, the caller copies them."""
        entries = {name: self._take(name, value) for name, value in self._state.items()}
        private = {name: (_get(value),) for name, value in self._rank_state.items()}
        if self._keeps_rng:
            private[RNG_KEY] = (take_rng(),)
        if private:
            entries[RANK_KEY] = {str(self._rank): private}
        return entries

    def build_target(self, metadata: Any, *, is_same_world: bool) -> dict[str, Any]:
        """What to read from a checkpoint, with live tensors where they can be read in place.

        Initialises optimizers that have no state yet: called only once a checkpoint was chosen.

        Args:
            metadata: DCP's, of the chosen step.
            is_same_world: False reads the rank state of all ranks, for the rule.

        Raises:
            Reject: a name is missing in the checkpoint, a tensor has another dtype, or an optimizer
                cannot take what the checkpoint has.
        """
        self._frozen = []
        saved = _saved_paths(metadata)
        present = {path[0] for path in saved.values()}
        missing = sorted(set(self._state) - present)
        if missing:
            raise Reject(f"state {missing[0]!r} is not in the checkpoint; it has {sorted(present)}")
        target: dict[str, Any] = {}
        for entry, path in saved.items():
            if self._is_rebuilt(path, is_same_world=is_same_world):
                set_element(target, path, _blank(metadata.state_dict_metadata[entry]))
        for name, value in self._state.items():
            if isinstance(value, torch.nn.Module):
                target[name] = get_model_state_dict(value)
            elif isinstance(value, torch.optim.Optimizer):
                target[name]["state"] = self._optimizer_target(name, value, saved)
            elif isinstance(value, torch.Tensor):
                target[name] = value
        _check_dtypes(target, metadata)
        return target

    def find_misfit(self, target: dict[str, Any], metadata: Any) -> str | None:
        """A sentence on an entry that the checkpoint does not fill as it is; None if all fit.

        A restore leaves it to DCP, which takes a module that has fewer entries than were saved.

        Args:
            target: what `build_target` gave.
            metadata: DCP's, of the same step.
        """
        live = flatten_state_dict(target)[0]
        for entry, value in live.items():
            misfit = _find_misfit(value, metadata.state_dict_metadata.get(entry))
            if misfit is not None:
                return f"{entry}: {misfit}"
        whole = self._modules().keys()
        left = [entry for entry, path in _saved_paths(metadata).items() if path[0] in whole]
        left = [entry for entry in left if entry not in live]
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        return f"{left[0]}{more}: the checkpoint has it, the program not" if left else None

    def apply(self, loaded: dict[str, Any], *, saved_world: int, world_size: int) -> None:
        """Puts what was read into the user's objects; generators last."""
        if self._frozen:
            more = len(self._frozen) - _MOST_NAMED
            _LOG.warning(
                "the checkpoint has an optimizer's state of parameters that are frozen now, and it "
                "was left out: %s%s; to keep it, thaw them before the restore",
                ", ".join(self._frozen[:_MOST_NAMED]),
                f" and {more} more" if more > 0 else "",
            )
        for name, value in list(self._state.items()):
            self._put(name, value, loaded[name])
        self._apply_rank_state(loaded.get(RANK_KEY, {}), saved_world, world_size)

    def _modules(self) -> dict[str, Any]:
        return {n: v for n, v in self._state.items() if isinstance(v, torch.nn.Module)}

    def _optimizers(self) -> list[Any]:
        return [v for v in self._state.values() if isinstance(v, torch.optim.Optimizer)]

    def _owner(self) -> Any:
        """One module that holds all parameters, as an optimizer may span several models."""
        modules = self._modules()
        return next(iter(modules.values())) if len(modules) == 1 else torch.nn.ModuleDict(modules)

    def _take(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            return get_model_state_dict(value)
        if isinstance(value, torch.optim.Optimizer):
            return _take_optimizer(self._owner(), value)
        return _wrap(name, _get(value))

    def _optimizer_target(self, name: str, optimizer: Any, saved: Mapping[str, Any]) -> Any:
        has_begun = bool(optimizer.state)
        with _gradients_aside(optimizer):
            found = get_optimizer_state_dict(self._owner(), optimizer)
        live = found["state"]
        held = {parameter for group in found["param_groups"] for parameter in group["params"]}
        kept = {path for path in saved.values() if path[:2] == (name, "state")}
        lost = _find_lost((path for path in kept if path[2] in held), live)
        frozen = lost.keys() & _frozen_names(self._owner()) if lost else set()
        self._frozen += sorted(frozen)
        if refused := sorted(lost.keys() - frozen):
            why = (
                "has begun without it; restore before its first step (one that makes part of its "
                "state when it is built must make all of it)"
                if has_begun
                else "keeps none; build it with the options it was saved with"
            )
            raise Reject(
                f"{name}.state.{lost[refused[0]]}: the checkpoint has it, and this optimizer {why}"
            )
        # A parameter that had no gradient yet has no state in the checkpoint and gets none here.
        parameters = {path[2] for path in kept}
        return {parameter: entry for parameter, entry in live.items() if parameter in parameters}

    def _is_rebuilt(self, path: tuple[Any, ...], *, is_same_world: bool) -> bool:
        """True for entries whose shape the checkpoint tells, not the live object."""
        if path[0] == RANK_KEY:
            is_wanted = not is_same_world or path[1] == str(self._rank)
            return self.has_rank_state and is_wanted
        value = self._state.get(path[0])
        if isinstance(value, torch.optim.Optimizer):
            return bool(path[1] != "state")
        is_live: bool = isinstance(value, torch.nn.Module | torch.Tensor)
        return path[0] in self._state and not is_live

    def _put(self, name: str, value: Any, loaded: Any) -> None:
        if isinstance(value, torch.nn.Module):
            set_model_state_dict(value, loaded)
        elif isinstance(value, torch.optim.Optimizer):
            options = StateDictOptions(strict=False)  # parameters without a state, see above
            set_optimizer_state_dict(self._owner(), value, loaded, options=options)
        elif not isinstance(value, torch.Tensor):
            _set(self._state, name, value, _unwrap(loaded))

    def _apply_rank_state(self, saved: dict[str, Any], saved_world: int, world_size: int) -> None:
        if not self.has_rank_state:
            return
        names = [*self._rank_state, *([RNG_KEY] if self._keeps_rng else [])]
        for name in names:
            by_rank = {int(r): entry[name][0] for r, entry in saved.items() if name in entry}
            found = by_rank.get(self._rank)
            if saved_world != world_size and self._on_world_change is not None:
                found = self._on_world_change(name, by_rank, self._rank, world_size)
            if found is None:
                continue
            if name == RNG_KEY:
                put_rng(found)
            else:
                _set(self._rank_state, name, self._rank_state[name], found)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name == RANK_KEY:
        raise Reject(
            f"state name {name!r}: allowed are letters, digits, '_' and '-', and not {RANK_KEY!r}"
        )


def _take_optimizer(owner: Any, optimizer: Any) -> Any:
    was_empty = not optimizer.state
    taken = get_optimizer_state_dict(owner, optimizer)
    if was_empty and optimizer.state:
        # DCP ran a step to learn the shapes; an optimizer that has not begun must stay so.
        optimizer.state.clear()
        taken["state"] = {}
    return taken


def _parameters(optimizer: Any) -> list[Any]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _frozen_names(owner: Any) -> set[str]:
    """Plain names of the parameters that are not trained now."""
    found = (name for name, one in owner.named_parameters() if not one.requires_grad)
    return {plain for name in found for plain in _get_fqns(owner, name)}


def _find_lost(kept: Iterable[tuple[Any, ...]], live: Mapping[str, Any]) -> dict[str, str]:
    """Parameter → the first entry of it in a checkpoint that has no place in the live state."""
    paths = flatten_state_dict(live)[1].values()
    there = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    lost: dict[str, str] = {}
    for path in sorted((path[2:] for path in kept), key=str):
        if path not in there:
            shown = path if path[0] in live else path[:1]
            lost.setdefault(path[0], ".".join(map(str, shown)))
    return lost


@contextmanager
def _gradients_aside(optimizer: Any) -> Iterator[None]:
    """DCP takes an optimizer for one that has begun where a parameter has a gradient."""
    held = [(one, one.grad) for one in _parameters(optimizer) if one.grad is not None]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


def _get(value: Any) -> Any:
    if _is_pair(value):
        return value[0]()
    return value.state_dict() if _is_stateful(value) else value


def _set(mapping: MutableMapping[str, Any], name: str, value: Any, found: Any) -> None:
    if _is_pair(value):
        value[1](found)
    elif _is_stateful(value):
        value.load_state_dict(found)
    else:
        mapping[name] = found


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(callable, value))


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _wrap(name: str, value: Any) -> Any:
    """A value that DCP would not give back as it was becomes one opaque entry: a tuple of it."""
    is_container = isinstance(value, Mapping | list | tuple)
    if not is_container or (isinstance(value, Mapping) and _survives_flattening(name, value)):
        return value
    return (value,)


def _unwrap(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _survives_flattening(name: str, value: Any) -> bool:
    try:
        flat, paths = flatten_state_dict({name: value})
    except ValueError:
        return False  # two keys with one flat name
    return bool(flat) and _is_same(value, unflatten_state_dict(flat, paths)[name])


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, Mapping):
        return (
            type(left) in (dict, OrderedDict)
            and isinstance(right, dict)
            and list(left) == list(right)
            and all(_is_same(left[key], right[key]) for key in left)
        )
    if type(left) is list:
        return type(right) is list and len(left) == len(right) and all(map(_is_same, left, right))
    return left is right


def _saved_paths(metadata: Any) -> dict[str, tuple[Any, ...]]:
    paths = metadata.planner_data or {}
    return {entry: paths.get(entry, (entry,)) for entry in metadata.state_dict_metadata}


def _blank(entry: Any) -> Any:
    if isinstance(entry, TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    return None


def _find_misfit(value: Any, saved: Any) -> str | None:
    if saved is None:
        return "the program has it, the checkpoint not"
    if isinstance(value, torch.Tensor) != isinstance(saved, TensorStorageMetadata):
        return "a tensor in one of checkpoint and program only"
    if not isinstance(value, torch.Tensor):
        return None
    if value.is_meta:
        return "the program has it on the meta device; give it memory first, by to_empty(device=…)"
    if value.size() != saved.size:
        return f"the checkpoint has shape {tuple(saved.size)}, the program {tuple(value.size())}"
    return None


def _check_dtypes(target: dict[str, Any], metadata: Any) -> None:
    """DCP would round silently."""
    for entry, value in flatten_state_dict(target)[0].items():
        saved = metadata.state_dict_metadata.get(entry)
        if isinstance(value, torch.Tensor) and isinstance(saved, TensorStorageMetadata):
            if saved.properties.dtype != value.dtype:
                raise Reject(
                    f"{entry}: the checkpoint has {saved.properties.dtype}, the program "
                    f"{value.dtype}; use one dtype"
                )
