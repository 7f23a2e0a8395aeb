"""What workers, shards and the coordinator say to each other. Every message is a typed msgspec Struct; tensors travel
as raw bytes behind a message, never in it."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from paceline.policies.core import Key
from paceline.state.spec import ModelSpec


class Message(Struct, frozen=True, tag=True):
    """Base of every message; the class name is the tag on the wire."""


class Hello(Message, frozen=True):
    """First on every link, both ways: who this is."""

    role: Literal["worker", "server"]
    index: int
    incarnation: int = 0


class Beat(Message, frozen=True):
    """Still here. The coordinator answers each with one of its own."""


# Worker to coordinator ------------------------------------------------------------------------------------------------


class DataSpec(Struct, frozen=True):
    """The data of an epoch: how many examples, in batches of how many; `examples = 0`: each worker brings its own."""

    examples: int = 0
    batch: int = 1
    drop_last: bool = False


class Register(Message, frozen=True):
    """A worker's model, optimizer and data are prepared."""

    spec: ModelSpec
    data: DataSpec


class Digest(Message, frozen=True):
    """A hash over the initial values a worker has received."""

    digest: str


class Take(Message, frozen=True):
    """The next batch of `epoch`, please; see `members.ledger.Take`."""

    epoch: int
    wait: bool


class GiveBack(Message, frozen=True):
    """Batches that this worker will not use after all: for another to do, or (`skip`) left out for good."""

    grants: tuple[int, ...]
    skip: bool = False


class Announce(Message, frozen=True):
    """A contribution: its gradient goes to the shards. `groups` are the optimizer's hyperparameters as they stand;
    without `pushed` there is no gradient (it was not finite, or of no weight)."""

    step: int
    version: int
    weight: float
    grants: tuple[int, ...]
    groups: tuple[dict[str, Any], ...]
    max_norm: float | None = None
    max_value: float | None = None
    pushed: bool = True


class Finished(Message, frozen=True):
    """The train function has returned."""


class Saved(Message, frozen=True):
    """The final weights are on disk."""


class Failed(Message, frozen=True):
    """This process ends with an error; `error` is the class's name in `paceline.errors`."""

    error: str
    what: str
    fix: str


# Coordinator to worker ------------------------------------------------------------------------------------------------


class Provide(Message, frozen=True):
    """Your initial values are everybody's: upload them."""


class Go(Message, frozen=True):
    """Begin the next step, from `version`. `step` is the finished one (-1 at the start), `staleness` and `discarded`
    what became of its contribution."""

    step: int
    version: int
    staleness: int = 0
    discarded: str = ""


class Granted(Message, frozen=True):
    grant: int
    epoch: int
    start: int
    stop: int


class Empty(Message, frozen=True):
    epoch: int


class Over(Message, frozen=True):
    epoch: int


class Now(Message, frozen=True):
    """The answer to `Fetch`: the values of `version` are on their way."""

    version: int


class Fetch(Message, frozen=True):
    """The newest values, please (worker to coordinator)."""


class Bye(Message, frozen=True):
    """The worker may end; the one told to `save` gets the final values of `version` first and writes them."""

    save: bool
    version: int


class Abort(Message, frozen=True):
    """The run ends with an error (to everybody)."""

    error: str
    what: str
    fix: str


# Worker to shard and back ---------------------------------------------------------------------------------------------


class Init(Message, frozen=True):
    """The initial values of one piece (payload: its bytes)."""

    piece: int


class Push(Message, frozen=True):
    """One piece of a contribution (payload: the bytes of its present slices; None: all of them)."""

    step: int
    piece: int
    present: tuple[int, ...] | None = None


class Values(Message, frozen=True):
    """One piece of the parameters at `version` (payload: its bytes)."""

    version: int
    piece: int


# Coordinator to shard and back ----------------------------------------------------------------------------------------


class Setup(Message, frozen=True):
    """The model this job trains, and how its pieces are laid out."""

    spec: ModelSpec
    shards: int
    piece_bytes: int


class SetUp(Message, frozen=True):
    """The shard has laid out its pieces."""


class Initialised(Message, frozen=True):
    """All initial values of the shard's pieces are here."""


class Staged(Message, frozen=True):
    """All of the shard's pieces of a contribution are here, in whole."""

    key: Key


class Reduce(Message, frozen=True):
    """Sum `coefficient * gradient` over parts (key, coefficient, lam), in this order; with `norm`, answer `Reduced`."""

    version: int
    parts: tuple[tuple[Key, float, float], ...]
    norm: bool = False


class Reduced(Message, frozen=True):
    """The squared L2 norm of the shard's part of the averaged gradient."""

    version: int
    squared_norm: float


class Apply(Message, frozen=True):
    """Make the reduced gradient the optimizer step that gives `version`."""

    version: int
    groups: tuple[dict[str, Any], ...]
    lr_scale: float = 1.0
    grad_scale: float = 1.0
    max_value: float | None = None


class Drop(Message, frozen=True):
    """A contribution that will be in no update."""

    key: Key


class Send(Message, frozen=True):
    """Send the values, which are at `version` by now, to a worker; frozen parameters too when `everything`."""

    worker: int
    version: int
    everything: bool = False
    remember: bool = False


class Forget(Message, frozen=True):
    """A worker's incarnation is gone, with all it has staged."""

    worker: int
    incarnation: int


class Close(Message, frozen=True):
    """The run is over."""


MESSAGES = (
    Hello | Beat | Register | Digest | Take | GiveBack | Announce | Finished | Saved | Failed | Provide | Go | Granted
    | Empty | Over | Fetch | Now | Bye | Abort | Init | Push | Values | Setup | SetUp | Initialised | Staged | Reduce
    | Reduced | Apply | Drop | Send | Forget | Close
)  # fmt: skip
