"""Started processes: spawn, gather their output by line, stop them, and know how they ended."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

import paceline
from paceline.engines.child import LAUNCHED
from paceline.engines.spec import ProcessSpec


class Process:
    """One child of the launcher."""

    def __init__(self, spec: ProcessSpec, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.spec = spec
        self.name = f"{spec.role}-{spec.index}"
        self.popen = popen
        self.code: int | None = None
        self.stopped = False
        self._log = log.open("ab")
        self._rest = b""

    @property
    def killed_by(self) -> str:
        """The name of the signal that ended it, where that was not the launcher's own."""
        return signal.Signals(-self.code).name if self.code is not None and self.code < 0 and not self.stopped else ""

    def lines(self, data: bytes) -> Iterator[str]:
        """Keep output in the log, and give it out line by line; no data stands for its end."""
        self._log.write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [self._rest], b""
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]  # what a terminal would show

    def close(self) -> None:
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()


class Processes:
    """All children of one run. None outlives this one: a lifeline pipe and, on Linux, a death signal end them."""

    def __init__(self, print_line: Callable[[str, str], None]) -> None:
        self.alive: list[Process] = []
        self.ended: list[Process] = []
        self._print_line = print_line
        self._selector = selectors.DefaultSelector()

    def start(self, spec: ProcessSpec) -> Process:
        """Spawn a process and hand it its spec."""
        env = dict(os.environ)
        env[LAUNCHED] = "1"
        env["PYTHONUNBUFFERED"] = "1"
        env.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(spec.threads)))
        home = str(Path(paceline.__file__).parent.parent)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [home, env.get("PYTHONPATH", "")]))
        popen = subprocess.Popen(
            [sys.executable, "-m", "paceline.engines.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=[spec.listen_fd] if spec.listen_fd >= 0 else [],
            start_new_session=True,
        )
        process = Process(spec, popen, Path(spec.folder) / "log" / f"{spec.role}-{spec.index}.log")
        self.alive.append(process)
        data = msgspec.msgpack.encode(spec)
        assert popen.stdin is not None
        assert popen.stdout is not None
        try:
            popen.stdin.write(len(data).to_bytes(8, "little") + data)
            popen.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once; its exit code tells
        os.set_blocking(popen.stdout.fileno(), False)
        self._selector.register(popen.stdout, selectors.EVENT_READ, process)
        return process

    def poll(self, timeout_s: float) -> list[Process]:
        """Pass on output for up to `timeout_s`; the processes that ended meanwhile."""
        for key, _ in self._selector.select(timeout_s) if self._selector.get_map() else []:
            self._read(key.data)
        ended = []
        for process in list(self.alive):
            if (code := process.popen.poll()) is None:
                continue
            process.code = code
            self.alive.remove(process)
            self.ended.append(process)
            ended.append(process)
            self._read(process)
            self._forget(process)
        return ended

    def stop(self, grace_s: float = 3.0) -> None:
        """End what still runs: ask first, then kill."""
        for process in self.alive:
            process.stopped = True
            process.popen.terminate()
        deadline_s = time.monotonic() + grace_s
        while self.alive and time.monotonic() < deadline_s:
            self.poll(0.05)
        for process in self.alive:
            process.popen.kill()
        while self.alive:
            self.poll(0.05)

    def _read(self, process: Process) -> None:
        assert process.popen.stdout is not None
        for _ in range(64):
            try:
                data = os.read(process.popen.stdout.fileno(), 65536)
            except BlockingIOError:
                return
            for line in process.lines(data):
                self._print_line(process.name, line)
            if not data:
                if process.popen.stdout in {key.fileobj for key in self._selector.get_map().values()}:
                    self._selector.unregister(process.popen.stdout)
                return

    def _forget(self, process: Process) -> None:
        assert process.popen.stdout is not None
        if process.popen.stdout in {key.fileobj for key in self._selector.get_map().values()}:
            self._selector.unregister(process.popen.stdout)
        process.close()
