"""A small GPT over the Python standard library's own source, read as bytes.

    python examples/bytes_lm.py
    paceline train examples/bytes_lm.toml --set args.epochs=8

Shows what a language model needs beyond the plain loop: batches weighted by their tokens, micro-batches, a warm-up with
cosine decay, and clipping. Settings (`args`): see DEFAULTS.

Letters after an underscore in a tensor's name are its shape: B batch, T time, C width, V vocabulary.
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline

DEFAULTS = {
    "megabytes": 0.4,  # of source, of which about a tenth is held out
    "context": 64,  # bytes that the model sees at most
    "width": 128,
    "layers": 2,
    "heads": 4,
    "batch": 4,  # sequences in a micro-batch
    "epochs": 3,
    "lr": 3e-3,
    "warmup": 50,  # steps
}
VOCABULARY = 256
NOTHING = -100  # the target after a file's last byte, which counts for nothing


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each on normalised input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # to (B, heads, T, C / heads)
            for part in self.qkv(self.norm1(x_BTC)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTC + self.mlp(self.norm2(x_BTC))


class GPT(nn.Module):
    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.byte.weight  # one matrix for both

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        places_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        x_BTC = self.blocks(self.byte(bytes_BT) + self.place(places_T))
        return self.head(self.norm(x_BTC))


def data(megabytes: float, context: int) -> tuple[TensorDataset, TensorDataset]:
    """Sequences to train on and held-out ones, as (bytes, next bytes), from the first files in the order of their
    paths; every tenth file is held out. A file's last sequence is filled up, and the filling has no target."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in library.rglob("*.py") if "-packages" not in str(path.relative_to(library)))
    rows: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    left = int(megabytes * 1e6)
    for number, path in enumerate(paths):
        text = path.read_bytes()[:left]
        left -= len(text)
        for start in range(0, len(text) - 1, context):
            part = torch.frombuffer(bytearray(text[start : start + context + 1]), dtype=torch.uint8).long()
            row = torch.full((context + 1,), NOTHING)
            row[: len(part)] = part
            rows[number % 10 == 9].append(row)
    train, held_out = (torch.stack(part) for part in rows)
    return tuple(TensorDataset(rows_BT[:, :-1].clamp(min=0), rows_BT[:, 1:]) for rows_BT in (train, held_out))


def loss_of(model: nn.Module, bytes_BT: torch.Tensor, next_BT: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy in nats over the targets that count."""
    logits_BTV = model(bytes_BT)
    return F.cross_entropy(logits_BTV.flatten(0, 1), next_BT.flatten(), ignore_index=NOTHING)


def bits_per_byte(model: nn.Module, loader: DataLoader) -> float:
    nats, count = 0.0, 0
    for bytes_BT, next_BT in loader:
        targets = int((next_BT != NOTHING).sum())
        nats += loss_of(model, bytes_BT, next_BT).item() * targets
        count += targets
    return nats / count / math.log(2)


def train(worker: paceline.Worker) -> None:
    args = DEFAULTS | worker.args
    examples, held_out = data(args["megabytes"], args["context"])
    model = GPT(args["context"], args["width"], args["layers"], args["heads"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args["lr"], betas=(0.9, 0.95), weight_decay=0.1)
    loader = DataLoader(examples, batch_size=args["batch"], shuffle=True)
    steps = args["epochs"] * math.ceil(len(loader) / (worker.world * worker.job.accumulate))

    def schedule(step: int) -> float:
        """Up in a straight line, then down along a cosine; a fast worker makes more than its share of `steps`."""
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return min(1.0, (step + 1) / args["warmup"]) * max(0.05, decay)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    validation = DataLoader(held_out, batch_size=64)
    model, optimizer, loader, scheduler = worker.prepare(model, optimizer, loader, scheduler)

    def validate(epoch: int) -> None:
        if worker.rank == 0:
            with worker.evaluate():
                bits = bits_per_byte(model, validation)
            worker.log(bits_per_byte=bits)
            print(f"after {epoch} epochs: {bits:.3f} bits per byte of the held-out files")

    validate(0)
    for epoch in range(args["epochs"]):
        for bytes_BT, next_BT in loader:
            with worker.accumulate():  # the job's `accumulate` says how many of these make one step
                worker.weight(int((next_BT != NOTHING).sum()))
                loss = loss_of(model, bytes_BT, next_BT)
                loss.backward()
                worker.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            worker.log(loss=loss)
        validate(epoch + 1)


if __name__ == "__main__":
    run = paceline.launch(train, workers=2, accumulate=2, when="bsp")
    print(f"{run.metrics['examples']:g} bytes in {run.metrics['seconds']:.1f} s; see {run.folder}")
