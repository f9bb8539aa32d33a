"""The only reader of what a run's folder says beside its steps: who it is, restores, pins. I/O.

Documents that are damaged, or of another run, never pass for what they are not; what each then
counts as is said at its reader. Reads only; callers may be any process that may read the folder.
"""

from typing import TypeVar

from tidegate_contract.document import decode, max_bytes
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import ENTRY_ERRORS, Folder
from tidegate_contract.identity import UNTOLD, LineageClaim, Pin, RunIdentity, Trained
from tidegate_contract.layout import (
    LINEAGES,
    PINS,
    RUN_DOCUMENT,
    Attempt,
    lineage_file,
    parse_lineage_file,
    parse_pin_file,
    parse_trained_file,
    trained_file,
)

D = TypeVar("D")


def read_identity(run: Folder) -> RunIdentity | None:
    """The run's `run.json`; None where there is none. Raises as `read_document`."""
    return read_document(run, RunIdentity, RUN_DOCUMENT)


def read_document(folder: Folder, cls: type[D], name: str) -> D | None:
    """One document of an open folder; None where there is no such file.

    Raises:
        Corrupt: it is damaged, or no regular file.
        Reject: a newer release wrote it.
        OSError: it cannot be read.
    """
    data = folder.read(name, max_bytes(cls))
    return None if data is None else decode(cls, data, f"{folder.path}/{name}")


def _read_entry(folder: Folder, cls: type[D], name: str, *, is_local: bool = False) -> D | None:
    """As `read_document`, but a file that refuses although its tier is well counts as damaged.

    On a node's own disk that is any error: one bad block must not end the look at it.
    """
    try:
        return read_document(folder, cls, name)
    except OSError as error:
        if error.errno not in ENTRY_ERRORS and not is_local:
            raise
        raise Corrupt(f"{folder.path}/{name}: cannot be read ({error.strerror})") from error


def scan_claims(run: Folder, run_id: str, *, is_local: bool = False) -> list[LineageClaim]:
    """All lineage claims of the run, by number; those of another run are left out.

    A damaged claim still takes its number. It comes back as its `trained` word repeats it, and
    where there is no such word as one that `is_lost`.

    Args:
        run: the run's folder.
        run_id: of the run.
        is_local: of a node: a claim that cannot be read is a damaged one, whatever the error.

    Raises:
        OSError: the folder cannot be read.
        Reject: a newer release wrote a claim.
    """
    try:
        folder = run.child(LINEAGES)
    except FileNotFoundError:
        return []
    with folder:
        claims = []
        for name in folder.names():
            number = parse_lineage_file(name)
            if number is None:
                continue
            claim = _read_claim(folder, number, run_id, is_local=is_local)
            if claim is not None:
                claims.append(claim)
    return sorted((c for c in claims if c.run_id == run_id), key=lambda claim: claim.number)


def _read_claim(folder: Folder, number: int, run_id: str, *, is_local: bool) -> LineageClaim | None:
    try:
        claim = _read_entry(folder, LineageClaim, lineage_file(number), is_local=is_local)
        if claim is None or claim.number == number:
            return claim
    except Corrupt:
        pass
    word = _read_word(folder, number, run_id, is_local=is_local)
    if word is None or word.explicit is None:
        return LineageClaim(run_id=run_id, number=number, claimed_at=UNTOLD)
    return LineageClaim(
        run_id=run_id,
        number=number,
        restored=word.restored,
        explicit=word.explicit,
        claimed_at=word.trained_at,
    )


def scan_trained(run: Folder, run_id: str, *, is_local: bool = False) -> frozenset[int]:
    """Lineages of the run whose restore came back to training; a damaged word counts as none.

    `is_local` as of `scan_claims`.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        folder = run.child(LINEAGES)
    except FileNotFoundError:
        return frozenset()
    with folder:
        numbers = [n for name in folder.names() if (n := parse_trained_file(name))]
        return frozenset(n for n in numbers if _read_word(folder, n, run_id, is_local=is_local))


def _read_word(folder: Folder, number: int, run_id: str, *, is_local: bool) -> Trained | None:
    try:
        word = _read_entry(folder, Trained, trained_file(number), is_local=is_local)
    except (Corrupt, Reject):
        return None
    is_of_claim = word is not None and (word.number, word.run_id) == (number, run_id)
    return word if is_of_claim else None


def scan_pins(run: Folder) -> dict[Attempt, Pin | None]:
    """The pins of the run, by attempt; a pin that cannot be read still holds, as None.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        folder = run.child(PINS)
    except FileNotFoundError:
        return {}
    with folder:
        names = {attempt: name for name in folder.names() if (attempt := parse_pin_file(name))}
        return {attempt: _read_pin(folder, name, attempt) for attempt, name in names.items()}


def _read_pin(folder: Folder, name: str, attempt: Attempt) -> Pin | None:
    try:
        pin = _read_entry(folder, Pin, name)
    except (Corrupt, Reject):
        return None
    return pin if pin is not None and pin.attempt == attempt else None
