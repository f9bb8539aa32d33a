"""Random number generators of one rank: taken at a save, put back by a restore. Main thread."""

import random
import sys
from typing import Any

import torch


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

        state = np.random.get_state(legacy=False)  # the global one is what loops use
        # A safe loader refuses arrays, not tensors.
        key = torch.from_numpy(state["state"]["key"].astype(np.int64))
        taken["numpy"] = {**state, "state": {**state["state"], "key": key}}
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

        np.random.set_state(_as_arrays(taken["numpy"]))
    if "cuda" in taken and torch.cuda.is_available():
        torch.cuda.set_rng_state(taken["cuda"])


def _as_arrays(state: Any) -> Any:
    """NumPy's own form; saves of earlier versions hold it."""
    if not isinstance(state, dict):
        return state
    key = state["state"]["key"].numpy().astype("uint32")
    return {**state, "state": {**state["state"], "key": key}}
