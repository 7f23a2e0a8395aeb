"""The exception tree: what was wrong (with the value), the fix, and the exit code the command line ends with.

| code | meaning |
|---|---|
| 0 | the run finished |
| 1 | the user's script raised |
| 2 | a setting, path or model is wrong; nothing was trained |
| 3 | a worker was lost and `on_loss` is "stop", or no worker is left |
| 4 | a server was lost |
| 5 | something did not happen in time |
| 6 | a loss or gradient was not finite and `on_nan` is "stop" |
| 7 | the network: an address, a token, a broken frame |
| 130, 143 | ended by Ctrl-C, by SIGTERM |
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of every error a user may see: `what` was wrong, with the value, and the `fix`."""

    exit_code = 2

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}" if self.fix else self.what


class JobError(PacelineError):
    """A setting is unknown, of the wrong type, or out of range."""


class ScriptError(PacelineError):
    """The script or its train function cannot be found, imported or called with one worker."""


class ModelError(PacelineError):
    """The model differs between workers, or a parameter was replaced after `prepare`."""


class OptimizerError(PacelineError):
    """The optimizer has no server form, or does not match the model."""


class DataError(PacelineError):
    """The loader cannot be shared out among the workers."""


class TrainError(PacelineError):
    """The user's train function raised."""

    exit_code = 1


class WorkerLost(PacelineError):
    """A worker died, or was silent for longer than the lease."""

    exit_code = 3


class ServerLost(PacelineError):
    """A server died, or was silent for longer than the lease."""

    exit_code = 4


class TimedOut(PacelineError):
    """Something that must happen within a time did not."""

    exit_code = 5


class NonFiniteError(PacelineError):
    """A gradient held a NaN or an infinity."""

    exit_code = 6


class AddressError(PacelineError):
    """An address cannot be parsed, bound or reached."""

    exit_code = 7


class AuthError(PacelineError):
    """A peer did not prove that it knows the job token."""

    exit_code = 7


class FrameError(PacelineError):
    """A frame was corrupt, truncated, oversize, or of an unknown kind."""

    exit_code = 7


class Interrupted(PacelineError):
    """The run was ended by a signal."""

    exit_code = 143


def by_name(name: str) -> type[PacelineError]:
    """The error class called `name`, or `TrainError`: how an error crosses from a process to its launcher.

    >>> by_name("WorkerLost").exit_code
    3
    >>> by_name("ZeroDivisionError").__name__
    'TrainError'
    """
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, PacelineError) else TrainError


def nearest(word: str, choices: list[str]) -> str:
    """A fix that offers the nearest known name.

    >>> nearest("qourum", ["bsp", "quorum"])
    "did you mean 'quorum'? Known: bsp, quorum"
    """
    import difflib

    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    known = "Known: " + ", ".join(choices)
    return f"did you mean {close[0]!r}? {known}" if close else known
