"""What trainers print: which lines are believed, at which steps."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfagent_client.history import OldRun, find_runs
from perfagent_client.history.console import lines_of

FIXTURES = Path(__file__).parents[2] / "data" / "history"
TRAINERS = ("transformers-4.57", "transformers-5.23")


def read(path: Path) -> list[OldRun]:
    return [run for source in find_runs([path]) for run in source.read()]


def printed(folder: Path, lines: list[str]) -> OldRun:
    (folder / "train.log").write_text("\n".join(lines) + "\n")
    [run] = read(folder)
    return run


def points(run: OldRun, name: str) -> list[tuple[int, float]]:
    return [*zip(run.series[name].step, run.series[name].value, strict=True)]


@pytest.mark.parametrize("version", TRAINERS)
def test_trainer_prints_what_its_state_has_at_the_same_steps(version: str) -> None:
    """Its second training went on from a checkpoint; the progress bar lags behind above a line, and not below."""
    [run] = read(FIXTURES / version / "printed.log")
    truth = json.loads((FIXTURES / version / "truth.json").read_text())
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert list(run.series[name].step) == [step for step, _ in truth[name]]
    if version != "transformers-5.23":  # which prints four digits
        wanted = [float.fromhex(value) for _, value in truth["grad_norm"]]
        assert [value for _, value in points(run, "grad_norm")] == wanted
    assert run.left_out == []


def test_trainer_in_slow_steps_has_its_bar_above_the_line(tmp_path: Path) -> None:
    lines = [
        f"\r {step}%| | {step}/40 [00:{step}<00:30, 1it/s]\r  \r{{'loss': {9 - step}, 'epoch': 1}}"
        for step in (10, 20, 30)
    ]
    assert points(printed(tmp_path, lines), "loss") == [(10, -1.0), (20, -11.0), (30, -21.0)]


def test_keras_lines_count_once_an_epoch_with_the_evaluation() -> None:
    [run] = read(FIXTURES / "keras-3" / "printed.log")
    truth = json.loads((FIXTURES / "keras-3" / "truth.json").read_text())
    assert set(run.series) == set(truth)
    for name, values in truth.items():
        assert list(run.series[name].step) == [1, 2, 3, 4, 5]
        assert [value for _, value in points(run, name)] == pytest.approx(
            [float.fromhex(one) for one in values], abs=1e-4
        )


CASES = {
    "torchtitan": (
        [
            f"[rank{rank}]:[titan] 2025-03-01 12:00:00,123 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: "
            f"{9 - step:7.4f}  \x1b[38;2;180;60;0mgrad_norm: 1.2500  \x1b[33mmemory: 12.34GiB(15.60%)  "
            f"\x1b[34mtps: 12,345  \x1b[35mmfu: 12.48%\x1b[39m"
            for step in (1, 2, 3)
            for rank in (0, 1)
        ],
        {"loss": [(1, 8.0), (2, 7.0), (3, 6.0)], "tps": [(1, 12345.0), (2, 12345.0), (3, 12345.0)]},
    ),
    "nanogpt": (
        [
            "number of parameters: 10.65M", "step 0: train loss 4.2874, val loss 4.2823",
            *(f"iter {step}: loss {4 - step / 8:.4f}, time 250.00ms, mfu {step:.2f}%" for step in (0, 1, 2)),
            "step 2: train loss 3.5, val loss 3.75",
        ],
        {
            "loss": [(0, 4.0), (1, 3.875), (2, 3.75)], "val_loss": [(0, 4.2823), (2, 3.75)],
            "step_time_s": [(0, 0.25), (1, 0.25), (2, 0.25)], "mfu_pct": [(0, 0.0), (1, 1.0), (2, 2.0)],
        },
    ),
    "megatron": (
        [
            f" [2024-01-01 00:00:00] iteration {step:8d}/  500000 | consumed samples: {step * 64:12d} | elapsed time per "
            f"iteration (ms): 1500.0 | learning rate: 1.000000E-04 | lm loss: {step:.6E} | loss scale: 1.0 | grad norm: 1.250 |"
            for step in (10, 20, 30)
        ],
        {"lm_loss": [(10, 10.0), (20, 20.0), (30, 30.0)], "step_time_s": [(step, 1.5) for step in (10, 20, 30)]},
    ),
    "coqui": (
        [
            line
            for step in (25, 50, 75)
            for line in (
                f"\x1b[1m   --> TIME: 2023-01-01 12:00:00 -- STEP: {step - 25}/406 -- GLOBAL_STEP: {step}\x1b[0m",
                f"     | > loss: {9 - step / 25}  (9.1)", "     | > current_lr: 2.5e-07 ", "",
            )
        ] + ["  --> EVAL PERFORMANCE", "     | > avg_loss:\x1b[92m 2.75 \x1b[0m(-0.1)"],
        {"loss": [(25, 8.0), (50, 7.0), (75, 6.0)], "eval_avg_loss": [(75, 2.75)]},
    ),
    "counted anew in each epoch": (
        [f"Epoch [{epoch}/2], Step [{step}/300], Loss: {epoch}.5" for epoch in (1, 2) for step in (100, 200, 300)],
        {"Loss": [(100, 1.5), (200, 1.5), (300, 1.5), (400, 2.5), (500, 2.5), (600, 2.5)]},
    ),
    "examples of PyTorch": (
        [f"Train Epoch: {epoch} [{at}/60000 (1%)]\tLoss: {epoch}.25" for epoch in (1, 2) for at in (0, 640)],
        {"Loss": [(0, 1.25), (640, 1.25), (60000, 2.25), (60640, 2.25)]},
    ),
    "timm": (
        [
            line
            for epoch in (0, 1)
            for line in (
                *(
                    f"Train: {epoch} [{at:4d}/1251 ({at / 12.51:3.0f}%)]  Loss: {7 - epoch}.5 (6.94)  Time: 1.325s,  772.64/s  "
                    f"(1.325s,  772.64/s)  LR: 1.000e-05  Data: 0.911 (0.911)"
                    for at in (0, 50, 1250)
                ),
                f"Test: [   0/97]  Time: 0.5 (0.5)  Loss:   {6 - epoch}.250 ( 6.250)  Acc@1:   1.000 (  1.000)",
                f"Test (EMA): [  97/97]  Time: 0.5 (0.5)  Loss:   {6 - epoch}.125 ( 6.125)  Acc@1:   2.000 (  2.000)",
            )
        ],
        {
            "Loss": [(0, 7.5), (50, 7.5), (1250, 7.5), (1251, 6.5), (1301, 6.5), (2501, 6.5)],
            "eval_Loss": [(1250, 6.25), (1250, 6.125), (2501, 5.25), (2501, 5.125)], "Train": [],
        },
    ),
    "timm that goes on at its sixth epoch": (
        [f"INFO:train:Train: 5 [{at:4d}/100 (  1%)]  Loss: {at}.5 (1.0)" for at in (0, 50, 99)],
        {"Loss": [(500, 0.5), (550, 50.5), (599, 99.5)]},
    ),
    "mmengine": (
        [
            f"2024/01/01 12:00:00 - mmengine - INFO - Epoch(train)  [{epoch}][{at:4d}/500]  lr: 1.0e-02  eta: 0:10:00  "
            f"time: 0.3  loss: {epoch}.5"
            for epoch in (1, 2, 1) for at in (250, 500)
        ],
        {
            "loss": [(250, 1.5), (500, 1.5), (750, 2.5), (1000, 2.5), (250, 1.5), (500, 1.5)],
            "lr": [(step, 0.01) for step in (250, 500, 750, 1000, 250, 500)],
        },
    ),
    "mmengine by iterations": (
        [f"Iter(train) [{at:6d}/40000]  base_lr: 1.0e-02  loss: {at}.5" for at in (50, 100, 150)],
        {"loss": [(50, 50.5), (100, 100.5), (150, 150.5)]},
    ),
    "torchvision": (
        [f"Epoch: [{epoch}]  [{at:3d}/100]  eta: 0:01:00  lr: 0.1  loss: {epoch}.5 (1.5)" for epoch in (0, 1) for at in (0, 50)],
        {"loss": [(0, 0.5), (50, 0.5), (100, 1.5), (150, 1.5)]},
    ),
    "words beside numbers": (
        [
            f"[10/01 12:00:00 d2.utils.events]: INFO trainer.py:42 | __main__:train:17 - step {step} loss 0.5 48% bf16 "
            "MFU on 8xH100"
            for step in (1, 2, 3)
        ],
        {"loss": [(1, 0.5), (2, 0.5), (3, 0.5)]},
    ),
    "plain": (
        [f"epoch {epoch} loss={loss} acc 0.5" for epoch, loss in ((1, "2.5"), (2, "nan"), (3, "inf"))],
        {"loss": [(1, 2.5), (2, math.nan), (3, math.inf)], "acc": [(1, 0.5), (2, 0.5), (3, 0.5)]},
    ),
    "restarted": (
        [f"step {step} | loss = {step}.5" for step in (1, 2, 3, 2, 3, 4)],
        {"loss": [(step, step + 0.5) for step in (1, 2, 3, 2, 3, 4)]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("trainer", CASES)
def test_lines_of_a_trainer_are_read(tmp_path: Path, trainer: str) -> None:
    lines, wanted = CASES[trainer]
    run = printed(tmp_path, lines)
    for name, expected in wanted.items():
        assert repr(points(run, name) if name in run.series else []) == repr(expected), name
    assert run.left_out == []
    if trainer == "words beside numbers":
        assert list(run.series) == ["loss"]


def test_lines_are_counted_where_none_says_its_step(tmp_path: Path) -> None:
    run = printed(
        tmp_path, [f"{{'loss': '{loss}', 'learning_rate': '5e-05', 'epoch': '0.1'}}" for loss in ("2.5", "2", "nan")]
    )
    assert list(run.series["loss"].step) == [1, 2, 3] and "lines are counted" in run.left_out[0]


@pytest.mark.parametrize(
    "lines",
    [
        ["The best loss so far is 0.5 at step 3."],
        ["loss 1", "loss 2 and lr 3"],
        ["torch==2.5", "numpy>=2", "loss-functions==1.0"],
        [],
    ],
)
def test_what_does_not_repeat_is_not_believed(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "notes.txt").write_text("\n".join(lines) + "\n")
    assert read(tmp_path) == []


def test_sources_and_binary_files_are_no_logs(tmp_path: Path) -> None:
    text = "\n".join(f"step {step} loss 1.5" for step in range(9))
    for name in ("train.py", "notes.md", "run.sh"):
        (tmp_path / name).write_text(text)
    (tmp_path / "train").write_text("#!/bin/sh\n" + text)
    (tmp_path / "model.bin").write_bytes(b"\x00\x01" + text.encode())
    assert read(tmp_path) == []


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_pieces_of_any_size_are_the_same_lines(size: int) -> None:
    data = "größe\x1b[31m 1\r\n\n\rstep 2\x08\x08step 3\n\n\nthe end".encode() + b"\xc3"
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert list(lines_of(pieces)) == ["größe 1", "step 2", "step 3", "the end\ufffd"]


def test_a_packed_log_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    packed = gzip.compress(LOG)
    (tmp_path / "train.log.gz").write_bytes(packed)
    [run], [whole] = read(tmp_path), read(FIXTURES / "transformers-4.57" / "printed.log")
    assert run.name == "train" and points(run, "loss") == points(whole, "loss") and run.console == whole.console
    (tmp_path / "train.log.gz").write_bytes(packed[:-100])
    [run] = read(tmp_path)
    assert (
        points(run, "loss") == points(whole, "loss")[: len(run.series["loss"])] and "cut or damaged" in run.left_out[0]
    )


LOG = (FIXTURES / "transformers-4.57" / "printed.log").read_bytes()


@settings(deadline=None)
@given(st.integers(0, len(LOG)))
def test_log_cut_at_any_byte_has_no_wrong_value(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    file = tmp_path_factory.mktemp("cut") / "train.log"
    file.write_bytes(LOG[:size])
    [whole] = read(FIXTURES / "transformers-4.57" / "printed.log")
    for run in read(file):
        for name in run.series:
            assert points(run, name) == points(whole, name)[: len(run.series[name])]


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, len(LOG)))
def test_foreign_bytes_are_no_crash(tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int) -> None:
    file = tmp_path_factory.mktemp("odd") / "train.log"
    file.write_bytes(LOG[:at] + data + LOG[at:])
    assert len(read(file)) <= 1


LINES = "\n".join(line for lines, _ in CASES.values() for line in lines)


@settings(deadline=None)
@given(st.data())
def test_changed_lines_of_all_trainers_are_no_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, len(LINES)))
    put = data.draw(
        st.sampled_from(
            ["9" * 30, "-", ",", "1e999", "nan", "/", ": ", "9" * 4999, " epoch 7 ", "GLOBAL_STEP: ", "[0/0 "]
        )
    )
    file = tmp_path_factory.mktemp("odd") / "train.log"
    file.write_text(LINES[:begin] + put + LINES[begin:])
    for run in read(file):
        assert all(0 <= step < 2**53 for one in run.series.values() for step in one.step)
