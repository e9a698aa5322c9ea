"""How a run ended, and whether it is heard; and the verdict that follows."""

from __future__ import annotations

import math
from typing import Any

import pytest
from judging import fired, frame, judge_series, make_evaluator, state
from syrupy.assertion import SnapshotAssertion

from perfagent.wire import Event
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.causes import reason_words
from perfagent_server.rules.life.process_crash import THREAD_DIED, ProcessCrash
from perfagent_server.rules.texts.spoken import spoken

TRACE = "Traceback (most recent call last):\n  File 'train.py', line 3, in <module>\nValueError: bad shape"


RESET = "RuntimeError: [pair.cc:537] Read error [10.0.0.2]:33976: Connection reset by peer. Check the logs of the remote worker"


CLOSED = "DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?"


ABORTED = "DistBackendError: NCCL communicator was aborted on rank 0"


ELSEWHERE = "ConnectionResetError: [Errno 104] Connection reset by peer"


SLOW = {"phase/data_s": [0.05] * 60, "step_time_s": [0.1] * 60}


def _trained(steps: int = 30, **columns: list[float]) -> Evaluator:
    _, evaluator = judge_series(
        {"loss": [3.0 - 0.01 * step for step in range(steps)], "step_time_s": [0.1] * steps, **columns}
    )
    return evaluator


def _end(evaluator: Evaluator, name: str, *, rank: int = 0, **data: Any) -> list:
    return evaluator.take(frame({}, [], ident=evaluator.upto + 1, rank=rank, events=[state(name, step=30, **data)]))


@pytest.mark.parametrize(("world", "silent"), [(1, [0]), (4, [2]), (4, [0, 3])], ids=["one process", "a rank", "ranks"])
def test_silence_names_who_fell_silent(world: int, silent: list[int], words: SnapshotAssertion) -> None:
    evaluator = _trained()
    evaluator.window.world_size = world
    [change] = evaluator.silence({(1, rank): 31.0 for rank in silent}, evaluator.window.now + 31)
    assert change.finding.message == words


def test_a_flood_of_a_users_alerts_leaves_room_for_others() -> None:
    evaluator = _trained()
    now = evaluator.window.now
    changes = [change for at in range(400) for change in _said(evaluator, f"best loss {at}", now + at)]
    assert (len(fired(changes)), evaluator.dropped) == (256, 144)  # in seven minutes: a flood
    changes += [change for at in range(300) for change in _said(evaluator, f"worst loss {at}", now + 4000 + 70 * at)]
    assert (len(fired(changes)), evaluator.dropped) == (556, 144)
    assert len(evaluator.machines) <= 256 + 8
    changes += evaluator.take(frame({"loss": [math.nan], "grad/norm": [1.0]}, [31], ident=evaluator.upto + 1))
    changes += _end(evaluator, "oom", reason="the control group's limit")
    assert {change.finding.rule for change in fired(changes)} >= {"nonfinite_loss", "oom_observed"}
    resolved = {change.alert for change in changes if change.kind == "resolve"}
    assert resolved >= {change.alert for change in fired(changes) if "st loss " in change.finding.title}


def test_silence_of_an_older_attempt_or_after_the_end_is_none() -> None:
    evaluator = _trained()
    assert evaluator.silence({(0, 0): 100.0}, evaluator.window.now + 100) == []
    _end(evaluator, "finished")
    assert evaluator.silence({(1, 0): 100.0}, evaluator.window.now + 100) == []


def test_what_the_agent_found_is_an_alert_under_its_own_rule() -> None:
    evaluator = _trained()
    told = {"rule": "oom_observed", "severity": "critical", "message": "out of memory", "since_step": 7, "fix": ""}
    event = Event(kind="finding", time=1.0, step=7, data=told)
    changes = evaluator.take(frame({}, [], ident=evaluator.upto + 1, events=[event]))
    changes += _end(evaluator, "oom", reason="OutOfMemoryError")
    assert [(change.finding.rule, change.finding.since_step) for change in fired(changes)] == [("oom_observed", 7)]


def test_a_users_alert_is_told_at_once_and_once_a_minute() -> None:
    evaluator = _trained()
    now = evaluator.window.now
    first = _said(evaluator, "accuracy fell", now, "WARN")
    assert [(change.kind, change.finding.severity) for change in first] == [("fire", "warning")]
    assert _said(evaluator, "accuracy fell", now + 10, "WARN") == []
    assert [one.finding.severity for one in fired(_said(evaluator, "disk", now + 11, "ERROR"))] == ["critical"]
    over, again = _said(evaluator, "accuracy fell", now + 100, "WARN")
    assert (over.kind, over.alert, over.why) == ("resolve", first[0].alert, "said again")
    assert (again.kind, again.alert != first[0].alert) == ("fire", True)


def _said(evaluator: Evaluator, title: str, at: float, level: str = "info") -> list:
    event = Event(kind="alert", time=at, data={"title": title, "text": "look", "level": level})
    return evaluator.take(frame({}, [], ident=evaluator.upto + 1, received=at, events=[event]))


def test_a_run_has_finished_when_every_rank_that_reported_has() -> None:
    evaluator = make_evaluator()
    evaluator.take(frame({}, [], events=[state("starting", world_size=8)]))
    for rank in (0, 1):
        evaluator.take(frame(SLOW, range(1, 61), rank=rank, ident=rank + 2))
    assert [change.finding.rule for change in fired(evaluator.tick(evaluator.window.now + 20))] == ["data_bound"]
    assert _end(evaluator, "finished", rank=0) == []
    assert [change.kind for change in _end(evaluator, "finished", rank=1)] == ["resolve"]
    assert (evaluator.window.ended, evaluator.verdict().rule) == (True, "data_bound"), "it still says what held it back"
    sick = _trained(loss=[3.0] * 20 + [math.nan] * 10)
    assert (_end(sick, "finished"), sick.verdict().rule) == ([], "nonfinite_loss")


def raised(said: str) -> dict[str, str]:
    return {"reason": said, "exception": said.partition(":")[0], "traceback": TRACE}


def test_the_step_of_an_end_is_not_moved_by_other_ranks() -> None:
    evaluator = _trained()
    evaluator.window.world_size = 2
    [change] = _end(evaluator, "killed", rank=1, reason={"key": "killed", "signal": "SIGKILL"})
    evaluator.take(frame({"loss": [2.0] * 9}, range(31, 40), ident=evaluator.upto + 1))
    _end(evaluator, "preempted", reason={"key": "terminated"})
    assert (
        change.finding.message == evaluator.verdict().message == "Rank 1 was killed after step 30: killed by SIGKILL."
    )
    assert reason_words({"key": "killed", "signal": "SIGKILL"}, "zh") in spoken(change.finding, "zh").message


CRASH, OOM, TOLD = ("process_crash", "critical"), ("oom_observed", "critical"), ("process_crash", "info")


@pytest.mark.parametrize(
    ("name", "data", "rule", "says"),
    [
        ("failed", raised("ValueError: bad shape"), CRASH, "Read the exception"),
        ("failed", raised("KeyError: 'conversations'"), CRASH, "compare the fields"),
        ("failed", raised("IndexError: index out of range in self"), CRASH, "num_embeddings"),
        ("failed", raised("SystemExit: 3"), CRASH, "The script ended itself"),
        ("failed", {"reason": "the disk is full"}, CRASH, "Look at what the script printed last"),
        ("failed", raised("KeyboardInterrupt"), TOLD, ""),
        ("killed", {"reason": "killed by SIGKILL"}, CRASH, "look for who sent the signal"),
        ("failed", {"reason": "crashed with SIGSEGV"}, CRASH, "crashed outside of Python"),
        ("preempted", {"reason": "SIGTERM"}, TOLD, ""),
        ("oom", {"reason": "the control group's limit"}, OOM, ""),
        ("failed", raised("OutOfMemoryError: CUDA out of memory."), OOM, ""),
    ],
)
def test_an_end_has_its_rule_and_its_remedy(name: str, data: dict[str, str], rule: tuple[str, str], says: str) -> None:
    evaluator = _trained()
    [change] = _end(evaluator, name, **data)
    found = change.finding
    assert (change.kind, found.rule, found.severity, evaluator.verdict().rule) == ("fire", *rule, rule[0])
    assert says in found.fix
    assert rule != CRASH or "last checkpoint" in found.fix
    assert "Read the exception" not in found.fix or "exception" in data
    if rule == CRASH and "traceback" in data:
        assert found.evidence["traceback"].endswith("ValueError: bad shape")


@pytest.mark.parametrize(
    ("ends", "severity", "message"),
    [
        ([("failed", 1, 0, "ValueError: bad shape"), ("preempted", 0, 0, "SIGTERM")], "critical", "Rank 1 failed"),
        ([("failed", 0, 9, ABORTED), ("failed", 1, 3, "KeyError: 'labels'")], "critical", "Rank 1 failed"),
        ([("failed", 0, 0, "KeyboardInterrupt"), ("failed", 0, 0, "exit code 130")], "info", ""),
        ([("failed", 0, 0, "RuntimeError: NCCL error"), ("oom", 1, 0, "limit")], "critical", "Host memory ran out"),
        # the socket of a peer is closed before its death is seen, and its exception told after it
        ([("failed", 0, 0, RESET), ("killed", 1, 0.05, "killed by SIGKILL")], "critical", "Rank 1 was killed"),
        ([("failed", 0, 0, CLOSED), ("failed", 1, 0.05, "exit code 3")], "critical", "Rank 1 failed"),
        ([("failed", 0, 0, ABORTED), ("failed", 1, 0.05, "KeyError: 'labels'")], "critical", "Rank 1 failed"),
        # what the launcher kills long after is a consequence
        ([("failed", 0, 0, RESET), ("killed", 1, 30, "killed by SIGKILL")], "critical", "Rank 0 failed"),
        ([("failed", 0, 0.05, RESET), ("preempted", 1, 0, "terminated by SIGTERM")], "info", "Rank 1 was preempted (SIGTERM)"),
        ([("preempted", 1, 0.1, "terminated by SIGTERM"), ("failed", 0, 0, RESET)], "critical", "Rank 0 failed"),
        ([("preempted", 1, 0, "terminated by SIGTERM"), ("failed", 0, 3600, RESET)], "critical", "Rank 0 failed"),
        # a dataset on a server, a database: the words are the system's own, for every socket
        ([("failed", 0, 0, ELSEWHERE), ("failed", 1, 2, "crashed with SIGABRT")], "critical", "Rank 0 failed"),
    ],
)  # fmt: skip
def test_of_the_ends_of_two_ranks_the_cause_leads(
    ends: list[tuple[str, int, float, str]], severity: str, message: str
) -> None:
    evaluator = _trained()
    evaluator.window.world_size = 2
    changes = []
    for name, rank, after_s, said in ends:
        reason = {"state": name, "reason": said}
        event = Event(kind="state", time=evaluator.window.now + after_s, step=30, data=reason)
        changes += evaluator.take(frame({}, [], ident=evaluator.upto + 1, rank=rank, events=[event]))
    found = evaluator.verdict()
    assert (found.severity, found.message[: len(message)]) == (severity, message)
    assert ("the other ranks" in found.fix) == (message == "Rank 0 failed" and ELSEWHERE not in ends[0])
    assert len(fired(changes)) == len({change.alert for change in changes}) == 1


@pytest.mark.parametrize(
    ("file", "steps", "trains", "severity"),
    [
        ("/job/train.py", 10, False, "warning"), ("/job/train.py", 10, True, "critical"),
        ("/usr/lib/python3/site-packages/hub/files.py", 10, False, "info"), ("/job/train.py", 3, False, None),
    ],
)  # fmt: skip
def test_a_thread_that_died_is_told_when_steps_go_on(file: str, steps: int, trains: bool, severity: str | None) -> None:
    evaluator = _trained()
    told = {"name": "Saver", "reason": "IndexError: no slot", "training": trains, "frames": [f"{file}:9 in run: x"]}
    event = Event(kind="thread", time=evaluator.window.now, step=30, data=told)
    columns = {"loss": [2.0] * steps, "step_time_s": [0.1] * steps}
    after = frame(columns, range(31, 31 + steps), ident=evaluator.upto + 1, events=[event])
    changes = [*evaluator.take(after), *_end(evaluator, "finished")]
    assert {(one.finding.cause, one.finding.severity) for one in fired(changes)} == (
        {(THREAD_DIED, severity)} if severity else set()
    )
    said = evaluator.verdict()
    assert (said.rule == "process_crash") == (severity in ("warning", "critical"))
    assert ("Saver died" in said.message, "finished" in said.message) == (
        severity is not None,
        severity not in (None, "info"),
    )


def test_silence_is_told_once_until_frames_come_or_the_end() -> None:
    evaluator = _trained()
    now = evaluator.window.now
    changes = evaluator.silence({(1, 0): 31.0}, now + 31)
    changes += evaluator.silence({(1, 0): 40.0}, now + 40)
    assert [(change.kind, change.finding.rule) for change in changes] == [("fire", "lost_contact")]
    assert evaluator.verdict().rule == "lost_contact"
    [back] = evaluator.take(frame({"loss": [1.0]}, [31], ident=evaluator.upto + 1))
    assert (back.kind, back.alert, evaluator.verdict().rule) == ("resolve", changes[0].alert, "healthy")
    evaluator.silence({(1, 0): 31.0}, evaluator.window.now + 31)
    over, ended = _end(evaluator, "killed", reason="killed by SIGKILL")
    assert (over.kind, over.finding.rule) == ("resolve", "lost_contact")
    assert (ended.finding.rule, evaluator.verdict().since_step) == ("process_crash", 30)


def test_a_healthy_verdict_is_in_the_tense_of_its_run(words: SnapshotAssertion) -> None:
    assert make_evaluator().verdict().message == words
    evaluator = _trained()
    assert evaluator.verdict().message == words
    assert _end(evaluator, "finished") == []
    assert (evaluator.verdict().rule, evaluator.verdict().message) == ("healthy", words)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("RuntimeError: received 0 items of ancdata", "open files"),
        ("OSError: [Errno 24] Too many open files: '/data/3.pt'", "open files"),
        ("RuntimeError: An attempt has been made to start a new process before the\n current process has finished its "
         "bootstrapping phase.", "no main guard"),
        ("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 136640 vs 136528", "write failed"),
        ("RuntimeError: DataLoader worker (pid(s) 71) exited unexpectedly", "worker died"),
        ("AttributeError: Can't get local object 'main.<locals>.<lambda>'", "pickle"),
        ("RuntimeError: CUDA error: device-side assert triggered", "device assert"),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x8 and 16x4)", "shapes"),
        ("RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for fc.weight", "state_dict"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'epoch_2.pt'", "no file"),
        ("PermissionError: [Errno 13] Permission denied: '/etc/last.pt'", "not allowed"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "no CUDA"),
        ("ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 640])", "one sample"),
        ("KeyError: 'labels'", "KeyError"),
        ("datasets.exceptions.DatasetNotFoundError: no dataset", "exception"),
    ],
)  # fmt: skip
def test_an_exception_that_many_meet_has_its_own_remedy(text: str, cause: str) -> None:
    change = _end(_trained(), "failed", exception=text, reason=text)[0]
    assert change.finding.cause == cause
    assert change.finding.fix == ProcessCrash().text().remedies[cause]


def test_unused_parameters_and_unequal_loaders_are_named() -> None:
    told = "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. "
    [change] = _end(_trained(), "failed", exception="RuntimeError", reason=told, unused="head.weight, head.bias")
    assert change.finding.cause == "unused parameters"
    assert "(head.weight, head.bias)" in change.finding.message
    evaluator = _trained()
    evaluator.window.world_size = 2
    _end(evaluator, "finished", rank=1)
    lost = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:9"
    [change] = _end(evaluator, "failed", exception=lost, reason=lost)
    assert (change.finding.cause, change.finding.evidence["finished_rank"]) == ("uneven inputs", 1)
