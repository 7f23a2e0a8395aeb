"""The worker as the user's train function sees it: prepare, accumulate, clip, log, evaluate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import DataError, ModelError, NonFiniteError, OptimizerError, PacelineError
from paceline.exchange import messages as m
from paceline.job import Job
from paceline.state.describe import describe, hyperparameters
from paceline.state.layout import lay_out
from paceline.state.replica import Replica
from paceline.train.client import Client
from paceline.train.loader import Drawn, PreparedLoader, data_spec
from paceline.train.meter import Meter
from paceline.train.optimizer import PreparedOptimizer, PreparedScheduler
from paceline.watch.events import EventLog


class Worker:
    """One of `world` workers. The train function gets it, prepares its model, optimizer and loader with it, and then
    trains as plain PyTorch does.

    `rank`: 0 to `world - 1`; `seed`: `job.seed + rank`, with which torch, NumPy and random were seeded; `args`: the
    job's `args`; `version`: of the parameters that the model holds.
    """

    def __init__(self, rank: int, job: Job, client: Client, log: EventLog, meter: Meter) -> None:
        self.rank = rank
        self.world = job.workers
        self.seed = job.seed + rank
        self.args = job.args
        self.job = job
        self.version = -1
        self.replica: Replica | None = None
        self._client = client
        self._log = log
        self._meter = meter
        self._drawn = Drawn()
        self._optimizer: torch.optim.Optimizer | None = None
        self._model: nn.Module | None = None
        self._loader: PreparedLoader | None = None
        self._step = 0
        self._micro = 0
        self._window_open = False
        self._due = True
        self._window: dict[str, torch.Tensor] = {}
        self._window_weight = 0.0
        self._weight: float | None = None
        self._max_norm: float | None = None
        self._max_value: float | None = None

    # Preparing --------------------------------------------------------------------------------------------------------

    def prepare(self, *things: Any, shard: bool = True) -> Any:
        """Take part: give one model, its optimizer, and, where you have them, a loader of training batches and
        learning-rate schedulers, in any order; get them back in that order, ready for the loop.

        The model is changed in place to the initial values, which are those of worker 0. The examples of a loader over
        a map-style dataset are shared out by the ledger; of any other loader or iterable, each worker reads all and
        keeps every world-th batch. `shard=False` says instead that the loader is this worker's own data.

        Raises ModelError, OptimizerError or DataError for what cannot be prepared, and whatever ends the run.
        """
        if self.replica is not None:
            raise ModelError("prepare() was called twice", "prepare the model, optimizer and loader in one call")
        model = self._only(things, nn.Module, "model", ModelError)
        optimizer = self._only(things, torch.optim.Optimizer, "optimizer", OptimizerError)
        loaders = [t for t in things if not isinstance(t, nn.Module | torch.optim.Optimizer | LRScheduler)]
        if len(loaders) > 1:
            raise DataError(f"prepare() got {len(loaders)} loaders", "prepare the training loader only")
        spec = describe(model, optimizer)
        data = data_spec(loaders[0], shard, self.world) if loaders else m.DataSpec()
        self._model, self._optimizer = model, optimizer
        self._join(spec, data)
        prepared: dict[int, Any] = {id(optimizer): PreparedOptimizer(optimizer, self._exchange)}
        if loaders:
            look_ahead = self.job.accumulate > 1
            self._loader = PreparedLoader(
                loaders[0], self._client, self._drawn, data, self.job.seed, look_ahead, self._meter, self._refresh
            )
            if shard:
                self._loader.stride = (self.rank, self.world)
        result: list[Any] = []
        for thing in things:
            if isinstance(thing, LRScheduler):
                result.append(PreparedScheduler(thing, lambda: self._due))
            elif isinstance(thing, nn.Module):
                result.append(thing)
            else:
                result.append(prepared.get(id(thing), self._loader))
        return result[0] if len(result) == 1 else tuple(result)

    @staticmethod
    def _only(things: Iterable[Any], kind: type, name: str, error: type[PacelineError]) -> Any:
        found = [thing for thing in things if isinstance(thing, kind)]
        if len(found) != 1:
            raise error(f"prepare() got {len(found)} {name}s", f"give exactly one {name}, in one call")
        return found[0]

    def _join(self, spec: Any, data: m.DataSpec) -> None:
        """Register, upload the initial values if asked to, and take in everybody's."""
        assert self._model is not None
        layout = lay_out(spec, self.job.servers, self.job.piece_bytes)
        self.replica = Replica(self._model, layout, spec)
        self._pieces = layout.pieces
        self._moving = {piece.index for piece in layout.pieces if piece.kind != "frozen"}
        self._client.expect_pieces({piece.index: piece.nbytes for piece in layout.pieces})
        self._client.tell(m.Register(spec, data))
        answer = self._client.wait_for(m.Provide, m.Go)
        if isinstance(answer, m.Provide):
            values = [(p.shard, m.Init(p.index), self.replica.values(p)) for p in layout.pieces]
            self._client.tell_shards(values)
            answer = self._client.wait_for(m.Go)
        self._receive(answer.version, {piece.index for piece in layout.pieces})
        if answer.version == 0:
            self._client.tell(m.Digest(self.replica.digest()))
        self._meter.ready()

    # The step ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around one micro-batch: forward, backward, `optimizer.step()`, `optimizer.zero_grad()`. Each `job.accumulate`
        micro-batches, and where the data ends, make one contribution, equal to that of the one big batch: the
        micro-batches' gradients are weighted by their examples, so do not divide the loss yourself."""
        self._micro += 1
        self._due = self._micro >= self.job.accumulate or self._drawn.last
        self._window_open = True
        try:
            yield
        finally:
            self._window_open = False
            if self._due:
                self._micro = 0
            self._due = True

    def weight(self, amount: float) -> None:
        """Say what this batch weighs among the others of its step (tokens, say), where that is not its leading
        dimension. Amounts given since the last `optimizer.step()` add up. Raises DataError when negative or not
        finite."""
        amount = float(amount)
        if not 0 <= amount < float("inf"):
            raise DataError(f"weight({amount})", "give the number of examples or tokens, 0 or more")
        self._weight = (self._weight or 0.0) + amount

    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> None:
        """Clip the averaged gradient of the whole model to L2 norm `max_norm` in this step. Equal to
        `torch.nn.utils.clip_grad_norm_` in one process on the whole batch. Raises ModelError when `parameters` are not
        all of the model's, or `max_norm` is not above 0."""
        self._check_whole(parameters)
        if not max_norm > 0:
            raise ModelError(f"max_norm = {max_norm}", "give a norm above 0")
        self._max_norm = float(max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp each element of the averaged gradient to ±`clip_value` in this step, as
        `torch.nn.utils.clip_grad_value_` does. Raises ModelError as `clip_grad_norm_` does."""
        self._check_whole(parameters)
        if not clip_value > 0:
            raise ModelError(f"clip_value = {clip_value}", "give a value above 0")
        self._max_value = float(clip_value)

    def without_gradient(self) -> list[str]:
        """The names of the trained parameters that have no gradient now: they count as zero in this step. Raises
        ModelError before `prepare`."""
        if self._model is None:
            raise ModelError("without_gradient() before prepare()", "prepare the model first")
        return [name for name, p in self._model.named_parameters() if p.requires_grad and p.grad is None]

    def _check_whole(self, parameters: Any) -> None:
        assert self._model is not None
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ours = {id(p) for p in self._model.parameters() if p.requires_grad}
        if not ours <= {id(p) for p in given}:
            raise ModelError(
                f"clipping {len(given)} of the model's {len(ours)} parameters",
                "give model.parameters(): the servers clip the averaged gradient of the whole model",
            )

    def _exchange(self) -> None:
        """The optimizer's step: close the accumulation window, or keep this micro-batch's gradients in it."""
        replica, client, meter = self.replica, self._client, self._meter
        if replica is None:
            raise ModelError("optimizer.step() before prepare()", "use the optimizer that prepare() gave back")
        replica.check_identity()
        meter.computed(self.job.slow.get(self.rank, 1.0))
        gradients = None
        weight = self._take_weight()
        if self._window_open and (not self._due or self._window_weight):
            gradients = self._fold(weight)
            if not self._due:
                meter.ready()
                return
            weight, self._window_weight = self._window_weight, 0.0
        meter.now("sending", self._step)
        bad = replica.finite(gradients) if weight > 0 else None
        if bad is not None and self.job.on_nan == "stop":
            raise NonFiniteError(
                f"worker {self.rank}: the gradient of {bad} is not finite at step {self._step}",
                'lower the learning rate, or set on_nan="skip" to leave such batches out',
            )
        step, pushed = self._step, weight > 0 and bad is None
        assert self._optimizer is not None
        client.tell(
            m.Announce(
                step=step,
                version=self.version,
                weight=weight,
                grants=tuple(self._drawn.grants),
                groups=hyperparameters(self._optimizer),
                max_norm=self._max_norm,
                max_value=self._max_value,
                pushed=pushed,
            )
        )
        if pushed:
            frames: list[tuple[int, m.Message, Any]] = []
            for piece in self._pieces:
                if piece.index in self._moving:
                    present, payload = replica.gradients(piece, gradients)
                    frames.append((piece.shard, m.Push(step, piece.index, present), payload))
            client.tell_shards(frames)
        meter.sent()
        go = client.wait_for(m.Go)
        read = self.version
        self._receive(go.version, self._moving)
        self._window = {}
        self._drawn.clear()
        self._max_norm = self._max_value = None
        epoch = self._loader.epoch if self._loader is not None else 0
        meter.stepped(self._log, step=step, epoch=epoch, weight=weight, version=read, go=go, sent_s=client.sent_s)
        self._step += 1

    def _take_weight(self) -> float:
        """The weight of what was drawn since the last call: what the user said, or examples, or 1 without a loader."""
        weight = self._weight if self._weight is not None else self._drawn.weight
        self._weight = self._drawn.weight = None
        return 1.0 if weight is None else weight

    def _fold(self, weight: float) -> dict[str, torch.Tensor]:
        """Add this micro-batch's gradients to the window, so that it holds the weighted mean of all so far."""
        assert self._model is not None
        total = self._window_weight + weight
        share = weight / total if total else 0.0
        for name, parameter in self._model.named_parameters():
            kept = self._window.get(name)
            gradient = parameter.grad
            if kept is not None:
                kept.mul_(1 - share)
            if gradient is None:
                continue
            wide = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.dtype
            if kept is None:
                self._window[name] = gradient.to(wide, copy=True).mul_(share)
            else:
                kept.add_(gradient.to(wide), alpha=share)
            parameter.grad = None
        self._window_weight = total
        return self._window

    def _receive(self, version: int, pieces: set[int]) -> None:
        """Wait for the values of `version` and take them into the model."""
        assert self.replica is not None
        self._client.wait_for_pieces(version, pieces)
        for piece in self._pieces:
            if piece.index in pieces:
                self.replica.load(piece, self._client.buffers[piece.index])
        self.version = version

    def _refresh(self) -> None:
        """Take in the newest values."""
        self._client.tell(m.Fetch())
        self._receive(self._client.wait_for(m.Now).version, self._moving)

    # Evaluating and logging -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluate(self) -> Iterator[None]:
        """Evaluate the newest version, the same cut on all servers: in eval mode, without gradients. The others do not
        take this worker for lost meanwhile, however long it lasts. Raises ModelError in an open accumulation window."""
        if self.replica is None or self._model is None:
            raise ModelError("evaluate() before prepare()", "prepare the model first")
        if self._window_weight:
            raise ModelError(
                "evaluate() in an open accumulation window", "evaluate after the window's last micro-batch"
            )
        self._meter.evaluating(self._step)
        self._refresh()
        training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._model.train(training)
            self._meter.ready()

    def log(self, **values: Any) -> None:
        """Record values of this step (floats or tensors of one element); `loss` is what the progress line and the
        curves show."""
        plain = {
            key: float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            for key, value in values.items()
        }
        epoch = self._loader.epoch if self._loader is not None else 0
        self._log.write("log", step=self._step, epoch=max(epoch, 0), values=plain)

    # The end ----------------------------------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Leave the run; True when this worker is the last one and now holds the final values, to be saved."""
        self._meter.now("finished", self._step)
        self._client.tell(m.Finished())
        bye = self._client.wait_for(m.Bye)
        if bye.save and self.replica is not None:
            self._receive(bye.version, {piece.index for piece in self._pieces})
        return bye.save

    def save(self, path: str) -> None:
        """Write the model's values as safetensors: written aside, synced, then renamed, so that a crash leaves either
        the whole file or none."""
        import os

        from safetensors.torch import save_model

        assert self._model is not None
        aside = f"{path}.part"
        save_model(self._model, aside, metadata={"version": str(self.version)})
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
        self._client.tell(m.Saved())
