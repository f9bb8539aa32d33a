"""Where a run lives: its folders on both tiers, its identity, and which ranks share a node.

Called by `Checkpointer` while it is made, on all ranks, main thread.
"""

import logging
import os
import secrets
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

from tidegate.deadline import run_within
from tidegate.ranks import Ranks, Topology, build_topology
from tidegate.settings import Place, Settings
from tidegate_contract.errors import Corrupt, Reject, Retry
from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import (
    CONTROL_DOCUMENT,
    LINEAGES,
    QUARANTINE,
    ROOT_ID,
    RUN_DOCUMENT,
    parse_state_file,
    parse_step_folder,
)
from tidegate_contract.publish import begin_identity, check_owner, ensure_identity
from tidegate_contract.run_documents import read_identity

_LOG = logging.getLogger(__name__)
_ROOT_ID_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What all ranks agreed on before the restore.

    Attributes:
        settings: of this rank.
        identity: of the run.
        topology: who shares a node.
        rank: of this process.
    """

    settings: Settings
    identity: RunIdentity
    topology: Topology
    rank: int

    @property
    def local(self) -> str:
        """The run's folder on this node."""
        return str(self.settings.local.path)

    @property
    def is_first_of_node(self) -> bool:
        """This rank acts for its node."""
        return self.topology.is_first(self.rank)

    @property
    def trusted_uids(self) -> frozenset[int]:
        """Owners whose files may be unpickled."""
        own = {os.getuid(), 0, self.identity.uid}
        sidecar = self.settings.sidecar_uid
        return frozenset(own if sidecar is None else own | {sidecar})


def open_place(place: Place) -> Folder:
    """The run's open folder; what is missing below the place's root is made.

    Raises:
        OSError: the root does not exist or cannot be used.
    """
    with Folder.open(place.root) as root:
        return root.below(place.parts, makes=True)


def open_known(place: Place) -> tuple[Folder, RunIdentity]:
    """The open folder of a run that must be there, and its identity; nothing is made.

    Raises:
        Retry: it holds no run: an empty mount point must not pass for an empty tier.
        OSError: the root cannot be used.
        Corrupt: the identity is damaged.
    """
    with Folder.open(place.root) as root:
        try:
            folder = root.below(place.parts)
        except FileNotFoundError as error:
            raise _unknown_run(place) from error
    try:
        found = read_identity(folder)
        if found is None:
            raise _unknown_run(place)
    except BaseException:
        folder.close()
        raise
    return folder, found


def _unknown_run(place: Place) -> Retry:
    return Retry(f"{place.path}/{RUN_DOCUMENT} is missing: is the remote tier mounted?")


def open_site(settings: Settings, ranks: Ranks) -> Site:
    """Makes the folders, agrees on the identity, tells nodes apart. Collective.

    Raises:
        Reject: the run belongs to another owner, or a folder holds a run of another name.
        Retry: a tier cannot be used, or the remote one does not hold a run that a node knows.
        Corrupt: an identity document is damaged.
    """
    if settings.local.parts:
        os.makedirs(settings.local.root, exist_ok=True)
    seen = ranks.attempt(lambda: _observe_local(settings.local))
    topology = build_topology([root_id for root_id, _ in seen])
    known = next((identity for _, identity in seen if identity is not None), None)
    chosen = ranks.attempt(lambda: _decide_identity(settings, known) if ranks.rank == 0 else None)[
        0
    ]
    assert chosen is not None, "rank 0 gives an identity or raises"
    is_first = topology.is_first(ranks.rank)
    ranks.attempt(lambda: _adopt_identity(settings.local, chosen) if is_first else None)
    return Site(settings=settings, identity=chosen, topology=topology, rank=ranks.rank)


def _observe_local(place: Place) -> tuple[str, RunIdentity | None]:
    with open_place(place) as run:
        return _root_id(run), read_identity(run)


def _root_id(run: Folder) -> str:
    """The id of this node's tier; whoever comes first makes one where no agent did."""
    data = run.read(ROOT_ID, limit=_ROOT_ID_BYTES)
    if data is None:
        made = secrets.token_hex(16).encode()
        with run.new_file(ROOT_ID) as file:
            file.write(made)
            file.publish(len(made), is_exclusive=True)
        data = run.read(ROOT_ID, limit=_ROOT_ID_BYTES)
    text = (data or b"").decode("ascii", "replace").strip()
    if not text:
        raise Corrupt(f"{run.path}/{ROOT_ID}: empty")
    return text


def _decide_identity(settings: Settings, known: RunIdentity | None) -> RunIdentity:
    """The run's identity; a new one only where neither tier holds one and both can be used."""
    remote = settings.remote
    if remote is None:
        found = known or _new_identity(settings)
    else:
        found = _identity_beside(remote, settings, known)
    if found.name != settings.run:
        raise Reject(f"run {settings.run}: its folder holds {RUN_DOCUMENT} of run {found.name}")
    check_owner(found, settings.owner_uid)
    return found


def _identity_beside(remote: Place, settings: Settings, known: RunIdentity | None) -> RunIdentity:
    try:
        return run_within(
            settings.policy.stall_timeout_seconds,
            f"opening the remote tier at {remote.path}",
            lambda: _remote_identity(remote, settings, is_known=known is not None),
        )
    except (OSError, Retry) as error:
        if known is None or settings.policy.remote_unreachable_is_error:
            raise Retry(f"remote tier {remote.path} cannot be used: {error}") from error
        _LOG.warning("remote tier is left out", extra={"run": settings.run, "error": str(error)})
        return known


def _remote_identity(remote: Place, settings: Settings, *, is_known: bool) -> RunIdentity:
    if not is_known:
        with open_place(remote) as run:
            return begin_identity(run, _new_identity(settings))
    folder, found = open_known(remote)
    folder.close()
    return found


def _new_identity(settings: Settings) -> RunIdentity:
    return RunIdentity(
        run_id=str(uuid.uuid4()),
        name=settings.run,
        owner_uid=settings.owner_uid,
        uid=os.getuid(),
        created_at=datetime.now(UTC),
    )


def _adopt_identity(place: Place, chosen: RunIdentity) -> None:
    with open_place(place) as run:
        found = read_identity(run)
        if found is not None and found.run_id != chosen.run_id:
            _set_aside(run, found)
        ensure_identity(run, chosen)


def _set_aside(run: Folder, old: RunIdentity) -> None:
    """Moves everything of another run id into `quarantine/<run id>/`; nothing is deleted."""
    _LOG.warning("local data of an earlier run id is set aside", extra={"run": old.name})
    documents = {CONTROL_DOCUMENT, LINEAGES}
    with run.ensure_child(QUARANTINE) as quarantine, quarantine.ensure_child(old.run_id) as aside:
        names = run.names()
        for name in names:
            is_numbered = parse_step_folder(name) is not None or parse_state_file(name) is not None
            if is_numbered or name in documents:
                run.rename(name, name, into=aside)
        run.rename(
            RUN_DOCUMENT, RUN_DOCUMENT, into=aside
        )  # last: until then it says whose they are
        aside.sync()
    run.sync()
