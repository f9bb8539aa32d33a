"""Names and paths of both tiers: every builder beside its parser. Pure.

```
<local run folder>/  root-id run.json control.json state-<rank>.json step-…/ quarantine/
<remote run folder>/ run.json lineages/<n>.json step-…/ .trash/ quarantine/
```

A step folder has its final name from the start; only a valid COMMIT makes it a checkpoint.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from tidegate_contract.errors import Reject

RUN_DOCUMENT = "run.json"
CONTROL_DOCUMENT = "control.json"
ROOT_ID = "root-id"
TIER_DOCUMENT = "tier.json"
LINEAGES = "lineages"
TRASH = ".trash"
QUARANTINE = "quarantine"

METADATA = ".metadata"
"""DCP's metadata: on a local tier with this node's replicas, on the remote tier the plain one."""
METADATA_REMOTE = "metadata-remote"
"""The plain metadata as rank 0 writes it; the committer publishes it as `.metadata`."""
MANIFEST = "manifest.json"
COMMIT = "COMMIT"

_STEP = re.compile(r"step-(\d{20})\.([0-9a-f]{16})")
_DATA = re.compile(r"(weights|optim|rest|replica)-(0|[1-9]\d{0,8})\.distcp")
_SEAL = re.compile(r"seal-(0|[1-9]\d{0,8})\.json")
_ANNOUNCED = re.compile(r"announced-(0|[1-9]\d{0,8})\.json")
_STATE = re.compile(r"state-(0|[1-9]\d{0,8})\.json")
_LINEAGE = re.compile(r"([1-9]\d{0,17})\.json")
_TEMP = re.compile(r"\.tmp-[0-9a-f]{16}-.+")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class Part(StrEnum):
    """What a rank's data file holds; `REPLICA` stays on the local tier."""

    WEIGHTS = "weights"
    OPTIM = "optim"
    REST = "rest"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Attempt:
    """One try at saving one step.

    Attributes:
        step: optimizer steps done, 0 or more.
        nonce: 64 bits drawn by rank 0, as 16 hex digits; never reused.
    """

    step: int
    nonce: str

    def __post_init__(self) -> None:
        """Refuses what could not be a folder name."""
        if not 0 <= self.step < 2**63:
            raise ValueError(f"step {self.step} is not in 0…2^63-1")
        if not re.fullmatch(r"[0-9a-f]{16}", self.nonce):
            raise ValueError(f"nonce {self.nonce!r} is not 16 hex digits")


def step_folder(attempt: Attempt) -> str:
    """Folder name of an attempt, sorted as text like its step."""
    return f"step-{attempt.step:020d}.{attempt.nonce}"


def parse_step_folder(name: str) -> Attempt | None:
    """The attempt of a step folder; None for any other name."""
    match = _STEP.fullmatch(name)
    if not match or int(match[1]) >= 2**63:
        return None
    return Attempt(step=int(match[1]), nonce=match[2])


def data_file(part: Part, rank: int) -> str:
    """Name of a rank's data file of one part."""
    return f"{part}-{rank}.distcp"


def parse_data_file(name: str) -> tuple[Part, int] | None:
    """Part and rank of a data file's name; None for any other name."""
    match = _DATA.fullmatch(name)
    return (Part(match[1]), int(match[2])) if match else None


def seal_file(rank: int) -> str:
    """Name of a rank's seal; on the remote tier, its receipt."""
    return f"seal-{rank}.json"


def parse_seal_file(name: str) -> int | None:
    """The rank of a seal's name; None for any other name."""
    match = _SEAL.fullmatch(name)
    return int(match[1]) if match else None


def announced_file(rank: int) -> str:
    """Name under which a flusher announces a seal before it copies the files."""
    return f"announced-{rank}.json"


def parse_announced_file(name: str) -> int | None:
    """The rank of an announcement's name; None for any other name."""
    match = _ANNOUNCED.fullmatch(name)
    return int(match[1]) if match else None


def state_file(rank: int) -> str:
    """Name of a trainer's state document."""
    return f"state-{rank}.json"


def parse_state_file(name: str) -> int | None:
    """The rank of a state document's name; None for any other name."""
    match = _STATE.fullmatch(name)
    return int(match[1]) if match else None


def lineage_file(number: int) -> str:
    """Name of a lineage's claim inside `lineages/`."""
    return f"{number}.json"


def parse_lineage_file(name: str) -> int | None:
    """The number of a claim's name; None for any other name."""
    match = _LINEAGE.fullmatch(name)
    return int(match[1]) if match else None


def temp_file(final: str, token: str) -> str:
    """Name of the unfinished `final`; `token` is 16 hex digits, new for each try."""
    return f".tmp-{token}-{final}"


def parse_temp_file(name: str) -> str | None:
    """The final name of an unfinished file's name; None for any other name."""
    return name.split("-", 2)[2] if is_temp_file(name) else None


def is_temp_file(name: str) -> bool:
    """True for an unfinished file that no reader may take."""
    return _TEMP.fullmatch(name) is not None


def target_file(run: str) -> str:
    """Name of a run's `wire.Target` beside its folder; no run's name holds a dot."""
    return f"{run}.target.json"


def parse_target_file(name: str) -> str | None:
    """The run of a target's name; None for any other name."""
    run = name.removesuffix(".target.json")
    return run if run != name and _DNS_LABEL.fullmatch(run) else None


def quarantined_file(attempt: Attempt, name: str) -> str:
    """Name inside `quarantine/` of a damaged file of a step folder."""
    return f"{step_folder(attempt)}.{name.lstrip('.')}"


def parse_quarantined_file(name: str) -> Attempt | None:
    """The attempt whose damaged file this is; None for any other name."""
    match = _STEP.match(name)
    return parse_step_folder(match[0]) if match and name[match.end() :].startswith(".") else None


def check_file_name(name: str) -> str:
    """A name that a document may give to a file of a step folder.

    Raises:
        ValueError: the name could leave the folder or hide another document.
    """
    if not _NAME.fullmatch(name) or name in (".", "..") or is_temp_file(name):
        raise ValueError(f"file name {name[:80]!r} is not allowed")
    return name


def check_run_name(name: str) -> str:
    """A run's full name, `namespace/name`, each a DNS-1123 label.

    Raises:
        Reject: it is not.
    """
    parts = name.split("/")
    if len(parts) != 2 or not all(_DNS_LABEL.fullmatch(part) for part in parts):
        raise Reject(
            f"run name {name[:140]!r}: allowed is NAMESPACE/NAME, "
            "each of a-z, 0-9 and '-', at most 63 characters"
        )
    return name
