"""The threads engine: a whole run inside this process, for debuggers and quick tests.

The protocol, the links and the servers are the same as in the local engine; only the processes are threads. Workers
share the interpreter and PyTorch's global random state, so it is neither fast nor reproducible where randomness is
drawn.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from paceline import job as jobs
from paceline import wire
from paceline.engines import child
from paceline.engines.run import Run, make_folder
from paceline.engines.spec import FunctionRef, ProcessSpec, check
from paceline.errors import PacelineError
from paceline.job import Job
from paceline.watch.events import EventLog
from paceline.watch.summary import write_metrics


def launch_threads(train: Callable[[Any], Any], job: Job | None = None, /, **settings: Any) -> Run:
    """`launch`, with threads in place of processes; `train` may be any function of one argument, a closure too.

    Raises what ended the run, as `launch` does.
    """
    check(train)
    resolved = jobs.job(job, **settings)
    place = tempfile.mkdtemp(prefix="paceline-")
    bound = [wire.bind(f"unix:{place}/server-{index}") for index in range(resolved.servers)]
    folder = make_folder(resolved).absolute()
    token = secrets.token_bytes(32)
    errors: list[tuple[str, BaseException]] = []

    def body(role: Any, index: int, listener: socket.socket | None) -> None:
        spec = ProcessSpec(
            role=role,
            index=index,
            incarnation=0,
            job=jobs.to_table(resolved),
            addresses=[address for _, address in bound],
            listen_fd=-1,
            token=token,
            folder=str(folder),
            function=FunctionRef("", "", ""),
            sys_path=[],
            threads=1,
        )
        log = EventLog(folder / "events" / f"{role}-{index}.jsonl")
        try:
            if listener is not None:
                child.serve(spec, listener, log)
            else:
                child.work(spec, lambda: train, log)
        except BaseException as error:
            errors.append((f"{role}-{index}", error))
        finally:
            log.close()

    threads = [
        threading.Thread(target=body, args=("server", i, sock), daemon=True) for i, (sock, _) in enumerate(bound)
    ]
    threads += [threading.Thread(target=body, args=("worker", i, None), daemon=True) for i in range(resolved.workers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    write_metrics(folder)
    if errors:
        by_server = [error for name, error in errors if name == "server-0"]
        error = by_server[0] if by_server else errors[0][1]
        raise error if isinstance(error, PacelineError) else RuntimeError(f"the run failed: {error!r}") from error
    return Run(folder)
