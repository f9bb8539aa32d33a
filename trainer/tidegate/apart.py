"""Whether the two tiers that a program names can be two. Called by rank 0 when it starts."""

from contextlib import suppress

from tidegate.deadline import run_within
from tidegate.settings import Settings
from tidegate_contract.errors import Retry
from tidegate_contract.tiers import check_apart


def check_tiers(settings: Settings) -> None:
    """Refuses two tiers that are one folder, or lie in each other.

    A remote tier that does not answer is met again, and told, by whoever needs it.

    Raises:
        Reject: see above.
    """
    remote = settings.remote
    if remote is None:
        return
    with suppress(OSError, Retry):
        run_within(
            settings.policy.stall_timeout_seconds,
            f"comparing {settings.local.root} with {remote.root}",
            lambda: check_apart(settings.local.root, remote.root),
        )
