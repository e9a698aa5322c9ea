"""Which calls of which library log what: the scalars, under which names and at which step.

The parameters have the names that the library's own callers give them. Patched is what lies underneath: a method of a
class, since names of functions may have been bound before there was a run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations import functions
from perfagent.integrations.loggers.capture import Logs, captured
from perfagent.integrations.loggers.settings import note
from perfagent.step.state import state

if TYPE_CHECKING:
    from perfagent.integrations.functions import Patch, Table, WhenImported

__all__ = ["LOGGERS", "install", "logs_of"]

Values = Mapping[str, object]


@captured
def _accelerate(accelerator: Any, values: Values, step: object = None, *_: object, **__: object) -> list[Logs]:
    """With or without trackers, which it calls on the main process only."""
    return [Logs(values, step, joint="/")] if accelerator.is_main_process else []


@captured
def _deepspeed(monitor: Any, event_list: Iterable[tuple[str, object, object]]) -> list[Logs]:
    """With which of its own backends ever: what the engine writes, and a script by `engine.monitor.write_events`, on rank 0
    only. An event: (name, value, samples so far); the step here is the run's own."""
    return [Logs({event[0]: event[1] for event in event_list})] if monitor.enabled else []


@captured
def _fabric(fabric: Any, metrics: Values, step: object = None) -> list[Logs]:
    """`Fabric.log` calls it. Its loggers write on rank 0."""
    return [Logs(metrics, step, joint="/")] if fabric.is_global_zero else []


@captured
def _lightning(connector: Any, metrics: Values, step: object = None) -> list[Logs]:
    """What `self.log` hands to the trainer's loggers, whether it has any or none (`logger=False`), under their names.

    Lightning counts batches and the steps of all optimizers; the step here is the optimizer step that was completed last.
    Where the trainer names a step, in an evaluation that logs each of its batches, or the module logs one under the name
    `step`, it is that.
    """
    trainer = connector.trainer
    if not metrics or not trainer.is_global_zero:
        return []
    values = dict(metrics)
    if step is None:
        step = values.pop("step", None)
    if step is None:
        values.setdefault("epoch", trainer.current_epoch)
        p = state.current
        stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
        step = int(stepped) if p is None or p.last is None else p.completed
    return [Logs(values, step, joint="/")]


@captured
def _lightning_csv(_logger: object, metrics: Values, step: object = None) -> list[Logs]:
    """Modules and callbacks may call a logger past the trainer. Lightning's other loggers write by libraries that are
    watched themselves."""
    return [Logs(metrics, step)]


@captured
def _mlflow_metric(
    _client: object, run_id: object, key: str, value: object, timestamp: object = None, step: object = None,  # noqa: ARG001
    *_: object, **__: object,
) -> list[Logs]:  # fmt: skip
    """Where `mlflow.log_metric(s)` and the client's meet, whether they wait for the server or not. Below `mlflow.log_metric` a
    step that was not named is 0: `_patch_mlflow` knows which it was."""
    return [Logs({key: value}, step)]


@captured
def _mlflow_batch(
    _client: object, run_id: object, metrics: Iterable[Any] = (), params: Iterable[Any] = (), *_: object, **__: object  # noqa: ARG001
) -> list[Logs]:  # fmt: skip
    note("mlflow", {one.key: one.value for one in params})
    by_step: dict[object, dict[str, object]] = {}
    for metric in metrics:
        by_step.setdefault(metric.step, {})[metric.key] = metric.value
    return [Logs(values, step) for step, values in by_step.items()]


@captured
def _mlflow_parameter(_client: object, run_id: object, key: str, value: object, *_: object, **__: object) -> list[Logs]:  # noqa: ARG001
    note("mlflow", {key: value})
    return []


@captured
def _mlflow_log_metric(key: str, value: object, step: object = None, *_: object, **__: object) -> list[Logs]:
    return [Logs({key: value}, step)]


@captured
def _mlflow_log_metrics(metrics: Values, step: object = None, *_: object, **__: object) -> list[Logs]:
    return [Logs(metrics, step)]


def _patch_mlflow(patch: Patch) -> None:
    """MLflow's functions without a client: a call that names no step is of the step in progress. Scripts that took a function
    by its name before there was a run (`from mlflow import log_metric`) are looked up."""
    for name, watch in (("log_metric", _mlflow_log_metric), ("log_metrics", _mlflow_log_metrics)):
        original = getattr(sys.modules["mlflow"], name)
        for module in [*sys.modules.values()]:
            if isinstance(module, ModuleType) and vars(module).get(name) is original:
                patch(module, name, watch)


@captured
def _tensorboard_scalar(
    _writer: object, tag: str, scalar_value: object, global_step: object = None, *_: object, **__: object
) -> list[Logs]:
    return [Logs({tag: scalar_value}, global_step)]


@captured
def _tensorboard_scalars(
    _writer: object, main_tag: str, tag_scalar_dict: Values, global_step: object = None, *_: object, **__: object
) -> list[Logs]:
    """TensorBoard draws them as lines of one chart, the main tag."""
    return [Logs({f"{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()}, global_step)]


@captured
def _tensorboard_hyperparameters(_writer: object, hparam_dict: Values, *_: object, **__: object) -> list[Logs]:
    """Its metrics are logged by `add_scalar`, below it."""
    note("tensorboard", hparam_dict)
    return []


@captured
def _trackio(run: Any, metrics: Values | None = None, step: object = None) -> list[Logs]:
    """`trackio.log` calls it. At the end: what was set since the last log()."""
    if isinstance(config := getattr(run, "config", None), dict):
        note("trackio", {name: value for name, value in config.items() if not str(name).startswith("_")})
    return [Logs(metrics or {}, step, own_step=getattr(run, "_next_step", None))]


@captured
def _transformers(
    _handler: object, args: object, state: Any, control: object, logs: Values, *_: object, **__: object  # noqa: ARG001
) -> list[Logs]:  # fmt: skip
    """`Trainer.log`, with whatever `report_to`: what it hands to its callbacks, which has what a subclass adds in its own
    `log`, and the epoch."""
    return logs_of(state, logs)


def logs_of(state: Any, logs: Values) -> list[Logs]:
    """state: the trainer's, which has the steps of a checkpoint as well. Its callbacks write on the first process only."""
    if not state.is_world_process_zero:
        return []
    return [Logs({_written(name): value for name, value in logs.items()}, state.global_step, forwarded=logs)]


@functools.lru_cache(maxsize=4096)
def _written(name: str) -> str:
    """As its TensorBoard and W&B callbacks call it."""
    prefix, _, rest = name.partition("_")
    return f"{prefix}/{rest}" if prefix in ("eval", "test") and rest else f"train/{name}"


@captured
def _wandb(run: Any, data: Values, step: object = None, commit: object = None) -> list[Logs]:  # noqa: ARG001
    """`wandb.log` is `Run.log`, bound when a run begins; both call it. A dict among the values is a group of charts, with a dot
    in their names. `commit=False` adds to a step that later calls go on with: W&B's own count stays where it is."""
    return [Logs(data, step, own_step=getattr(run, "_local_step", None), joint=".")]


@captured
def _wandb_finish(run: Any, *_: object, **__: object) -> list[Logs]:
    """Both run.finish() and the end of a `with` call it. Afterwards `wandb.run` is gone, and with it what was set since the
    agent's last look."""
    note("wandb", dict(run.config.items()))
    return []


LOGGERS: Table = (
    (_accelerate, {"accelerate.accelerator": ("Accelerator.log",)}),
    (_deepspeed, {"deepspeed.monitor.monitor": ("MonitorMaster.write_events",)}),
    (_fabric, {"lightning.fabric.fabric": ("Fabric.log_dict",)}),
    (_lightning, {
        "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": ("_LoggerConnector.log_metrics",),
    }),
    (_lightning_csv, {"lightning.pytorch.loggers.csv_logs": ("CSVLogger.log_metrics",)}),
    (_mlflow_metric, {"mlflow.tracking._tracking_service.client": ("TrackingServiceClient.log_metric",)}),
    (_mlflow_batch, {"mlflow.tracking._tracking_service.client": ("TrackingServiceClient.log_batch",)}),
    (_mlflow_parameter, {"mlflow.tracking._tracking_service.client": ("TrackingServiceClient.log_param",)}),
    (_tensorboard_scalar, {"torch.utils.tensorboard.writer": ("SummaryWriter.add_scalar",)}),
    (_tensorboard_scalars, {"torch.utils.tensorboard.writer": ("SummaryWriter.add_scalars",)}),
    (_tensorboard_hyperparameters, {"torch.utils.tensorboard.writer": ("SummaryWriter.add_hparams",)}),
    (_trackio, {"trackio.run": ("Run.log", "Run.finish")}),
    (_transformers, {"transformers.trainer_callback": ("CallbackHandler.on_log",)}),
    (_wandb, {"wandb.sdk.wandb_run": ("Run._log",)}),
    (_wandb_finish, {"wandb.sdk.wandb_run": ("Run._finish",)}),
)  # fmt: skip


def install(patch: Patch, when_imported: WhenImported) -> None:
    """Each now if its library is there, else when the script's own import of it is complete."""
    functions.install(patch, when_imported, LOGGERS)

    def mlflow() -> None:
        _patch_mlflow(patch)

    when_imported("mlflow", mlflow)
