"""What a slow worker costs under each policy. Computing is a sleep, so that the cores are not what is measured.

Four workers, two servers. Each case is a whole run with real processes; cases are interleaved over the repetitions and
compared by medians within one repetition.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.watch.events import read

COMPUTE_S = 0.05
WORKERS = 4
STRAGGLER = 3
SLOWER = 5.0
REPETITIONS = 3


def train(worker: Any) -> None:
    """Sleep instead of computing; with `stall_every`, worker 1 takes one long break now and then."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(worker.args["examples"], 64))
    model, optimizer, loader = worker.prepare(model, optimizer, DataLoader(data, batch_size=1))
    stall_every = worker.args.get("stall_every", 0)
    for step, (x,) in enumerate(loader):
        slower = SLOWER if worker.rank == worker.args.get("straggler", -1) else 1.0
        time.sleep(COMPUTE_S * slower)
        if stall_every and worker.rank == 1 and step % stall_every == stall_every - 1:
            time.sleep(worker.args["stall_s"])
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def rates(when: str, **args: Any) -> tuple[float, float]:
    """Updates and examples a second, between the first and the last update."""
    with tempfile.TemporaryDirectory() as runs:
        run = paceline.launch(train, workers=WORKERS, servers=2, when=when, runs=runs, args=args, progress=False)
        updates = [e for e in read(Path(run.folder) / "events" / "server-0.jsonl") if e["kind"] == "update"]
    seconds = updates[-1]["t"] - updates[0]["t"]
    examples = sum(weight for e in updates[1:] for _, _, weight, _ in e["parts"])
    return (len(updates) - 1) / seconds, examples / seconds


def run() -> Iterator[dict[str, Any]]:
    """A worker made 5 times slower: quorum(3) against BSP without it, ASP against BSP with it; and short stalls of one
    worker (2.5 steps long, every 25 steps) under ssp(3) against none, beside what they cost BSP."""
    cases: dict[str, dict[str, Any]] = {
        "bsp": {"when": "bsp", "examples": 240},
        "bsp, straggler": {"when": "bsp", "examples": 96, "straggler": STRAGGLER},
        "quorum:3, straggler": {"when": "quorum:3", "examples": 240, "straggler": STRAGGLER},
        "asp, straggler": {"when": "asp", "examples": 320, "straggler": STRAGGLER},
        "bsp, stalls": {"when": "bsp", "examples": 240, "stall_every": 25, "stall_s": 2.5 * COMPUTE_S},
        "ssp:3": {"when": "ssp:3", "examples": 320},
        "ssp:3, stalls": {"when": "ssp:3", "examples": 320, "stall_every": 25, "stall_s": 2.5 * COMPUTE_S},
    }
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(REPETITIONS):
        for name, case in cases.items():
            seen[name].append(rates(**case))

    def row(name: str, top: str, bottom: str, what: int, target: float) -> dict[str, Any]:
        ratios = [a[what] / b[what] for a, b in zip(seen[top], seen[bottom], strict=True)]
        ratio = statistics.median(ratios)
        return {
            "name": name,
            "ratio": round(ratio, 3),
            "target": target,
            "passed": ratio >= target,
            "unit": "updates/s" if what == 0 else "examples/s",
            "medians": {key: round(statistics.median(r[what] for r in seen[key]), 2) for key in (top, bottom)},
            "spread": [round(min(ratios), 3), round(max(ratios), 3)],
            "repetitions": REPETITIONS,
        }

    yield row("quorum:3 with a 5x straggler / bsp without", "quorum:3, straggler", "bsp", 0, 0.9)
    yield row("asp / bsp, both with a 5x straggler", "asp, straggler", "bsp, straggler", 1, 3.0)
    yield row("bsp with short stalls of one worker / without (for comparison)", "bsp, stalls", "bsp", 1, 0.0)
    yield row("ssp:3 with short stalls of one worker / without", "ssp:3, stalls", "ssp:3", 1, 0.9)
