"""Finds hyperparameters that nobody passed to us: what argparse returned, and the configuration objects that a training
script holds.

`argparse` is watched for as long as the run lasts: its last result counts. And twice, when a run starts and after its
first step, the variables of the running functions are searched for configuration: objects of known libraries
(integrations/configurations.py) and, in the script's own functions, what is called `config`, `args`, `hparams` or the
like: a dict, a dataclass, a namespace, a model of pydantic, a class of constants or an object of one. What the script
gave to other loggers counts as well. Only references are kept here; the sender's thread reads them later.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import functools
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

from perfagent.boundary.guard import guarded
from perfagent.causes.variables import variables_of
from perfagent.integrations.configurations import configuration_in, settings_of_dataclasses
from perfagent.integrations.loggers import settings as logged
from perfagent.integrations.techniques import of_variable
from perfagent.libraries import FIELDS, MODEL_CONFIGURATIONS
from perfagent.measure.source_lines import is_ours
from perfagent.redaction import redacted

__all__ = ["Hyperparameters"]

MAX_FRAMES = 100
_NAMED = re.compile(
    r"(?:config|cfg|conf|args|opts?|options|flags|hps|hparams|h_?params|params|hyper_?param(?:eter)?s|settings|configuration)"
    r"|\w+_(?:args|arguments|config|cfg|hparams)",
    re.IGNORECASE,
)
_PLAIN = (str, int, float, bool, type(None), list, tuple, dict, Path, enum.Enum, type, FunctionType)
MAX_SETTINGS = 500
_LIBRARIES = re.compile(r"[/\\](?:site|dist)-packages[/\\]|^<frozen ")
_STDLIB = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120 - compared with the names of files as code objects have them


class Hyperparameters:
    """What was found so far: by source (`argparse`, `click`, `absl`, `huggingface`, `hydra`, `lightning`, `deepspeed`),
    or by variable."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        logged.forget()
        self.techniques: dict[str, Any] = {}
        self._original: Any = None

    # ---- on the training thread

    @guarded
    def search_frames(self, frame: FrameType | None) -> None:
        """Looks through the variables of this frame and of its callers. Once or twice a run, about 0.1 ms."""
        for _ in range(MAX_FRAMES):
            if frame is None:
                return
            file = frame.f_code.co_filename
            if not is_ours(file):
                script = is_script(file)
                with variables_of(frame) as variables:
                    for name, value in variables:
                        self._consider(name, value, script=script)
            frame = frame.f_back
        logged.given()  # W&B forgets its run when that ends

    def _consider(self, name: str, value: Any, *, script: bool) -> None:
        kind = type(value)
        if kind.__module__ == "builtins":
            if script and kind in (dict, type) and _NAMED.fullmatch(name):
                self._keep(name, _settings(value) if kind is dict else _settings_of(value))
            return
        for base in kind.__mro__[:-1]:
            if base.__name__ in MODEL_CONFIGURATIONS:
                return
            if (found := configuration_in(value, base)) is not None:
                source, settings = found
                if source != "argparse" or script:
                    self._keep(source, _settings(settings) if type(settings) is dict else settings)
                return
        if script:
            self.techniques |= of_variable(name, value)
        if script and _NAMED.fullmatch(name):
            self._keep(name, value if _is_record(kind) else _settings_of(value))

    def _keep(self, name: str, settings: object) -> None:
        if settings is not None:
            self._found.setdefault(name, settings)

    def watch_argparse(self) -> None:
        """From here on the script's last result of `parse_args` or `parse_known_args` is kept."""
        original: Any = argparse.ArgumentParser.parse_known_args
        self._original = original

        @functools.wraps(original)
        def parse_known_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(parser, *args, **kwargs)
            if self._original is not None:
                with contextlib.suppress(Exception):  # whatever a subclass returned
                    self._parsed(parser, result[0], sys._getframe(1))
            return result

        argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]
        self._watched = parse_known_args

    def _parsed(self, parser: Any, namespace: Any, caller: FrameType | None) -> None:
        """Parsers of libraries are none of our business: counted is what the script asked for, or a parser class for
        scripts."""
        own = (argparse.__file__, getattr(sys.modules.get(type(parser).__module__), "__file__", None))
        while caller is not None and caller.f_code.co_filename in own:
            caller = caller.f_back
        if caller is not None and is_script(caller.f_code.co_filename):
            self._found["argparse"] = (
                settings_of_dataclasses(parser, namespace) if hasattr(parser, "dataclass_types") else namespace
            )

    def close(self) -> None:
        if self._original is not None and argparse.ArgumentParser.parse_known_args is self._watched:
            argparse.ArgumentParser.parse_known_args = self._original  # type: ignore[method-assign]
        self._original = None

    # ---- on the sender's thread

    def sources(self) -> tuple[tuple[str, int], ...]:
        """Tells whether something was found since."""
        found = [(name, id(value)) for name, value in list(self._found.items())]
        return *found, *((logger, hash(repr(given))) for logger, given in logged.given().items())

    def settle(self) -> None:
        """Keeps copies from here on: what the script let go of is not to live on because of us."""
        for name, value in list(self._found.items()):
            self._found[name] = redacted(value)

    def found(self) -> dict[str, Any]:
        """source or variable -> the object."""
        found: dict[str, Any] = logged.given()
        for source, value in self._found.items():
            found[source] = found[source] | dict(value) if source in found and isinstance(value, Mapping) else value
        return found


def is_script(file: str) -> bool:
    """Whether this code is the user's: no installed package, not Python's own, not ours."""
    return not (_LIBRARIES.search(file) or file.startswith(_STDLIB) or is_ours(file))


def _settings(values: dict[object, object]) -> dict[object, object] | None:
    """The dict itself where all of it is settings, most of it where most is; None where it holds something else, as
    tensors."""
    if not 0 < len(values) <= MAX_SETTINGS:
        return None
    kept = {key: value for key, value in list(values.items()) if type(key) in (str, int) and _is_setting(value)}
    if len(kept) == len(values):
        return values
    return kept if 2 * len(kept) > len(values) else None


def _is_setting(value: object) -> bool:
    kind = type(value)
    return (
        issubclass(kind, _PLAIN)  # isinstance asks a proxy for its __class__, and a lazy one would do its work
        or (kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "Size"))
        or (kind.__module__ == "numpy" and any(base.__name__ == "generic" for base in kind.__mro__))
    )


def _is_record(kind: type) -> bool:
    """Whether objects of this class are their fields, and redaction knows how to read them."""
    named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    validated = any(name in vars(kind) for name in FIELDS)
    return dataclasses.is_dataclass(kind) or kind is SimpleNamespace or named_tuple or validated


def _settings_of(value: Any) -> dict[object, object] | None:
    """Settings in a value whose name says that it is configuration: a dict with attributes, a class of the script's that only
    has settings (`class CFG: lr = 1e-3`; its methods do not count), or an object of one."""
    kind: type = value if isinstance(value, type) else type(value)
    if kind is not value and issubclass(kind, dict):
        return _settings(dict(dict.items(value)))
    of_torch = any(base.__module__.partition(".")[0] == "torch" for base in kind.__mro__)
    if of_torch or _is_record(kind) or not _is_of_script(kind):
        return None
    constants = [item for base in reversed(kind.__mro__[:-1]) for item in vars(base).items()]
    held = {name: item for name, item in constants if not (callable(item) or hasattr(type(item), "__get__"))}
    if kind is not value:
        with contextlib.suppress(AttributeError):  # slots
            held |= object.__getattribute__(value, "__dict__")
    return _settings({name: item for name, item in held.items() if not name.startswith("_")})


def _is_of_script(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__ == "__main__":  # what was executed without being imported, as in a notebook
        return True
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_script(file)
