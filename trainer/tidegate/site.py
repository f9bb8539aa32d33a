"""Where a run lives: its folders on both tiers, its identity, and which ranks share a node.

Called by `Checkpointer` while it is made, on all ranks, main thread.
"""

import logging
import os
import secrets
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from tidegate.apart import check_tiers
from tidegate.deadline import run_within
from tidegate.ranks import Ranks, Topology, build_topology
from tidegate.settings import Place, Settings
from tidegate.trust import Told, read_told, vouching_uids, without_doubted
from tidegate_contract.errors import Corrupt, Reject, Retry
from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import (
    CONTROL_DOCUMENT,
    LINEAGES,
    QUARANTINE,
    ROOT_ID,
    RUN_DOCUMENT,
    lineage_file,
    parse_lineage_file,
    parse_state_file,
    parse_step_folder,
    parse_trained_file,
)
from tidegate_contract.publish import (
    begin_identity,
    check_owner,
    ensure_identity,
    mend_identity,
    replace_identity,
)
from tidegate_contract.run_documents import read_identity
from tidegate_contract.scan import scan_run_ids
from tidegate_contract.tiers import check_is_local

_LOG = logging.getLogger(__name__)
_ROOT_ID_BYTES = 256
_NO_COPY = (
    "no sound copy of it is at hand: start from a node that still has the run, bring back a copy"
    " that you kept, or move the run's folders aside to begin anew"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What all ranks agreed on before the restore.

    Attributes:
        settings: of this rank.
        identity: of the run; its `uid` is trusted, a doubted one was replaced by the own one.
        topology: who shares a node.
        rank: of this process.
        doubted_uids: users that a `run.json` names and nobody vouches for; they are not trusted.
    """

    settings: Settings
    identity: RunIdentity
    topology: Topology
    rank: int
    doubted_uids: frozenset[int] = frozenset()

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
        named = {self.identity.uid, *self.settings.options.trusted_uids}
        return vouching_uids(self.settings) | named


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """What one node says of itself and of the run.

    Attributes:
        root_id: of its tier.
        told: by its `run.json`; None where there is none, or a damaged one.
        damage: what is wrong with that.
    """

    root_id: str
    told: Told | None = None
    damage: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What all nodes together know of the run.

    Attributes:
        told: by the first node that has a `run.json`, as `_choose_told` gives it.
        is_agreed: no node has another one, whichever user it names.
        damage: of a node whose `run.json` is damaged: the run was begun, whoever it is.
    """

    told: Told | None
    is_agreed: bool
    damage: str | None

    @property
    def is_begun(self) -> bool:
        """There is such a run: it is never begun anew."""
        return self.told is not None or self.damage is not None


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
        Corrupt: an identity document is damaged, and no sound copy of it may take its place.
    """
    ranks.attempt(lambda: check_tiers(settings) if ranks.rank == 0 else None)
    if settings.local.parts:
        os.makedirs(settings.local.root, exist_ok=True)
    nodes = ranks.attempt(lambda: _observe_local(settings))
    topology = build_topology([node.root_id for node in nodes])
    known = _build_known(nodes, vouching_uids(settings))
    told = ranks.attempt(lambda: _decide_identity(settings, known) if ranks.rank == 0 else None)[0]
    assert told is not None, "rank 0 gives an identity or raises"
    chosen, doubted = _drop_doubted(settings, told, nodes)
    is_first = topology.is_first(ranks.rank)
    ranks.attempt(lambda: _adopt_identity(settings.local, chosen) if is_first else None)
    return Site(
        settings=settings,
        identity=chosen,
        topology=topology,
        rank=ranks.rank,
        doubted_uids=doubted,
    )


def _observe_local(settings: Settings) -> _Node:
    with open_place(settings.local) as run:
        check_is_local(run)
        root_id = _root_id(run)
        try:
            return _Node(root_id=root_id, told=read_told(run, vouching_uids(settings)))
        except Corrupt as error:
            return _Node(root_id=root_id, damage=str(error))


def _drop_doubted(
    settings: Settings, told: Told, nodes: Sequence[_Node]
) -> tuple[RunIdentity, frozenset[int]]:
    """The identity, and the users that it must not name: one doubt on any tier is enough."""
    known = [told, *(node.told for node in nodes if node.told is not None)]
    same = [one for one in known if one.identity.run_id == told.identity.run_id]
    if all(one.is_vouched for one in same):
        return told.identity, frozenset()
    vouching = vouching_uids(settings)
    chosen = without_doubted(told.identity, vouching)
    doubted = {one.named_uid for one in same} - vouching
    return chosen, frozenset(doubted.difference(settings.options.trusted_uids))


def _build_known(nodes: Sequence[_Node], vouching: Collection[int]) -> _Known:
    known = [node.told for node in nodes if node.told is not None]
    return _Known(
        told=_choose_told(known, vouching) if known else None,
        is_agreed=len({replace(told.identity, uid=0) for told in known}) == 1,
        damage=next((node.damage for node in nodes if node.damage is not None), None),
    )


def _choose_told(known: Sequence[Told], vouching: Collection[int]) -> Told:
    """The first node's copy, with the user that copies of the same run name.

    A single pass that mends one names its own user there, who tells nothing of the trainer's.
    """
    same = [one for one in known if one.identity.run_id == known[0].identity.run_id]
    told = next((one for one in same if one.identity.uid not in vouching), known[0])
    if all(one.is_vouched for one in same):
        return told
    return replace(told, identity=without_doubted(told.identity, vouching))


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


def _decide_identity(settings: Settings, known: _Known) -> Told:
    """The run's identity; a new one only where neither tier holds one and both can be used."""
    remote = settings.remote
    if remote is not None:
        told = _told_beside(remote, settings, known)
    elif known.told is not None:
        told = known.told
    elif known.damage is not None:
        raise Corrupt(f"{known.damage}; {_NO_COPY}")
    else:
        new = _new_identity(settings)
        told = Told(identity=new, named_uid=new.uid, is_vouched=True)
    _check_name(told.identity, settings)
    check_owner(told.identity, settings.owner_uid)
    return told


def _check_name(found: RunIdentity, settings: Settings) -> None:
    if found.name != settings.run:
        raise Reject(f"run {settings.run}: its folder holds {RUN_DOCUMENT} of run {found.name}")


def _told_beside(remote: Place, settings: Settings, known: _Known) -> Told:
    try:
        return run_within(
            settings.policy.stall_timeout_seconds,
            f"opening the remote tier at {remote.path}",
            lambda: _told_on(remote, settings, known),
        )
    except (OSError, Retry) as error:
        if known.told is None or settings.policy.remote_unreachable_is_error:
            raise Retry(f"remote tier {remote.path} cannot be used: {error}") from error
        _LOG.warning("remote tier is left out", extra={"run": settings.run, "error": str(error)})
        return known.told


def _told_on(remote: Place, settings: Settings, known: _Known) -> Told:
    found = _remote_identity(remote, settings, known)
    with Folder.open(remote.root) as root, root.below(remote.parts) as run:
        told = read_told(run, vouching_uids(settings))
    if told is None or told.identity.run_id != found.run_id:
        raise Retry(f"{remote.path}/{RUN_DOCUMENT} was exchanged while it was read")
    return told


def _remote_identity(remote: Place, settings: Settings, known: _Known) -> RunIdentity:
    if not known.is_begun:
        with open_place(remote) as run:
            return begin_identity(run, _new_identity(settings))
    try:
        folder, found = open_known(remote)
    except Corrupt as error:
        return _mend_remote(remote, settings, known, error)
    folder.close()
    return found


def _mend_remote(remote: Place, settings: Settings, known: _Known, error: Corrupt) -> RunIdentity:
    """Gives the remote tier back what all nodes that know the run have a copy of."""
    if known.told is None:
        raise Corrupt(f"{error}; so is that of a node: {known.damage}; {_NO_COPY}") from error
    if not known.is_agreed:
        raise Corrupt(f"{error}; the nodes' copies of it differ; {_NO_COPY}") from error
    _check_name(known.told.identity, settings)
    with Folder.open(remote.root) as root, root.below(remote.parts) as run:
        found = mend_identity(run, known.told.identity)
    if found is None:
        raise _unknown_run(remote) from error
    _LOG.warning("%s; it is written anew", error, extra={"run": settings.run})
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
        former = _find_former(run, chosen)
        if former is not None:
            _LOG.warning("local data of an earlier run id is set aside", extra={"run": chosen.name})
            _set_aside(run, former, chosen.run_id)
        ensure_identity(run, chosen)


def _find_former(run: Folder, chosen: RunIdentity) -> str | None:
    """The run id of what lies here, if that is not the chosen run's; mends a damaged `run.json`."""
    try:
        found = read_identity(run)
    except Corrupt as error:
        told = set(scan_run_ids(run).values())
        former = next((run_id for run_id in told if _is_run_id(run_id)), None)
        if former is not None and chosen.run_id not in told:
            return former
        _LOG.warning("%s; it is written anew", error, extra={"run": chosen.name})
        replace_identity(run, chosen)
        return None
    return found.run_id if found is not None and found.run_id != chosen.run_id else None


def _is_run_id(text: str | None) -> bool:
    """It can be a folder's name: a document may say anything."""
    try:
        return text is not None and str(uuid.UUID(text)) == text
    except ValueError:
        return False


def _set_aside(run: Folder, run_id: str, chosen_id: str) -> None:
    """Moves everything but the chosen run's own into `quarantine/<run id>/`; nothing is deleted.

    A late process of the other run may have written its `run.json` over that of the chosen one.
    """
    own = {path for path, told in scan_run_ids(run).items() if told == chosen_id}
    with run.ensure_child(QUARANTINE) as quarantine, quarantine.ensure_child(run_id) as aside:
        names = run.names()
        for name in names:
            is_numbered = parse_step_folder(name) is not None or parse_state_file(name) is not None
            if name == LINEAGES:
                _set_claims_aside(run, aside, own)
            elif (is_numbered and name not in own) or name == CONTROL_DOCUMENT:
                run.rename(name, name, into=aside)
        run.rename(
            RUN_DOCUMENT, RUN_DOCUMENT, into=aside
        )  # last: until then it says whose they are
        aside.sync()
    run.sync()


def _set_claims_aside(run: Folder, aside: Folder, own: Collection[str]) -> None:
    with run.child(LINEAGES) as source, aside.ensure_child(LINEAGES) as target:
        for name in source.names():
            number = parse_lineage_file(name) or parse_trained_file(name)
            if number is None or f"{LINEAGES}/{lineage_file(number)}" not in own:
                source.rename(name, name, into=target)
        target.sync()
        source.sync()
