"""Makes what must lie on a local tier before a pod starts: `tier.json`, the runs' folders. I/O.

Runs as root on folders that tenants can write to, so every step is relative to an open folder and
no link is followed. Called by the agent's loop only.
"""

import errno
import os
import stat
import uuid
from dataclasses import dataclass
from datetime import datetime

from tidegate_contract.document import decode
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import FOLDER_MODE, Folder
from tidegate_contract.identity import TierState
from tidegate_contract.layout import ROOT_ID, TIER_DOCUMENT, check_run_name, target_file
from tidegate_contract.publish import write_document
from tidegate_contract.wire import Target
from tidegate_sidecar.mounts import TierReason

_PARENT_MODE = 0o755
_ROOT_ID_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """A folder that a pod waits for.

    Attributes:
        run: `namespace/name`.
        uid: of the trainer.
        gid: of the tier.
    """

    run: str
    uid: int
    gid: int


def ensure_root_id(root: Folder) -> str:
    """The id of this disk, made once; it goes with the disk, not with the node's name.

    Raises:
        OSError: it can be neither read nor made.
    """
    _create_root_id(root, uuid.uuid4().hex)
    return (root.read(ROOT_ID, _ROOT_ID_BYTES) or b"").decode(errors="replace").strip()


def _create_root_id(folder: Folder, root_id: str) -> None:
    if folder.size(ROOT_ID) is not None:
        return
    data = f"{root_id}\n".encode()
    with folder.new_file(ROOT_ID) as file:
        file.write(data)
        file.publish(len(data), is_exclusive=True)


def write_tier_state(root: Folder, root_id: str, reason: TierReason, now: datetime) -> TierState:
    """Writes `tier.json` if it says anything new.

    Raises:
        OSError: it cannot be written.
    """
    found = _read_tier_state(root)
    is_usable = reason is TierReason.OK
    if found is not None and (found.root_id, found.usable, found.reason) == (
        root_id,
        is_usable,
        reason,
    ):
        return found
    state = TierState(root_id=root_id, usable=is_usable, reason=reason, checked_at=now)
    write_document(root, TIER_DOCUMENT, state)
    return state


def _read_tier_state(root: Folder) -> TierState | None:
    try:
        data = root.read(TIER_DOCUMENT)
        return None if data is None else decode(TierState, data, TIER_DOCUMENT)
    except (Corrupt, Reject):
        return None


def ensure_run_folder(root: Folder, wanted: RunFolder, root_id: str) -> None:
    """Makes a run's folder, or gives the one that is there to the run's user.

    Args:
        root: the tier's root.
        wanted: which folder, and whose.
        root_id: copied into it, as pods see nothing above their folder.

    Raises:
        Corrupt: a link or a stranger's folder is in the way.
        OSError: it cannot be made.
    """
    namespace, name = check_run_name(wanted.run).split("/")
    with _ensure_parent(root, namespace) as parent:
        _make(parent, name, 0o700)
        with _open_folder(parent, name) as folder:
            _give(folder, wanted)
            _create_root_id(folder, root_id)
            folder.sync()


def _give(folder: Folder, wanted: RunFolder) -> None:
    """Sets mode, owner and group, in this order.

    Without CAP_FSETID the kernel drops the set-group-ID bit when a folder of a foreign group gets
    its mode; a change of the group leaves it.
    """
    if stat.S_IMODE(os.fstat(folder.fd).st_mode) != FOLDER_MODE:
        os.fchown(folder.fd, -1, os.getegid())
        os.fchmod(folder.fd, FOLDER_MODE)
    os.fchown(folder.fd, wanted.uid, wanted.gid)
    mode = stat.S_IMODE(os.fstat(folder.fd).st_mode)
    if mode != FOLDER_MODE:
        raise PermissionError(errno.EPERM, f"mode is {mode:o}, wanted {FOLDER_MODE:o}", folder.path)


def write_target(root: Folder, run: str, target: Target) -> None:
    """Notes, out of the tenant's reach, where the run's steps go once its pods are gone."""
    namespace, name = check_run_name(run).split("/")
    with _ensure_parent(root, namespace) as parent:
        if read_target(parent, name) != target:
            write_document(parent, target_file(name), target)


def read_target(parent: Folder, name: str) -> Target | None:
    """The target of a run; None where there is none that can be read.

    Args:
        parent: the namespace's folder.
        name: of the run, without namespace.
    """
    try:
        data = parent.read(target_file(name))
        return None if data is None else decode(Target, data, f"{parent.path}/{target_file(name)}")
    except (Corrupt, Reject):
        return None


def _ensure_parent(root: Folder, namespace: str) -> Folder:
    _make(root, namespace, _PARENT_MODE)
    folder = _open_folder(root, namespace)
    if os.fstat(folder.fd).st_uid != os.geteuid():
        folder.close()
        raise Corrupt(f"{root.path}/{namespace}: belongs to someone else")
    os.fchmod(folder.fd, _PARENT_MODE)
    return folder


def _make(parent: Folder, name: str, mode: int) -> None:
    try:
        os.mkdir(name, mode, dir_fd=parent.fd)
    except FileExistsError:
        return
    parent.sync()


def _open_folder(parent: Folder, name: str) -> Folder:
    try:
        return parent.child(name)
    except OSError as error:
        found = os.stat(name, dir_fd=parent.fd, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            raise
        raise Corrupt(f"{parent.path}/{name}: not a folder") from error
