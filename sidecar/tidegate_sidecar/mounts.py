"""Whether a local tier's root is a mount of its own, from inside a container. Pure.

A container sees every tier as a mount, so asking for a mount point proves nothing. What tells is
the folder *of the file system* that is mounted: `/` for a disk that was mounted on the node, and
the path of a plain folder for one that lies on another disk.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

KUBELET_FILE = "/etc/hosts"
"""The kubelet mounts it from its own folder, which lies on the node's root disk as a rule."""


class TierReason(StrEnum):
    """Reasons of `tier.json` and of the condition `LocalTierHealthy`."""

    OK = "OK"
    ON_ROOT_DISK = "OnRootDisk"
    NOT_MOUNTED = "NotMounted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of `/proc/self/mountinfo`.

    Attributes:
        device: major:minor of the file system.
        root: the folder of that file system which is mounted.
        path: where.
    """

    device: str
    root: str
    path: str


def parse_mountinfo(text: str) -> list[Mount]:
    """All mounts, in the order they were made; a later one hides an earlier one at its path."""
    mounts = []
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) >= 5:
            mounts.append(Mount(device=fields[2], root=_plain(fields[3]), path=_plain(fields[4])))
    return mounts


def _plain(text: str) -> str:
    """Undoes the octal escapes of blanks, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def judge_tier(mounts: list[Mount], root: str, *, requires_mount_point: bool) -> TierReason:
    """Whether runs may use the tier.

    Args:
        mounts: of this process.
        root: the tier's root, as this process sees it.
        requires_mount_point: the admin's word that it is a disk of its own.
    """
    if not requires_mount_point:
        return TierReason.OK
    tier = next((mount for mount in reversed(mounts) if mount.path == root), None)
    if tier is None:
        return TierReason.NOT_MOUNTED
    if tier.root == "/":
        return TierReason.OK
    kubelet = next((mount for mount in mounts if mount.path == KUBELET_FILE), None)
    if kubelet is not None and kubelet.device == tier.device:
        return TierReason.ON_ROOT_DISK
    return TierReason.NOT_MOUNTED
