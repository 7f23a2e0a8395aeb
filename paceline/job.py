"""The job: every choice about a run in one frozen dataclass; from keywords, TOML or the command line, and back."""

from __future__ import annotations

import dataclasses
import functools
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from paceline.errors import JobError, nearest
from paceline.policies import BSP, REGISTRY, Policy, find, settings


@dataclass(frozen=True)
class Job:
    """What to run and how workers keep pace.

    Raises JobError when a value is of the wrong type or out of range.

    >>> job(when="ssp:5", workers=4).when
    SSP(slack=5)
    """

    script: str = ""
    """The train function: `path/to/script.py:function` or `package.module:function`."""
    when: Policy = field(default_factory=BSP)
    """The policy: when contributions make an update and when a worker may go on."""
    workers: int = 2
    """Worker processes."""
    servers: int = 1
    """Server processes; the model's pieces are balanced over them by bytes."""
    assignment: Literal["auto", "dynamic", "fixed"] = "auto"
    """How an epoch's batches are handed out: to whoever asks, or to the workers in turn; "auto" is what the policy
    prefers ("fixed" for bsp, which is then bitwise reproducible)."""
    accumulate: int = 1
    """Micro-batches a step inside `with worker.accumulate():`."""
    seed: int = 0
    """The order of the examples, and `seed + rank` the worker's own random state."""
    on_loss: Literal["stop", "continue", "restart"] = "stop"
    """When a worker dies: end the run by name, go on with the others, or start it anew and let it join."""
    on_nan: Literal["stop", "skip"] = "stop"
    """When a gradient is not finite: end the run by name, or leave that contribution out."""
    slow: dict[int, float] = field(default_factory=dict)
    """Workers made slower on purpose: `{3: 2.5}` makes each step of worker 3 take 2.5 times its compute time."""
    lease_s: float = 10.0
    """A process unheard for so long is lost."""
    start_s: float = 120.0
    """All workers must have called `prepare` by then."""
    piece_bytes: int = 4_000_000
    """The size of the pieces in which parameters are stored and moved."""
    link: Literal["unix", "tcp"] = "unix"
    """How the processes of one host talk."""
    host: str = "127.0.0.1"
    """The address that servers listen on with `link = "tcp"`."""
    port: int = 0
    """The first server's port, the next ones follow; 0 takes free ones."""
    threads: int = 0
    """Torch threads a process; 0 shares the cores out among the workers."""
    name: str = ""
    """The run's folder below `runs`; empty makes one from the time and the policy."""
    runs: str = "runs"
    """Where run folders are made."""
    args: dict[str, Any] = field(default_factory=dict)
    """The script's own settings, as `worker.args`."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            checked = _value(Job, f.name, f.name, getattr(self, f.name), strict=False)
            object.__setattr__(self, f.name, checked)
        at_least = {"workers": 1, "servers": 1, "accumulate": 1, "piece_bytes": 1, "threads": 0}
        for key, low in at_least.items():
            if (value := getattr(self, key)) < low:
                raise JobError(f"{key} = {value}", f"{key} must be {low} or more")
        for key in ("lease_s", "start_s"):
            if not (value := getattr(self, key)) > 0:
                raise JobError(f"{key} = {value}", f"{key} must be more than 0 seconds")
        if not 0 <= self.port <= 65536 - self.servers:
            raise JobError(f"port = {self.port}", f"ports go from 1 to {65536 - self.servers} here, 0 takes free ones")
        for rank, factor in self.slow.items():
            if not 0 <= rank < self.workers:
                raise JobError(f"slow names worker {rank}", f"workers are 0 to {self.workers - 1}")
            if not 1 <= factor < float("inf"):
                raise JobError(f"slow.{rank} = {factor}", "a worker can be made 1 or more times slower")
        if self.name and (self.name in (".", "..") or os.sep in self.name):
            raise JobError(f"name = {self.name!r}", "name is one folder's name; set `runs` for where it is made")

    @property
    def dealing(self) -> str:
        """The assignment with "auto" resolved: "dynamic" or "fixed"."""
        return self.when.assignment if self.assignment == "auto" else self.assignment


def policy(value: Any) -> Policy:
    """A policy from any of its forms: itself, its short form, or a table with `kind`.

    Raises JobError for an unknown kind or setting (the nearest name is offered) and for a value out of range.

    >>> policy("quorum:3"), policy("asp:inverse"), policy({"kind": "ssp", "slack": 2})
    (Quorum(k=3), ASP(staleness='inverse', lam=0.04), SSP(slack=2))
    """
    if isinstance(value, Policy):
        return value
    if isinstance(value, str):
        kind, _, rest = value.partition(":")
        cls = find(kind)
        names = list(settings(cls))
        words = [word.strip() for word in rest.split(",")] if rest else []
        given: dict[str, Any] = {}
        for i, word in enumerate(words):
            key, equals, text = word.partition("=")
            if not equals:
                if i >= len(names):
                    raise JobError(f"{value!r} has {len(words)} settings, {kind} has {len(names)}", _signature(cls))
                key, text = names[i], word
            given[key.strip()] = text.strip()
        strict = False
    elif isinstance(value, Mapping):
        given = dict(value)
        if "kind" not in given:
            raise JobError("the policy has no kind", f"set when.kind to one of {', '.join(REGISTRY)}")
        cls = find(str(given.pop("kind")))
        strict = any(not isinstance(item, str) for item in given.values())
    else:
        raise JobError(
            f"when = {value!r}", f'give a policy, "ssp:3" or a table with kind; known: {", ".join(REGISTRY)}'
        )
    values = {key: _value(cls, f"when.{key}", key, item, strict) for key, item in given.items()}
    missing = [key for key, default in settings(cls).items() if default is dataclasses.MISSING and key not in values]
    if missing:
        raise JobError(f"{cls.kind} needs {', '.join(missing)}", _signature(cls))
    return cls(**values)


def job(base: Job | None = None, **changes: Any) -> Job:
    """`base` with `changes`; policies may be in their short form.

    Raises JobError for an unknown key (the nearest name is offered) and for a value of the wrong type or out of range.
    """
    names = [f.name for f in dataclasses.fields(Job)]
    for key in changes:
        if key not in names:
            raise JobError(f"unknown setting {key!r}", nearest(key, names))
    return dataclasses.replace(base or Job(), **changes)


def load(path: str | os.PathLike[str], sets: tuple[str, ...] = ()) -> Job:
    """A job from a TOML file, with `path=value` settings on top; relative scripts are looked up beside the file.

    Raises JobError when the file is missing, is not TOML, or holds a wrong key or value.
    """
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except FileNotFoundError:
        raise JobError(f"no job file {os.fspath(path)!r}", "give the path of a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{os.fspath(path)} is not TOML: {error}", "see https://toml.io for the format") from None
    script, colon, function = str(table.get("script", "")).rpartition(":")
    if script.endswith(".py") and not os.path.isabs(script):
        beside = os.path.join(os.path.dirname(os.path.abspath(path)), script)
        table["script"] = (beside if os.path.exists(beside) else script) + colon + function
    return job(**with_sets(table, sets))


def with_sets(table: dict[str, Any], sets: tuple[str, ...]) -> dict[str, Any]:
    """`table` with each `a.b=value` put in; a value is read as TOML, or else as text.

    A new `when.kind` starts from that policy's defaults.

    >>> with_sets({"when": "bsp"}, ("when.kind=ssp", "when.slack=2", "args.lr=0.1"))
    {'when': {'kind': 'ssp', 'slack': 2}, 'args': {'lr': 0.1}}
    """
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    for text in sets:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise JobError(f"--set {text!r}", "write it as path=value, as in --set when.slack=3")
        keys = path.strip().split(".")
        place: Any = result
        for depth, key in enumerate(keys[:-1]):
            inside = place.get(key, {})
            if key == "when" and depth == 0 and not isinstance(inside, Mapping):
                inside = to_table(policy(inside))
            if not isinstance(inside, Mapping):
                raise JobError(f"--set {text!r}: {key} is not a table", f"set {key} itself")
            place[key] = dict(inside)
            place = place[key]
        if keys == ["when", "kind"]:
            place.clear()
        is_text = len(keys) == 1 and _types(Job).get(keys[0]) is str
        place[keys[-1]] = value.strip().strip('"') if is_text else _toml_value(value.strip())
    return result


def to_table(value: Job | Policy) -> dict[str, Any]:
    """A job or policy as plain values, as they stand in TOML."""
    if isinstance(value, Policy):
        return {"kind": value.kind, **{f.name: getattr(value, f.name) for f in dataclasses.fields(value)}}
    table = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    table["when"] = to_table(value.when)
    table["slow"] = {str(rank): factor for rank, factor in value.slow.items()}
    return table


def to_toml(value: Job) -> str:
    """The job as a TOML document that `load` reads back to an equal job."""
    import tomlkit

    return tomlkit.dumps(to_table(value))


def label(value: Policy) -> str:
    """A policy's short form, which `policy` reads back; settings at their defaults are left out, whole numbers are not.

    >>> label(policy("ssp:3")), label(policy("asp:compensate")), label(BSP())
    ('ssp:3', 'asp:compensate', 'bsp')
    """
    shown = [(getattr(value, f.name), f.default) for f in dataclasses.fields(value)]
    while shown and shown[-1][0] == shown[-1][1] and not isinstance(shown[-1][0], int):
        shown.pop()
    return f"{value.kind}:" + ",".join(str(item) for item, _ in shown) if shown else value.kind


def _signature(cls: type[Policy]) -> str:
    shown = [key if default is dataclasses.MISSING else f"{key}={default}" for key, default in settings(cls).items()]
    return f"its settings: {', '.join(shown) or 'none'}"


def _value(cls: type, where: str, key: str, value: Any, strict: bool) -> Any:
    """Check one field's value against its declared type."""
    types = _types(cls)
    if key not in types:
        raise JobError(f"unknown setting {where!r}", nearest(key, list(types)))
    if types[key] is Policy:
        return policy(value)
    try:
        return msgspec.convert(value, types[key], strict=strict, str_keys=True)
    except msgspec.ValidationError as error:
        choices = [str(choice) for choice in get_args(types[key])] if get_origin(types[key]) is Literal else []
        fix = nearest(str(value), choices) if choices else str(error)
        raise JobError(f"{where} = {value!r}", fix) from None


@functools.cache
def _types(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


__all__ = ["Job", "job", "label", "load", "policy", "to_table", "to_toml", "with_sets"]
