"""torch.profiler on command: what is recorded is right, whole and harmless."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from agent.causes.conftest import Training

from perfagent.causes.profile import Profile
from perfagent.causes.upload import Upload

LINEAR_LAYERS = 5


def summary_of(job: Training) -> dict[str, Any]:
    (found,) = [data for data in job.events("profile") if "payload" not in data]
    return found


def trace_of(job: Training) -> dict[str, Any]:
    pieces = [data for data in job.events("profile") if "payload" in data]
    raw, summary = b"".join(data["payload"] for data in pieces), summary_of(job)
    assert [data["part"] for data in pieces] == [*range(1, summary["parts"] + 1)]
    assert hashlib.sha256(raw).hexdigest() == summary["sha256"]
    return json.loads(gzip.decompress(raw))


def states(job: Training, identity: str = "c1") -> list[str]:
    return [state for state, _ in job.answers(identity)]


def profiled(train: Any, steps: int, trained: int, **more: Any) -> Training:
    """A job with a profile asked for after its second step, and how many steps follow."""
    job: Training = train()
    job.steps(2)
    job.command("profile", steps=steps, **more)
    job.steps(trained)
    return job


def recording() -> bool:
    """Of the calling thread."""
    return bool(torch.autograd._profiler_enabled())


def own_profiler(**more: Any) -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **more)


def calls(own: Any, name: str = "aten::addmm") -> int:
    return sum(row.count for row in own.key_averages() if row.key == name)


def test_a_profile_of_an_alert_covers_its_steps_and_explains_it(train):
    job = profiled(train, 4, 9, rule="data_bound", since_step=3)
    kinds = [kind for kind, data, _ in job.sender.events if kind in ("profile", "finding", "command")]
    assert kinds[-1] == "finding", "once it is sent"
    summary, found = summary_of(job), job.finding()
    assert (summary["first_step"], summary["last_step"], summary["command"]) == (4, 7, "c1")
    events = trace_of(job)["traceEvents"]
    names = sorted(event["name"] for event in events if event["name"].startswith("ProfilerStep#"))
    assert names == [f"ProfilerStep#{step}" for step in (4, 5, 6, 7)]
    operators = {row["name"]: row["calls"] for row in summary["operators"]}
    assert (operators["aten::addmm"], operators["Optimizer.step#AdamW.step"]) == (LINEAR_LAYERS * 4, 4)
    spans = [event for event in events if event.get("ph") == "X"]
    assert len(spans) > 100
    assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() and event["dur"] >= 0 for event in spans), (
        "for Perfetto"
    )
    assert (found["explains"], found["since_step"], found["severity"]) == (["data_bound"], 3, "info")
    assert (found["evidence"]["steps"], found["evidence"]["profile"]) == ([4, 7], summary["profile"])
    assert found["evidence"]["url"] == f"/api/v1/runs/recorded/profiles/{summary['profile']}"
    assert found["evidence"]["shares"] == summary["shares"]
    for number, more in enumerate(({}, {"rule": ""}, {"rule": 7})):  # somebody asks for one
        job.command("profile", f"c{number + 2}", steps=1, **more)
        job.steps(3)
        assert states(job, f"c{number + 2}") == ["accepted", "done"]
    assert job.finding() is found


def test_what_cannot_be_profiled_is_refused(train):
    job = train()
    job.command("profile", "early", steps=2)
    job.steps(2)
    refused = ["early", "second"]
    for steps in (0, 101, 2.5, True, "5", None):
        refused.append(f"odd {steps}")
        job.command("profile", refused[-1], steps=steps)
    job.command("profile", steps=3)
    job.command("profile", "second", steps=3)
    job.steps(7)
    assert [states(job, one) for one in refused] == [["refused"]] * len(refused)
    assert states(job) == ["accepted", "done"]


# ---- profilers of the script's own


def test_ours_gives_way_where_the_script_starts_its_own(train):
    from torch.autograd import profiler

    job = profiled(train, 50, 3)
    assert recording()
    with own_profiler() as own:
        job.steps(2)
    assert calls(own) == LINEAR_LAYERS * 2
    assert not recording()
    assert job.answers()[1][1] == {"key": "gave_way"}
    assert not profiler._enable_profiler.__module__.startswith("perfagent")
    job.command("profile", "c2", steps=2)
    job.steps(5)
    assert states(job, "c2") == ["accepted", "done"]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
@pytest.mark.parametrize("asked_at", [2, 11])
def test_ours_is_refused_while_the_scripts_warms_up_or_records(train, asked_at):
    """Its end would kill the process, if ours had been in between."""
    job, seen = train(), []
    cycles = torch.profiler.schedule(wait=1, warmup=3, active=3, repeat=2)
    with own_profiler(schedule=cycles, on_trace_ready=lambda own: seen.append(calls(own))) as own:
        for step in range(16):
            if step == asked_at:
                job.command("profile", steps=1)
            job.step()
            own.step()
    assert states(job) == ["accepted", "refused"]
    assert job.answers()[1][1] == {"key": "other_profiler"}
    assert seen == [15, 15]
    job.command("profile", "c2", steps=1)
    job.steps(3)
    assert states(job, "c2") == ["accepted", "done"], "its end is seen"


def test_a_training_that_ends_leaves_no_profiler_behind(train):
    job = profiled(train, 50, 3)
    job.recorded.finish()
    assert not recording()
    assert job.answers()[-1] == ("refused", {"key": "training_ended", "of": 50})


# ---- evaluations


def without_gradients(job: Training) -> None:
    job.model.eval()
    with torch.no_grad():
        job.model(torch.randn(6, 8))
    job.model.train()


def by_a_phase(job: Training) -> None:
    with job.run.phase("eval"):
        job.model(torch.randn(6, 8))


@pytest.mark.parametrize("evaluate", [without_gradients, by_a_phase])
def test_a_profile_ends_before_an_evaluation(train, evaluate):
    from perfagent.hooks import evaluation, forward

    job = profiled(train, 50, 1)
    evaluate(job)
    assert recording(), "it is a part of the first step"
    job.steps(2)
    evaluate(job)
    assert not recording(), "an evaluation may be without end"
    job.look()
    job.look()
    why = {"key": "cut_short_evaluation", "whole": 2, "of": 50}
    assert job.answers()[1] == ("done", why)
    summary = summary_of(job)
    assert (summary["first_step"], summary["last_step"], summary["cut"]) == (4, 5, why)
    operators = {row["name"]: row["calls"] for row in summary["operators"]}
    assert operators["aten::addmm"] == 3 * LINEAR_LAYERS
    assert (forward.evaluated, forward.interrupted) == (evaluation.evaluated, evaluation.interrupted)


# ---- limits


@dataclass
class Limited:
    """A profile of 50 steps under way in a job, whose clock and size a test moves."""

    job: Training
    at_s: float = 0.0
    rss_bytes: int = 10**9

    def __post_init__(self) -> None:
        self.job.steps(2)
        self.profile = Profile(self.job.watch, "c1", 50, {}, clock=lambda: self.at_s, rss_bytes=lambda: self.rss_bytes)
        self.job.watch.add(self.profile)
        self.job.steps(3)


def end_a_step(job: Training) -> None:
    job.step()


def fetch(_job: Training) -> None:
    next(iter(torch.utils.data.DataLoader(torch.randn(6, 8))))


def save_a_checkpoint(job: Training) -> None:
    torch.save(job.model.state_dict(), io.BytesIO())


@pytest.mark.parametrize("passing", [end_a_step, fetch, save_a_checkpoint])
@pytest.mark.parametrize(
    ("within", "beyond", "why"),
    [
        ((59, 0), (60, 0), {"key": "cut_short_time", "s": 60}),
        ((1, 127), (2, 129), {"key": "cut_short_size", "bytes": 129 * 2**20}),
    ],
)
def test_a_profile_ends_at_a_limit_where_training_passes(train, passing, within, beyond, why):
    """Seconds, and MiB by which the process has grown."""
    limited = Limited(train())
    for seconds, mib in (within, beyond):
        assert recording()
        limited.at_s, limited.rss_bytes = seconds, 10**9 + mib * 2**20
        passing(limited.job)
    assert not recording()
    while not limited.profile.done:
        limited.profile.poll()
    whole = 4 if passing is end_a_step else 2
    assert limited.profile.cut_short == {**why, "whole": whole, "of": 50}
    assert summary_of(limited.job)["last_step"] == 3 + whole


# ---- the trace on its way


@pytest.mark.parametrize(("count", "goes"), [(12, True), (13, False)])
def test_what_is_left_at_the_end_goes_at_once_or_not_at_all(record, count, goes):
    sender, file = record().sender, io.BytesIO(bytes(count * 512 * 1024))

    def pieces(sender: Any) -> list[bytes]:
        return [data["payload"] for kind, data, _ in sender.events if kind == "profile" and "payload" in data]

    upload = Upload(sender, {"profile": "p1"}, file, step=3)
    sender.spool.backlog = True
    assert not upload.poll(), "pieces wait for the frames before them"
    assert pieces(sender) == []
    sender.closing_at = 1.0
    assert upload.poll()
    assert len(pieces(sender)) == (count if goes else 0)
    assert upload.problem == ({} if goes else {"key": "trace_unsent", "parts": count, "sent": 0})
    assert file.closed


# ---- other threads: only the one that began a profile can end it


def test_ours_is_refused_beside_one_on_another_thread(train):
    """What is running is told by torch for the calling thread only."""
    with ThreadPoolExecutor(1) as trainer, own_profiler() as own:
        job = trainer.submit(profiled, train, 1, 3).result()
        torch.dot(torch.randn(3), torch.randn(3))
    assert states(job) == ["accepted", "refused"]
    assert calls(own, "aten::dot") == 1


def test_the_scripts_profiler_elsewhere_waits_till_ours_ended(train):
    """Had it not waited, the end of ours would kill the process, or ours would record for ever."""
    stopped = threading.Event()
    with ThreadPoolExecutor(1) as trainer:
        job = trainer.submit(profiled, train, 50, 2).result()

        def train_on() -> None:
            while not stopped.is_set():
                job.step()

        training = trainer.submit(train_on)
        try:
            with own_profiler() as own:
                torch.dot(torch.randn(3), torch.randn(3))
        finally:
            stopped.set()
        training.result()
        assert not trainer.submit(recording).result()
    assert calls(own, "aten::dot") == 1
    assert job.answers()[-1][1] == {"key": "gave_way"}


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_training_that_goes_on_elsewhere_ends_the_profile(train, comes_back):
    """Where its own thread passes next; a thread that has ended records nothing any more."""
    with ThreadPoolExecutor(1) as other:
        with ThreadPoolExecutor(1) as first:
            job = first.submit(profiled, train, 50, 2).result()
            if comes_back:
                other.submit(job.steps, 2).result()
                first.submit(job.steps, 1).result()
                assert not first.submit(recording).result()
        other.submit(job.steps, 2).result()
        assert job.answers()[-1][0] == "refused"
        other.submit(job.command, "profile", "c2", steps=1).result()
        other.submit(job.steps, 3).result()
    assert job.answers()[-1][1] == {"key": "another_thread"}
    assert states(job, "c2") == ["accepted", "done"]
    assert not torch.autograd.profiler._enable_profiler.__module__.startswith("perfagent")
