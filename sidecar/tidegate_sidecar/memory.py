"""How much memory the copies of dead runs' leftovers may take. I/O.

What they read a tenant wrote, and a document of allowed size takes hundreds of MiB once it is
parsed. They run in the agent's container, whose limit would end the agent with them. So the kernel
bounds each pass, and the child of its own that touches the remote tier: an allocation beyond that
fails, and with it this one run's copy alone.
"""

import resource
import threading
from pathlib import Path

MIB = 1 << 20
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CHART_BYTES = 512 * MIB
"""The chart's limit of the agent; assumed where the container tells none."""
_AGENT_BYTES = 64 * MIB
"""For the agent itself, which takes about 40 MiB."""
_LEAST_BYTES = 128 * MIB
"""With less not even a small run is copied: Python, its threads' stacks and the buffers."""


def share_of_container(copies: int) -> int:
    """MiB for each of so many passes at once, each with its child. Called by the agent."""
    try:
        limit = int(_CONTAINER_LIMIT.read_text())
    except (OSError, ValueError):
        limit = _CHART_BYTES  # no such file, or "max"
    return max(_LEAST_BYTES, (limit - _AGENT_BYTES) // copies) // MIB


def limit_pass(total_mib: int) -> None:
    """Bounds this process, and whatever it starts; before it reads anything.

    Two sevenths are its own: it reads one step's seals, its child at once those of both tiers and
    the manifest. Measured for 64 ranks of 1,000 files each: 55 MiB and 140 MiB. Private writable
    memory is counted, touched or not; of address space each thread's heap reserves 64 MiB.
    """
    own = total_mib * MIB * 2 // 7
    resource.setrlimit(resource.RLIMIT_DATA, (own, total_mib * MIB - own))
    threading.stack_size(MIB)  # of threads that only pass messages on


def take_rest() -> None:
    """Raises this process to what its parent left it. Called by the child, once, at its start."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
