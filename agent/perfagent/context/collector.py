"""Collects what a run was started with, piece by piece on the sender's thread, and sends it.

At the first ticks, while a script still loads its data: git and environment, then packages, which take longer (20 ms of
CPU, which after the first step would fall into the training). After the first step, and again when `run.config` has
changed: hyperparameters, which are known only then. Whether files are changed `git` says when it knows.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perfagent.context.environment import environment as variables
from perfagent.context.environment import packages
from perfagent.context.hyperparameters import Hyperparameters
from perfagent.integrations.techniques import elements, of_model, of_process
from perfagent.libraries import MODEL_CONFIGURATIONS
from perfagent.redaction import Versions, redacted

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from perfagent.context.git import ChangedFiles
    from perfagent.delivery.handoff import Handoff, Source

__all__ = ["Context"]

WAIT_S = 10.0
AGAIN_S = 5.0
"""Between two looks whether anything has changed, once all is sent that was there at the start."""
_IMPORTED_LATER = ["perfagent.context.git", "perfagent.redaction"]
PIECE_S, LAST_PIECE_S = 0.02, 0.2


class Context:
    """What the process with rank 0 sends about its job; the other ranks were started in the same way.

    config: what the user handed over, a dict that may still change; model, optimizer: of the run, None where they are
    not known.
    """

    def __init__(
        self,
        handoff: Handoff,
        config: dict[str, Any],
        model: Callable[[], nn.Module | None],
        optimizer: Callable[[], Optimizer | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handoff, self._config, self._clock = handoff, config, clock
        self._model, self._optimizer = model, optimizer
        self.malloc: str | None = None
        """What was done about the host's allocator (process/host_allocator.py); None as long as nothing was decided."""
        self._variables: dict[str, str] = {}
        self._stepped = False
        self.hyperparameters = Hyperparameters()
        self._pieces: list[Callable[[], None]] = []
        """What is still to be told of the start."""
        self._due = math.inf
        """When to look next whether anything has changed."""
        self._source: Source | None = None
        self._asked: ChangedFiles | None = None
        self._told: tuple[object, ...] = ()
        self._told_environment: dict[str, str] = {}
        self._told_techniques: dict[str, Any] = {}

    def install(self) -> None:
        """On the training thread, when the run starts. Looks for configuration in the functions that are being
        executed."""
        if self._handoff.identity.rank != 0:
            return
        self._pieces = [self._tell_repository, self._tell_packages]
        self._due = self._clock() + WAIT_S
        self.hyperparameters.watch_argparse()
        self.hyperparameters.search_frames(sys._getframe(1))
        self._handoff.imports += _IMPORTED_LATER
        self._source = self._handoff.add_source(self.poll, every_s=0.25)

    def first_step(self) -> None:
        """On the training thread, when the first step is over: looks once more, about 0.1 ms."""
        if self._handoff.identity.rank != 0:
            return
        self.hyperparameters.search_frames(sys._getframe(1))
        self._stepped = True
        self._due = 0.0  # in this order: the sender's thread may look in between

    def close(self) -> None:
        self.hyperparameters.close()

    def ended(self) -> None:
        """When the sender has ended: no process is left behind."""
        if self._asked is not None:
            self._asked.close()

    def poll(self) -> None:
        """On the sender's thread: works for 20 ms, or until there is nothing to do; at the end of the process for 200
        ms."""
        closing, begun = self._handoff.closing_at is not None, self._clock()
        while self._pieces and self._clock() <= begun + (LAST_PIECE_S if closing else PIECE_S):
            self._pieces.pop(0)()
        if closing or (not self._pieces and begun >= self._due):
            self._due = begun + AGAIN_S
            # at the end techniques, too: the model may have been pruned, wrapped or quantised in the course of the training
            if self._state() != self._told or (closing and self._techniques() != self._told_techniques):
                self._tell()
        if self._stepped and not self._pieces and self._source is not None:
            self._source.due = self._due

    def _tell_repository(self) -> None:
        from perfagent.context.git import ChangedFiles, find

        repository = find()
        git: dict[str, object] = dict(repository.describe()) if repository is not None else {}
        self._variables = variables()
        self._tell(git=git)
        if repository is not None:
            tell = self._handoff.event
            self._asked = ChangedFiles(repository.root, lambda dirty: tell("context", {"git": git | {"dirty": dirty}}))
            self._handoff.add_slow_source(self._asked.poll)

    def _tell_packages(self) -> None:
        self._tell(packages=Versions(sorted(packages().items())))

    def _state(self) -> tuple[object, ...]:
        """What has to be sent again when it has changed."""
        return self._stepped, self.malloc, self.hyperparameters.sources(), repr(redacted(self._config))

    def _everything(self) -> dict[str, Any]:
        """Hyperparameters by source, with what the user handed over on top."""
        found = self.hyperparameters.found()
        optimizer = self._optimizer()
        if described := self._ask_model(_of_model):
            found["model"] = described
        defaults = getattr(optimizer, "defaults", None)
        if isinstance(defaults, dict):
            found["optimizer"] = {"class": type(optimizer).__name__, **defaults}
        self._told_techniques = techniques = self._techniques()
        if techniques:
            found["techniques"] = techniques
        return found | self._config

    def _techniques(self) -> dict[str, Any]:
        """Techniques that the run uses or has used: in the end a pruned model's masks are made permanent, and adapters
        merged."""
        found = self._ask_model(of_model)
        return {**self._told_techniques, **of_process(), **self.hyperparameters.techniques, **found}

    def _ask_model(self, ask: Callable[[nn.Module], dict[str, object]]) -> dict[str, object]:
        model = self._model()
        with contextlib.suppress(Exception):  # a model of another kind, or one that is being changed at this moment
            return {} if model is None else ask(model)
        return {}

    def _tell(self, **context: object) -> None:
        environment = self._variables | ({} if self.malloc is None else {"malloc": self.malloc})
        if environment != self._told_environment:
            context["environment"] = self._told_environment = environment
        facts = {"config": redacted(self._everything()), **context}
        if self._stepped:
            self.hyperparameters.settle()
        self._told = self._state()
        self._handoff.event("context", {name: value for name, value in facts.items() if value})


def _of_model(model: nn.Module) -> dict[str, object]:
    inner: Any = model
    # DDP, torch.compile
    while len(inner._modules) == 1 and (name := next(iter(inner._modules))) in ("module", "_orig_mod"):
        inner = inner._modules[name]
    facts: dict[str, object] = {"class": type(inner).__name__}
    with contextlib.suppress(ValueError):  # those of a lazy module have no size before its first call
        sizes = [(elements(p), p.requires_grad) for p in list(model.parameters())]
        facts["parameters"] = sum(size for size, _ in sizes)
        facts["trainable_parameters"] = sum(size for size, trained in sizes if trained)
    configuration = inner.__dict__.get("config")
    of_a_model = any(base.__name__ in MODEL_CONFIGURATIONS for base in type(configuration).__mro__)
    return facts | ({"config": configuration} if of_a_model else {})
