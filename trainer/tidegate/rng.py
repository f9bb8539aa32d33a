"""Random number generators of one rank: taken at a save, put back by a restore. Main thread."""

import random
import sys
from typing import Any

import torch

_BYTES = "array_bytes"


def take_rng() -> dict[str, Any]:
    """States of Python's, NumPy's (if it was imported) and torch's generators.

    CUDA's is that of the current device, and only where CUDA is in use: asking would start it.
    """
    version, numbers, gauss = random.getstate()
    # As a tensor: a snapshot copies 625 separate numbers a thousand times slower.
    python = {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss}
    taken: dict[str, Any] = {"python": python, "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        # The global one is what loops use.
        taken["numpy"] = _without_arrays(np.random.get_state(legacy=False), np)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        taken["cuda"] = torch.cuda.get_rng_state()
    return taken


def put_rng(taken: dict[str, Any]) -> None:
    """Puts all generators of `taken` back; called last, as anything else may draw numbers."""
    python = taken["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    torch.set_rng_state(taken["torch"])
    if "numpy" in taken:
        import numpy as np

        np.random.set_state(_with_arrays(taken["numpy"], np))
    if "cuda" in taken and torch.cuda.is_available():
        torch.cuda.set_rng_state(taken["cuda"])


def _without_arrays(state: Any, np: Any) -> Any:
    """Arrays as tensors of their bytes: a safe loader refuses arrays, and torch some dtypes."""
    if isinstance(state, dict):
        return {key: _without_arrays(value, np) for key, value in state.items()}
    if not isinstance(state, np.ndarray) or state.dtype.hasobject:
        return state
    data = torch.from_numpy(state.reshape(-1).view(np.uint8).copy())
    return {_BYTES: data, "dtype": state.dtype.str, "shape": state.shape}


def _with_arrays(state: Any, np: Any, kind: Any = None) -> Any:
    """NumPy's own form again; saves of earlier versions hold it, or a key as whole numbers."""
    if isinstance(state, torch.Tensor):
        return state.numpy().astype(np.uint32 if kind == "MT19937" else np.uint64)
    if not isinstance(state, dict):
        return state
    if _BYTES in state:
        return state[_BYTES].numpy().copy().view(state["dtype"]).reshape(state["shape"])
    kind = state.get("bit_generator", kind)
    return {key: _with_arrays(value, np, kind) for key, value in state.items()}
