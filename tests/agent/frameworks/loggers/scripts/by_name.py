"""A training with each library that knows perfagent by name: alone, then with it. What it logged, and whether it trained
the same.

Arguments: a folder, which training. Only a part that begins no run by itself says where that goes.
"""

import hashlib
import os
import sys
import warnings

import torch
from said import of_lightning, of_transformers, report

import perfagent

folder, which = sys.argv[1:]
warnings.simplefilter("ignore")
os.environ["PERFAGENT_RECORD"] = f"{folder}/record"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def forward(self, x, labels=None):
        y = self.linear(x)
        return {"loss": (y - labels).square().mean(), "logits": y} if labels is not None else y


def digest(model):
    whole = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for tensor in model.state_dict().values():
        whole.update(tensor.numpy().tobytes())
    return whole.hexdigest()


def data(number=40):
    torch.manual_seed(0)
    return [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(number)]


# ---- Transformers


def transformers(named, capture=True):
    from trainers import gpt2_trainer

    from perfagent.integrations import PerfagentCallback

    trainer = gpt2_trainer(
        f"{folder}/out", *([PerfagentCallback(capture_logs=False)] if named and not capture else []), rows=40, evaluates=True,
        per_device_train_batch_size=4, num_train_epochs=1, logging_steps=2, eval_strategy="steps", eval_steps=4,
        report_to="perfagent" if named and capture else [], save_strategy="no", run_name="by name", seed=3,
    )  # fmt: skip
    trainer.train()
    return trainer.model, of_transformers(trainer)


def transformers_uncaptured(named):
    """The mirroring is off: the callback writes by itself."""
    return transformers(named, capture=False)


# ---- Lightning


def lightning(named, callback=False):
    from trainers import lightning_task, lightning_trainer

    from perfagent.integrations import PerfagentLightningCallback, PerfagentLogger

    class Module(lightning_task()):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"depth": 3})

        def training_step(self, batch, index):
            loss = super().training_step([batch["x"]], index)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            if index == 3 and self.loggers and self.current_epoch == 0:
                self.logger.log_metrics({"past/the/trainer": 7.5}, step=4)
                logged.append(("past/the/trainer", 4, 7.5))
            return loss

    trainer = lightning_trainer(
        max_epochs=2, log_every_n_steps=2, default_root_dir=folder,
        logger=PerfagentLogger(project="mine", name="by name") if named and not callback else False,
        callbacks=[PerfagentLightningCallback(project="mine", name="by name")] if named and callback else [],
    )  # fmt: skip
    logged = of_lightning(trainer)
    module = Module()
    for logger in trainer.loggers:
        logger.log_hyperparams({"seen": 1})
    trainer.fit(module, torch.utils.data.DataLoader(data(24), batch_size=4))
    return module, logged


def lightning_callback(named):
    return lightning(named, callback=True)


# ---- Accelerate


def accelerate(named, as_object=False):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from perfagent.integrations import PerfagentTracker

    AcceleratorState._reset_state(True)
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data(24), batch_size=4)
    tracker = PerfagentTracker("mine", name="by name") if as_object and named else "perfagent"
    accelerator = Accelerator(cpu=True, log_with=tracker if named else None)
    accelerator.init_trackers("mine", config={"depth": 3}, init_kwargs={"perfagent": {"name": "by name"}})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    logged = []
    for step, batch in enumerate(loader, 1):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        images = {"image": perfagent.Image(torch.zeros(2, 2))} if named and step == 2 else {}
        accelerator.log({"train_loss": loss.item(), **images}, step=step)
        logged.append(("train_loss", step, loss.item()))
    accelerator.end_training()
    return accelerator.unwrap_model(model), logged


def accelerate_object(named):
    return accelerate(named, as_object=True)


# ---- DeepSpeed


def deepspeed(named):
    """Its own monitor, of CSV files: what it is given is mirrored."""
    import logging

    import deepspeed as package

    package.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles C++ for a minute
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if not torch.distributed.is_initialized():
        os.environ["LOCAL_RANK"] = "0"
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    torch.manual_seed(1)
    model = Model()
    engine, *_ = package.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 4, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9,
            "csv_monitor": {"enabled": True, "output_path": f"{folder}/csv"},
        },
    )  # fmt: skip
    if named:
        perfagent.attach(engine, name="by name")
    logged = []
    for step, batch in enumerate(torch.utils.data.DataLoader(data(24), batch_size=4), 1):
        engine.backward(engine(**batch)["loss"])
        engine.step()
        logged.append(("Train/Samples/lr", step, 0.01))
        engine.monitor.write_events([("Own/score", step / 2, engine.global_samples)])
        logged.append(("Own/score", step, step / 2))
    return model, logged


trainings = {
    one.__name__: one
    for one in (
        transformers, transformers_uncaptured, lightning, lightning_callback, accelerate, accelerate_object, deepspeed,
    )
}  # fmt: skip
alone = digest(trainings[which](named=False)[0])
assert perfagent.run is None
trained, told = trainings[which](named=True)
if perfagent.run is not None:
    perfagent.finish()
report(folder, told)
assert digest(trained) == alone, "perfagent changed the training"
