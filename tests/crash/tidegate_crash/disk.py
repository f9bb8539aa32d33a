"""A disk in memory: what is visible now, and what a power cut would leave of it.

Inodes are immutable records in one dictionary, so a clone costs a few dictionary copies. Two views
of each name and each file are kept: the present one, which every process sees, and the durable one.
What lies between them remembers the machine that did it, since a power cut of one machine loses
only what its own processes had not synced.

- Bytes of a file become durable by a sync of that file, done on the machine that wrote them.
- A name becomes durable by a sync of its directory, whoever does it: a name that another machine
  sees is known to the server. A rename is one change, durable with either of its directories.
- A failed sync drops the pages: later syncs succeed and change nothing. Names are journalled: a
  failed sync of a directory leaves them to the next one.

Errors are OSError as the kernel gives them. Symbolic links do not exist here. Calls by path and
descriptor are in `effects`; what a cut may leave is enumerated in `cuts`.
"""

import errno
import stat
from collections.abc import Callable, Collection, Iterable, Iterator

from tidegate_crash.nodes import (
    BYTES,
    END,
    MASK,
    WHOLE,
    Change,
    Directory,
    File,
    Fingerprint,
    Footprint,
    Slot,
    fail,
    mixed,
)

ROOT = 1


class Disk:
    """All file systems of a world; see the module.

    Attributes:
        now: nanoseconds; the same for a whole phase, so times are as coarse as they may be.
        changes: of names, not durable yet, in the order they were made.
        nodes: the record of each inode, unnamed ones included.
        footprint: where it is noted what calls read and change; None: nowhere.
    """

    def __init__(self, mounts: Iterable[str]) -> None:
        """Empty file systems, one for each name under `/`."""
        self.now = 0
        self.changes: tuple[Change, ...] = ()
        self.footprint: Footprint | None = None
        self.nodes: dict[int, File | Directory] = {}
        self._dirty: set[int] = set()
        self._hashes: dict[int, int] = {}
        self._sum = 0
        self._state: int | None = None
        self._prints: dict[int, Fingerprint] = {}
        self._above: dict[int, tuple[int, ...]] = {}
        names = {name: ROOT + 1 + index for index, name in enumerate(mounts)}
        self.put(ROOT, Directory(stat.S_IFDIR | 0o755, 0, 0, names, names, False))
        self._above = dict.fromkeys(names.values(), (ROOT,))
        for device, inode in enumerate(names.values(), start=1):
            self.put(inode, Directory(stat.S_IFDIR | 0o755, 0, device, {}, {}, False))

    def clone(self) -> "Disk":
        """A disk that goes its own way."""
        other = object.__new__(Disk)
        other.__dict__.update(self.__dict__)
        other.nodes = self.nodes.copy()
        other._hashes = self._hashes.copy()
        other._dirty = self._dirty.copy()
        other._prints = self._prints.copy()
        other._above = self._above.copy()
        other.footprint = None
        return other

    def put(self, inode: int, node: File | Directory) -> None:
        """Replaces the record of an inode."""
        self.nodes[inode] = node
        self._dirty.add(inode)
        self._state = None
        self._forget_print(inode)

    def _forget_print(self, inode: int) -> None:
        """A directory's print is known only while those of all below it are."""
        if self._prints.pop(inode, None) is not None:
            for above in self._above.get(inode, ()):
                self._forget_print(above)

    def note_read(self, inode: int, what: str) -> None:
        """A call's result depends on this."""
        if self.footprint is not None:
            self.footprint.reads.add((inode, what))

    def note_write(self, inode: int, what: str) -> None:
        """A call changes this."""
        if self.footprint is not None:
            self.footprint.writes.add((inode, what))

    # What can be seen.

    def directory(self, inode: int) -> Directory:
        """The record of a directory; NotADirectoryError if it is a file."""
        node = self.nodes[inode]
        if not isinstance(node, Directory):
            raise fail(errno.ENOTDIR)
        return node

    def file(self, inode: int) -> File:
        """The record of a file; IsADirectoryError if it is a directory."""
        node = self.nodes[inode]
        if not isinstance(node, File):
            raise fail(errno.EISDIR)
        return node

    def find(self, directory: int, name: str) -> int | None:
        """The inode of a name; None where there is none."""
        if self.footprint is not None:
            self.footprint.reads.add((directory, name))
        node = self.nodes[directory]
        if type(node) is not Directory:
            raise fail(errno.ENOTDIR)
        return node.names.get(name)

    def lookup(self, directory: int, name: str) -> int:
        """The inode of a name; FileNotFoundError where there is none."""
        found = self.find(directory, name)
        if found is None:
            raise fail(errno.ENOENT)
        return found

    def list_names(self, directory: int) -> list[str]:
        """All names in a directory."""
        self.note_read(directory, WHOLE)
        return list(self.directory(directory).names)

    def walk(self, directory: int = ROOT, path: str = "") -> Iterator[tuple[str, int]]:
        """Paths and inodes below a directory, parents first, by name."""
        for name, inode in sorted(self.directory(directory).names.items()):
            yield f"{path}/{name}", inode
            if isinstance(self.nodes[inode], Directory):
                yield from self.walk(inode, f"{path}/{name}")

    # Changes of names. Each takes the machine whose power cut may undo it.

    def create(self, slot: Slot, inode: int, mode: int, machine: str) -> None:
        """Makes an empty file under a new name."""
        above = self._free(slot)
        regular = stat.S_IFREG | mode
        self.put(inode, File(regular, self.now, above.device, b"", None, machine, False))
        self._change(Change(machine, inode, None, slot))

    def mkdir(self, slot: Slot, inode: int, mode: int, machine: str) -> None:
        """Makes an empty directory under a new name."""
        above = self._free(slot)
        mode |= stat.S_IFDIR | above.mode & stat.S_ISGID
        node = Directory(mode, self.now, above.device, {}, {}, False)
        self.put(inode, node)
        self._change(Change(machine, inode, None, slot))

    def link(self, inode: int, slot: Slot, machine: str) -> None:
        """Gives a file one more name."""
        above = self._free(slot)
        node = self.nodes[inode]
        if above.device != node.device:
            raise fail(errno.EXDEV)
        if isinstance(node, Directory):
            raise fail(errno.EPERM)
        self._change(Change(machine, inode, None, slot))

    def unlink(self, slot: Slot, machine: str) -> None:
        """Takes a file's name away."""
        inode = self.lookup(*slot)
        if isinstance(self.nodes[inode], Directory):
            raise fail(errno.EISDIR)
        self._change(Change(machine, inode, slot, None))

    def rmdir(self, slot: Slot, machine: str) -> None:
        """Takes an empty directory away."""
        inode = self.lookup(*slot)
        if self.list_names(inode):
            raise fail(errno.ENOTEMPTY)
        self._bury(inode)
        self._change(Change(machine, inode, slot, None))

    def rename(self, source: Slot, target: Slot, machine: str) -> None:
        """Moves a name over whatever the target is, if that can be replaced."""
        if self.directory(source[0]).device != self.directory(target[0]).device:
            raise fail(errno.EXDEV)
        inode, replaced = self.lookup(*source), self.find(*target)
        if self.directory(target[0]).is_gone:
            raise fail(errno.ENOENT)
        is_directory = isinstance(self.nodes[inode], Directory)
        if is_directory and self._is_inside(target[0], inode):
            raise fail(errno.EINVAL)
        if replaced == inode:
            return
        if replaced is not None:
            self._check_replaceable(replaced, source, is_directory)
        self._change(Change(machine, inode, source, target))

    def _check_replaceable(self, replaced: int, source: Slot, by_folder: bool) -> None:
        if self._is_inside(source[0], replaced):
            raise fail(errno.ENOTEMPTY)
        node = self.nodes[replaced]
        if isinstance(node, File):
            if by_folder:
                raise fail(errno.ENOTDIR)
            return
        if not by_folder:
            raise fail(errno.EISDIR)
        if node.names:
            raise fail(errno.ENOTEMPTY)
        self._bury(replaced)

    def _is_inside(self, directory: int, above: int) -> bool:
        return directory == above or any(inode == directory for _, inode in self._below(above))

    def _below(self, inode: int) -> Iterator[tuple[str, int]]:
        return self.walk(inode) if isinstance(self.nodes[inode], Directory) else iter(())

    def _bury(self, inode: int) -> None:
        self.note_read(inode, WHOLE)
        self.note_write(inode, END)
        self.put(inode, self.directory(inode)._replace(is_gone=True))

    def _free(self, slot: Slot) -> Directory:
        if self.find(*slot) is not None:
            raise fail(errno.EEXIST)
        self.note_read(slot[0], END)
        above = self.directory(slot[0])
        if above.is_gone:
            raise fail(errno.ENOENT)
        return above

    def _change(self, change: Change) -> None:
        self.changes = (*self.changes, change)
        for slot, inode in ((change.source, None), (change.target, change.inode)):
            if slot is not None:
                self._name(slot, inode)

    def _name(self, slot: Slot, inode: int | None) -> None:
        self.note_write(*slot)
        above = self.directory(slot[0])
        names = above.names.copy()
        if inode is None:
            del names[slot[1]]
        else:
            names[slot[1]] = inode
            known = self._above.get(inode, ())
            if slot[0] not in known:
                self._above[inode] = (*known, slot[0])
        self.put(slot[0], above._replace(names=names, mtime=self.now))

    # Changes of what an inode holds.

    def write(self, inode: int, offset: int, data: bytes, machine: str) -> None:
        """Overwrites and extends a file."""
        node = self.file(inode)
        self.note_write(inode, BYTES)
        old = node.data.ljust(offset, b"\0")
        new = old[:offset] + data + old[offset + len(data) :]
        self.put(inode, node._replace(data=new, writer=machine, mtime=self.now))

    def set_mode(self, inode: int, mode: int) -> None:
        """Sets the permission bits."""
        self.note_write(inode, BYTES)
        node = self.nodes[inode]
        self.put(inode, node._replace(mode=stat.S_IFMT(node.mode) | mode))

    def set_mtime(self, inode: int, mtime: int) -> None:
        """Sets the modification time."""
        self.note_write(inode, BYTES)
        self.put(inode, self.nodes[inode]._replace(mtime=mtime))

    # Durability.

    def sync(self, inode: int, machine: str) -> None:
        """fsync of a file or directory on a machine."""
        self.note_read(inode, WHOLE)
        node = self.nodes[inode]
        if isinstance(node, Directory):
            self.settle(lambda change: inode in _directories(change))
        elif node.writer == machine and not node.is_poisoned:
            self.put(inode, node._replace(durable=node.data, writer=""))

    def poison(self, inode: int) -> None:
        """What a failed fsync leaves: pages that no later sync writes."""
        self.note_write(inode, BYTES)
        node = self.nodes[inode]
        if isinstance(node, File):
            self.put(inode, node._replace(is_poisoned=True))

    def sync_all(self) -> None:
        """Everything is durable."""
        self.settle(lambda _: True)
        for inode, node in list(self.nodes.items()):
            if isinstance(node, File) and node.data != node.durable:
                self.put(inode, node._replace(durable=node.data, writer=""))

    def drop_changes(self, lost: Collection[int]) -> None:
        """Some changes of names will never be durable; what is seen stays as it is."""
        self.changes = tuple(c for index, c in enumerate(self.changes) if index not in lost)
        self._state = None

    def settle(self, is_wanted: Callable[[Change], bool]) -> None:
        """Makes changes of names durable, and earlier ones of the same names they build on."""
        slots: set[Slot] = set()
        settled, kept = [], []
        for change in reversed(self.changes):
            own = {slot for slot in (change.source, change.target) if slot is not None}
            if is_wanted(change) or own & slots:
                slots |= own
                settled.append(change)
            else:
                kept.append(change)
        if settled:
            self.changes = tuple(reversed(kept))
            for change in reversed(settled):
                self._make_durable(change)

    def _make_durable(self, change: Change) -> None:
        if change.source is not None:
            above = self.directory(change.source[0])
            if above.durable.get(change.source[1]) == change.inode:
                left = {k: v for k, v in above.durable.items() if k != change.source[1]}
                self.put(change.source[0], above._replace(durable=left))
        if change.target is not None:
            above = self.directory(change.target[0])
            taken = {**above.durable, change.target[1]: change.inode}
            self.put(change.target[0], above._replace(durable=taken))

    def redo(self, change: Change) -> None:
        """Does a change again that is still volatile, after a cut of other machines."""
        if change.source is not None and self.find(*change.source) == change.inode:
            self._name(change.source, None)
        if change.target is not None:
            self._name(change.target, change.inode)

    # Fingerprints.

    def state(self) -> int:
        """A hash of everything, durability included, by inode."""
        if self._state is None:
            for inode in self._dirty:
                new = _hash_node(inode, self.nodes[inode])
                self._sum += new - self._hashes.get(inode, 0)
                self._hashes[inode] = new
            self._dirty.clear()
            self._state = hash((self._sum & MASK, self._hash_changes()))
        return self._state

    def _hash_changes(self) -> int:
        """Their order matters where they are of one name."""
        last: dict[Slot, int] = {}
        result = 0
        for change in self.changes:
            slots = [slot for slot in (change.source, change.target) if slot is not None]
            one = hash((change, *(last.get(slot, 0) for slot in slots)))
            last.update(dict.fromkeys(slots, one))
            result += mixed(one)
        return result

    def fingerprint(self, inode: int = ROOT) -> Fingerprint:
        """Of what can be seen by path: names, bytes, modes; inode numbers do not matter."""
        known = self._prints.get(inode)
        if known is None:
            known = self._prints[inode] = self._fingerprint(self.nodes[inode])
        return known

    def _fingerprint(self, node: File | Directory) -> Fingerprint:
        if isinstance(node, File):
            content = hash((node.mode, node.data))
            return Fingerprint(content, hash((content, node.mtime)))
        content = timed = 0
        for name, child in node.names.items():
            below = self.fingerprint(child)
            content += mixed(hash((name, below.content)))
            timed += mixed(hash((name, below.timed)))
        return Fingerprint(hash((node.mode, content)), hash((node.mode, node.mtime, timed)))


def _hash_node(inode: int, node: File | Directory) -> int:
    if isinstance(node, File):
        return mixed(hash((inode, node)))
    parts = tuple(sorted(node.names.items())), tuple(sorted(node.durable.items()))
    return mixed(hash((inode, node.mode, node.mtime, node.is_gone, parts)))


def _directories(change: Change) -> tuple[int, ...]:
    return tuple(slot[0] for slot in (change.source, change.target) if slot is not None)
