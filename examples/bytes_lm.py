"""A small GPT over the source of Python's standard library, byte by byte, by plain PyTorch.

    paceline train examples/bytes_lm.toml
    python examples/bytes_lm.py

Shapes: B batch, T time, C channels, V = 256 bytes, H heads.
"""

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import paceline


def corpus(megabytes: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation bytes: about `megabytes` MB of source files, of which every 20th file is held out."""
    paths = [p for p in sorted(Path(os.__file__).parent.rglob("*.py")) if "site-packages" not in p.parts]
    step = max(1, round(sum(p.stat().st_size for p in paths) / (megabytes * 1e6)))
    train, valid = bytearray(), bytearray()
    for i, path in enumerate(paths[::step]):
        (valid if i % 20 == 19 else train).extend(path.read_bytes())
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(valid, dtype=torch.uint8)


class Windows(Dataset[torch.Tensor]):
    """Consecutive windows of `length + 1` bytes."""

    def __init__(self, data: torch.Tensor, length: int) -> None:
        self.data, self.length = data, length

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.data[i * self.length : (i + 1) * self.length + 1].long()


class Block(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        B, T, C = x_BTC.shape
        q, k, v = (y.view(B, T, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x_BTC)).split(C, 2))
        mixed_BHTc = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.out(mixed_BHTc.transpose(1, 2).reshape(B, T, C))
        return x_BTC + self.mlp(self.norm2(x_BTC))


class GPT(nn.Module):
    def __init__(self, layers: int, channels: int, heads: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, channels), nn.Embedding(length, channels)
        self.blocks = nn.Sequential(*[Block(channels, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(channels), nn.Linear(channels, 256, bias=False)
        self.head.weight = self.bytes.weight  # tied
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        x_BTC = self.bytes(bytes_BT) + self.places.weight[: bytes_BT.shape[1]]
        return self.head(self.norm(self.blocks(x_BTC)))  # logits_BTV


def loss_of(model: nn.Module, window_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each next byte, in nats."""
    logits_BTV = model(window_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), window_BT[:, 1:].flatten())


def train(worker: Any) -> None:
    args = {
        "megabytes": 0.6,
        "length": 64,
        "layers": 2,
        "channels": 96,
        "heads": 4,
        "batch": 16,
        "lr": 3e-3,
        "epochs": 1,
    }
    args |= worker.args
    train_bytes, valid_bytes = corpus(args["megabytes"])
    model = GPT(args["layers"], args["channels"], args["heads"], args["length"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args["lr"], weight_decay=0.01)
    loader = DataLoader(Windows(train_bytes, args["length"]), batch_size=args["batch"], shuffle=True, drop_last=True)
    valid = Windows(valid_bytes, args["length"])
    held_out = torch.stack([valid[i] for i in range(min(256, len(valid)))])

    steps = args["epochs"] * len(loader) // worker.world // worker.job.accumulate
    warm = max(1, steps // 20)

    def rate(step: int) -> float:  # linear warm-up, then a cosine down to a tenth
        return min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / max(1, steps))))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model, optimizer, loader, scheduler = worker.prepare(model, optimizer, loader, scheduler)

    def validate() -> None:
        with worker.evaluate():
            worker.log(bits_per_byte=loss_of(model, held_out) / math.log(2))

    for _ in range(args["epochs"]):
        for i, window_BT in enumerate(loader):
            if worker.rank == 0 and i % 100 == 0:
                validate()
            with worker.accumulate():
                worker.weight(window_BT[:, 1:].numel())  # tokens, not windows
                loss = loss_of(model, window_BT)
                loss.backward()
                worker.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                worker.log(loss=loss)
    if worker.rank == 0:
        validate()


if __name__ == "__main__":
    run = paceline.launch(train, workers=2, when="bsp")
    print(f"trained in {run.metrics['seconds']:.1f} s; see {run.folder}")
