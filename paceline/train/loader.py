"""The user's loader after `prepare`: batches come as the ledger grants them, or are this worker's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from paceline.errors import DataError
from paceline.exchange import messages as m
from paceline.train.client import Client
from paceline.train.meter import Meter


class Drawn:
    """What the worker has drawn from its loader and not contributed yet."""

    def __init__(self) -> None:
        self.weight: float | None = None
        self.grants: list[int] = []
        self.last = False
        """Whether no batch follows at present: an accumulation window closes here."""

    def add(self, batch: Any, grant: int | None) -> None:
        size = leading_dimension(batch)
        self.weight = (self.weight or 0.0) + (1 if size is None else size)
        if grant is not None:
            self.grants.append(grant)

    def clear(self) -> None:
        self.weight, self.grants = None, []


def leading_dimension(batch: Any) -> int | None:
    """The size of the first dimension of the first tensor in a batch (tensors, sequences, mappings; nested).

    >>> leading_dimension({"x": torch.zeros(5, 3), "y": torch.zeros(5)})
    5
    """
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((size for item in batch if (size := leading_dimension(item)) is not None), None)
    return None


def data_spec(loader: Any, shard: bool, workers: int) -> m.DataSpec:
    """How the ledger sees a loader. Raises DataError for one that cannot be shared out."""
    if not shard or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        if shard and not isinstance(loader, DataLoader) and not isinstance(loader, Iterable):
            raise DataError(f"{type(loader).__name__} is no loader", "give a DataLoader or an iterable of batches")
        return m.DataSpec()
    if loader.batch_size is None or not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        what = type(loader.sampler if loader.batch_size is not None else loader.batch_sampler).__name__
        raise DataError(
            f"the loader has its own sampling ({what}), and examples are shared out by position",
            "use shuffle=True or False with a batch_size; or prepare(..., shard=False), each worker then draws its own",
        )
    examples = len(loader.dataset)  # type: ignore[arg-type]
    if examples < workers:
        raise DataError(f"the dataset has {examples} examples for {workers} workers", "use fewer workers or more data")
    if loader.drop_last and examples < loader.batch_size:
        what = f"the dataset has {examples} examples, less than one batch of {loader.batch_size}, and drop_last is set"
        raise DataError(what, "use a smaller batch_size or drop_last=False")
    return m.DataSpec(examples, loader.batch_size, loader.drop_last)


class PreparedLoader:
    """Iterates over the worker's share of an epoch. Each `for` is one epoch; epochs end together on all workers.

    `len()` is the number of batches of an even share. A loader over an `IterableDataset` is read whole by every worker,
    which keeps each world-th batch.
    """

    def __init__(
        self,
        inner: Any,
        client: Client,
        drawn: Drawn,
        spec: m.DataSpec,
        seed: int,
        look_ahead: bool,
        meter: Meter,
        refresh: Callable[[], None],
    ) -> None:
        self._inner = inner
        self._client = client
        self._drawn = drawn
        self._spec = spec
        self._seed = seed
        self._look_ahead = look_ahead
        self._meter = meter
        self._refresh = refresh
        self.stride = (0, 1)
        self.epoch = -1

    def __len__(self) -> int:
        if not self._spec.examples:
            return -(-len(self._inner) // self.stride[1])
        batch, whole = self._spec.batch, self._spec.examples
        batches = whole // batch if self._spec.drop_last else -(-whole // batch)
        return -(-batches // self.stride[1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[Any]:
        self._leave_behind()
        self.epoch += 1
        while True:
            batches = self._granted() if self._spec.examples else ((None, b) for b in self._own())
            yield from self._count(batches)
            self._leave_behind()
            with self._meter.loading():
                self._client.tell(m.Take(self.epoch, wait=True))
                answer = self._client.wait_for(m.Granted, m.Over)
                self._refresh()  # the others may have gone on while this worker stood still
            if isinstance(answer, m.Over):
                return
            self._first = answer

    def _leave_behind(self) -> None:
        """Batches drawn, but in no contribution when the epoch ends or is left: they are reported as skipped."""
        if self._drawn.grants:
            self._client.tell(m.GiveBack(tuple(self._drawn.grants), skip=True))
            self._drawn.grants = []

    _first: m.Granted | None = None

    def _count(self, batches: Iterator[tuple[int | None, Any]]) -> Iterator[Any]:
        """Note each batch's weight and grant as it is handed out; look one ahead where a window must know its end."""
        ahead = self._next(batches)
        while ahead is not None:
            grant, batch = ahead
            ahead = self._next(batches) if self._look_ahead else None
            self._drawn.last = self._look_ahead and ahead is None
            self._drawn.add(batch, grant)
            yield batch
            if not self._look_ahead:
                ahead = self._next(batches)

    def _next(self, batches: Iterator[tuple[int | None, Any]]) -> tuple[int | None, Any] | None:
        with self._meter.loading():
            return next(batches, None)

    def _own(self) -> Iterator[Any]:
        rank, world = self.stride
        return (batch for i, batch in enumerate(self._inner) if i % world == rank)

    def _granted(self) -> Iterator[tuple[int, Any]]:
        inner: DataLoader[Any] = self._inner
        order = self._order(inner)
        queue: list[int] = []

        def positions() -> Iterator[list[int]]:
            while (granted := self._next_grant()) is not None:
                queue.append(granted.grant)
                yield order[granted.start : granted.stop]

        loader = DataLoader(
            inner.dataset,
            batch_sampler=positions(),
            num_workers=inner.num_workers,
            collate_fn=inner.collate_fn,
            pin_memory=inner.pin_memory,
            timeout=inner.timeout,
            worker_init_fn=inner.worker_init_fn,
            multiprocessing_context=inner.multiprocessing_context,
            generator=inner.generator,
            prefetch_factor=inner.prefetch_factor,
        )
        try:
            for batch in loader:
                yield queue.pop(0), batch
        finally:
            if queue:
                self._client.tell(m.GiveBack(tuple(queue), skip=False))

    def _next_grant(self) -> m.Granted | None:
        if self._first is not None:
            granted, self._first = self._first, None
            return granted
        self._client.tell(m.Take(self.epoch, wait=False))
        answer = self._client.wait_for(m.Granted, m.Empty, m.Over)
        return answer if isinstance(answer, m.Granted) else None

    def _order(self, inner: DataLoader[Any]) -> Any:
        """The epoch's order of examples: the same on every worker, from the seed and the epoch."""
        if isinstance(inner.sampler, SequentialSampler):
            return range(self._spec.examples)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        return torch.randperm(self._spec.examples, generator=generator).tolist()
