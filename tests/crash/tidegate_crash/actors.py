"""The other processes of a scenario: trainers that save, committers, retention, users. I/O.

Each is short, so that every order of two of them can be tried.
"""

import os
from contextlib import suppress
from threading import Event

from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, Pin
from tidegate_contract.layout import step_folder
from tidegate_contract.publish import announce, claim_lineage, commit_step
from tidegate_crash.flusher import Duty, Flusher
from tidegate_crash.scenario import Actor, Fact, History, Place
from tidegate_crash.stage import (
    NOW,
    RUN_ID,
    Save,
    deliver,
    identity_of,
    make_local,
    make_remote,
    make_run,
    seal,
    seal_of,
)
from tidegate_sidecar.pinning import Found, pin_step
from tidegate_sidecar.removal import trash_step
from tidegate_sidecar.tasks import CopyRanks, Places, RemoteTier
from tidegate_sidecar.transfer import Meter, TokenBucket

_MAX_TURNS = 20
TIDY = Duty(copies=False, commits=False, tidies_remote=True)
"""The lead's retention and collection; the grace of `.trash` has not passed."""
EMPTY = Duty(copies=False, commits=False, tidies_remote=True, empties=True)
"""The same a grace later."""


def in_turn(*actors: Actor) -> Actor:
    """One process that does several things one after the other."""

    def actor(place: Place, history: History) -> None:
        for one in actors:
            one(place, history)

    return actor


def start(*nodes: int, run_id: str = RUN_ID) -> Actor:
    """The trainers of some nodes start: rank 0's makes the run on the remote tier."""

    def actor(place: Place, _history: History) -> None:
        if 0 in nodes:
            make_remote(place, run_id)
        for node in nodes:
            make_local(place, node, run_id)

    return actor


def sealed(*saves: Save, ranks: tuple[int, ...] = (0, 1)) -> Actor:
    """The trainers of these ranks seal some attempts, each on its node."""

    def actor(place: Place, history: History) -> None:
        for one in saves:
            for rank in ranks:
                seal(place, history, one, rank)

    return actor


def delivered(*saves: Save, ranks: tuple[int, ...] = (0, 1)) -> Actor:
    """For `prepare`: these ranks' files and receipts are on the remote tier."""

    def actor(place: Place, _history: History) -> None:
        for one in saves:
            deliver(place, one, ranks)

    return actor


def announced(which: Save, rank: int) -> Actor:
    """For `prepare`: a rank is announced and nothing of it copied."""

    def actor(place: Place, _history: History) -> None:
        with (
            Folder.open(place.remote) as run,
            run.ensure_child(step_folder(which.attempt)) as step,
        ):
            announce(step, seal_of(which, rank))

    return actor


def commit(*saves: Save) -> Actor:
    """A committer that does nothing else: a sidecar that was just told to, or a restoring job."""

    def actor(place: Place, history: History) -> None:
        for one in saves:
            with Folder.open(place.remote) as run, run.child(step_folder(one.attempt)) as step:
                if commit_step(step, one.attempt, one.run_id, NOW) is not None:
                    history.note(Fact.COMMITTED, one.attempt)

    return actor


def commit_if_there(*saves: Save) -> Actor:
    """The same where some of the steps may be in `.trash`, or not be there at all."""

    def actor(place: Place, history: History) -> None:
        for one in saves:
            with suppress(FileNotFoundError):
                commit(one)(place, history)

    return actor


def committed(*saves: Save) -> Actor:
    """For `prepare`: these steps are delivered and committed."""
    return in_turn(delivered(*saves), commit(*saves))


def copy_late(which: Save, node: int) -> Actor:
    """A flusher that decided long ago: it copies its rank and commits, whatever has come since."""

    def actor(place: Place, history: History) -> None:
        places = Places(
            local=place.nodes[node],
            remote_root=place.remote_root,
            remote=os.path.basename(place.remote),
            identity=identity_of(which.run_id),
        )
        tier = RemoteTier(places)
        task = CopyRanks(
            attempt=which.attempt,
            ranks=frozenset({node}),
            bytes_per_second=None,
            files_at_once=1,
        )
        tier.announce(task.attempt, task.ranks)
        tier.copy(task, Meter(TokenBucket(None), Event(), lambda _: None))
        tier.commit(which.attempt, NOW)

    return actor


def roll_back(which: Save, number: int = 2) -> Actor:
    """For `prepare`: a person restored this attempt by name."""

    def actor(place: Place, history: History) -> None:
        claim = LineageClaim(
            run_id=RUN_ID, number=number, restored=which.attempt, explicit=True, claimed_at=NOW
        )
        with Folder.open(place.remote) as run:
            claim_lineage(run, claim)
        history.note(Fact.ROLLED_BACK, which.attempt, number)

    return actor


def pin(which: Save) -> Actor:
    """A person pins a commit, and is told so unless retention was faster."""

    def actor(place: Place, history: History) -> None:
        with Folder.open(place.remote) as run:
            wanted = Pin(run_id=RUN_ID, attempt=which.attempt, pinned_at=NOW)
            if pin_step(run, wanted) is not Found.GONE:
                history.note(Fact.PINNED, which.attempt)

    return actor


def trashed(*saves: Save) -> Actor:
    """For `prepare`: retention has moved these steps."""

    def actor(place: Place, _history: History) -> None:
        with Folder.open(place.remote) as run:
            for one in saves:
                trash_step(run, one.attempt)

    return actor


def make_anew(run_id: str, *saves: Save) -> Actor:
    """A user moves the run's remote folder aside and starts another run of the same name."""

    def actor(place: Place, history: History) -> None:
        with Folder.open(place.remote_root) as root:
            name = os.path.basename(place.remote)
            root.rename(name, f"{name}-old")
            root.sync()
        make_remote(place, run_id)
        committed(*saves)(place, history)

    return actor


def damage(which: Save, name: str) -> Actor:
    """For `prepare`: one bit of a file of a remote step folder is not what was written."""

    def actor(place: Place, history: History) -> None:
        with Folder.open(place.remote) as run, run.child(step_folder(which.attempt)) as step:
            data = bytearray(step.read(name) or b"")
            data[len(data) // 2] ^= 0x10
            with step.new_file(name) as file:
                file.write(bytes(data))
                file.publish(len(data))
        history.note(Fact.FLIPPED, which.attempt)

    return actor


def recover(duty: Duty, *, run_id: str = RUN_ID) -> Actor:
    """Everybody's second run: trainers and flushers start anew, until nobody finds work.

    Node 0's flusher is the lead: it alone tidies the remote tier.

    Args:
        duty: of the lead.
        run_id: of the run that is made where there is none.
    """
    duties = (duty, Duty(tidies_local=duty.tidies_local))

    def actor(place: Place, history: History) -> None:
        make_run(place, run_id)
        idle = 0
        for turn in range(_MAX_TURNS):
            node = turn % len(duties)
            idle = 0 if _work(place, history, node, duties[node]) else idle + 1
            if idle == len(duties):
                return
        history.complain("I5 flushers find something to do for ever")

    return actor


def _work(place: Place, history: History, node: int, duty: Duty) -> bool:
    with Flusher(place, history, node, duty) as flusher:
        return flusher.work()
