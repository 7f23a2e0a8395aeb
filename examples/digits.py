"""A small convolutional network on scikit-learn's digits: 1,797 images of 8 x 8, of which 360 are held out.

    python examples/digits.py
    paceline train examples/digits.py:train --workers 4 --when ssp:3
    paceline compare examples/digits.toml --when bsp --when quorum:3 --when ssp:3 --when asp

Settings (`args`): epochs, batch (examples a worker takes at a time), lr.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline

HELD_OUT = 360


def data() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """The examples to train on, and the held-out images and labels: the same split on every worker, in every run."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[:HELD_OUT], order[HELD_OUT:]
    return TensorDataset(images[rest], labels[rest]), images[held_out], labels[held_out]


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 48, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(48, 96, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(96 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(worker: paceline.Worker) -> None:
    args = {"epochs": 10, "batch": 16, "lr": 0.001} | worker.args
    examples, images, labels = data()
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=args["lr"])
    loader = DataLoader(examples, batch_size=args["batch"], shuffle=True)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    for epoch in range(args["epochs"]):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)  # steadies Adam under stale gradients
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            worker.log(loss=loss)
        if worker.rank == 0:
            with worker.evaluate():
                accuracy = (model(images).argmax(1) == labels).float().mean().item()
            worker.log(accuracy=accuracy)
            print(f"epoch {epoch + 1}: {accuracy:.1%} of the held-out digits are right")


if __name__ == "__main__":
    run = paceline.launch(train, workers=2, when="ssp:3")
    print(f"{run.metrics['examples']:g} examples in {run.metrics['seconds']:.1f} s; see {run.folder}")
