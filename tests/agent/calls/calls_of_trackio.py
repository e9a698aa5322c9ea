"""What scripts call of trackio. Arguments: the module that is imported as trackio, a folder."""

import importlib
import sys

import numpy

trackio = importlib.import_module(sys.argv[1])

options = {"auto_log_gpu": False, "gpu_log_interval": 1.0, "private": True, "webhook_min_level": None}
if sys.argv[1] != "trackio":
    options |= {"space_id": "me/space", "webhook_url": "http://127.0.0.1:9"}
run = trackio.init(project="mine", name="first", group="g", config={"lr": 0.1}, resume="never", embed=False, **options)
assert run.name == "first" and trackio.config["lr"] == 0.1
for step in range(3):
    trackio.log({"loss": 1.0 / (step + 1)}, step=step)
pixels = numpy.zeros((4, 4, 3), numpy.uint8)
trackio.log({"image": trackio.Image(value=pixels, caption="black")}, step=3)
trackio.log({"table": trackio.Table(columns=["word"], data=[["one"]])}, step=3)
trackio.log({"histogram": trackio.Histogram([1.0, 2.0], num_bins=4)}, step=3)
trackio.alert(title="slow", text="slower than before", level=trackio.AlertLevel.ERROR)
trackio.log_system({"fan": 0.5})
trackio.finish()
