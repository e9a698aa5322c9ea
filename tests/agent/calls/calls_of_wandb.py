"""What scripts call of W&B, most of it in use. Arguments: the module that is imported as wandb, a folder."""

import importlib.util
import sys
import time
from pathlib import Path

import numpy
import torch

wandb = importlib.import_module(sys.argv[1])
folder = sys.argv[2]

wandb.login(key="0" * 40)
run = wandb.init(
    entity="team", project="mine", name="first", notes="", tags=("a", "b"), group="g", job_type="train",
    config={"lr": 0.1}, mode="offline", dir=folder, id="run-1", resume="allow", reinit=True, save_code=False,
    settings=wandb.Settings(silent=True), anonymous=None, config_exclude_keys=["x"],
)  # fmt: skip
assert run is wandb.run and wandb.run.id == "run-1" and run.name == "first" and run.project == "mine"
assert run.url is None or isinstance(run.url, str)
assert run.group == "g" and set(run.tags) >= {"a", "b"} and run.config["lr"] == wandb.config.lr == 0.1
assert not run.resumed and run.offline and run.sweep_id is None and isinstance(run.step, int)
wandb.config.update({"depth": 3}, allow_val_change=True)
wandb.config.width = 8
wandb.config.setdefaults({"lr": 0.2, "heads": 2})
assert wandb.config.lr == 0.1 and wandb.config.as_dict()["heads"] == 2
if sys.argv[1] != "wandb":  # which asks its server, and does not record such a config
    wandb.config = {"early": 1}
    assert wandb.config is run.config
    wandb.use_artifact("data:latest").download()
    assert wandb.restore("model.h5") is None
    assert list(wandb.Api().runs("team/mine")) == []
wandb.define_metric("loss", step_metric="epoch", summary="min")
run.log_code(".")
wandb.watch(torch.nn.Linear(2, 1), log="all", log_freq=10)
run.name = "renamed"
run.tags = (*run.tags, "c")
run.tags = run.tags + ("d",)  # noqa: RUF005 - as scripts have it
assert time.time() - 600 < run.start_time <= time.time()

for step in range(3):
    wandb.log({"loss": 1.0 / (step + 1), "val": {"accuracy": step / 2}}, step=step)
wandb.log(data={"early": 1.5}, step=3, commit=False)
wandb.log({"late": 2.5}, step=3, commit=True)

table = wandb.Table(columns=["word", "count"], data=[["one", 1]])
table.add_data("two", 2)
table.add_column("half", [0.5, 1.0])
assert table.get_column("count") == [1, 2] and table.columns == ["word", "count", "half"] and len(table.data) == 2
assert wandb.data_types.Image is wandb.Image
wandb.Classes([{"id": 0, "name": "cat"}])
pixels = numpy.zeros((4, 4, 3), numpy.uint8)
run.log(
    {
        "image": wandb.Image(data_or_path=pixels, caption="black"),
        "images": [wandb.Image(pixels, mode="RGB", caption="a"), wandb.Image(pixels)],
        "table": table,
        "histogram": wandb.Histogram([1.0, 2.0, 2.0], num_bins=4),
        "html": wandb.Html("<b>no</b>"),
    },
    step=4,
)
if sys.argv[1] != "wandb" or importlib.util.find_spec("soundfile"):
    run.log({"sound": wandb.Audio(numpy.zeros(160, numpy.float32), sample_rate=16000, caption="silence")}, step=4)
wandb.log({"curve": wandb.plot.line_series([1, 2], [[1, 2]], title="x")}, step=5)
wandb.summary["best"] = 0.25
run.summary.update({"worst": 1.0})
assert run.summary["best"] == 0.25
assert isinstance(run.summary["late"], float)
artifact = wandb.Artifact("weights", type="model", metadata={"a": 1})
with artifact.new_file("note.txt") as file:
    file.write("x")
run.log_artifact(artifact)
wandb.save(f"{folder}/nothing-*.pt", base_path=folder)
assert Path(run.dir).is_dir()
wandb.alert(title="slow", text="slower than before", level=wandb.AlertLevel.WARN, wait_duration=300)
run.mark_preempting()
wandb.unwatch()
assert not hasattr(wandb.util, "generate_id") or len(wandb.util.generate_id()) > 4  # of older versions
wandb.finish(exit_code=0)
assert wandb.run is None

if sys.argv[1] != "wandb":
    wandb.config = {"later": 2}
    assert wandb.config["later"] == 2
with wandb.init(project="mine", mode="offline", dir=folder, id="run-2") as second:
    assert sys.argv[1] == "wandb" or wandb.config == {"later": 2}
    second.log({"loss": 0.5})
off = wandb.init(project="mine", mode="disabled")
off.log({"loss": 0.5})
off.finish()
