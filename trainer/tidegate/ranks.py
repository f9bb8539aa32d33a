"""The ranks of a run: two gloo groups, who shares a node, calls that fail on all ranks or none.

One group for the agreement (main thread) and one for saving (writer thread): the same group for
both hangs. Every method is collective: all ranks call it in the same order, from the main thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from tidegate.agreement import AgreementLost
from tidegate_contract.errors import Corrupt, Reject, Retry, TidegateError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Which ranks share a node, told by the id of the tier root that they see.

    Attributes:
        nodes: ranks of each node, in the order of their lowest rank.
    """

    nodes: tuple[frozenset[int], ...]

    def node_of(self, rank: int) -> int:
        """Index of the node of a rank."""
        return next(index for index, ranks in enumerate(self.nodes) if rank in ranks)

    def is_first(self, rank: int) -> bool:
        """True for the lowest rank of a node: it acts for the node."""
        return rank == min(self.nodes[self.node_of(rank)])


def build_topology(root_ids: Sequence[str]) -> Topology:
    """The topology of ranks whose local tiers have these root ids, in rank order."""
    nodes: dict[str, set[int]] = {}
    for rank, root_id in enumerate(root_ids):
        nodes.setdefault(root_id, set()).add(rank)
    return Topology(nodes=tuple(frozenset(ranks) for ranks in nodes.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    verdict: str
    sentence: str


class Ranks:
    """The process groups of this trainer."""

    def __init__(self, *, timeout: timedelta, save_timeout: timedelta) -> None:
        """Makes both groups.

        Args:
            timeout: of a collective call of the main thread.
            save_timeout: of a collective call inside a save.

        Raises:
            Reject: `torch.distributed` is not initialised.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise Reject("torch.distributed: call init_process_group before Checkpointer")
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        self._save_timeout = save_timeout
        self.agreement_group = dist.new_group(backend="gloo", timeout=timeout)
        self.save_group = self._new_save_group()

    def renew_save_group(self) -> None:
        """Replaces the saving group after a hang or a lost peer; the old one is left behind."""
        self.save_group = self._new_save_group()

    def _new_save_group(self) -> Any:
        return dist.new_group(backend="gloo", timeout=self._save_timeout)

    def close(self) -> None:
        """Ends both groups, so that none of their threads is left when the interpreter ends.

        Only once no rank waits for another one: all have read their last message.
        """
        for group in (self.save_group, self.agreement_group):
            dist.destroy_process_group(group)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order.

        Raises:
            AgreementLost: a rank is gone, or did not answer in time.
        """
        values: list[T | None] = [None] * self.world_size
        try:
            dist.all_gather_object(values, value, group=self.agreement_group)
        except RuntimeError as error:
            raise AgreementLost(f"a rank did not answer: {error}") from error
        return values  # type: ignore[return-value]  # all_gather_object has filled every place

    def attempt(self, action: Callable[[], T]) -> list[T]:
        """Runs `action` on every rank; gives all results, or raises on all ranks.

        Raises:
            Reject, Retry, Corrupt: as the lowest failing rank raised; the sentence names the rank.
                Any other error of a rank becomes `Retry`.
        """
        result: T | _Failure
        try:
            result = action()
        except Exception as error:  # noqa: BLE001  # the others wait for this rank's word
            result = _Failure(verdict=type(error).__name__, sentence=_sentence(error))
        results = self.gather(result)
        for rank, found in enumerate(results):
            if isinstance(found, _Failure):
                raise _error_of(found, rank)
        return results  # type: ignore[return-value]  # no failure is left in it


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, TidegateError) else f"{type(error).__name__}: {error}"


def _error_of(failure: _Failure, rank: int) -> TidegateError:
    verdicts = {cls.__name__: cls for cls in (Reject, Corrupt)}
    return verdicts.get(failure.verdict, Retry)(f"rank {rank}: {failure.sentence}")
