"""Scripts with W&B (offline), MLflow and trackio: a training by each, and processes in which nothing trains.

Arguments: a folder, the tracker.
"""

import contextlib
import os
import sys
from pathlib import Path

from agent_recorded import Recording
from builders import until
from said import report

import perfagent

folder, tracker = sys.argv[1:]
place = f"{folder}/{tracker}"
for part in (place, f"{folder}/untrained"):
    Path(part).mkdir(parents=True)
os.environ |= {
    "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": place, "TRACKIO_DIR": f"{place}/trackio",
    "MLFLOW_TRACKING_URI": f"file://{place}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true", "HF_HUB_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true",
}  # fmt: skip
STEPS = 5
if tracker == "mlflow":
    from mlflow import log_metric  # by its name, before there is a run of ours
logged = []


def context_is_told():
    """Waits for the configuration of the run in which nothing trains; the agent looks again much later, or at the end."""
    record = Path(folder, "untrained", "record")

    def is_told():
        with contextlib.suppress(FileNotFoundError):  # its folder is being made
            return any("packages" in told for told in Recording(record).events("context"))
        return False

    until(is_told)


def training():
    """One optimizer step after the other, with its loss."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for n in range(1, STEPS + 1):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield n, loss.detach()


def by_wandb():
    import wandb

    run = wandb.init(project="mine", config={"depth": 3}, settings=wandb.Settings(console="off"))
    log = wandb.log  # bound before there is a run of ours
    perfagent.attach(record=f"{place}/record")
    for n, loss in training():
        log({"loss": loss, "group": {"a": n}, "flag": n > 2, "note": "text", "image": wandb.Histogram([1, 2, 3])})
        logged.extend([("logged/loss", n, loss), ("group.a", n, n), ("flag", n, n > 2)])
        run.log({"late": n}, commit=False)
        run.log({"named": n}, step=100 * n)
        run.config["width"] = 8
        logged.extend([("late", n, n), ("named", 100 * n, n)])
    perfagent.finish()
    report(place, logged)

    perfagent.attach(record=f"{folder}/untrained/record")
    del logged[:]
    begin = run._local_step
    for n in range(3):
        wandb.log({"score": n, "lr": 0.5})
        logged.extend([("score", begin + n, n), ("lr", begin + n, 0.5)])
    context_is_told()
    wandb.config.update({"late": 5})
    run.finish()
    perfagent.finish()
    report(f"{folder}/untrained", logged)


def by_mlflow():
    import mlflow
    from mlflow.entities import Metric

    client = mlflow.MlflowClient()
    with mlflow.start_run() as run:
        perfagent.attach(record=f"{place}/record")
        mlflow.log_params({"depth": 3})
        mlflow.log_param("width", 8)
        waited = []
        for n, loss in training():
            log_metric("loss", loss)
            mlflow.log_metrics({"a": n, "b": 2 * n}, step=10 * n)
            waited.append(mlflow.log_metric("later", n, synchronous=False))
            client.log_metric(run.info.run_id, "by_client", n, step=n)
            client.log_batch(run.info.run_id, [Metric("batch", n, 0, 0), Metric("batch", n, 0, n)])
            logged.extend([("logged/loss", n, loss), ("a", 10 * n, n), ("b", 10 * n, 2 * n), ("later", n, n)])
            logged.extend([("by_client", n, n), ("batch", 0, n), ("batch", n, n)])
        for each in waited:
            each.wait()
        perfagent.finish()
    report(place, logged)


def by_trackio():
    import trackio

    def begun():
        config = {"depth": 3, "width": 8}
        return trackio.init(project="mine", config=config, auto_log_gpu=False, auto_log_cpu=False)

    run = begun()
    perfagent.attach(record=f"{folder}/untrained/record")
    for n in range(3):
        trackio.log({"score": n, "loss": 0.5})
        logged.extend([("score", n, n), ("loss", n, 0.5)])
    context_is_told()
    run.config["late"] = 5
    trackio.finish()
    assert "torch" not in sys.modules
    perfagent.finish()
    report(f"{folder}/untrained", logged)
    del logged[:]

    run = begun()
    perfagent.attach(record=f"{place}/record")
    for n, loss in training():
        trackio.log({"loss": loss.item(), "accuracy": n / 10, "note": "text"})
        run.log({"named": n}, step=7 * n)
        logged.extend([("logged/loss", n, loss), ("accuracy", n, n / 10), ("named", 7 * n, n)])
    perfagent.finish()
    report(place, logged)
    trackio.finish()


def by_tensorboardx():
    perfagent.attach(record=f"{place}/record")
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(f"{place}/board")
    for n in (3, 50, 700):
        writer.add_scalar("loss", 1 / n, n)
        writer.add_scalars("both", {"a": n}, n)
        logged.extend([("loss", n, 1 / n), ("both/a", n, n)])
    writer.close()
    perfagent.finish()
    report(place, logged)


{"tensorboardX": by_tensorboardx, "wandb": by_wandb, "mlflow": by_mlflow, "trackio": by_trackio}[tracker]()
