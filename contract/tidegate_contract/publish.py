"""The only writer of visibility: temp, fsync, rename, folder fsync, marker.

Every document and every commit of both tiers is written here. Any error leaves what was visible
before; the caller looks again with `scan`, it never assumes.
"""

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

from tidegate_contract.digest import ContentHasher, sha256_hex
from tidegate_contract.document import decode, encode, max_bytes
from tidegate_contract.errors import Corrupt, DamagedFile, Reject, Retry
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, Pin, RunIdentity, Trained
from tidegate_contract.layout import (
    COMMIT,
    LINEAGES,
    MANIFEST,
    METADATA,
    METADATA_REMOTE,
    PINS,
    QUARANTINE,
    RUN_DOCUMENT,
    Attempt,
    announced_file,
    lineage_file,
    parse_step_folder,
    pin_file,
    quarantined_file,
    seal_file,
    trained_file,
)
from tidegate_contract.run_documents import read_identity
from tidegate_contract.scan import (
    CommittedStep,
    committable_manifest,
    confirm_commit,
    read_commit,
    scan_run_ids,
    verify_file,
)
from tidegate_contract.seal import Commit, FileEntry, Manifest, Seal, has_own_metadata

_READ_BYTES = 4 << 20
_BRING_BACK = (
    "bring it back by `tidegate flush --once` from a node that still has the run, or move the"
    " folder aside to begin anew"
)


def write_document(folder: Folder, name: str, document: object) -> None:
    """Replaces a document atomically and durably."""
    data = encode(document)
    with folder.new_file(name) as file:
        file.write(data)
        file.publish(len(data))


def create_document(folder: Folder, name: str, document: object) -> bool:
    """Writes a document unless its name is taken; of two callers exactly one gets True."""
    data = encode(document)
    with folder.new_file(name) as file:
        file.write(data)
        return file.publish(len(data), is_exclusive=True)


def ensure_identity(run: Folder, wanted: RunIdentity) -> RunIdentity:
    """The identity of the run in this folder; `wanted` becomes it where there is none yet.

    Called by rank 0 on the remote tier and by each node's first rank on the local one.

    Raises:
        Corrupt: the document is damaged.
        Retry: another caller is about to write it.
    """
    found = read_identity(run)
    if found is not None:
        run.sync()  # its writer may have died before its name was durable
        return found
    if create_document(run, RUN_DOCUMENT, wanted):
        return wanted
    found = read_identity(run)
    if found is None:
        raise Retry(f"{run.path}/{RUN_DOCUMENT}: another process is about to write it")
    return found


def begin_identity(run: Folder, wanted: RunIdentity) -> RunIdentity:
    """As `ensure_identity`, on the remote tier, by somebody who knows of no earlier identity.

    A folder that holds steps was a run's: to begin anew there would hide them behind an identity
    that none of them bears.

    Raises:
        Corrupt: `run.json` is damaged.
        Reject: `run.json` is missing although steps lie beside it.
    """
    try:
        if read_identity(run) is None:
            steps = [name for name in run.names() if parse_step_folder(name) is not None]
            if steps and read_identity(run) is None:  # again: the run may just have begun
                raise Reject(
                    f"{run.path}/{RUN_DOCUMENT} is missing, but steps lie beside it, such as"
                    f" {steps[-1]}; {_BRING_BACK}"
                )
        return ensure_identity(run, wanted)
    except Corrupt as error:
        raise Corrupt(f"{error}; {_BRING_BACK}") from error


def mend_identity(
    run: Folder, sound: RunIdentity, *, needs_word: bool = True
) -> RunIdentity | None:
    """Writes a damaged `run.json` anew from a copy that another tier or process still has.

    Not over what may be another run's: each step and lineage here that names a run must name this
    one, and where there are any, one must. Called on the remote tier by rank 0 and by flushers, on
    a local one by flushers.

    Args:
        run: the run's folder.
        sound: what `run.json` said.
        needs_word: False for who has read `sound` in this very folder: silence does not object.

    Returns:
        What `run.json` says now, as of `replace_identity`.

    Raises:
        Corrupt: it stays as it is; the sentence says what a person can do.
        OSError: it cannot be written, or what lies beside it cannot be listed.
    """
    told = scan_run_ids(run)
    objection = _find_stranger(told, sound.run_id)
    if objection is None and needs_word and told and sound.run_id not in told.values():
        objection = f"nothing that can be read names it, in steps such as {min(told)}"
    doubt = f"it may not be that of run {sound.run_id}: {objection}" if objection else None
    return replace_identity(run, sound, doubt)


def _find_stranger(told: Mapping[str, str | None], run_id: str) -> str | None:
    """A sentence on the first that is of another run; None where there is none. Pure.

    Args:
        told: as of `scan_run_ids`.
        run_id: of the run.
    """
    strangers = ((path, other) for path, other in told.items() if other not in (None, run_id))
    return next((f"{path} is of run {other}" for path, other in strangers), None)


def replace_identity(
    run: Folder, sound: RunIdentity, doubt: str | None = None
) -> RunIdentity | None:
    """Writes `run.json` over a damaged one, whose bytes stay in `quarantine/` for people.

    Two callers with the same copy write the same bytes. At each moment there is one, damaged or
    sound: a folder without any would be taken for one that no run has begun in.

    Args:
        run: the run's folder.
        sound: what `run.json` said.
        doubt: why a damaged one is not replaced after all; None where nothing objects.

    Returns:
        What `run.json` says now; somebody else may have mended it, or taken it away: None.

    Raises:
        Corrupt: see `doubt`; or it is no file, or larger than any document: a person put it there.
        OSError: it cannot be written.
    """
    data = run.read(RUN_DOCUMENT, max_bytes(RunIdentity))
    if data is None:
        return None
    try:
        return decode(RunIdentity, data, f"{run.path}/{RUN_DOCUMENT}")
    except Corrupt as error:
        if doubt is not None:
            raise Corrupt(f"{error}; {doubt}; {_BRING_BACK}") from error
    with suppress(OSError):  # it can say nothing any more; the run can go on
        _keep_aside(run, f"{RUN_DOCUMENT}.{sha256_hex(data)[:16]}", data)
    return sound if _write_over(run, data, sound) else read_identity(run)


def _write_over(run: Folder, damaged: bytes, sound: RunIdentity) -> bool:
    """Replaces `run.json` unless it changed meanwhile: then another run may have begun here."""
    text = encode(sound)
    with run.new_file(RUN_DOCUMENT) as file:
        file.write(text)
        os.fsync(file.fd)  # all that takes long comes before the last look
        if run.read(RUN_DOCUMENT, max_bytes(RunIdentity)) != damaged:
            return False
        file.publish(len(text))
    return True


def _keep_aside(run: Folder, name: str, data: bytes) -> None:
    """Named by its bytes, so that each damage is kept, and once."""
    with run.ensure_child(QUARANTINE) as quarantine, quarantine.new_file(name) as file:
        file.write(data)
        file.publish(len(data), is_exclusive=True)


def check_owner(found: RunIdentity, owner_uid: str | None) -> None:
    """Refuses a run whose derived name is bound to another owner.

    Raises:
        Reject: the owner differs; the sentence says what to do.
    """
    if found.owner_uid is None or owner_uid is None or found.owner_uid == owner_uid:
        return
    raise Reject(
        f"run {found.name}: its name was derived from another owner ({found.owner_uid}) than "
        f"this one ({owner_uid}); name the run by a label to resume it, or set recovery.onNewOwner"
    )


def claim_lineage(run: Folder, claim: LineageClaim) -> bool:
    """Claims a lineage number; False if another restore took it."""
    with run.ensure_child(LINEAGES) as folder:
        return create_document(folder, lineage_file(claim.number), claim)


def note_trained(run: Folder, word: Trained) -> bool:
    """Says that a restore came back to training; False if that was said before."""
    with run.ensure_child(LINEAGES) as folder:
        return create_document(folder, trained_file(word.number), word)


def write_pin(run: Folder, pin: Pin) -> None:
    """Pins a commit; the caller looks afterwards whether it is still there.

    Retention reads the pins right before it moves a step, so a pin that was written before that
    holds; whoever pins a step that was just moved finds it in `.trash` and moves it back.
    """
    with run.ensure_child(PINS) as folder:
        write_document(folder, pin_file(pin.attempt), pin)


def remove_pin(run: Folder, attempt: Attempt) -> bool:
    """Takes a pin away; False if there was none."""
    try:
        folder = run.child(PINS)
    except FileNotFoundError:
        return False
    with folder:
        found = folder.size(pin_file(attempt)) is not None
        folder.remove(pin_file(attempt))
        folder.sync()
    return found


def announce(step: Folder, seal: Seal) -> None:
    """Tells, on the remote tier, that this rank's files will come."""
    write_document(step, announced_file(seal.rank), seal)


def write_seal(step: Folder, seal: Seal) -> None:
    """Declares a rank's files complete; on the remote tier it is the receipt. Called last."""
    step.sync()  # names of the files before the name that vouches for them
    write_document(step, seal_file(seal.rank), seal)


def commit_step(step: Folder, attempt: Attempt, run_id: str, now: datetime) -> CommittedStep | None:
    """Commits a step if all receipts and files are there; safe to race and to repeat.

    A COMMIT or manifest that was damaged, or a `.metadata` that was set aside, is written again:
    all three are functions of the receipts. Called by sidecars, agents and restoring trainers on
    the remote tier.

    Args:
        step: the open step folder; all work goes through this handle.
        attempt: which attempt it is.
        run_id: of the run.
        now: UTC, for the commit's time.

    Returns:
        The commit as it was read back, or None while something is missing.

    Raises:
        OSError: from any call; the step may or may not count: look again.
        DamagedFile: rank 0's metadata does not match its seal; the caller sets it aside.
        Corrupt: the seals contradict each other.
        Reject: a newer release wrote COMMIT or manifest.
    """
    try:
        if read_commit(step, attempt, run_id) is not None:
            return confirm_commit(step, attempt, run_id)
    except Corrupt:
        pass  # as good as no commit; the receipts tell whether there can be one
    manifest = committable_manifest(step, attempt, run_id)
    if manifest is None:
        return None
    if has_own_metadata(manifest):
        _publish_metadata(step, manifest)
    write_document(step, MANIFEST, manifest)
    digest = sha256_hex(encode(manifest))
    write_document(step, COMMIT, Commit(manifest_sha256=digest, committed_at=now))
    del manifest  # the one that is read back may be as large
    return confirm_commit(step, attempt, run_id)


def _publish_metadata(step: Folder, manifest: Manifest) -> None:
    entry = next(entry for entry in manifest.files if entry.name == METADATA)
    hasher = ContentHasher(entry.block_size)
    with (
        step.new_file(METADATA) as file,
        os.fdopen(step.open_file(METADATA_REMOTE), "rb") as source,
    ):
        while data := source.read(_READ_BYTES):
            hasher.update(data)
            file.write(data)
        if hasher.finish() != entry.content:
            source_entry = next(e for e in manifest.files if e.name == METADATA_REMOTE)
            path = f"{step.path}/{METADATA_REMOTE}"
            raise DamagedFile(f"{path}: does not match its seal", source_entry)
        file.publish(entry.size)


def set_aside(run: Folder, step: Folder, attempt: Attempt, entry: FileEntry) -> bool:
    """Moves one damaged file of a step into `quarantine/`, for people; nobody reads it again.

    Its step is incomplete from then on, so whoever still holds the file copies it again. Two
    readers may meet the same damage, and that copy may be there before the second one comes: a
    file that is whole stays, or is put back. Each takes a name of its own in `quarantine/`.

    Args:
        run: the run's folder on the file's tier.
        step: the open step folder.
        attempt: which step it is.
        entry: what the file should be.

    Returns:
        False if the file was whole, or gone.

    Raises:
        OSError: it cannot be read or moved.
    """
    aside_name = quarantined_file(attempt, entry.name, secrets.token_hex(4))
    with run.ensure_child(QUARANTINE) as quarantine:
        try:
            if is_whole(step, entry):
                return False
            step.rename(entry.name, aside_name, quarantine)
        except FileNotFoundError:
            return False
        was_whole = is_whole(quarantine, replace(entry, name=aside_name))
        if was_whole:
            quarantine.rename(aside_name, entry.name, step)
        quarantine.sync()
    step.sync()
    return not was_whole


def is_whole(folder: Folder, entry: FileEntry) -> bool:
    """Reads a file from its disk and says whether it is what it should be.

    Raises:
        OSError: it cannot be read.
    """
    try:
        verify_file(folder, entry, from_disk=True)
    except Corrupt:
        return False
    return True
