"""Whose files a trainer takes: loading a checkpoint runs pickles, so no stranger's are opened.

Owner and mode of the open file count, never its name or folder: nobody can exchange it between the
look and the reading. `site` and `weights` ask for `run.json`, `storage` and `reading` for what is
loaded.
"""

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass, replace

from tidegate.settings import Settings
from tidegate_contract.document import decode, max_bytes
from tidegate_contract.errors import Reject
from tidegate_contract.folder import Folder
from tidegate_contract.identity import RunIdentity
from tidegate_contract.layout import RUN_DOCUMENT


class StrangersFile(Reject):
    """A file's owner is nobody whom this process trusts.

    Attributes:
        owner: numeric user id.
    """

    def __init__(self, message: str, owner: int) -> None:
        """Keeps the sentence and the owner."""
        super().__init__(message)
        self.owner = owner


def find_distrust(found: os.stat_result, trusted: Collection[int]) -> str | None:
    """Why a file of this owner and mode is not taken; None if it is.

    Groups are shared, a tier's by all its tenants: only the own one of this process may write.

    Args:
        found: of the open file.
        trusted: owners whose files are taken.
    """
    if found.st_uid not in trusted:
        return f"belongs to uid {found.st_uid}, trusted are only files of uids {sorted(trusted)}"
    mode = f"mode {stat.S_IMODE(found.st_mode):o}"
    if found.st_mode & stat.S_IWOTH:
        return f"{mode} lets everybody write it; if nobody has, take that away with chmod o-w"
    if found.st_mode & stat.S_IWGRP and found.st_gid != os.getgid():
        return (
            f"{mode} lets group {found.st_gid} write it, which is not this process's own; if nobody"
            " has, take that away with chmod g-w"
        )
    return None


def open_trusted(folder: Folder, name: str, trusted: Collection[int]) -> int:
    """A descriptor of a file that may be unpickled; the caller closes it.

    Raises:
        StrangersFile: a stranger owns it: loading it could run his code.
        Reject: a stranger may write it.
        Corrupt: it is a link or no regular file.
        OSError: it cannot be opened.
    """
    fd = folder.open_file(name)
    found = os.fstat(fd)
    distrust = find_distrust(found, trusted)
    if distrust is None:
        return fd
    os.close(fd)
    sentence = f"{folder.path}/{name}: {distrust}"
    if found.st_uid in trusted:
        raise Reject(sentence)
    uids = f"trusted_uids=[{found.st_uid}]"
    hint = f"to trust that user as well pass Options({uids}), or {uids} to tidegate.load"
    raise StrangersFile(f"{sentence}; {hint}", found.st_uid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a `run.json` says of the run.

    Any tenant of a shared tier may make a run's folder first and name himself in its `run.json`.

    Attributes:
        identity: names no user that is doubted: this process's own copy would vouch for him.
        named_uid: the user that it names.
        is_vouched: it is the word of somebody of `vouching_uids`.
    """

    identity: RunIdentity
    named_uid: int
    is_vouched: bool


def own_uids() -> frozenset[int]:
    """Users whose files are taken anywhere: this process's, and root."""
    return frozenset({os.getuid(), 0})


def vouching_uids(settings: Settings) -> frozenset[int]:
    """Users whose word on who else is trusted is taken: this process's, root, the sidecar's."""
    own = own_uids()
    return own if settings.sidecar_uid is None else own | {settings.sidecar_uid}


def without_doubted(identity: RunIdentity, vouching: Collection[int]) -> RunIdentity:
    """The same run, with this process's user in the place of one that nobody vouches for."""
    return identity if identity.uid in vouching else replace(identity, uid=os.getuid())


def read_told(run: Folder, vouching: Collection[int]) -> Told | None:
    """What a folder's `run.json` says, judged by owner and mode of the very file that was read.

    Args:
        run: the run's open folder.
        vouching: users whose word on who else is trusted is taken.

    Returns:
        None where there is none.

    Raises:
        Corrupt: it is damaged.
        Reject: a newer release wrote it.
        OSError: it cannot be read.
    """
    try:
        fd = run.open_file(RUN_DOCUMENT)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        is_vouched = find_distrust(os.fstat(fd), vouching) is None
        data = file.read(max_bytes(RunIdentity) + 1)
    found = decode(RunIdentity, data, f"{run.path}/{RUN_DOCUMENT}")
    return Told(
        identity=found if is_vouched else without_doubted(found, vouching),
        named_uid=found.uid,
        is_vouched=is_vouched,
    )
