"""torch.profiler on command: what is recorded is right, whole and harmless."""

from __future__ import annotations

import gc
import gzip
import hashlib
import io
import json
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from agent.rootcause.kineto import GPU, Fake
from case_selection import everyday
from torch import nn

from perfagent.hooks import evaluation, forward
from perfagent.rootcause import trace
from perfagent.rootcause.profile import Profile, _rss_bytes
from perfagent.rootcause.upload import Upload

OPTIONS = ("shapes", "memory", "python")


def summary_of(job: Any) -> dict[str, Any]:
    (found,) = [data for data in job.events("profile") if "payload" not in data]
    return found


def trace_of(job: Any) -> dict[str, Any]:
    pieces = [data for data in job.events("profile") if "payload" in data]
    raw = b"".join(data["payload"] for data in sorted(pieces, key=lambda data: data["part"]))
    summary = summary_of(job)
    assert len(pieces) == summary["parts"]
    assert hashlib.sha256(raw).hexdigest() == summary["sha256"]
    loaded: dict[str, Any] = json.loads(gzip.decompress(raw))
    return loaded


def answers(job: Any, identity: str = "c1") -> list[tuple[str, str]]:
    return [(data["state"], data.get("message", "")) for data in job.events("command") if data["command"] == identity]


def test_a_profile_covers_exactly_the_steps_that_were_asked_for(train):
    job = train()
    job.steps(3)
    job.command("profile", steps=4)
    job.steps(8)
    assert [state for state, _ in answers(job)] == ["accepted", "done"], answers(job)
    summary = summary_of(job)
    assert (summary["first_step"], summary["last_step"], summary["command"]) == (5, 8, "c1")
    names = [event["name"] for event in trace_of(job)["traceEvents"]]
    assert sorted(name for name in names if name.startswith("ProfilerStep#")) == [
        f"ProfilerStep#{step}" for step in (5, 6, 7, 8)
    ]
    calls = {row["name"]: row["calls"] for row in summary["operators"]}
    assert calls["aten::addmm"] == 5 * 4, "five linear layers, four steps"
    assert calls["Optimizer.step#AdamW.step"] == 4


def test_a_profile_that_an_alert_asked_for_explains_it_when_its_trace_is_sent(train):
    job = train()
    job.steps(3)
    job.command("profile", steps=2, rule="data_bound", since_step=3)
    job.steps(4)
    kinds = [kind for kind, data, _ in job.sender.events if kind in ("profile", "finding", "command")]
    assert kinds[-1] == "finding"
    found, summary = job.finding(), summary_of(job)
    assert (found["explains"], found["since_step"], found["severity"]) == (["data_bound"], 3, "info")
    assert found["message"].startswith("A profile of rank 0 in steps 5 to 6 shows: Of ")
    assert found["evidence"]["profile"] == summary["profile"]
    assert found["evidence"]["url"] == f"/api/v1/runs/recorded/profiles/{summary['profile']}"
    assert found["evidence"]["shares"] == summary["shares"]
    assert "fix" not in found, "the rule's own advice stays"


@pytest.mark.parametrize("more", [{}, {"rule": ""}, {"rule": 7}])
def test_a_profile_that_somebody_asks_for_explains_nothing(train, more):
    job = train()
    job.steps(3)
    job.command("profile", steps=2, rule="data_bound", since_step=3)
    job.steps(4)
    job.command("profile", "c2", steps=2, **more)
    job.steps(4)
    assert [state for state, _ in answers(job, "c2")] == ["accepted", "done"]
    assert len(job.events("finding")) == 1


def test_the_trace_is_what_perfetto_reads(train):
    job = train()
    job.steps(2)
    job.command("profile", steps=2)
    job.steps(5)
    loaded = trace_of(job)
    spans = [event for event in loaded["traceEvents"] if event.get("ph") == "X"]
    assert len(spans) > 100
    for event in spans:
        assert {"name", "ts", "dur", "pid", "tid"} <= event.keys()
        assert event["dur"] >= 0


def test_operator_times_are_those_of_torchs_own_table():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
    cpu, device, _ = trace.record(profiler.profiler.kineto_results.events())
    assert device == []
    ours = {row["name"]: row for row in trace.operators(cpu)}
    torchs = {row.key: row for row in profiler.key_averages()}
    assert len(ours) > 30
    for name, row in ours.items():
        assert row["calls"] == torchs[name].count, name
        assert row["self_cpu_s"] * 1e6 == pytest.approx(torchs[name].self_cpu_time_total, rel=1e-6, abs=1.0), name
        assert row["total_cpu_s"] * 1e6 >= row["self_cpu_s"] * 1e6 - 1.0


def test_the_profile_changes_no_loss_and_no_weight(make_net, record):
    def trained(profiled: bool) -> list[Any]:
        torch.manual_seed(11)
        model = make_net()
        model.blocks[1] = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3))
        optimizer = torch.optim.AdamW(model.parameters())
        recorded = record(model) if profiled else None
        losses = []
        for step in range(1, 16):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 8)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if recorded is not None:
                if step == 3:
                    for callback in recorded.sender.on_command:
                        callback({"id": "c", "kind": "profile", "params": {"steps": 5, **dict.fromkeys(OPTIONS, True)}})
                recorded.rows += recorded.sender.drain()
                recorded.run._investigator.poll()
        if recorded is not None:
            assert any("operators" in data for kind, data, _ in recorded.sender.events if kind == "profile")
        return [losses, [tensor.clone() for tensor in model.state_dict().values()], torch.get_rng_state()]

    plain, profiled = trained(False), trained(True)
    assert plain[0] == profiled[0]
    assert all(torch.equal(one, other) for one, other in zip(plain[1], profiled[1], strict=True))
    assert torch.equal(plain[2], profiled[2])


def test_a_second_profile_while_one_runs_is_refused(train):
    job = train()
    job.steps(2)
    job.command("profile", "c1", steps=3)
    job.command("profile", "c2", steps=3)
    job.steps(7)
    job.command("profile", "c3", steps=1)
    job.steps(4)
    assert answers(job, "c2") == [("refused", "a profile of this process is under way; ask again when it is done")]
    assert [state for state, _ in answers(job, "c1")] == ["accepted", "done"]
    assert [state for state, _ in answers(job, "c3")] == ["accepted", "done"], "one after the other"


def test_where_the_script_has_its_own_profiler_ours_is_refused(train):
    job = train()
    job.steps(2)
    job.command("profile", steps=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        job.steps(3)
    assert sum(row.count for row in own.key_averages() if row.key == "aten::addmm") == 15
    assert [state for state, _ in answers(job)] == ["accepted", "refused"]
    assert "the script has a torch profiler of its own running" in answers(job)[1][1]


def test_where_the_script_starts_its_own_ours_gives_way(train):
    job = train()
    job.steps(2)
    job.command("profile", steps=50)
    job.steps(3)
    assert torch.autograd._profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        job.steps(2)
    assert sum(row.count for row in own.key_averages() if row.key == "aten::addmm") == 10
    assert not torch.autograd._profiler_enabled()
    assert "the script started a torch profiler of its own" in answers(job)[1][1]
    assert torch.autograd.profiler._enable_profiler.__module__ != "perfagent.rootcause.profile"
    job.command("profile", "c2", steps=2)
    job.steps(5)
    assert [state for state, _ in answers(job, "c2")] == ["accepted", "done"]


CYCLES = torch.profiler.schedule(wait=1, warmup=3, active=3, repeat=2)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
@pytest.mark.parametrize("accumulates", everyday(1, [False, True]))
@pytest.mark.parametrize("asked_at", [2, 4, 9, 11], ids=["warm-up", "recording", "second warm-up", "second recording"])
def test_where_the_scripts_profiler_is_warming_up_ours_is_refused(train, asked_at, accumulates):
    """Its end would kill the process, if ours had been in between."""
    job = train()
    seen: list[int] = []

    def ready(own: torch.profiler.profile) -> None:
        seen.append(sum(row.count for row in own.key_averages() if row.key == "aten::addmm"))

    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, schedule=CYCLES, on_trace_ready=ready, acc_events=accumulates) as own:
        for step in range(16):
            if step == asked_at:
                job.command("profile", steps=1)
            job.step()
            own.step()
    assert [state for state, _ in answers(job)] == ["accepted", "refused"]
    assert "the script has a torch profiler of its own" in answers(job)[1][1]
    assert seen == ([15, 30] if accumulates else [15, 15])
    job.command("profile", "c2", steps=1)
    job.steps(3)
    assert [state for state, _ in answers(job, "c2")] == ["accepted", "done"], "its end is seen"


def test_where_the_scripts_profiler_runs_on_another_thread_ours_is_refused(train):
    """What is running is told by torch for the calling thread only."""
    with ThreadPoolExecutor(1) as trainer:
        job = trainer.submit(train).result()
        trainer.submit(job.steps, 2).result()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
            torch.dot(torch.randn(3), torch.randn(3))
            job.command("profile", steps=1)
            trainer.submit(job.steps, 3).result()
    assert [state for state, _ in answers(job)] == ["accepted", "refused"]
    assert [row.count for row in own.key_averages() if row.key == "aten::dot"] == [1]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchs_old_profiler_is_given_way_to(train):
    from torch.autograd import profiler_legacy

    job = train()
    job.steps(2)
    job.command("profile", steps=50)
    job.steps(3)
    with profiler_legacy.profile() as own:
        job.steps(2)
    assert sum(row.count for row in own.key_averages() if row.key == "aten::addmm") == 10
    assert "the script started a torch profiler of its own" in answers(job)[1][1]


def test_a_training_that_ends_in_the_middle_leaves_no_profiler_behind(train):
    job = train()
    job.steps(2)
    job.command("profile", steps=50)
    job.steps(3)
    job.recorded.finish()
    assert not torch.autograd._profiler_enabled()
    assert answers(job)[-1] == ("refused", "the training ended before its 50 steps were over")


def without_gradients(job: Any) -> None:
    job.model.eval()
    with torch.no_grad():
        job.model(torch.randn(6, 8))
    job.model.train()


def in_evaluation_mode_only(job: Any) -> None:
    job.model.eval()
    job.model(torch.randn(6, 8))
    job.model.train()


def by_a_phase(job: Any) -> None:
    with job.run.phase("eval"):
        job.model(torch.randn(6, 8))


EVALUATIONS = [without_gradients, in_evaluation_mode_only, by_a_phase]


def forward_calls(job: Any) -> int:
    calls: int = {row["name"]: row["calls"] for row in summary_of(job)["operators"]}["aten::addmm"]
    return calls // 5  # linear layers


@pytest.mark.parametrize("evaluate", EVALUATIONS)
def test_a_profile_ends_before_an_evaluation_that_its_steps_had_none_of(train, evaluate):
    job = train()
    job.steps(2)
    job.command("profile", steps=50)
    job.steps(3)
    assert torch.autograd._profiler_enabled()
    evaluate(job)
    assert not torch.autograd._profiler_enabled(), "an evaluation may be without end"
    job.look()
    job.look()
    assert answers(job)[1] == ("done", "cut short before an evaluation: 2 of 50 steps are in it")
    summary = summary_of(job)
    assert (summary["first_step"], summary["last_step"]) == (4, 5)
    assert summary["cut_short"] == answers(job)[1][1]
    assert forward_calls(job) == 2
    assert summary["gaps"]["busy_s"] > 0
    assert forward.evaluated is evaluation.evaluated
    assert forward.interrupted is evaluation.interrupted


@pytest.mark.parametrize("evaluate", EVALUATIONS)
def test_an_evaluation_before_the_first_step_is_over_is_left_out(train, evaluate):
    job = train()
    job.steps(2)
    job.command("profile", steps=2)
    job.step()
    evaluate(job)
    assert not torch.autograd._profiler_enabled()
    job.steps(5)
    assert answers(job)[1:] == [("done", "")]
    summary = summary_of(job)
    assert (summary["first_step"], summary["last_step"], forward_calls(job)) == (5, 6, 2)
    assert "cut_short" not in summary


def test_an_evaluation_in_every_step_is_a_part_of_it(train):
    job = train()
    job.steps(2)
    job.command("profile", steps=3)
    for _ in range(8):
        without_gradients(job)
        job.step()
    assert answers(job)[1:] == [("done", "")]
    assert forward_calls(job) == 6, "three steps, each with a call of its own and one of the evaluation"


@dataclass
class Limited:
    """A profile of 50 steps under way in a job, whose clock and size a test moves."""

    job: Any
    at_s: float = 0.0
    rss_bytes: int | None = 10**9

    def __post_init__(self) -> None:
        self.job.steps(2)
        self.job.command("flush", "c0")
        investigator = self.job.run._investigator
        self.profile = Profile(investigator, "c1", 50, {}, clock=lambda: self.at_s, rss_bytes=lambda: self.rss_bytes)
        investigator._commands._profile = self.profile
        investigator.add(self.profile)
        self.job.steps(3)
        assert torch.autograd._profiler_enabled()


def end_a_step(job: Any) -> None:
    job.step()


def fetch(_job: Any) -> None:
    next(iter(torch.utils.data.DataLoader(torch.randn(6, 8))))


def save_a_checkpoint(job: Any) -> None:
    torch.save(job.model.state_dict(), io.BytesIO())


def roll_out_in_training_mode(job: Any) -> None:
    with torch.no_grad():
        job.model(torch.randn(6, 8))


@pytest.mark.parametrize("passing", [end_a_step, fetch, save_a_checkpoint, roll_out_in_training_mode])
def test_what_lasts_too_long_is_cut_short_where_the_training_thread_passes_next(train, passing):
    job = train()
    limited = Limited(job)
    limited.at_s = 59.0
    passing(job)
    assert torch.autograd._profiler_enabled()
    limited.at_s = 60.0
    passing(job)
    assert not torch.autograd._profiler_enabled()
    job.look()
    job.look()
    whole = 4 if passing is end_a_step else 2
    assert answers(job) == [("done", f"cut short after 60 s: {whole} of 50 steps are in it")]
    assert summary_of(job)["last_step"] == 3 + whole


def test_what_takes_too_much_memory_is_cut_short(train):
    job = train()
    limited = Limited(job)
    limited.at_s, limited.rss_bytes = 1.0, 10**9 + 127 * 2**20
    fetch(job)
    assert torch.autograd._profiler_enabled()
    limited.at_s, limited.rss_bytes = 2.0, 10**9 + 129 * 2**20
    fetch(job)
    assert not torch.autograd._profiler_enabled()
    job.look()
    job.look()
    assert answers(job) == [("done", "cut short when its records took 129 MiB: 2 of 50 steps are in it")]


def test_where_the_kernel_tells_no_size_the_time_alone_ends_a_profile(train):
    job = train()
    limited = Limited(job, rss_bytes=None)
    job.steps(3)
    assert torch.autograd._profiler_enabled()
    limited.at_s = 60.0
    job.step()
    assert not torch.autograd._profiler_enabled()


def test_a_fetch_on_another_thread_leaves_the_profile_alone(train):
    job = train()
    limited = Limited(job)
    limited.at_s = 60.0
    other = threading.Thread(target=fetch, args=(job,))
    other.start()
    other.join(20)
    assert torch.autograd._profiler_enabled(), "only the thread that started it can stop it"
    assert not limited.profile.cut_short


def test_before_the_first_step_there_is_nothing_to_profile(train):
    job = train()
    job.command("profile", steps=2)
    assert answers(job) == [("refused", "this process has not completed a step of a torch optimizer yet")]


@pytest.mark.parametrize("steps", [0, 101, 2.5, True, "5", None])
def test_steps_that_make_no_sense_are_refused(train, steps):
    job = train()
    job.steps(1)
    job.command("profile", steps=steps)
    assert answers(job)[0][0] == "refused"


def test_what_a_user_named_goes_through_redaction(tmp_path: Path):
    model = nn.Linear(4, 4)
    named = torch.profiler.record_function('stage "one" api_key=sk-abcdefghijklmnopqrstuv')
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, named:
        model(torch.randn(2, 4))
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    profiler.export_chrome_trace(str(plain))
    trace.compress(plain, packed)
    text = gzip.decompress(packed.read_bytes()).decode()
    names = [event["name"] for event in json.loads(text)["traceEvents"]]
    assert "sk-abcdefghij" not in text
    assert any(name.startswith('stage "one" api_key=') for name in names)
    assert "aten::linear" in names


def test_a_large_trace_goes_piece_by_piece_and_the_file_is_gone_after(tmp_path: Path, record):
    sender = record().sender
    file = tmp_path / "trace.gz"
    content = bytes(range(256)) * 5000
    file.write_bytes(content)
    upload = Upload(sender, {"profile": "p1"}, file, step=3)
    turns = 1
    while not upload.poll():
        turns += 1
    pieces = [data for kind, data, _ in sender.events if kind == "profile" and "payload" in data]
    assert turns == 4, "three pieces, one a tick, and the end"
    assert b"".join(data["payload"] for data in pieces) == content
    assert not file.exists()


def test_what_is_left_when_the_run_ends_goes_at_once(tmp_path: Path, record):
    sender = record().sender
    file = tmp_path / "trace.gz"
    file.write_bytes(bytes(2_000_000))
    upload = Upload(sender, {"profile": "p1"}, file, step=3)
    sender.closing_at = 1.0
    assert upload.poll()
    assert sum(len(data["payload"]) for kind, data, _ in sender.events if "payload" in data) == 2_000_000


# ---- the CUDA door: events as Kineto would give them


EVENTS = [
    Fake("aten::linear", 0, 100, correlation=1),
    Fake("aten::addmm", 10, 90, correlation=2),
    Fake("aten::relu", 100, 120, correlation=3),
    Fake("gemm_kernel", 50, 450, GPU, link=2),
    Fake("relu_kernel", 650, 700, GPU, link=3),
]


def test_time_on_a_device_belongs_to_the_operator_that_launched_it():
    cpu, device, _ = trace.record(EVENTS)
    rows = {row["name"]: row for row in trace.operators(cpu)}
    assert rows["aten::addmm"]["self_device_s"] == rows["aten::addmm"]["total_device_s"] == 400e-9
    assert (rows["aten::linear"]["self_device_s"], rows["aten::linear"]["total_device_s"]) == (0.0, 400e-9)
    assert (rows["aten::linear"]["self_cpu_s"], rows["aten::linear"]["total_cpu_s"]) == pytest.approx((20e-9, 100e-9))
    assert [name for _, _, name in device] == ["gemm_kernel", "relu_kernel"]
    assert next(iter(rows)) == "aten::addmm", "the largest of the own times first, on whichever side"


def test_calls_of_cuda_have_numbers_of_their_own_and_take_no_kernel_from_an_operator():
    """Those of operators and those of calls both begin at 1; and the library's threads are numbered in another way."""
    calls = [
        Fake("cudaStreamIsCapturing", 12, 14, correlation=3, link=2, thread=4711),
        Fake("cudaLaunchKernel", 20, 60, correlation=2, link=2, thread=4711),
        Fake("cudaEventRecord", 125, 130, correlation=1, thread=4711),
        Fake("cuLaunchKernelEx", 105, 115, correlation=4, link=3, thread=4711),
    ]
    rows = {row["name"]: row for row in trace.operators(trace.record(EVENTS + calls)[0])}
    assert rows["aten::addmm"]["self_device_s"] == 400e-9
    assert rows["aten::relu"]["self_device_s"] == 50e-9
    assert not any("self_device_s" in rows[call.title] for call in calls)
    assert rows["aten::addmm"]["self_cpu_s"] == pytest.approx((80 - 2 - 40) * 1e-9), (
        "without what CUDA's own calls took"
    )
    assert rows["aten::relu"]["self_cpu_s"] == pytest.approx(10e-9)


def test_gaps_on_the_device_are_named_by_what_ran_before_and_after():
    cpu, device, _ = trace.record(EVENTS)
    found = trace.gaps(cpu, device, 1, 0, 1000)
    assert (found["of"], found["busy_s"], found["idle_pct"]) == ("device", 450e-9, 55.0)
    first, second, third = found["longest"]
    assert (first["s"], first["after"], first["before"]) == (300e-9, "relu_kernel", "the end")
    assert (second["s"], second["after"], second["before"]) == (200e-9, "gemm_kernel", "relu_kernel")
    assert (third["s"], third["after"]) == (50e-9, "the beginning")


def test_of_python_functions_only_those_of_the_training_thread_are_told():
    events = [
        Fake("ProfilerStep#1", 0, 100),
        Fake("train.py(7): step", 5, 95),
        Fake("aten::mm", 10, 40),
        Fake("bell.py(65): wait", 0, 100, thread=2),
        Fake("aten::index", 20, 30, thread=2),
    ]
    table = {row["name"]: row["calls"] for row in trace.operators(trace.record(events)[0])}
    assert table == {"train.py(7): step": 1, "aten::mm": 1, "aten::index": 1}


def test_a_name_that_is_no_text_is_told_as_far_as_it_goes():
    """So torch names a module that was imported meanwhile, where Python functions are recorded."""

    class Freed(Fake):
        def name(self) -> str:
            return b"json/__init__.py(0): \xe0v`\x7f".decode()

    cpu, _, _ = trace.record([Freed("", 0, 10)])
    assert [one.name for one in cpu] == ["json/__init__.py(0): \ufffdv`\x7f"]


def test_a_recursive_operator_counts_each_time_once():
    events = [Fake("a", 0, 100), Fake("a", 10, 60), Fake("b", 20, 30), Fake("c", 70, 80), Fake("a", 0, 50, thread=2)]
    cpu, _, _ = trace.record(events)
    rows = {row["name"]: row for row in trace.operators(cpu)}
    assert rows["a"]["calls"] == 3
    assert rows["a"]["total_cpu_s"] == pytest.approx(150e-9)
    assert rows["a"]["self_cpu_s"] == pytest.approx((40 + 40 + 50) * 1e-9)


def test_pieces_wait_for_the_frames_before_them_and_a_file_too_large_for_the_end_is_given_up(tmp_path: Path, record):
    sender = record().sender
    file = tmp_path / "trace.gz"
    file.write_bytes(bytes(14 * 512 * 1024))
    upload = Upload(sender, {"profile": "p1"}, file, step=3)
    sender.spool.backlog = True
    assert not upload.poll()
    assert [kind for kind, _, _ in sender.events].count("profile") == 1, "the summary alone"
    sender.closing_at = 1.0
    assert upload.poll()
    assert "the training ended before its trace (14 pieces) was sent" in upload.problem
    assert not file.exists()


def test_a_training_that_moves_to_another_thread_ends_its_profile_and_not_its_process(train):
    """Only the thread that began it can end it: what another one ends goes on recording, and kills who reads it."""
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        job = first.submit(train).result()
        for trainer in (first, second, first, second):
            trainer.submit(job.step).result()
        job.command("profile", steps=3)
        first.submit(job.step).result()
        assert first.submit(torch.autograd._profiler_enabled).result()
        second.submit(job.steps, 6).result()
        assert [state for state, _ in answers(job)] == ["accepted", "refused"]
        assert "the training went on on another thread" in answers(job)[1][1]
        first.submit(job.step).result()
        assert not first.submit(torch.autograd._profiler_enabled).result(), "where it passes next"
        assert not job.events("profile")
        job.command("profile", "c2", steps=2)
        first.submit(job.steps, 5).result()
    assert [state for state, _ in answers(job, "c2")] == ["accepted", "done"]


def test_where_another_thread_ends_the_run_the_profile_ends_where_its_own_trains_on(train):
    with ThreadPoolExecutor(1) as trainer:
        job = trainer.submit(train).result()
        trainer.submit(job.steps, 2).result()
        job.command("profile", steps=50)
        trainer.submit(job.steps, 3).result()
        job.recorded.finish()
        assert answers(job)[-1] == ("refused", "the training ended before its 50 steps were over")
        trainer.submit(lambda: job.model(torch.randn(6, 8)).sum().backward()).result()
        assert not trainer.submit(torch.autograd._profiler_enabled).result()
    assert not hasattr(torch.autograd._engine_run_backward, "__wrapped__"), "nothing of it is left"


def test_a_profiler_of_the_scripts_on_another_thread_waits_until_ours_has_ended(train):
    """Had it not waited, the end of ours would kill the process, or ours would record for ever."""
    stopped = threading.Event()

    def train_on() -> None:
        while not stopped.is_set():
            job.step()

    with ThreadPoolExecutor(1) as trainer:
        job = trainer.submit(train).result()
        trainer.submit(job.steps, 2).result()
        job.command("profile", steps=50)
        trainer.submit(job.steps, 2).result()
        training = trainer.submit(train_on)
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
                torch.dot(torch.randn(3), torch.randn(3))
        finally:
            stopped.set()
        training.result()
        assert not trainer.submit(torch.autograd._profiler_enabled).result()
    assert [row.count for row in own.key_averages() if row.key == "aten::dot"] == [1]
    assert "the script started a torch profiler of its own" in answers(job)[-1][1]


@pytest.fixture
def nothing_collected():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("nothing_collected")
def test_where_its_thread_does_nothing_ours_is_kept_from_recording_beside_the_scripts(train):
    with ThreadPoolExecutor(1) as trainer:
        job = trainer.submit(train).result()
        trainer.submit(job.steps, 2).result()
        job.command("profile", steps=50)
        trainer.submit(job.steps, 2).result()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
            torch.dot(torch.randn(3), torch.randn(3))
        trainer.submit(job.steps, 3).result()
        before = _rss_bytes()
        trainer.submit(lambda: [torch.ones(1) + 1 for _ in range(50_000)]).result()
        assert _rss_bytes() - before < 30 * 2**20, "80 MiB where it goes on recording"
    assert [row.count for row in own.key_averages() if row.key == "aten::dot"] == [1]
    assert "the script started a torch profiler of its own" in answers(job)[-1][1]
    job = train()
    job.steps(2)
    job.command("profile", steps=2)
    job.steps(5)
    assert [state for state, _ in answers(job)] == ["accepted", "done"], answers(job)


def test_where_the_disk_takes_no_trace_the_operators_come_and_nothing_is_left_on_it(train):
    job = train()
    job.steps(2)
    job.command("profile", steps=2)
    job.steps(2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    try:
        job.steps(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [state for state, _ in answers(job)] == ["accepted", "done"], answers(job)
    summary = summary_of(job)
    assert summary["trace_left_out"] == "the trace could not be written: the disk is full, or cannot be written to"
    assert "aten::addmm" in {row["name"] for row in summary["operators"]}
    assert [*(job.sender.config.state_dir / "profiles").iterdir()] == []


def test_where_the_folder_for_traces_cannot_be_made_the_operators_come(train):
    job = train()
    job.steps(2)
    job.sender.config.state_dir.mkdir(parents=True, exist_ok=True)
    (job.sender.config.state_dir / "profiles").write_text("in the way")
    job.command("profile", steps=2)
    job.steps(5)
    assert [state for state, _ in answers(job)] == ["accepted", "done"], answers(job)
    assert summary_of(job)["trace_left_out"] == "the trace could not be written: File exists"
