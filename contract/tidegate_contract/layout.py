"""Names and paths of both tiers: every builder beside its parser. Pure.

```
<local run folder>/  root-id run.json control.json state-<rank>.json step-…/ quarantine/
                     lineages/<n>.json
<remote run folder>/ run.json lineages/<n>.json lineages/<n>.trained.json pins/<step folder>.json
                     step-…/ .trash/ quarantine/
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
PINS = "pins"
TRASH = ".trash"
QUARANTINE = "quarantine"

METADATA = ".metadata"
"""DCP's metadata: on a local tier with this node's replicas, on the remote tier the plain one."""
METADATA_REMOTE = "metadata-remote"
"""The plain metadata as rank 0 writes it; the committer publishes it as `.metadata`."""
MANIFEST = "manifest.json"
COMMIT = "COMMIT"

_RANK = r"(0|[1-9][0-9]{0,8})"  # not \d: that takes the digits of every script
_STEP = re.compile(r"step-([0-9]{20})\.([0-9a-f]{16})")
_HIDDEN = re.compile(r"(step-[0-9]{20}\.[0-9a-f]{16})\.hidden\.([0-9a-f]{16})")
_REMOVED = re.compile(r"(step-[0-9]{20}\.[0-9a-f]{16})\.removed\.([0-9a-f]{16})")
_DATA = re.compile(rf"(weights|optim|rest|replica)-{_RANK}\.distcp")
_SEAL = re.compile(rf"seal-{_RANK}\.json")
_ANNOUNCED = re.compile(rf"announced-{_RANK}\.json")
_STATE = re.compile(rf"state-{_RANK}\.json")
_LINEAGE = re.compile(r"([1-9][0-9]{0,17})\.json")
_TRAINED = re.compile(r"([1-9][0-9]{0,17})\.trained\.json")
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


def trained_file(number: int) -> str:
    """Name, beside a lineage's claim, of the word that its restore came back to training."""
    return f"{number}.trained.json"


def parse_trained_file(name: str) -> int | None:
    """The lineage of such a word's name; None for any other name."""
    match = _TRAINED.fullmatch(name)
    return int(match[1]) if match else None


def pin_file(attempt: Attempt) -> str:
    """Name inside `pins/` of the pin of an attempt."""
    return f"{step_folder(attempt)}.json"


def parse_pin_file(name: str) -> Attempt | None:
    """The attempt of a pin's name; None for any other name."""
    stem = name.removesuffix(".json")
    return parse_step_folder(stem) if stem != name else None


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


def hidden_folder(attempt: Attempt, token: str) -> str:
    """Name inside `.trash/` of a step about to be removed; `token` is 16 hex digits, new each time.

    To readers it is no step. Whole: it may still go back.
    """
    return f"{step_folder(attempt)}.hidden.{token}"


def parse_hidden_folder(name: str) -> tuple[Attempt, str] | None:
    """Attempt and token of such a folder's name; None for any other name."""
    return _parse_leftover(_HIDDEN, name)


def removed_folder(attempt: Attempt, token: str) -> str:
    """Name inside `.trash/` of a step whose files are being removed: nothing brings it back."""
    return f"{step_folder(attempt)}.removed.{token}"


def parse_removed_folder(name: str) -> tuple[Attempt, str] | None:
    """Attempt and token of such a folder's name; None for any other name."""
    return _parse_leftover(_REMOVED, name)


def _parse_leftover(form: re.Pattern[str], name: str) -> tuple[Attempt, str] | None:
    match = form.fullmatch(name)
    attempt = parse_step_folder(match[1]) if match else None
    return (attempt, match[2]) if match and attempt else None


def quarantined_file(attempt: Attempt, name: str, token: str) -> str:
    """Name inside `quarantine/` of a damaged file of a step folder; `token` is new for each."""
    return f"{step_folder(attempt)}.{name}.{token}"


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
    if is_step_document(name):
        raise ValueError(f"file name {name!r} is not allowed: a step's own document has it")
    return name


def is_step_document(name: str) -> bool:
    """True for what a step folder's own documents are called, also where case does not count."""
    folded = name.lower()
    return (
        folded in (MANIFEST, COMMIT.lower())
        or parse_seal_file(folded) is not None
        or parse_announced_file(folded) is not None
    )


def check_tier_path(path: str) -> str:
    """A path below a tier's root, such as `team/run`; it may not leave the root.

    Raises:
        ValueError: it is absolute, empty, or has `.` or `..` in it.
    """
    if not path or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"path {path[:80]!r} is not allowed: it must be below the tier's root")
    return path


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
