"""What really lies on both tiers, byte by byte, whatever production believes. Reads only.

It knows the stage's exact bytes, so it needs no digest, no size and no seal to tell what is whole.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tidegate_contract.digest import sha256_hex
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, RunIdentity
from tidegate_contract.layout import (
    COMMIT,
    MANIFEST,
    TRASH,
    Attempt,
    parse_step_folder,
    seal_file,
)
from tidegate_contract.run_documents import read_identity, scan_claims
from tidegate_contract.seal import Scope
from tidegate_crash.scenario import Fact, History, Place
from tidegate_crash.stage import RANKS, SAVES, Save, local_bytes, remote_bytes, save_of

Order = tuple[int, int]
"""(lineage, step) as the user means it: a rollback that was asked for counts from its claim on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A step folder that holds exactly what its attempt should.

    Attributes:
        save: which.
        is_committed: its COMMIT is that of its manifest, and every file is exact.
        is_in_trash: where it lies.
        shards: ranks whose files and seal or receipt are exact.
    """

    save: Save
    is_committed: bool
    is_in_trash: bool
    shards: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Both tiers in one moment.

    Attributes:
        run_id: of the remote tier's `run.json`; None where there is none.
        remote: step folders there.
        local: for each node, its step folders.
        rolled_back: attempt → highest lineage that an explicit restore of it claimed.
    """

    run_id: str | None
    remote: tuple[Whole, ...]
    local: tuple[tuple[Whole, ...], ...]
    rolled_back: dict[Attempt, int] = field(default_factory=dict)

    def order(self, save: Save) -> Order:
        """Its place: newer is greater."""
        return order_of(save, self.rolled_back)

    @property
    def commits(self) -> list[Whole]:
        """Good commits of this run, newest first, `.trash` included."""
        found = [w for w in self.remote if w.is_committed and w.save.run_id == self.run_id]
        return sorted(found, key=lambda w: self.order(w.save), reverse=True)

    @property
    def newest(self) -> Order:
        """Of the newest good commit, wherever it lies; (0, 0) before any."""
        return max((self.order(w.save) for w in self.commits), default=(0, 0))

    @property
    def newest_outside(self) -> Order:
        """Of the newest good commit outside `.trash`."""
        return max((self.order(w.save) for w in self.commits if not w.is_in_trash), default=(0, 0))

    def has_shard(self, save: Save, rank: int) -> bool:
        """Somebody can still read or flush this rank's files."""
        near = any(w.save == save and rank in w.shards for w in self.local[rank])
        far = any(w.save == save and (rank in w.shards or w.is_committed) for w in self.remote)
        return near or far

    def is_available(self, save: Save) -> bool:
        """All its shards exist somewhere."""
        return all(self.has_shard(save, rank) for rank in RANKS)


def noted_rollbacks(history: History) -> dict[Attempt, int]:
    """attempt → highest lineage that an explicit restore of it claimed, as far as was told."""
    found: dict[Attempt, int] = {}
    for note in history.of(Fact.ROLLED_BACK):
        if note.attempt is not None:
            found[note.attempt] = max(found.get(note.attempt, 0), note.number or 0)
    return found


def told_saves(history: History, run_id: str | None) -> list[Save]:
    """Commits of a run that somebody was told of, or acted on, and nobody removed on purpose."""
    removed = {note.attempt for note in history.of(Fact.REMOVED)}
    told = {
        note.attempt
        for kind in (Fact.COMMITTED, Fact.REPORTED)
        for note in history.of(kind)
        if note.attempt is not None
    }
    return [s for s in SAVES if s.attempt in told - removed and s.run_id == run_id]


def order_of(save: Save, rolled_back: Mapping[Attempt, int]) -> Order:
    """A save's place: newer is greater."""
    return (max(save.lineage, rolled_back.get(save.attempt, 0)), save.attempt.step)


def merge_claims(
    rolled_back: Mapping[Attempt, int], claims: Iterable[LineageClaim]
) -> dict[Attempt, int]:
    """The same with what claims say, whether or not anybody was told of them."""
    merged = dict(rolled_back)
    for claim in claims:
        if claim.explicit and claim.restored is not None:
            merged[claim.restored] = max(merged.get(claim.restored, 0), claim.number)
    return merged


def told_orders(history: History, run_id: str | None) -> list[Order]:
    """Of the commits that somebody was told of, oldest first.

    A claim that nobody was told of promises nothing: it may arrive when its step is long gone.
    """
    back = noted_rollbacks(history)
    return sorted(order_of(save, back) for save in told_saves(history, run_id))


def newest_told(history: History, run_id: str | None) -> Order:
    """The last of them; (0, 0) before any."""
    return max(told_orders(history, run_id), default=(0, 0))


def read_truth(place: Place, history: History) -> Truth:
    """Looks at both tiers."""
    rolled_back = noted_rollbacks(history)
    with opened(place.remote) as run:
        found = _identity(run)
        remote = [] if run is None else [*_wholes(run, None, is_in_trash=False)]
        if run is not None:
            with inside(run, TRASH) as trash:
                remote += [] if trash is None else _wholes(trash, None, is_in_trash=True)
            claims = scan_claims(run, found.run_id) if found else []
            rolled_back = merge_claims(rolled_back, claims)
    local = []
    for node, path in enumerate(place.nodes):
        with opened(path) as run:
            local.append(() if run is None else tuple(_wholes(run, node, is_in_trash=False)))
    return Truth(
        run_id=found.run_id if found else None,
        remote=tuple(remote),
        local=tuple(local),
        rolled_back=rolled_back,
    )


def sealed_saves(truth: Truth, history: History) -> list[Save]:
    """Attempts of this run that every rank sealed."""
    return [
        save
        for save in SAVES
        if save.run_id == truth.run_id
        and all(history.has(Fact.SEALED, save.attempt, rank) for rank in RANKS)
    ]


@contextmanager
def opened(path: str) -> Iterator[Folder | None]:
    """An open folder; None where there is none."""
    try:
        folder = Folder.open(path)
    except FileNotFoundError:
        yield None
        return
    with folder:
        yield folder


@contextmanager
def inside(run: Folder, name: str) -> Iterator[Folder | None]:
    """An open folder inside another; None where there is none."""
    try:
        folder = run.child(name)
    except FileNotFoundError:
        yield None
        return
    with folder:
        yield folder


def _identity(run: Folder | None) -> RunIdentity | None:
    try:
        return read_identity(run) if run is not None else None
    except (Corrupt, Reject):
        return None


def _wholes(folder: Folder, node: int | None, *, is_in_trash: bool) -> Iterator[Whole]:
    for name in folder.names():
        attempt = parse_step_folder(name)
        save = save_of(attempt) if attempt is not None else None
        if save is None:
            continue
        with folder.child(name) as step:
            yield _whole(step, save, node, is_in_trash=is_in_trash)


def _whole(step: Folder, save: Save, node: int | None, *, is_in_trash: bool) -> Whole:
    names = set(step.names())
    scopes = {Scope.BOTH} if node is None else set(Scope)
    shards = frozenset(
        rank
        for rank in (RANKS if node is None else (node,))
        if seal_file(rank) in names
        and all(
            name in names and step.read(name) == data
            for name, (data, scope) in local_bytes(save, rank).items()
            if scope in scopes
        )
    )
    is_committed = {COMMIT, MANIFEST} <= names and _is_marked(step)
    return Whole(
        save=save,
        is_committed=is_committed
        and all(
            name in names and step.read(name) == data for name, data in remote_bytes(save).items()
        ),
        is_in_trash=is_in_trash,
        shards=shards,
    )


def _is_marked(step: Folder) -> bool:
    try:
        commit = json.loads(step.read(COMMIT) or b"{}")
    except ValueError:
        return False
    return bool(commit.get("manifest_sha256") == sha256_hex(step.read(MANIFEST) or b""))
