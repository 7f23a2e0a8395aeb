"""Events: each process writes what happens as JSON lines; others read them, also while they are being written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

Event = dict[str, Any]

_encode = msgspec.json.Encoder(enc_hook=str).encode
_decode = msgspec.json.Decoder(Event).decode


class EventLog:
    """Appends events to a file; any thread may write. Lines reach the file on `flush` and `close`. A line that a killed
    process left torn is ended first, so that only that line is lost."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        torn = _torn(path)
        self._file = path.open("ab")
        if torn:
            self._file.write(b"\n")
        self._clock = clock
        self._lock = threading.Lock()

    def write(self, kind: str, **fields: Any) -> None:
        """Add one event, with the time in unix seconds."""
        event = {"t": self._clock(), "kind": kind, **fields}
        try:
            line = _encode(event) + b"\n"
        except UnicodeEncodeError:  # half a surrogate pair, as in a message with a file name that is no UTF-8
            line = _encode({key: _printable(value) for key, value in event.items()}) + b"\n"
        with self._lock:
            if not self._file.closed:
                self._file.write(line)

    def flush(self) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()


def read(path: Path) -> list[Event]:
    """The events of a file; a torn last line, as a killed process leaves it, is passed over."""
    return list(_parse(path.read_bytes().split(b"\n"))) if path.exists() else []


def read_all(folder: Path) -> dict[str, list[Event]]:
    """The events of every process of a run, by process name."""
    return {path.stem: read(path) for path in sorted((folder / "events").glob("*.jsonl"))}


class Tail:
    """Reads what is new in all event files of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "events"
        self._places: dict[Path, int] = {}

    def poll(self) -> list[tuple[str, Event]]:
        """The events written since the last call, with the names of their processes."""
        found = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._places.get(path, 0))
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._places[path] = self._places.get(path, 0) + whole
            found += [(path.stem, event) for event in _parse(data[:whole].split(b"\n"))]
        return found


def _torn(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"


def _printable(value: Any) -> Any:
    return value if isinstance(value, int | float | None) else str(value).encode("utf-8", "backslashreplace").decode()


def _parse(lines: list[bytes]) -> Iterator[Event]:
    for line in lines:
        try:
            event = _decode(line)
        except msgspec.DecodeError:
            continue
        if "t" in event and "kind" in event:
            yield event
