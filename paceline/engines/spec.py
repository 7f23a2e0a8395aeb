"""What a launcher tells a process that it starts, and how a train function is found again there."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec

from paceline import job as jobs
from paceline.errors import ScriptError, nearest
from paceline.job import Job

SCRIPT_MODULE = "__paceline_script__"
"""The module name under which started processes load a script file."""

TrainFunction = Callable[[Any], Any]


class FunctionRef(msgspec.Struct, frozen=True):
    """A function by name: in a module that can be imported, or in a script file."""

    module: str
    path: str
    name: str


class ProcessSpec(msgspec.Struct, frozen=True):
    """Everything a child process needs; it comes on its standard input."""

    role: Literal["worker", "server"]
    index: int
    incarnation: int
    job: dict[str, Any]
    addresses: list[str]
    listen_fd: int
    token: bytes
    folder: str
    function: FunctionRef
    sys_path: list[str]
    threads: int

    def to_job(self) -> Job:
        return jobs.job(**self.job)


def reference(function: TrainFunction) -> FunctionRef:
    """How another process finds `function`. Raises ScriptError where it cannot: a lambda, a function inside another,
    one typed at a prompt."""
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if not name or "<" in name:
        raise ScriptError(
            f"{name or function!r} cannot be found by other processes", "define train at a module's top level"
        )
    path = inspect.getsourcefile(function) or ""
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        if spec is not None and spec.name != "__main__" and not spec.name.endswith(".__main__"):
            return FunctionRef(spec.name, "", name)
        if not os.path.exists(path):
            raise ScriptError(
                "the train function was typed at a prompt", "put it in a .py file, so that workers can load it"
            )
        return FunctionRef("", os.path.abspath(path), name)
    return FunctionRef(module, "", name)


def parse(script: str) -> FunctionRef:
    """A function from `path/to/script.py:function` or `package.module:function` (`train` where none is named).

    Raises ScriptError when the file is missing or the form is wrong.

    >>> parse("package.module:fit")
    FunctionRef(module='package.module', path='', name='fit')
    """
    place, _, name = script.partition(":")
    if not place:
        raise ScriptError("the job names no script", 'set script = "path/to/script.py:train"')
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            others = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
            raise ScriptError(
                f"no script {place!r}", nearest(place, others) if others else "give the path of a .py file"
            )
        return FunctionRef("", str(path.resolve()), name or "train")
    return FunctionRef(place, "", name or "train")


def resolve(ref: FunctionRef) -> TrainFunction:
    """Import the function. Raises ScriptError when the module or function is missing, or cannot be called with one
    worker."""
    module = _load(ref.path) if ref.path else _import(ref.module)
    found: Any = module
    for part in ref.name.split("."):
        names = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
        found = getattr(found, part, None)
        if found is None:
            where = ref.path or ref.module
            raise ScriptError(f"no function {ref.name!r} in {where}", nearest(ref.name, names))
    check(found)
    return found


def check(function: Any) -> None:
    """Raise ScriptError unless `function` can be called with one worker."""
    if not callable(function):
        raise ScriptError(f"{function!r} is no function", "give a function of one argument, the worker")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(None)
    except TypeError:
        name = getattr(function, "__name__", repr(function))
        raise ScriptError(
            f"{name}{signature} cannot be called with one worker",
            f"write it as def {name}(worker): and read other settings from worker.args",
        ) from None


def _import(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ScriptError(
                f"no module {name!r}", "give a script's path, or a module that can be imported here"
            ) from None
        raise


def _load(path: str) -> ModuleType:
    known = sys.modules.get(SCRIPT_MODULE)
    if known is not None and getattr(known, "__file__", None) == path:
        return known
    if os.path.dirname(path) not in sys.path:
        sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(SCRIPT_MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT_MODULE] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ScriptError(f"{path} does not compile: {error}", "mend the script") from None
    return module
