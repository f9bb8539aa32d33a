"""The live policy, the newest save request, and `control.json` that tells the trainer. I/O.

The lead has them from the gate. Other flushers of the same node read them from `control.json`;
those of other nodes work by the policy at admission.
"""

from tidegate_contract.folder import Folder
from tidegate_contract.layout import CONTROL_DOCUMENT
from tidegate_contract.publish import write_document
from tidegate_contract.wire import Control, Policy, Reply, SaveRequest


class LiveControl:
    """What this process and its trainer work by; one thread at a time."""

    def __init__(self, policy: Policy, found: Control | None) -> None:
        """Begins with the injected policy.

        Args:
            policy: at admission: newer than whatever an earlier pod left in the folder.
            found: `control.json` as it lies there: its request was told already.
        """
        self.policy = policy
        self.request: SaveRequest | None = found.request if found else None
        self._found = found

    @property
    def request_id(self) -> int:
        """Of the newest request; 0 before any."""
        return self.request.request_id if self.request else 0

    def take_reply(self, reply: Reply) -> None:
        """The gate's word."""
        self.policy = reply.policy or self.policy
        self.request = reply.request or self.request

    def follow(self, found: Control | None) -> None:
        """The word of another flusher of this node; called by those that are not the lead."""
        if found is not None and found != self._found:
            self._found = found
            self.policy = found.policy or self.policy
            self.request = found.request or self.request

    def write(self, run: Folder, found: Control | None, *, is_backlogged: bool) -> None:
        """Tells the trainer, if that changes anything; called by the lead.

        Args:
            run: the run's folder on this node.
            found: `control.json` as it lies there.
            is_backlogged: the next save is to wait for the flush.

        Raises:
            OSError: it cannot be written; the lead tries again.
        """
        wanted = Control(policy=self.policy, request=self.request, is_backlogged=is_backlogged)
        if found != wanted:
            write_document(run, CONTROL_DOCUMENT, wanted)
