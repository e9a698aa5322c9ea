"""What trainers say of themselves, for real: where a resumed training goes on, how one ends that is stopped from afar, and
which steps are a search's. The Transformers Trainer and Lightning."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent.frameworks.running import printed
from agent_recorded import Recording

HUGGINGFACE = """
    import json
    import perfagent
    from trainers import gpt2_trainer
    from transformers import TrainerCallback

    told = {}

    class Attaching(TrainerCallback):
        def on_train_begin(self, arguments, state, control, **_):
            perfagent.attach(record="in a callback")

    def trainer(steps, *callbacks):
        return gpt2_trainer("out", *callbacks, gradient_accumulation_steps=2, max_steps=steps, logging_steps=1, save_steps=2)

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
    import json
    import perfagent, torch
    from torch.utils.data import DataLoader, TensorDataset
    from trainers import lightning_task, lightning_trainer

    Task = lightning_task()
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)

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

    def go_on(task, accumulate=1, where=None):
        first = lightning_trainer(max_epochs=1, accumulate_grad_batches=accumulate)
        first.fit(task(), loader)
        first.save_checkpoint("saved")
        Task.losses.clear()
        if where is not None:
            perfagent.attach(record=where)
        lightning_trainer(max_epochs=2, accumulate_grad_batches=accumulate).fit(task(), loader, ckpt_path="saved")
        perfagent.finish()

    go_on(Task, accumulate=2, where="accumulated")
    go_on(Pair, where="pair")
    go_on(Attaching)
    go_on(Task, where="automatic")
    print(json.dumps(Task.losses))
"""


@pytest.mark.long
def test_a_resumed_trainer_counts_on(tmp_path: Path) -> None:
    told = printed(tmp_path, HUGGINGFACE)
    for how in ("after", "in a callback"):
        record = Recording(tmp_path / how)
        assert record.series("loss") == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in told[how]]
        assert [event["start_step"] for event in record.events("state") if "start_step" in event] == [3]
    assert [step for step, _ in told["after"]] == [3, 4, 5]
    again = [step for step, _ in Recording(tmp_path / "before").series("loss")]
    assert again == [3, 4, 5, 6, 7, 8], "a second training of the process repeats no number"


@pytest.mark.long
def test_a_resumed_lightning_training_counts_on(tmp_path: Path) -> None:
    losses = printed(tmp_path, LIGHTNING)
    told = Recording(tmp_path / "automatic").series("loss")
    assert told == [(step, pytest.approx(loss)) for step, loss in enumerate(losses, start=5)]
    for how, steps in {"in a hook": [5, 6, 7, 8], "pair": [5, 6, 7, 8], "accumulated": [3, 4]}.items():
        assert [step for step, _ in Recording(tmp_path / how).series("lr")] == steps, how


# ---- stopped from afar

OF_HUGGINGFACE = """
    from transformers import TrainerCallback

    class Asked(TrainerCallback):
        def on_step_begin(self, *_, **__):
            at_call()

    def train():
        trainer = trainers.gpt2_trainer("out", Asked(), max_steps=20, save_steps=100)
        trainer.train()
        step = trainer.state.global_step
        saved = [one.name for one in Path("out").glob("checkpoint-*")]
        for one in saved:
            trainer.train(resume_from_checkpoint=f"out/{one}")
        return step, saved
"""
OF_LIGHTNING = """
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    class Task(trainers.lightning_task()):
        def training_step(self, batch, index):
            at_call()
            return super().training_step(batch, index)

    def train():
        kept = ModelCheckpoint(dirpath="out", every_n_train_steps=1000, save_on_train_epoch_end=False)
        trainer = trainers.lightning_trainer(max_epochs=9, callbacks=[kept], enable_checkpointing=True)
        trainer.fit(Task(), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4))
        saved = [one.name for one in Path("out").glob("stopped-*")]
        for one in saved:
            assert torch.load(f"out/{one}", weights_only=False)["global_step"] == trainer.global_step
        return trainer.global_step, saved
"""
STOPPED = """
    import json
    from pathlib import Path
    import perfagent, torch
    import trainers
    from perfagent.step.state import state

    def at_call():
        global calls
        calls += 1
        if calls == 4:  # in the fourth step
            state.current.links.investigator.obey({"id": "c1", "kind": "stop", "params": {"step": 6, "saves": saves}})
TRAINS
    ended = []
    for saves in (False, True):
        perfagent.attach(record=f"record {saves}", stoppable=True)
        calls = 0
        ended.append(train())
        perfagent.finish()
    print(json.dumps(ended))
"""


@pytest.mark.real
@pytest.mark.parametrize(("trains", "left"), [(OF_HUGGINGFACE, "checkpoint-6"), (OF_LIGHTNING, "stopped-step=6.ckpt")])
def test_a_trainer_ends_after_the_named_step(tmp_path: Path, trains: str, left: str) -> None:
    """And saves there, if it was asked to."""
    assert printed(tmp_path, STOPPED.replace("TRAINS", trains)) == [[6, []], [6, [left]]]


# ---- searches

SEARCHES = """
    import json
    import perfagent, torch
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader, TensorDataset
    from trainers import lightning_task, lightning_trainer

    class Task(lightning_task()):
        lr, batch_size = 0.01, 4

        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=self.batch_size)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    task = Task()
    perfagent.attach(task, record="record")
    trainer = lightning_trainer(max_epochs=2)
    tuner = Tuner(trainer)
    tuner.scale_batch_size(task, mode="power", steps_per_trial=2, init_val=2, max_trials=2)
    searched = [len(Task.losses)]
    tuner.lr_find(task, min_lr=1e-3, max_lr=100.0, num_training=20, early_stop_threshold=None, update_attr=False)
    searched.append(len(Task.losses))
    trainer.fit(task)
    perfagent.finish()
    print(json.dumps([searched, Task.losses[searched[1]:]]))
"""


@pytest.mark.real
def test_searches_of_lightning_are_no_steps_of_the_run(tmp_path: Path) -> None:
    searched, losses = printed(tmp_path, SEARCHES)
    assert 0 < searched[0] < searched[1] - 10
    recorded = Recording(tmp_path / "record").series("loss")
    assert recorded == [(step, pytest.approx(loss)) for step, loss in enumerate(losses, start=1)]
