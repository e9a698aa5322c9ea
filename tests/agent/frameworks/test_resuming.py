"""A trainer that goes on from its own checkpoint counts on from there, for real: the Transformers Trainer and
Lightning."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent.frameworks.running import printed
from agent_recorded import Recording

HUGGINGFACE = """
    import json
    import perfagent, torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    size = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 61, "n_positions": 16}
    rows = torch.randint(0, 61, (16, 12), generator=torch.Generator().manual_seed(2))
    samples = [{"input_ids": row, "labels": row} for row in rows]
    told = {}

    class Attaching(TrainerCallback):
        def on_train_begin(self, arguments, state, control, **_):
            perfagent.attach(record="in a callback")

    def trainer(steps, *callbacks):
        arguments = TrainingArguments(
            output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=steps, logging_steps=1,
            report_to=[], save_steps=2, disable_tqdm=True, use_cpu=True,
        )
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
        return Trainer(model=model, args=arguments, train_dataset=samples, callbacks=list(callbacks))

    def go_on(name, trainer):
        trainer.train(resume_from_checkpoint="out/checkpoint-2")
        told[name] = [(one["step"], one["loss"]) for one in trainer.state.log_history if one["step"] > 2 and "loss" in one]

    trainer(2).train()
    perfagent.attach(record="before")
    go_on("before", trainer(5))
    trainer(5).train(resume_from_checkpoint="out/checkpoint-2")
    perfagent.finish()
    ready = trainer(5)
    perfagent.attach(record="after")
    go_on("after", ready)
    perfagent.finish()
    go_on("in a callback", trainer(5, Attaching()))
    perfagent.finish()
    print(json.dumps(told))
"""

LIGHTNING = """
    import json, logging, warnings
    import perfagent, torch
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
    losses = []

    class Task(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

        def training_step(self, batch, index):
            loss = self.second(self.first(batch[0])).square().mean()
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    class Pair(Task):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            main, other = self.optimizers()
            for optimizer in (main, other, other, other):
                optimizer.zero_grad()
                loss = super().training_step(batch, index)
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.first, self.second)]

    class Attaching(Task):
        def on_train_start(self):
            if self.trainer.ckpt_path:
                perfagent.attach(record="in a hook")

    def trainer(epochs, accumulate=1):
        return pl.Trainer(
            max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accumulate_grad_batches=accumulate,
        )

    def go_on(task, accumulate=1, where=None):
        first = trainer(1, accumulate)
        first.fit(task(), loader)
        first.save_checkpoint("saved")
        losses.clear()
        if where is not None:
            perfagent.attach(record=where)
        trainer(2, accumulate).fit(task(), loader, ckpt_path="saved")
        perfagent.finish()

    go_on(Task, accumulate=2, where="accumulated")
    go_on(Pair, where="pair")
    go_on(Attaching)
    go_on(Task, where="automatic")
    print(json.dumps(losses))
"""


SEARCHES = """
    import json, logging, warnings
    import perfagent, torch
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    losses = []

    class Task(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.lr, self.batch_size = 0.01, 4
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            loss = self.layer(batch[0]).square().mean()
            losses.append(loss.item())
            return loss

        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=self.batch_size)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    task = Task()
    perfagent.attach(task, record="record")
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    tuner = Tuner(trainer)
    tuner.scale_batch_size(task, mode="power", steps_per_trial=2, init_val=2, max_trials=2)
    searched = [len(losses)]
    tuner.lr_find(task, min_lr=1e-3, max_lr=100.0, num_training=20, early_stop_threshold=None, update_attr=False)
    searched.append(len(losses))
    trainer.fit(task)
    perfagent.finish()
    print(json.dumps([searched, losses[searched[1]:]]))
"""


@pytest.mark.real
def test_searches_of_lightning_are_no_steps_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    searched, losses = printed(tmp_path, SEARCHES)
    assert 0 < searched[0] < searched[1] - 10
    recorded = Recording(tmp_path / "record").series("loss")
    assert recorded == [(step, pytest.approx(loss)) for step, loss in enumerate(losses, start=1)]


@pytest.mark.long
def test_a_resumed_trainer_counts_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    told = dict(printed(tmp_path, HUGGINGFACE))
    for how in ("after", "in a callback"):
        record = Recording(tmp_path / how)
        assert record.series("loss") == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in told[how]]
        assert [event["start_step"] for event in record.events("state") if "start_step" in event] == [3]
    assert [step for step, _ in told["after"]] == [3, 4, 5]
    again = [step for step, _ in Recording(tmp_path / "before").series("loss")]
    assert again == [3, 4, 5, 6, 7, 8], "a second training of the process repeats no number"


@pytest.mark.long
def test_a_resumed_lightning_training_counts_on(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    losses = printed(tmp_path, LIGHTNING)
    told = Recording(tmp_path / "automatic").series("loss")
    assert told == [(step, pytest.approx(loss)) for step, loss in enumerate(losses, start=5)]
    for how, steps in {"in a hook": [5, 6, 7, 8], "pair": [5, 6, 7, 8], "accumulated": [3, 4]}.items():
        assert [step for step, _ in Recording(tmp_path / how).series("lr")] == steps, how
