"""What 10,000 logged images cost: the time of a training step with and without them, and the page of a run that has them
beside that of one that has none.

    PYTHONPATH=benchmarks:tests python benchmarks/media.py [--quick] [--write]

A perceptron trains on one thread; each step logs its loss, and in every second process 10 images of 64 × 64 pixels as well.
Processes are fresh and interleaved; all record to the disk, so that no server shares the machine with them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tables
from builders import ServerProcess, server_process
from pages import BROWSERS, visit
from playwright.sync_api import sync_playwright
from recorded import record_run, send, training

import perfagent
from perfagent.wire import Event

STEPS, IMAGES, ROUNDS = 1000, 10, 5

JOB = """
import json, sys, time, numpy as np, torch, perfagent
torch.manual_seed(0); torch.set_num_threads(1)
images, steps, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
run = perfagent.attach(model, optimizer, record=folder)
x, photo = torch.randn(256, 512), np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
wall, cpu = [], []
for step in range(steps):
    at, used = time.perf_counter(), time.thread_time()
    loss = model(x).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    values = {"my_loss": loss}
    if images:
        values["samples"] = [perfagent.Image(photo, caption=f"{n} of {step}") for n in range(images)]
    run.log(values)
    wall.append(time.perf_counter() - at); cpu.append(time.thread_time() - used)
run.finish()
warm = steps // 10
print(json.dumps({"wall": wall[warm:], "cpu": cpu[warm:], "left_out": run._sender.counters.get("dropped_media", 0)}))
"""


def train(images: int, steps: int) -> dict[str, float]:
    """Medians of a step in milliseconds, and how many images were left out."""
    with tempfile.TemporaryDirectory(prefix="perfagent-media-") as folder:
        job = [sys.executable, "-c", JOB, str(images), str(steps), folder]
        found: dict[str, Any] = json.loads(subprocess.run(job, check=True, capture_output=True, text=True).stdout)
    medians = {name: 1e3 * statistics.median(found[name]) for name in ("wall", "cpu")}
    return {**medians, "left_out": found["left_out"]}


def step_rows(rounds: int, steps: int) -> list[list[str]]:
    pairs = [[train(images, steps) for images in (0, IMAGES)] for _ in range(rounds)]
    rows = []
    for name, clock in (("wall", "a step, ms"), ("cpu", "of it CPU time of the training thread, ms")):
        without, logged = ([pair[at][name] for pair in pairs] for at in (0, 1))
        ratio = statistics.median(b / a for a, b in zip(without, logged, strict=True))
        rows.append([clock, *(tables.figure(statistics.median(one)) for one in (without, logged)), f"{ratio:.3f}"])
    rows.append(["images left out", "", f"{statistics.median(pair[1]['left_out'] for pair in pairs):.0f}", ""])
    return rows


def page_rows(server: ServerProcess, steps: int) -> list[list[str]]:
    picture = perfagent.Image(np.zeros((64, 64, 3), np.uint8)).encoded()
    for run in ("none", "images"):
        record_run(server, run, steps=steps, name=run)
    for begin in range(0, steps, 100):
        events = [
            Event(
                kind="media",
                time=1.0,
                step=step,
                data={"name": "samples", "what": "image", "index": at, "payload": picture},
            )
            for step in range(begin, begin + 100)
            for at in range(IMAGES)
        ]
        x = np.arange(steps + begin + 1, steps + begin + 2)
        send(server, "images", training(x), x, seq=begin + 2, events=events, name="images")
    named = os.environ.get("PERFAGENT_TEST_BROWSER")
    path = next(filter(None, map(shutil.which, [*([named] if named else []), *BROWSERS])), None)
    ready = {"": "#run-charts .plot[data-points]", "?tab=media": ".picture img"}
    rows = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--headless", "--no-sandbox", "--disable-gpu"])
        for what, address in (("charts, no images", "none"), ("charts", "images"), ("Media tab", "images?tab=media")):
            context = browser.new_context(viewport={"width": 1440, "height": 900})
            waits = ready[address.removeprefix("none").removeprefix("images")]
            found = [visit(context, f"{server.url}/run/{address}", waits) for _ in range(5)][1:]
            context.close()
            took, size, requests = (statistics.median(column) for column in zip(*found, strict=True))
            rows.append([what, f"{took:.2f}", f"{size:.3f}", f"{requests:.0f}"])
        browser.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    steps, rounds = (100, 1) if options.quick else (STEPS, ROUNDS)
    training_part = tables.table(["", "no images", f"{steps * IMAGES:,} images", "ratio"], step_rows(rounds, steps))
    with tempfile.TemporaryDirectory(prefix="perfagent-media-") as folder, server_process(Path(folder)) as server:
        page_part = tables.table(["page of a run", "second visit s", "MB", "requests"], page_rows(server, steps))
    text = f"{tables.machine('torch')}. Medians of {rounds} pairs.\n\n{training_part}\n\n{page_part}"
    print(text)
    if options.write:
        tables.replace("media", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
