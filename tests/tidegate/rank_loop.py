"""A small training loop and how a rank process begins it; shared by `rank_programs`."""

import hashlib
import logging
import os
import random
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # DDP imports it; once here is cheaper than in every fork
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tidegate
from tidegate_contract.cadence import Cadence, CadenceKind


def prepare(folder: Path, rank: int, world_size: int) -> None:
    """One gloo world on the loopback interface; it meets in a file, so no port is taken."""
    handler = logging.StreamHandler()
    text = "%(relativeCreated)d %(name)s %(message)s %(step)s %(why)s"
    handler.setFormatter(logging.Formatter(text, defaults={"why": "", "step": ""}))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    method = f"file://{folder}/rendezvous"
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=method, rank=rank, world_size=world_size, timeout=limit
    )


def build_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.2)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 4))
    model.register_parameter("spare", torch.nn.Parameter(torch.ones(3)))  # without any gradient
    if kind == "ddp":
        # Otherwise buckets change after the first step, and sums over 4 ranks by their last bit.
        return DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "fsdp":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
    return model


class Loop:
    """A small training loop whose data comes from all generators, so that they matter."""

    def __init__(self, kind: str, rank: int) -> None:
        self.model = build_model(kind)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sched = torch.optim.lr_scheduler.MultiStepLR(self.optim, milestones=[3, 9], gamma=0.5)
        self.loader = {"cursor": 0}
        self.notes = {"best": 1e9}
        torch.manual_seed(100 + rank)
        random.seed(200 + rank)
        np.random.seed(300 + rank)

    @property
    def state(self) -> dict:
        return {
            "model": self.model,
            "optim": self.optim,
            "sched": self.sched,
            "notes": (lambda: self.notes, lambda found: self.notes.update(found)),
        }

    def train(self) -> float:
        shift = random.random() + float(np.random.rand())
        batch = torch.randn(8, 16) + shift
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        self.sched.step()
        self.loader["cursor"] += 1
        self.notes["best"] = min(self.notes["best"], loss.item())
        return loss.item()

    def digest(self) -> str:
        """Of all parameters and buffers of a model that is not sharded."""
        whole = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            whole.update(tensor.numpy().tobytes())
        return whole.hexdigest()


def by_steps(steps: int) -> Cadence:
    return Cadence(by=CadenceKind.STEPS, steps=steps)


def open_run(
    loop: Loop,
    *,
    local: str,
    every: int,
    remote: str | None = None,
    may_reshape: bool = False,
    policy: dict | None = None,
) -> tidegate.Checkpointer:
    rule = (lambda name, saved, own, size: saved[own]) if may_reshape else None
    return tidegate.Checkpointer(
        loop.state,
        rank_state={"loader": (lambda: loop.loader, loop.loader.update)},
        run="tests/lm",
        local=local,
        remote=remote,
        cadence=by_steps(every),
        options=tidegate.Options(
            on_world_change=rule,
            policy=tidegate.Policy(**(policy or {})),
            durable_timeout=timedelta(seconds=25),
        ),
    )
