"""Where a worker's time goes: computing, sending, waiting for release, waiting for data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from paceline.exchange import messages as m
from paceline.watch.events import EventLog


class Meter:
    """Splits the wall time of the training loop into kinds, in seconds; what is left out (evaluation, the start) counts
    as none. `doing` is what the worker does now."""

    def __init__(self) -> None:
        self.doing = "starting"
        self.step = 0
        self.totals = {"steps": 0.0, "weight": 0.0, "compute_s": 0.0, "send_s": 0.0, "wait_s": 0.0, "idle_s": 0.0}
        self._mark_s = time.perf_counter()
        self._spent = {"compute_s": 0.0, "send_s": 0.0, "wait_s": 0.0, "idle_s": 0.0}

    def now(self, doing: str, step: int) -> None:
        self.doing, self.step = doing, step

    def ready(self) -> None:
        """Computing begins here."""
        self.doing = "computing"
        self._mark_s = time.perf_counter()

    def evaluating(self, step: int) -> None:
        self._lap("compute_s")
        self.now("evaluating", step)

    def computed(self, slow: float) -> None:
        """A batch's computing ends here. A worker that is to be slower waits, and counts that as computing."""
        took_s = self._lap("compute_s")
        if slow > 1:
            time.sleep(took_s * (slow - 1))
            self._lap("compute_s")

    def sent(self) -> None:
        """All was handed over to the event loop."""
        self.doing = "waiting"

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around a wait for data, which is no computing."""
        self._lap("compute_s")
        before, self.doing = self.doing, "data"
        try:
            yield
        finally:
            self._lap("idle_s")
            self.doing = before

    def stepped(
        self, log: EventLog, *, step: int, epoch: int, weight: float, version: int, go: m.Go, sent_s: float
    ) -> None:
        """A step ends here: write its event and begin the next. `sent_s` is when the last byte went out, on the clock
        of `time.perf_counter`."""
        sending_s = max(0.0, sent_s - self._mark_s)
        self._mark_s += sending_s
        self._spent["send_s"] += sending_s
        self._lap("wait_s")
        log.write(
            "step",
            step=step,
            epoch=max(epoch, 0),
            weight=weight,
            version=version,
            staleness=go.staleness,
            discarded=bool(go.discarded),
            **{key: round(value, 6) for key, value in self._spent.items()},
        )
        for key, value in self._spent.items():
            self.totals[key] += value
            self._spent[key] = 0.0
        self.totals["steps"] += 1
        self.totals["weight"] += 0.0 if go.discarded else weight
        self.now("computing", step + 1)

    def _lap(self, kind: str) -> float:
        now_s = time.perf_counter()
        lap_s, self._mark_s = now_s - self._mark_s, now_s
        self._spent[kind] += lap_s
        return lap_s
