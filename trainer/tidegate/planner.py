"""Who writes what: DCP's own plan, plus replicas so that a node's folder can be loaded alone.

DCP gives every entry that ranks share to one rank. What a node's ranks read but no rank of that
node owns is written once more on that node, as a replica that stays local.
"""

import dataclasses
import io
import zipfile
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from tidegate.ranks import Topology
from tidegate_contract.errors import Reject

MOST_PICKLED_BYTES = 4 << 30
"""Of one entry that is no tensor, without the tensors in it.

Pickle's protocol 2, which torch.save uses, counts texts and bytes with 32 bits.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What a rank's plan carries beside its own items.

    Attributes:
        replicas: items of other nodes that this rank writes for its node.
    """

    replicas: tuple[Any, ...]


def build_node_plans(
    wanted: Sequence[Sequence[Any]], owned: Sequence[Sequence[Any]], topology: Topology
) -> list[NodePlan]:
    """The replicas of every rank.

    Args:
        wanted: for each rank, all items of its own state; an item has an `index`.
        owned: for each rank, the items that it writes for everybody.
        topology: who shares a node.
    """
    have = [{item.index for rank in ranks for item in owned[rank]} for ranks in topology.nodes]
    plans = []
    for rank, items in enumerate(wanted):
        node = have[topology.node_of(rank)]
        missing = [item for item in items if item.index not in node]
        node.update(item.index for item in missing)
        plans.append(NodePlan(replicas=tuple(missing)))
    return plans


class NodePlanner(DefaultSavePlanner):  # type: ignore[misc]  # torch is not typed here
    """DCP's planner with replicas; one instance per save and rank."""

    def __init__(
        self,
        topology: Topology,
        failure: Exception | None = None,
        most_pickled_bytes: int = MOST_PICKLED_BYTES,
    ) -> None:
        """Takes the topology.

        Args:
            topology: who shares a node; the same on all ranks.
            failure: this rank has no snapshot; the save then fails on all ranks alike.
            most_pickled_bytes: a larger object, or one that cannot be pickled, fails the save.
        """
        super().__init__(enable_plan_caching=False)
        self._most_pickled_bytes = most_pickled_bytes
        self._topology = topology
        self._failure = failure

    def create_local_plan(self) -> Any:
        """DCP's hook: the items of this rank's state.

        Raises:
            Exception: the failure that this planner was made with.
        """
        if self._failure is not None:
            raise self._failure
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
        """DCP's hook on rank 0: its own plan, with `NodePlan` in each rank's `planner_data`."""
        plans, metadata = super().create_global_plan(all_plans)
        extra = build_node_plans(
            [plan.items for plan in all_plans], [plan.items for plan in plans], self._topology
        )
        return [
            dataclasses.replace(plan, planner_data=node)
            for plan, node in zip(plans, extra, strict=True)
        ], metadata

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002  # DCP's name
        """DCP's hook: a tensor as it is, anything else as torch.save writes it.

        Raises:
            Reject: it cannot be pickled, or is too large; names the entry.
        """
        if write_item.type is not WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        entry = f"state entry {write_item.index.fqn!r}, a {type(object).__qualname__},"
        try:
            data = super().transform_object(write_item, object)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise Reject(f"{entry} cannot be saved: {why}") from error
        size = len(data.getbuffer())
        if size > self._most_pickled_bytes:
            size = _pickled_bytes(data)  # without tensors, which may be large
        if size > self._most_pickled_bytes:
            raise Reject(
                f"{entry} has {size} bytes beside its tensors; allowed are "
                f"{self._most_pickled_bytes}: keep it as tensors, or in a file of its own"
            )
        return data


def _pickled_bytes(data: io.BytesIO) -> int:
    """Size of the pickle in what torch.save wrote, where each tensor is a record beside it."""
    with zipfile.ZipFile(data) as records:
        return sum(one.file_size for one in records.infolist() if one.filename.endswith("data.pkl"))
