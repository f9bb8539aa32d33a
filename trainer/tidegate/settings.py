"""What a trainer works by: the injected environment before the constructor's arguments. Pure.

Called once by `Checkpointer`, on every rank, before any collective call.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from tidegate_contract import keys
from tidegate_contract.cadence import Cadence
from tidegate_contract.document import decode
from tidegate_contract.errors import Reject
from tidegate_contract.layout import check_run_name
from tidegate_contract.wire import Policy

WorldChange = Callable[[str, Mapping[int, Any], int, int], Any]
"""Rule for rank state when the number of ranks changed: (name, saved rank → value, own rank,
world size) → this rank's value, or None to leave what it has."""

_OUTSIDE_NAMESPACE = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is seldom changed.

    Attributes:
        policy: outside a cluster, everything but the cadence; inside, the injected one is used.
        keeps_rng: random number generators are part of the rank state.
        on_world_change: rule for rank state saved by another number of ranks; None raises then.
        slots: snapshots in host memory; one is free while another is written.
        agreement_timeout: a step of another rank that takes longer ends saving, not training.
        durable_timeout: how long `close` waits for the remote tier where no agent will finish it.
        trusted_uids: numeric ids of users whose files may be loaded as well, which can run their
            code: of a run that goes on under another user than the one that saved it.
    """

    policy: Policy = field(default_factory=Policy)
    keeps_rng: bool = True
    on_world_change: WorldChange | None = None
    slots: int = 2
    agreement_timeout: timedelta = timedelta(minutes=30)
    durable_timeout: timedelta = timedelta(minutes=30)
    trusted_uids: Collection[int] = ()

    def __post_init__(self) -> None:
        """Refuses a ring without slots, and users that are no numbers."""
        if self.slots < 1:
            raise Reject(f"options.slots is {self.slots}; allowed is 1 or more")
        check_uids("options.trusted_uids", self.trusted_uids)


def check_uids(name: str, trusted: Collection[int]) -> None:
    """Refuses users that are no numbers; `name` is the argument's."""
    for uid in trusted:
        if type(uid) is not int or uid < 0:
            raise Reject(f"{name} holds {uid!r}; allowed are numeric user ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A run's folder on one tier: `root` must exist, `parts` below it are made where missing."""

    root: Path
    parts: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The run's own folder."""
        return self.root.joinpath(*self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The constructor's arguments that the environment may overrule."""

    run: str | None = None
    local: Path | None = None
    remote: Path | None = None
    cadence: Cadence | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What holds for this trainer.

    Attributes:
        run: `namespace/name`.
        owner_uid: UID that a derived name is bound to; None when the user named the run.
        local, remote: the run's folders; `remote` is None when there is no second tier.
        policy: at start; a live one may follow through `control.json`.
        options: as given.
        pod_uid: empty outside Kubernetes.
        has_sidecar: something else flushes; False makes this trainer start the flusher itself.
        sidecar_uid: user id of the sidecar, whose files are trusted; None when it is not told.
        overruled: names of arguments that the environment replaced.
    """

    run: str
    owner_uid: str | None
    local: Place
    remote: Place | None
    policy: Policy
    options: Options
    pod_uid: str
    has_sidecar: bool
    sidecar_uid: int | None = None
    overruled: tuple[str, ...] = ()


def resolve_settings(
    arguments: Arguments, options: Options, environment: Mapping[str, str]
) -> Settings:
    """The settings of this rank.

    Args:
        arguments: what the user's program passed and the environment may overrule.
        options: what it passed beside them.
        environment: of the process; the injected names are in `keys`.

    Raises:
        Reject: no run or no local folder is named, or a name is not allowed.
        Corrupt: the injected policy is damaged.
    """
    run = environment.get(keys.ENV_RUN) or _full_name(arguments.run)
    overruled = [
        name
        for name, key, given in (
            ("run", keys.ENV_RUN, arguments.run),
            ("local", keys.ENV_LOCAL, arguments.local),
            ("remote", keys.ENV_REMOTE, arguments.remote),
            ("cadence", keys.ENV_POLICY, arguments.cadence),
        )
        if given is not None and environment.get(key)
    ]
    return Settings(
        run=check_run_name(run),
        owner_uid=environment.get(keys.ENV_RUN_DERIVED_OWNER) or None,
        local=_local_place(run, arguments.local, environment),
        remote=_remote_place(run, arguments.remote, environment),
        policy=_policy(arguments.cadence, options, environment),
        options=options,
        pod_uid=environment.get(keys.ENV_POD_UID, ""),
        has_sidecar=bool(environment.get(keys.ENV_LOCAL)),
        sidecar_uid=_user_id(environment.get(keys.ENV_SIDECAR_UID, "")),
        overruled=tuple(overruled),
    )


def _full_name(run: str | None) -> str:
    if not run:
        raise Reject(f"run is not named: pass run=NAME, or set {keys.ENV_RUN}")
    return run if "/" in run else f"{_OUTSIDE_NAMESPACE}/{run}"


def _local_place(run: str, given: Path | None, environment: Mapping[str, str]) -> Place:
    injected = environment.get(keys.ENV_LOCAL)
    if injected:
        return Place(root=Path(injected))
    if given is None:
        raise Reject(f"local is not named: pass local=FOLDER, or set {keys.ENV_LOCAL}")
    return Place(root=given, parts=tuple(run.split("/")))


def _remote_place(run: str, given: Path | None, environment: Mapping[str, str]) -> Place | None:
    injected = environment.get(keys.ENV_REMOTE)
    if injected:
        return _split_remote(Path(injected))
    if given is None or environment.get(keys.ENV_LOCAL):
        return None
    return Place(root=given, parts=tuple(run.split("/")))


def _user_id(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None


def _split_remote(path: Path) -> Place:
    mount = Path(keys.REMOTE_MOUNT)
    root = mount if path.is_relative_to(mount) else path.parent.parent
    return Place(root=root, parts=path.relative_to(root).parts)


def _policy(
    cadence: Cadence | int | None, options: Options, environment: Mapping[str, str]
) -> Policy:
    injected = environment.get(keys.ENV_POLICY)
    if injected:
        return decode(Policy, injected.encode(), keys.ENV_POLICY)
    if cadence is None:
        return options.policy
    if isinstance(cadence, int):
        cadence = Cadence(tokens=cadence)
    if not isinstance(cadence, Cadence):
        raise Reject(f"cadence {cadence!r}: allowed is a Cadence, or a number of tokens")
    return replace(options.policy, cadence=cadence)
