"""The local engine: all processes of a run on this host."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline import job as jobs
from paceline import wire
from paceline.engines.child import LAUNCHED
from paceline.engines.processes import Process, Processes
from paceline.engines.run import Run, make_folder
from paceline.engines.spec import FunctionRef, ProcessSpec, check, parse, reference, resolve
from paceline.errors import Interrupted, PacelineError, ScriptError, ServerLost, TrainError, by_name
from paceline.job import Job
from paceline.watch.events import EventLog, read
from paceline.watch.progress import Progress
from paceline.watch.summary import write_metrics

GRACE_S = 5.0
"""How long the other processes may take to end once a server has, or all workers have."""

SOCKETS = "paceline-sockets-"

RESTARTS = 3
"""How often each worker is started anew with `on_loss = "restart"`."""


def launch(
    train: Callable[[Any], Any] | str | Job, job: Job | None = None, /, *, progress: bool = True, **settings: Any
) -> Run:
    """Train with worker and server processes on this host, and return the run when it has finished.

    `train` is a function of one argument, the worker, at the top level of a module; or `"script.py:function"`; or a Job
    that names its script. `settings` are fields of Job, as in `workers=4, servers=2, when="ssp:3"`. `progress` shows
    what the workers do while they do it.

    Raises, before any process starts, JobError, ScriptError or AddressError for what cannot run; afterwards what ended
    the run: TrainError, WorkerLost, ServerLost, NonFiniteError, TimedOut, ModelError, OptimizerError, DataError.
    """
    if os.environ.get(LAUNCHED):
        fix = 'put launch() under if __name__ == "__main__":, so that workers do not run it when they load the script'
        raise ScriptError("launch() was called in a process that launch() has started", fix)
    if isinstance(train, Job):
        return launch(train.script, train, progress=progress, **settings)
    resolved = jobs.job(job, **settings)
    if isinstance(train, str):
        function = parse(train)
        check(resolve(function))
    else:
        check(train)
        function = reference(train)
    return Launcher(resolved, function, progress).run()


class Launcher:
    """One run from its first process to its last."""

    def __init__(self, job: Job, function: FunctionRef, progress: bool) -> None:
        self.job = job
        self.function = function
        self._token = secrets.token_bytes(32)
        self._console = Console(stderr=True, quiet=not progress)
        self._restarts: dict[int, int] = {}
        self._deadline_s: float | None = None

    def run(self) -> Run:
        began_s = time.monotonic()
        with self._listeners() as (listeners, addresses):
            folder = make_folder(self.job).absolute()
            self._folder, self._addresses = folder, addresses
            self._log = EventLog(folder / "events" / "launcher.jsonl")
            self._log.write("job", **jobs.to_table(self.job))
            status, error = "failed", None
            self._progress = Progress(folder, self._console)
            self._processes = Processes(self._progress.print_line)
            try:
                with self._progress, _sigterm():
                    self._start(listeners)
                    self._watch()
                error = self._verdict()
                status = "failed" if error else "ok"
            except (KeyboardInterrupt, Interrupted) as signalled:
                status, error = "interrupted", signalled  # type: ignore[assignment]
            finally:
                self._processes.stop()
                seconds = round(time.monotonic() - began_s, 3)
                self._log.write("end", status=status, seconds=seconds, error=None if error is None else str(error))
                self._log.close()
                write_metrics(folder)
        if error is not None:
            raise error
        return Run(folder)

    @contextlib.contextmanager
    def _listeners(self) -> Iterator[tuple[list[socket.socket], list[str]]]:
        """Listening sockets, bound here so that a port in use is known before anything starts."""
        _sweep()
        place = tempfile.mkdtemp(prefix=f"{SOCKETS}{os.getpid()}-")
        sockets: list[socket.socket] = []
        addresses = []
        try:
            for index in range(self.job.servers):
                port = self.job.port + index if self.job.port else 0
                wanted = f"unix:{place}/server-{index}" if self.job.link == "unix" else f"tcp:{self.job.host}:{port}"
                sock, address = wire.bind(wanted)
                sockets.append(sock)
                addresses.append(address)
            yield sockets, addresses
        finally:
            for sock in sockets:
                sock.close()
            shutil.rmtree(place, ignore_errors=True)

    def _start(self, listeners: list[socket.socket]) -> None:
        for index, sock in enumerate(listeners):
            self._spawn("server", index, 0, sock.fileno())
        for sock in listeners:
            sock.close()
        for rank in range(self.job.workers):
            self._spawn("worker", rank, 0)

    def _spawn(self, role: Any, index: int, incarnation: int, fd: int = -1) -> Process:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = self.job.threads or (max(1, cores // self.job.workers) if role == "worker" else 1)
        process = self._processes.start(
            ProcessSpec(
                role=role,
                index=index,
                incarnation=incarnation,
                job=jobs.to_table(self.job),
                addresses=self._addresses,
                listen_fd=fd,
                token=self._token,
                folder=str(self._folder),
                function=self.function,
                sys_path=[path or os.getcwd() for path in sys.path],
                threads=threads,
            )
        )
        self._log.write("spawn", name=process.name, pid=process.popen.pid)
        self._log.flush()
        return process

    def _watch(self) -> None:
        """Until all have ended; what still runs some time after a server has ended, or all workers have, is stopped."""
        while self._processes.alive:
            for process in self._processes.poll(0.1):
                self._ended(process)
            self._progress.update()
            self._log.flush()
            if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                self._processes.stop(grace_s=0.5)

    def _ended(self, process: Process) -> None:
        self._log.write("exit", name=process.name, code=process.code)
        spec = process.spec
        if spec.role == "worker" and process.killed_by and self.job.on_loss == "restart" and self._deadline_s is None:
            count = self._restarts.get(spec.index, 0)
            if count < RESTARTS:
                self._restarts[spec.index] = count + 1
                self._spawn("worker", spec.index, spec.incarnation + 1)
                return
        workers_left = any(p.spec.role == "worker" for p in self._processes.alive)
        if self._deadline_s is None and (spec.role == "server" or not workers_left):
            self._deadline_s = time.monotonic() + GRACE_S

    def _verdict(self) -> PacelineError | None:
        """What ended the run, or None when it went well."""
        for process in self._processes.ended:
            if process.spec.role == "server" and process.killed_by:
                return ServerLost(
                    f"server {process.spec.index} was killed by {process.killed_by}",
                    f"see {self._folder}; start it again",
                )
        failed = [p for p in self._processes.ended if p.code != 0]
        if not any(p.spec.role == "server" for p in failed):
            return None if (self._folder / "model.safetensors").exists() or not failed else self._first_error(failed)
        return self._first_error(failed)

    def _first_error(self, failed: list[Process]) -> PacelineError:
        """The error that the coordinator ended the run with, or else the first that a process wrote."""
        events = [
            (process.name != "server-0", event["t"], event)
            for process in failed
            for event in read(self._folder / "events" / f"{process.name}.jsonl")
            if event["kind"] == "error"
        ]
        if not events:
            first = failed[0]
            how = f"was killed by {first.killed_by}" if first.killed_by else f"ended with code {first.code}"
            return TrainError(f"{first.name} {how}", f"see {self._folder / 'log' / first.name}.log")
        event = min(events, key=lambda item: item[:2])[2]
        what = event["message"]
        for process in self._processes.ended:
            if process.killed_by and event["type"] == "WorkerLost" and f"worker {process.spec.index} " in what:
                what += f" (killed by {process.killed_by})"
        return by_name(event["type"])(what, event["fix"])


def _sweep() -> None:
    """Remove the socket folders of launchers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SOCKETS}*-*"):
        pid = folder.name.removeprefix(SOCKETS).partition("-")[0]
        if pid.isdecimal():
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)
            except PermissionError:
                pass  # another user's, and alive


@contextlib.contextmanager
def _sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the run ends in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_it(*_: Any) -> None:
        raise Interrupted("the run was ended by SIGTERM")

    before = signal.signal(signal.SIGTERM, raise_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
