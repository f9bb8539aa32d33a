"""What a power cut may leave of a disk.

The product of all possibilities is too large; for one cut these are enumerated: everything kept,
everything lost, the names alone, each single change lost alone and kept alone, each file lost, torn
and zeroed alone, and a few mixes drawn from a seed.
"""

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from tidegate_crash.disk import Disk
from tidegate_crash.nodes import Change, Directory, File


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One outcome of a power cut.

    Attributes:
        machines: that lost power.
        lost: which of the disk's changes of names are lost, by index.
        contents: what is in files whose bytes did not survive.
        words: for people.
    """

    machines: frozenset[str]
    words: str
    lost: frozenset[int] = frozenset()
    contents: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Volatile:
    """What a cut of some machines may damage."""

    changes: tuple[int, ...]
    files: tuple[int, ...]


def _volatile(disk: Disk, machines: Collection[str]) -> _Volatile:
    named = {
        inode
        for node in disk.nodes.values()
        if isinstance(node, Directory)
        for names in (node.names, node.durable)
        for inode in names.values()
    }
    return _Volatile(
        tuple(i for i, change in enumerate(disk.changes) if change.machine in machines),
        tuple(
            inode
            for inode, node in disk.nodes.items()
            if isinstance(node, File)
            and node.writer in machines
            and inode in named
            and node.data != node.durable
        ),
    )


def machines_at_risk(disk: Disk) -> set[str]:
    """Machines whose power cut would lose something."""
    writers = {n.writer for n in disk.nodes.values() if isinstance(n, File) and n.writer}
    return writers | {change.machine for change in disk.changes}


def enumerate_cuts(disk: Disk, machines: Collection[str], mixes: int, seed: int) -> Iterator[Cut]:
    """All cuts of these machines; see the module.

    Args:
        disk: at the moment of the cut; it stays as it is.
        machines: that lose power together.
        mixes: how many random outcomes are added.
        seed: of these.
    """
    cut = frozenset(machines)
    volatile = _volatile(disk, cut)
    if not volatile.changes and not volatile.files:
        return
    every = frozenset(volatile.changes)
    gone = {inode: _old(disk, inode) for inode in volatile.files}
    yield Cut(machines=cut, words="nothing is lost")
    yield Cut(machines=cut, words="all is lost", lost=every, contents=gone)
    yield Cut(machines=cut, words="all bytes are lost", contents=gone)
    for index in volatile.changes:
        what = _in_words(disk.changes[index])
        yield Cut(machines=cut, words=f"{what} is lost", lost=frozenset({index}))
        yield Cut(machines=cut, words=f"only {what} is kept", lost=every - {index})
        yield Cut(
            machines=cut, words=f"only {what} without bytes", lost=every - {index}, contents=gone
        )
    for inode in volatile.files:
        for how, data in _damages(disk, inode):
            yield Cut(machines=cut, words=f"file {inode} is {how}", contents={inode: data})
    yield from _mixes(disk, cut, volatile, random.Random(seed), mixes)


def _mixes(
    disk: Disk, cut: frozenset[str], volatile: _Volatile, draw: random.Random, count: int
) -> Iterator[Cut]:
    if len(volatile.changes) + len(volatile.files) < 3:
        return  # the singles are all there is
    for _ in range(count):
        lost = frozenset(index for index in volatile.changes if draw.random() < 0.5)
        contents = {
            inode: draw.choice(_damages(disk, inode))[1]
            for inode in volatile.files
            if draw.random() < 0.5
        }
        words = f"a mix without changes {sorted(lost)} and bytes of {sorted(contents)}"
        yield Cut(machines=cut, words=words, lost=lost, contents=contents)


def _old(disk: Disk, inode: int) -> bytes:
    return disk.file(inode).durable or b""


def _damages(disk: Disk, inode: int) -> list[tuple[str, bytes]]:
    data = disk.file(inode).data
    return [
        ("lost", _old(disk, inode)),
        ("torn", data[: len(data) // 2]),
        ("zeroed", bytes(len(data))),
    ]


def _in_words(change: Change) -> str:
    source, target = change.source, change.target
    if source is None:
        return f"the new name {target[1] if target else ''}"
    return f"the removal of {source[1]}" if target is None else f"{source[1]} → {target[1]}"


def apply_cut(disk: Disk, cut: Cut) -> Disk:
    """The disk after a cut; what the other machines had not synced stays as it was."""
    after = disk.clone()
    after.drop_changes(cut.lost)
    after.settle(lambda change: change.machine in cut.machines)
    for index in cut.lost:
        _join_moves(disk, after, disk.changes[index])
    for inode, node in list(after.nodes.items()):
        if isinstance(node, Directory):
            if node.names != node.durable:
                after.put(inode, node._replace(names=node.durable))
        elif inode in cut.contents or node.writer in cut.machines:
            data = cut.contents.get(inode, node.data)
            after.put(inode, node._replace(data=data, durable=data, writer=""))
    for change in after.changes:
        after.redo(change)
    _dig_up(after)
    return after


def _dig_up(disk: Disk) -> None:
    """Directories whose removal was lost are there again."""
    gone = [i for i, node in disk.nodes.items() if isinstance(node, Directory) and node.is_gone]
    if gone:
        named = {inode for _, inode in disk.walk()}
        for inode in named.intersection(gone):
            disk.put(inode, disk.directory(inode)._replace(is_gone=False))


def _join_moves(before: Disk, after: Disk, lost: Change) -> None:
    """Where a later move of the same inode survived, both were one: the first name is gone too."""
    if lost.source is None or lost.target is None:
        return
    if before.directory(lost.target[0]).names.get(lost.target[1]) == lost.inode:
        return
    where, name = lost.source
    above = after.directory(where)
    if above.durable.get(name) == lost.inode and _names(after, lost.inode) > 1:
        left = {key: inode for key, inode in above.durable.items() if key != name}
        after.put(where, above._replace(durable=left))


def _names(disk: Disk, inode: int) -> int:
    folders = (node for node in disk.nodes.values() if isinstance(node, Directory))
    return sum(list(node.durable.values()).count(inode) for node in folders)
