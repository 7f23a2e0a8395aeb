"""The body of a started process: `python -m paceline.engines.child`, with its `ProcessSpec` on standard input.

Standard input stays open as a lifeline: when the launcher dies, however it dies, this process ends at once.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import PacelineError, TrainError
from paceline.watch.events import EventLog

LAUNCHED = "PACELINE_LAUNCHED"
"""Set in the environment of started processes."""


def main() -> int:
    """Read the spec, hold the lifeline, and be what the spec says."""
    _die_with_parent()
    from paceline.engines.spec import ProcessSpec

    size = int.from_bytes(_read(8), "little")
    spec = msgspec.msgpack.decode(_read(size), type=ProcessSpec)
    threading.Thread(target=_hold_lifeline, daemon=True, name="lifeline").start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    sys.path[:] = spec.sys_path
    import torch

    torch.set_num_threads(spec.threads)
    log = EventLog(Path(spec.folder) / "events" / f"{spec.role}-{spec.index}.jsonl")
    try:
        if spec.role == "server":
            serve(spec, socket.socket(fileno=spec.listen_fd), log)
        else:
            from paceline.engines.spec import resolve

            work(spec, lambda: resolve(spec.function), log)
    except PacelineError as error:
        return error.exit_code
    finally:
        log.close()
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def serve(spec: Any, listener: socket.socket, log: EventLog) -> None:
    """Be a server until the run ends. Raises what ended it."""
    from paceline.engines.server import Server
    from paceline.engines.spec import resolve

    _warm_up()
    log.write("start", index=spec.index, pid=os.getpid())
    server = Server(spec.index, spec.to_job(), listener, spec.token, log, lambda: resolve(spec.function))
    try:
        server.run(spec.addresses[0], spec.token)
    except PacelineError as error:
        if not server.aborted:
            record_error(log, error)
        raise
    except Exception as error:
        record_error(log, error)
        raise


def work(spec: Any, find: Callable[[], Callable[[Any], Any]], log: EventLog) -> None:
    """Be a worker: run the train function, then leave the run, saving the final weights if this worker is the last.

    Raises what ended it; an error of the user's script as TrainError, with its traceback printed.
    """
    from paceline.train.client import Client
    from paceline.train.meter import Meter
    from paceline.train.worker import Worker

    job, rank = spec.to_job(), spec.index
    seed = job.seed + rank
    log.write(
        "start",
        rank=rank,
        world=job.workers,
        incarnation=spec.incarnation,
        pid=os.getpid(),
        seed=seed,
        threads=spec.threads,
    )
    meter = Meter()
    client = Client(rank, spec.incarnation, spec.addresses, spec.token, job.lease_s)
    worker = Worker(rank, job, client, log, meter)

    def beat() -> None:
        log.write("now", doing=meter.doing, step=meter.step)
        log.flush()

    try:
        train = find()
        _seed(seed)
        client.start(job.start_s, beat)
        train(worker)
        if worker.finish():
            worker.save(str(Path(spec.folder) / "model.safetensors"))
        bytes_in, bytes_out = client.traffic()
        totals = {key: round(value, 6) for key, value in meter.totals.items()}
        log.write("end", **totals, bytes_in=bytes_in, bytes_out=bytes_out)
    except PacelineError as error:
        if not client.aborted:
            record_error(log, error)
            client.tell_failure(error)
        raise
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        print(text, file=sys.stderr, flush=True)
        mine = TrainError(f"worker {rank}: {type(error).__name__}: {error}", "the traceback is in its log")
        record_error(log, mine, text)
        client.tell_failure(mine)
        raise mine from error
    finally:
        client.close()


def record_error(log: EventLog, error: Exception, text: str = "") -> None:
    """Write an `error` event, from which the launcher tells the user what happened."""
    what = error.what if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
    log.write(
        "error",
        type=type(error).__name__,
        message=what,
        fix=getattr(error, "fix", ""),
        exit_code=getattr(error, "exit_code", 1),
        traceback=text or "".join(traceback.format_exception(error)),
    )
    log.flush()


def _warm_up() -> None:
    """Take the first optimizer step of this process, which imports much, before others wait for an answer."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.0).step()


def _seed(seed: int) -> None:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(0, size - len(data))
        if not chunk:
            os._exit(1)
        data += chunk
    return data


def _hold_lifeline() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _die_with_parent() -> None:
    """On Linux the kernel also ends this process when its launcher dies, even while it is stopped."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


__all__ = ["LAUNCHED", "main", "record_error", "serve", "work"]

if __name__ == "__main__":
    code = main()
    atexit._run_exitfuncs()
    os._exit(code)  # taking the interpreter and PyTorch apart would take a second
