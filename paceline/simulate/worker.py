"""A worker without a model: it says to the servers what a real one says, in the same order. Pure, as the rest of the
protocol: a driver carries its messages and lets its computations take their time."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.exchange import messages as m
from paceline.state.layout import Layout


@dataclass(frozen=True, slots=True)
class Say:
    """Send `message` with a payload of `nbytes` to `server`."""

    server: int
    message: m.Message
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Compute:
    """Work through `batches` batches, then call `computed()`."""

    batches: int


@dataclass(frozen=True, slots=True)
class Done:
    """The loop over the epochs has ended."""


Action = Say | Compute | Done


class Worker:
    """Takes a batch, computes, announces and pushes, waits for leave and values, and so on for `epochs` epochs.

    A step takes `accumulate` batches, fewer where the data ends. `doing` is what it is at now.
    """

    def __init__(
        self, rank: int, incarnation: int, register: m.Register, layout: Layout, epochs: int, accumulate: int
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.step = 0
        self.epoch = 0
        self.version = -1
        self.doing = "preparing"
        self.grants: list[m.Granted] = []
        self._register = register
        self._servers = self._unheard = layout.shards
        self._pieces = layout.pieces
        self._all = {piece.index for piece in layout.pieces}
        self._epochs = epochs
        self._accumulate = accumulate
        self._expected: int | None = None
        self._arrived: dict[int, set[int]] = {}

    def prepare(self) -> list[Action]:
        """Join the run."""
        return [Say(server, m.Hello("worker", self.rank, self.incarnation)) for server in range(self._servers)]

    def hear(self, message: m.Message) -> list[Action]:
        """A server says something."""
        match message:
            case m.Hello():
                self._unheard -= 1
                return [] if self._unheard else [Say(0, self._register)]
            case m.Provide():
                return [Say(piece.shard, m.Init(piece.index), piece.nbytes) for piece in self._pieces]
            case m.Go(_, version) | m.Now(version) | m.Bye(True, version):
                self._expected = version
                return self._receive()
            case m.Values(version, piece):
                self._arrived.setdefault(version, set()).add(piece)
                return self._receive()
            case m.Granted():
                self.grants.append(message)
                return self._fetch() if self.doing == "standing" else self._draw()
            case m.Empty() | m.Over():
                if self.doing == "standing":
                    return self._fetch()
                if self.grants:
                    return self._compute()
                self.doing = "standing"
                return [Say(0, m.Take(self.epoch, wait=True))]
        return []

    def computed(self) -> list[Action]:
        """The gradient is there: announce it, and push it piece by piece."""
        self.doing = "waiting"
        weight = float(sum(g.stop - g.start for g in self.grants))
        grants = tuple(g.grant for g in self.grants)
        pushes = [Say(piece.shard, m.Push(self.step, piece.index), piece.nbytes) for piece in self._pieces]
        return [Say(0, m.Announce(self.step, self.version, weight, grants, ({},))), *pushes]

    def _draw(self) -> list[Action]:
        if len(self.grants) >= self._accumulate:
            return self._compute()
        self.doing = "drawing"
        return [Say(0, m.Take(self.epoch, wait=False))]

    def _compute(self) -> list[Action]:
        self.doing = "computing"
        return [Compute(len(self.grants))]

    def _fetch(self) -> list[Action]:
        """After standing still: the others may have gone on meanwhile."""
        self.doing = "fetching"
        return [Say(0, m.Fetch())]

    def _receive(self) -> list[Action]:
        """Go on once the expected version is here in whole."""
        if self._expected is None or not self._arrived.get(self._expected, set()) >= self._all:
            return []
        before, self.version, self._expected = self.doing, self._expected, None
        self._arrived.clear()
        if before == "finished":
            return [Say(0, m.Saved())]
        if before == "preparing":
            return [*([Say(0, m.Digest("same"))] if self.version == 0 else []), *self._draw()]
        if before == "waiting":
            self.step += 1
            self.grants = []
        elif before == "fetching" and not self.grants:
            self.epoch += 1
            if self.epoch == self._epochs:
                self.doing = "finished"
                return [Done(), Say(0, m.Finished())]
        return self._draw()
