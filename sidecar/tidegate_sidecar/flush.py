"""The role `flush`: for one run on one node, in a pod, beside a trainer, or once by hand. I/O."""

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from types import FrameType

from tidegate_contract import keys
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import RUN_DOCUMENT
from tidegate_contract.publish import mend_identity
from tidegate_contract.run_documents import read_identity
from tidegate_sidecar.faults import Reason
from tidegate_sidecar.health import Health, serve
from tidegate_sidecar.loop import Beat, Loop
from tidegate_sidecar.settings import Settings
from tidegate_sidecar.trouble import Trouble
from tidegate_sidecar.view import RemoteView, StepView

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 0.2
_LOCAL_FAILURE_SECONDS = 2.0
_ONCE_TRIES = 3


class Ending:
    """Whether this process is to finish: it was told by a signal, or its trainer is gone."""

    def __init__(self, *, follows_parent: bool) -> None:
        """Remembers the parent.

        Args:
            follows_parent: the trainer started this process, and nobody else will end it. It says
                in the environment who it is: it may be dead before this line.
        """
        told = os.environ.get(keys.ENV_PARENT, "")
        parent = int(told) if told.isdecimal() else os.getppid()
        self._parent = parent if follows_parent else None
        self._is_told = False

    def listen(self) -> None:
        """Takes SIGTERM and SIGINT; from the main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)

    def _tell(self, _number: int, _frame: FrameType | None) -> None:
        self._is_told = True

    @property
    def is_due(self) -> bool:
        """Finish what is sealed and end."""
        return self._is_told or (self._parent is not None and os.getppid() != self._parent)


def flush(settings: Settings, ending: Ending) -> int:
    """Flushes a run until its trainer is gone and nothing is left to do.

    Called by `__main__` in the main thread. A tier that fails, however long, ends nothing.

    Returns:
        The exit status, 0.
    """
    health = Health()
    server = serve(health, settings.metrics_port)
    try:
        while True:
            run = _wait_for_folder(settings, health, ending)
            if run is None:
                return 0
            with run:
                if _flush_folder(settings, run, health, ending):
                    return 0
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()


def _wait_for_folder(settings: Settings, health: Health, ending: Ending) -> Folder | None:
    """The run's folder on this node; None if the end comes before it does."""
    while not ending.is_due:
        try:
            return Folder.open(settings.local)
        except OSError as error:
            health.beat(phase="WaitingForFolder", message=str(error))
            time.sleep(_WAIT_SECONDS)
    return None


def _flush_folder(settings: Settings, run: Folder, health: Health, ending: Ending) -> bool:
    """Flushes whatever run lies in the folder; False if the folder itself failed."""
    while True:
        try:
            identity = _wait_for_identity(run, health, ending)
            if identity is None:
                return True
            if _flush_run(settings, run, identity, health, ending) is Beat.DONE:
                return True
        except (OSError, Corrupt, Reject) as error:
            logger.error("the local tier fails", extra={"error": str(error)})
            health.beat(phase="LocalTierFails", message=str(error))
            time.sleep(_LOCAL_FAILURE_SECONDS)
            if ending.is_due:
                return True
            return False


def _wait_for_identity(run: Folder, health: Health, ending: Ending) -> RunIdentity | None:
    """The run's identity; None if the end comes before it does.

    A damaged one is waited for: a sound copy lies on the remote tier only, which this process does
    not touch. The trainer has it; and once the pods are gone, the pass that takes their steps over.
    """
    told = ""
    while True:
        try:
            identity = read_identity(run)
            message = f"{run.path}/{RUN_DOCUMENT} is not there yet: the trainer writes it"
        except Corrupt as error:
            identity = None
            message = f"{error}; the trainer writes it anew when it starts"
            if message != told:
                told = message
                logger.error("the run is not known", extra={"error": message})
        if identity is not None or ending.is_due:
            return identity
        health.beat(phase="WaitingForRun", message=message)
        time.sleep(_WAIT_SECONDS)


def _flush_run(
    settings: Settings, run: Folder, identity: RunIdentity, health: Health, ending: Ending
) -> Beat:
    logger.info("flushing", extra={"run": identity.name, "run_id": identity.run_id})
    loop = Loop(settings, run, identity, health)
    try:
        while True:
            loop.is_finishing = loop.is_finishing or ending.is_due
            beat = _beat(loop, run, identity)
            if beat is not Beat.ON:
                return beat
            loop.wait()
    finally:
        loop.close()


def _beat(loop: Loop, run: Folder, identity: RunIdentity) -> Beat:
    """A beat that gives a local `run.json` which was damaged meanwhile its bytes back."""
    try:
        return loop.beat()
    except Corrupt as error:
        mend_identity(run, identity, needs_word=False)
        logger.warning("the run's identity is written anew", extra={"error": str(error)})
    return loop.beat()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """How a single pass ended.

    Attributes:
        lines: one for each step that was sealed here, or cannot be read, newest first.
        is_whole: all that could be done from here was done.
    """

    lines: tuple[str, ...]
    is_whole: bool


def flush_once(settings: Settings, on_progress: Callable[[], None] = lambda: None) -> Pass:
    """Flushes what is sealed and newer than the newest commit, and commits what is whole.

    Called by hand and, for dead pods, by the agent. It deletes nothing.

    Args:
        settings: of this process.
        on_progress: called whenever bytes or steps reached the remote tier.

    Raises:
        Reject: the folder is no run's folder, or another process flushes it.
        Corrupt: its `run.json` is damaged, and the remote tier has no sound copy that fits.
        OSError: the local folder cannot be read.
    """
    with Folder.open(settings.local) as run:
        identity = _identity_of(run, settings)
        loop = Loop(replace(settings, is_single_pass=True), run, identity, Health())
        try:
            loop.is_finishing = True
            reached = loop.reached
            while _beat(loop, run, identity) is Beat.ON and not _is_hopeless(loop.troubles.worst):
                if loop.reached != reached:
                    reached = loop.reached
                    on_progress()
                loop.wait()
            if not loop.holds_lock:
                raise Reject(f"{settings.local}: another process flushes this folder")
            return _summary(loop)
        finally:
            loop.close()


def _identity_of(run: Folder, settings: Settings) -> RunIdentity:
    """The run's identity, mended where that can be: no trainer may ever come to do it.

    Only a single pass may ask the remote tier itself: whoever started it can give it up.
    """
    try:
        identity = read_identity(run)
    except Corrupt as error:
        identity = mend_identity(run, _remote_copy(settings, error))
        logger.warning("the run's identity is written anew", extra={"error": str(error)})
    if identity is None:
        raise Reject(f"{settings.local}/{RUN_DOCUMENT} is missing: not a run's folder")
    return identity


def _remote_copy(settings: Settings, damage: Corrupt) -> RunIdentity:
    try:
        with (
            Folder.open(settings.remote_root) as root,
            root.below(PurePosixPath(settings.remote).parts) as folder,
        ):
            found = read_identity(folder)
    except (OSError, Corrupt, Reject) as error:
        raise Corrupt(f"{damage}; nor can the remote tier's copy be read: {error}") from error
    if found is None:
        raise Corrupt(f"{damage}; {folder.path} has no copy of it") from damage
    # a stranger may have written that one, and trainers take this process's word for whom it names
    return replace(found, uid=os.getuid())


def _is_hopeless(worst: Trouble | None) -> bool:
    return worst is not None and (
        worst.reason is not Reason.STALLED or worst.failures >= _ONCE_TRIES
    )


def _summary(loop: Loop) -> Pass:
    worst = loop.troubles.worst
    lines = [
        f"step {step.attempt.step}: {describe_step(step, loop.remote, worst)}"
        for step in reversed(loop.local)
        if step.sealed or step.problems
    ]
    is_refused = bool(loop.troubles.refused(time.monotonic()))
    is_left = any(_may_be_missed(step, loop.remote) for step in loop.local)
    return Pass(lines=tuple(lines), is_whole=worst is None and not is_refused and not is_left)


def _may_be_missed(step: StepView, remote: RemoteView | None) -> bool:
    """Its seals cannot be read, and no later step is durable as far as the number tells."""
    newest = remote.newest if remote else None
    is_later = newest is None or step.attempt.step > newest.attempt.step
    return bool(step.problems) and is_later


def describe_step(step: StepView, remote: RemoteView | None, worst: Trouble | None) -> str:
    """What became of a sealed step, for people; pure."""
    far = remote.find(step.attempt) if remote else None
    if far is not None and far.commit:
        return "durable"
    key, newest = (remote.key(step), remote.newest_key) if remote else (None, None)
    if remote and remote.newest and key and newest and key < newest:
        return f"superseded by step {remote.newest.attempt.step}"
    if far is not None and step.ranks and step.ranks <= far.ranks:
        missing = sorted(set(range(step.world_size)) - far.ranks)
        return f"copied; not durable before ranks {missing} are"
    if step.problems:
        return f"not copied: {step.problems[0]}"
    return f"not copied: {worst.message if worst else 'see the log'}"
