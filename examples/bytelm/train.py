"""A small transformer language model on the bytes of Python's own standard library sources.

Run one process per rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, as torchrun or an
Indexed Job does. Each rank prints one JSON line a step; `loss` is this rank's own, to the last bit.
The lines that use Tidegate are marked; without `--save` the same training runs without it.
"""

import argparse
import json
import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tidegate  # 1

VOCABULARY = 256


def read_corpus(limit_bytes: int) -> torch.Tensor:
    """The standard library's top-level sources, in order of name: uint8, at most `limit_bytes`."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


class Batches:
    """Random windows of the corpus; its place in the random stream is part of a checkpoint."""

    def __init__(self, corpus: torch.Tensor, *, seed: int, batch: int, length: int) -> None:
        self.corpus, self.batch, self.length = corpus, batch, length
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64, batch x length."""
        high = len(self.corpus) - self.length - 1
        starts = torch.randint(high, (self.batch, 1), generator=self.generator)
        window = self.corpus[starts + torch.arange(self.length + 1)].long()
        return window[:, :-1], window[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class ByteLM(nn.Module):
    """Embedding, pre-norm transformer blocks with dropout, and a linear head."""

    def __init__(self, *, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        block = nn.TransformerEncoderLayer(
            width, max(1, width // 32), 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.embed(tokens) + self.place, mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--save", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def build(arguments: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Model, optimizer, schedule and data of this rank; ranks differ in data and dropout only."""
    torch.manual_seed(arguments.seed)
    model = ByteLM(width=arguments.width, layers=arguments.layers, length=arguments.length)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(
        optim, lambda step: min(1, (step + 1) / 50) * 0.5 * (1 + math.cos(step / 4000))
    )
    torch.manual_seed(arguments.seed + 1 + rank)
    data = Batches(
        read_corpus(4 << 20),
        seed=arguments.seed + 1000 + rank,
        batch=arguments.batch,
        length=arguments.length,
    )
    return {"model": DistributedDataParallel(model), "optim": optim, "sched": sched, "data": data}


def train_step(parts: dict[str, Any]) -> tuple[float, int]:
    """One optimizer step; this rank's loss and token count."""
    inputs, targets = parts["data"].next()
    logits = parts["model"](inputs)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    parts["optim"].zero_grad()
    loss.backward()
    parts["optim"].step()
    parts["sched"].step()
    return loss.item(), inputs.numel()


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parts = build(arguments, rank)
    step, ckpt = 0, None
    if arguments.save:
        state = {name: parts[name] for name in ("model", "optim", "sched")}
        ckpt = tidegate.Checkpointer(state, rank_state={"data": parts["data"]})  # 2
        start = ckpt.restore()  # 3
        if start is not None:
            step = start.step
            print(json.dumps({"rank": rank, "resumed": step, "tier": start.tier}), flush=True)
    while step < arguments.steps:
        loss, tokens = train_step(parts)
        step += 1
        print(json.dumps({"rank": rank, "step": step, "loss": loss}), flush=True)
        if ckpt is not None:
            ckpt.step(tokens=tokens)  # 4
    if ckpt is not None:
        ckpt.close()  # 5
    print(json.dumps({"rank": rank, "finished": step}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
