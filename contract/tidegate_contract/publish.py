"""The only writer of visibility: temp, fsync, rename, folder fsync, marker.

Every document and every commit of both tiers is written here. Any error leaves what was visible
before; the caller looks again with `scan`, it never assumes.
"""

import os
from datetime import datetime

from tidegate_contract.digest import ContentHasher, sha256_hex
from tidegate_contract.document import encode
from tidegate_contract.errors import Corrupt, Reject, Retry
from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim, RunIdentity
from tidegate_contract.layout import (
    COMMIT,
    LINEAGES,
    MANIFEST,
    METADATA,
    METADATA_REMOTE,
    RUN_DOCUMENT,
    Attempt,
    announced_file,
    lineage_file,
    seal_file,
)
from tidegate_contract.scan import (
    CommittedStep,
    committable_manifest,
    confirm_commit,
    read_commit,
    read_identity,
)
from tidegate_contract.seal import Commit, Manifest, Seal

_READ_BYTES = 4 << 20


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
        return found
    if create_document(run, RUN_DOCUMENT, wanted):
        return wanted
    found = read_identity(run)
    if found is None:
        raise Retry(f"{run.path}/{RUN_DOCUMENT}: another process is about to write it")
    return found


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


def announce(step: Folder, seal: Seal) -> None:
    """Tells, on the remote tier, that this rank's files will come."""
    write_document(step, announced_file(seal.rank), seal)


def write_seal(step: Folder, seal: Seal) -> None:
    """Declares a rank's files complete; on the remote tier it is the receipt. Called last."""
    step.sync()  # names of the files before the name that vouches for them
    write_document(step, seal_file(seal.rank), seal)


def commit_step(step: Folder, attempt: Attempt, run_id: str, now: datetime) -> CommittedStep | None:
    """Commits a step if all receipts and files are there; safe to race and to repeat.

    Called by sidecars, agents and restoring trainers on the remote tier.

    Args:
        step: the open step folder; all work goes through this handle.
        attempt: which attempt it is.
        run_id: of the run.
        now: UTC, for the commit's time.

    Returns:
        The commit as it was read back, or None while something is missing.

    Raises:
        OSError: from any call; the step may or may not count: look again.
        Corrupt: COMMIT does not match the step, or the seals contradict each other.
    """
    if read_commit(step, attempt, run_id) is not None:
        return confirm_commit(step, attempt, run_id)
    manifest = committable_manifest(step, attempt, run_id)
    if manifest is None:
        return None
    _publish_metadata(step, manifest)
    write_document(step, MANIFEST, manifest)
    digest = sha256_hex(encode(manifest))
    write_document(step, COMMIT, Commit(manifest_sha256=digest, committed_at=now))
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
            raise Corrupt(f"{step.path}/{METADATA_REMOTE}: does not match its seal")
        file.publish(entry.size)
