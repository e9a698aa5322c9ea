"""The training loop: precision, accumulation, clipping, schedule, position and state.

    loop = perfagent.loop(model, optimizer, scheduler, precision="bf16", grad_accum=8, clip_norm=1.0)
    loop.resume()
    for batch in loop.batches(loader, epochs=3):
        with loop.forward():
            loss = model(**batch).loss
        loop.backward(loss, num_items=n)
        loop.step()

torch does the work: nothing here wraps the model, the optimizer or the loader. What the agent watches is called as in
any training script. Nothing waits for the device, save GradScaler."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from perfagent.errors import ConfigError, Stopped
from perfagent.session import current
from perfagent.step.stop import claim
from perfagent_loop.accumulation import Count, Window
from perfagent_loop.batches import Batches
from perfagent_loop.checks import check_count, check_optimizer_step
from perfagent_loop.compute.compiling import compile_in_place
from perfagent_loop.data.prefetch import unwrapped
from perfagent_loop.deepspeed_engine import EngineStep
from perfagent_loop.kinds import Batch, State
from perfagent_loop.precision import autocast_of, checked_precision, scaler_of
from perfagent_loop.randomness import random_state, restore_random_state
from perfagent_loop.stepping import OptimizerStep, StepResult
from perfagent_loop.strategies import DeepSpeed, Strategy, strategy_of

__all__ = ["Checkpointing", "Loop", "StepResult", "loop"]


class Checkpointing(Protocol):
    """What the loop asks of `perfagent.Checkpoint`, or of anything in its place."""

    def after_step(self, loop: Any) -> None:
        """After each optimizer step."""

    def resume(self, loop: Any) -> Any:
        """Loads the newest good checkpoint into the loop, if there is one."""


class Loop:
    """The training loop: precision, accumulation, clipping, schedule, checkpoints, and the place in the data.

        loop = perfagent.loop(model, optimizer, scheduler, precision="bf16", grad_accum=8, clip_norm=1.0)
        loop.resume()
        for batch in loop.batches(loader, epochs=3):
            with loop.forward():
                loss = model(**batch).loss
            loop.backward(loss)
            loop.step()

    `perfagent.loop` is another name of this class. Nothing waits for the device, except GradScaler.

    Args:
        model: A module, or one wrapped by DistributedDataParallel (`perfagent.ddp`), `fully_shard` (`perfagent.fsdp`)
            or `deepspeed.initialize`. Its type decides how ranks communicate.
        optimizer: The optimizer of that model's parameters. A DeepSpeed engine has its own.
        scheduler: Any object with `step()`, called after each optimizer step that was not skipped. A ReduceLROnPlateau
            is saved and resumed, and you call its `step(metric)` after an evaluation.
        precision: "fp32" (default), "bf16" or "fp16" of the forward pass. A DeepSpeed engine has its own.
        grad_accum: Micro-steps of an optimizer step.
        clip_norm: The largest norm of all gradients. Clipped after unscaling.
        compile: True, a mode of torch.compile, or its arguments.
        checkpoint: A `perfagent.Checkpoint`.
        scaler: A GradScaler with your own settings, for fp16.

    Attributes:
        step_count: Optimizer steps so far, with those that the scaler skipped. `resume()` restores it.

    Raises:
        ConfigError: Values contradict each other, or do not fit the way in which the model is wrapped.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        precision: str | None = None,
        grad_accum: int | None = None,
        clip_norm: float | None = None,
        compile: bool | str | Mapping[str, Any] = False,  # noqa: A002 - the documented name
        checkpoint: Checkpointing | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        check_count("grad_accum", grad_accum, "a number of micro-steps", or_none=True)
        number = isinstance(clip_norm, (int, float)) and not isinstance(clip_norm, bool)
        if clip_norm is not None and not (number and clip_norm > 0):
            raise ConfigError(f"clip_norm is the largest norm of gradients, above 0, or None; got {clip_norm!r:.80}")
        if checkpoint is not None and not (hasattr(checkpoint, "after_step") and hasattr(checkpoint, "resume")):
            raise ConfigError(f"checkpoint must be a perfagent.Checkpoint, not {type(checkpoint).__name__}")
        self.model, self.scheduler, self.checkpoint = model, scheduler, checkpoint
        self.strategy: Strategy = strategy_of(model)
        self.step_count = 0
        self._update: OptimizerStep | EngineStep
        self.scaler: torch.amp.GradScaler | None = None
        if isinstance(self.strategy, DeepSpeed):
            engine = EngineStep(self.strategy, optimizer, scheduler, precision, grad_accum, clip_norm)
            self._update, grad_accum = engine, engine.grad_accum
            self.optimizer: Any = engine.optimizer
            self.precision = self.strategy.precision
            autocast = None
        else:
            self.precision = checked_precision("fp32" if precision is None else precision)
            _check_optimizer(optimizer, model)
            self.optimizer = optimizer
            self.scaler = scaler_of(self.precision, self.strategy.device, [*model.parameters()], scaler)
            autocast = autocast_of(self.precision, self.strategy.device)
            self._update = OptimizerStep(self.strategy, self.optimizer, scheduler, self.scaler, clip_norm)
        self._window = Window(grad_accum or 1, self.strategy)
        self._batches = Batches(self._window, self.strategy)
        self._until: int | None = None
        self._stopped = False
        self._forward = _Forward(self._window, self.strategy, autocast)
        self._scale: Callable[[Tensor], Tensor] | None = None if self.scaler is None else self.scaler.scale
        _compile(model, compile)

    def batches(
        self,
        loader: Iterable[Batch],
        epochs: int | None = 1,
        items: Callable[[Batch], Count] | None = None,
        *,
        steps: int | None = None,
    ) -> Iterator[Batch]:
        """Yields the loader's batches on the model's device, from where `resume()` left off.

        Args:
            loader: A DataLoader, or another iterable of batches.
            epochs: How often the loader is read. None means without end.
            items: Returns how many items a batch has. All batches of a step are then fetched before it begins, and
                `num_items` is not needed.
            steps: Ends when `step_count` is this number.

        Raises:
            ConfigError: The loop would never end, or the loaders of the ranks give different numbers of steps.
        """
        check_count("epochs", epochs, least=0, or_none=True)
        if epochs is None and steps is None:
            raise ConfigError("epochs is None and there is no steps=...: this loop would never end; give one of them")
        if not isinstance(loader, Iterable):
            raise ConfigError(f"batches() takes a DataLoader or another iterable, not {type(loader).__name__}")
        self._until = steps
        return self._batches.read(unwrapped(loader), epochs, items, self)  # the copies overlap here too

    def forward(self, *, last: bool | None = None) -> _Forward:
        """The context of the forward pass: autocast, and communication only in the last micro-step.

        Args:
            last: True ends the accumulation with this micro-step, for loops that do not use `batches()`.
        """
        if last is not None:
            self._window.will_end(self._window.done + 1 if last else max(self._window.size, self._window.done + 2))
        return self._forward

    def backward(self, loss: Tensor, num_items: Count | None = None) -> None:
        """The backward pass of one micro-step.

        Args:
            loss: The mean over `num_items` items.
            num_items: How many items (tokens, samples) the loss is the mean of; a number, or a tensor on the device.
                All micro-steps of a run give it, or none.
        """
        window = self._window
        if not window.trivial or num_items is not None:
            loss = window.weighted(loss, num_items)
        if self._scale is not None:
            loss = self._scale(loss)
        self._update.backward(loss)
        window.done += 1

    def step(self) -> StepResult:
        """Ends a micro-step. In the last one of a step: unscale, clip, step, update the scale, clear the gradients,
        schedule."""
        window = self._window
        if window.done < window.end:
            if not window.done:
                raise ConfigError("step() without a backward() before it; a micro-step is forward, backward, step")
            return StepResult.WAITING
        if window.trivial:
            result = self._update.step(None)
        else:
            loss, run = window.loss(), current()
            if loss is not None and run is not None:  # what the agent saw going backward is not the window's loss
                run.log({"loss": loss})
            result = self._update.step(window.factor())
        self.step_count += 1
        window.clear()
        self._batches.reached()
        self._update.under_way = False
        if self.checkpoint is not None:
            self.checkpoint.after_step(self)
        if (stop := claim(owned=True)) is not None:
            self._stop(stop.why)
        return result

    def _stop(self, why: str) -> None:
        """The run is stopped from afar: batches() ends; other loops are left at the end of the next step."""
        if self._stopped:
            raise Stopped(f"perfagent: stopped after step {self.step_count:,}: {why}")
        self._stopped = True
        save = getattr(self.checkpoint, "save_at_stop", None)
        if save is not None:
            save(self)

    def resume(self) -> Any:
        """Loads the newest checkpoint that can be verified. Without one, or without a `checkpoint`, the training begins
        anew.

        Returns:
            The step of the checkpoint, or None.
        """
        return None if self.checkpoint is None else self.checkpoint.resume(self)

    def discard_window(self) -> None:
        """Discards the micro-steps since the last optimizer step, after an error that the loop survives."""
        self._update.clear()
        self._window.clear()

    def pass_over_window(self) -> None:
        """Discards the current micro-steps for good: a checkpoint continues after their batches."""
        self.discard_window()
        self._batches.reached()

    def goes_on(self) -> bool:
        """Whether `batches()` will begin another step."""
        return not self._stopped and (self._until is None or self.step_count < self._until)

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self._batches.epoch

    @property
    def in_step(self) -> bool:
        """Whether an optimizer step began that is not counted yet: seen only where an exception left it."""
        return self._update.under_way

    @property
    def micro_steps(self) -> int:
        """Backward passes since the last optimizer step."""
        return self._window.done

    def state_dict(self) -> State:
        """The state that the next step depends on, as of the last optimizer step. "rng" and "sampler" are this rank's.

        Under FSDP2, model and optimizer are this rank's pieces as DTensors, for torch.distributed.checkpoint. Under
        DeepSpeed they are None, and `strategy.engine.save_checkpoint` saves them."""
        deepspeed = isinstance(self.strategy, DeepSpeed)
        of_model, of_optimizer = (None, None) if deepspeed else self.strategy.state(self.optimizer)
        run = current()
        of_loop = {"step_count": self.step_count, "run_id": None if run is None else run.id}
        position, sampler = self._batches.state()
        return {
            "model": of_model,
            "optimizer": of_optimizer,
            "scheduler": self.scheduler.state_dict() if hasattr(self.scheduler, "state_dict") else None,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "rng": random_state(),
            "sampler": sampler,
            "loop": {**of_loop, "items": self._window.expected, **position},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict()` returned. The next `batches()` continues from there."""
        wanted = ("model", "optimizer", "scheduler", "scaler", "rng", "sampler", "loop")
        if missing := [name for name in wanted if name not in state]:
            raise ConfigError(f"this is no state of a loop: it has no {', '.join(missing)}")
        if not isinstance(self.strategy, DeepSpeed):
            self.strategy.load(self.optimizer, state["model"], state["optimizer"])
        if state["scheduler"] is not None and hasattr(self.scheduler, "load_state_dict"):
            self.scheduler.load_state_dict(state["scheduler"])
        if state["scaler"] is not None and self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.discard_window()
        self._update.under_way = False
        place = state["loop"]
        self.step_count = int(place["step_count"])
        self._window.expected = place.get("items")
        self._batches.resume(place, state["sampler"], state["rng"])
        if state["rng"] is not None:
            restore_random_state(state["rng"])


class _Forward:
    """The context of a forward pass; one object for all of them, one after the other."""

    __slots__ = ("_autocast", "_communicate", "_depth", "_quiet", "_window")

    def __init__(self, window: Window, strategy: Strategy, autocast: Any) -> None:
        self._window, self._autocast = window, autocast
        self._quiet = strategy.kind == "plain"
        self._communicate = strategy.communicate
        # torch.autocast remembers one state to go back to: entered within itself it would stay on for ever
        self._depth = 0

    def __enter__(self) -> None:
        if not self._quiet:
            self._communicate(last=self._window.done + 1 >= self._window.end)
        if self._autocast is not None:
            if not self._depth:
                self._autocast.__enter__()
            self._depth += 1

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._autocast is not None:
            self._depth -= 1
            if not self._depth:
                self._autocast.__exit__(kind, error, trace)


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    if isinstance(optimizer, (list, tuple)):
        raise ConfigError(f"{len(optimizer)} optimizers were given: make one, or a loop for each (a GAN)")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer must be a torch optimizer, not {type(optimizer).__name__}")
    known = {id(parameter) for parameter in model.parameters()}
    held = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    if not any(id(parameter) in known for parameter in held):
        raise ConfigError("the optimizer holds none of the model's parameters: make it after the model is wrapped")
    check_optimizer_step(
        optimizer,
        "a loop of forward, backward and step has none: write this loop yourself, perfagent.attach() watches it all the same",
    )


def _compile(model: Any, how: bool | str | Mapping[str, Any]) -> None:
    """In place: the model keeps its type and the names of its parameters."""
    if how is True:
        compile_in_place(model)
    elif isinstance(how, str):
        modes = [*torch._inductor.list_mode_options()] if hasattr(torch, "_inductor") else []
        if modes and how not in (*modes, "default"):
            raise ConfigError(
                f"compile must be True, False, arguments of torch.compile or one of its modes ({', '.join(modes)}), not {how!r}"
            )
        compile_in_place(model, mode=how)
    elif isinstance(how, Mapping):
        compile_in_place(model, **how)
    elif how:
        raise ConfigError(f"compile must be True, False, a mode of torch.compile or its arguments, not {how!r:.80}")


loop = Loop
