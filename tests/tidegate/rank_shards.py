"""Programs of rank processes whose state is cut into shards that do not fit evenly."""

import torch
import torch.distributed as dist
from rank_loop import by_steps
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tidegate

_LONG = by_steps(1000)


def open_shards(state: dict, local: str) -> tidegate.Checkpointer:
    options = tidegate.Options(keeps_rng=False)
    return tidegate.Checkpointer(state, run="tests/lm", local=local, cadence=_LONG, options=options)


def whole(tensor: torch.Tensor) -> list:
    """All values, exactly; collective for a sharded tensor."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return [list(found.shape), found.flatten().tolist()]


def keep_pieces(rank: int, world_size: int, *, local: str, is_restored: bool) -> dict:
    """A fresh run saves tensors of which some ranks hold nothing; a later one only restores."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    uneven = torch.arange(1.0, 7.0)
    state = {
        "uneven": distribute_tensor(uneven, mesh, [Shard(0)]),
        "columns": distribute_tensor(uneven.reshape(1, 6), mesh, [Shard(1)]),
        "none": distribute_tensor(torch.zeros(0, 128), mesh, [Shard(0)]),
        "scalar": torch.tensor(3.5),
    }
    if is_restored:
        for tensor in state.values():
            tensor.zero_()
    ckpt = open_shards(state, local)
    start = ckpt.restore()
    if not is_restored:
        ckpt.step()
    ckpt.close()
    values = {name: whole(tensor) for name, tensor in state.items()}
    held = state["uneven"].to_local().numel()
    return {"held": held, "step": start.step if start else 0, "values": values}


class Uneven(torch.nn.Module):
    """Rows that 4, 2 and 3 ranks share unevenly; of 3 rows one of 4 ranks has none. One tie."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.mid, self.tied = torch.nn.Linear(7, 7), torch.nn.Linear(7, 7)
        self.tied.weight = self.mid.weight
        self.last = torch.nn.Linear(7, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.tied(self.mid(self.first(batch).tanh()).tanh()))


def tell(model: torch.nn.Module, optim: torch.optim.Optimizer) -> dict:
    """Weights and moments as whole tensors; collective."""
    told = {"tie": model.tied.weight is model.mid.weight}
    for name, parameter in model.named_parameters():
        kept = optim.state[parameter]
        told[name] = whole(parameter.detach())
        told |= {f"{name}.{part}": whole(kept[part]) for part in sorted(kept)}
    return told


def train_shards(rank: int, world_size: int, *, local: str, steps: int) -> dict:
    """Trains until `steps` on the same batches whatever the number of ranks."""
    torch.manual_seed(7)
    model = Uneven()
    if world_size > 1:
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    ckpt = open_shards({"model": model, "optim": optim}, local)
    start = ckpt.restore()
    first = start.step if start else 0
    began = tell(model, optim) if start else None
    for step in range(first + 1, steps + 1):
        torch.manual_seed(step)
        model(torch.randn(8, 5)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        ckpt.step(tokens=1)
    ckpt.close()
    return {"start": first, "began": began, "ended": tell(model, optim)}
