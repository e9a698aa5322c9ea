"""What the ranks of a run that hangs answer: which of them is named, with its line and the collective it did not join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from judging import START, frame, make_evaluator, restored, state
from syrupy.assertion import SnapshotAssertion

from perfagent.wire import Event
from perfagent_server.alerts.state_machine import Change
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.life.absent_ranks import find_absence
from perfagent_server.rules.life.hang import Hang
from perfagent_server.rules.life.rank_absent import RankAbsent
from perfagent_server.rules.life.stack_groups import apart, groups_of, place_of, shown
from perfagent_server.rules.texts import said

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
MAIN = "/home/me/job/train.py:80 in main: train()"
IN_ALL_REDUCE = [
    MAIN,
    "/home/me/job/train.py:41 in train: dist.all_reduce(loss)",
    f"{TORCH}/distributed/c10d_logger.py:83 in wrapper: return func(*args, **kwargs)",
    f"{TORCH}/distributed/distributed_c10d.py:3000 in all_reduce: work.wait()",
]
IN_BACKWARD = [
    MAIN,
    "/home/me/job/train.py:39 in train: loss.backward()",
    f"{TORCH}/_tensor.py:648 in backward: torch.autograd.backward(",
    f"{TORCH}/autograd/graph.py:824 in _engine_run_backward: return Variable._execution_engine.run_backward(",
]
IN_READ = [MAIN, "/home/me/job/train.py:30 in train: batch = read()", "/home/me/job/shards.py:12 in read: file.read()"]
IN_LOADER = [
    MAIN,
    "/home/me/job/train.py:31 in train: for batch in loader:",
    f"{TORCH}/utils/data/dataloader.py:733 in __next__: data = self._next_data()",
    "/usr/lib/python3.11/queue.py:180 in get: self.not_empty.wait(remaining)",
]


def group(seq: int, *, waits: bool = False, name: str = "0", op: str = "all_reduce", **more: Any) -> dict[str, Any]:
    recent = [[number, op if number == seq else "all_reduce"] for number in range(max(1, seq - 7), seq + 1)]
    found = {"group": name, "backend": "gloo", "desc": "default_pg" if name == "0" else "", "seq": seq, "waits": waits}
    return {**found, "recent": recent, "size": 4, "members": f"m{name}", **more}


def event(kind: str, at: float, step: int, data: dict[str, Any]) -> Event:
    return Event(kind=kind, time=at, step=step, data=data)


def answer(
    evaluator: Evaluator, rank: int, at: float, *, frames: Sequence[str] = (), groups: Sequence[dict[str, Any]] = (),
    **look: Any,
) -> list[Change]:  # fmt: skip
    step = evaluator.window.step
    threads = [
        {"name": "pin", "training": False, "main": False, "frames": ["x.py:1 in pin"]},
        {"name": "MainThread", "training": True, "main": True, "frames": list(frames), "waits_in": "futex_do_wait"},
    ]
    events = []
    if frames:
        events.append(event("stacks", at, step + 1, {"command": "c", "step": step, "threads": threads, **look}))
    if groups:
        events.append(event("collectives", at, step + 1, {"command": "c", "groups": list(groups), "complete": True}))
    return evaluator.take(frame({}, [], rank=rank, ident=evaluator.upto + 1, received=at, events=events))


def standing(ranks: int) -> Evaluator:
    """A run of so many ranks that have just ended step 20."""
    evaluator = make_evaluator(rules=(Hang(), RankAbsent()))
    for rank in range(ranks):
        evaluator.take(frame({}, [], rank=rank, ident=rank + 1, events=[state("starting", world_size=ranks)]))
    for rank in range(ranks):
        columns = {"step_time_s": [1.0] * 20}
        evaluator.take(frame(columns, range(1, 21), rank=rank, ident=evaluator.upto + 1, received=START))
    return evaluator


def hanging(ranks: int) -> tuple[Evaluator, float, list[Change]]:
    """A run of so many ranks that has just been called hanging."""
    evaluator, at, changes = standing(ranks), START, []
    while not changes:
        at += 3.0
        changes = evaluator.tick(at)
    return evaluator, at, changes


def test_the_rank_that_stands_apart_is_named_in_the_open_alert(words: SnapshotAssertion) -> None:
    evaluator, at, [opened] = hanging(4)
    changes = []
    for rank in range(4):
        changes += answer(evaluator, rank, at + 1, frames=IN_READ if rank == 2 else IN_BACKWARD)
    [told] = changes
    assert (told.kind, told.alert) == ("update", opened.alert)
    found = evaluator.verdict()
    assert (found.rule, found.ranks, found.cause) == ("hang", [2], "a rank stands apart")
    assert (found.title, found.message) == words
    assert [(one["ranks"], one["waits"]) for one in found.evidence["groups"]] == [([2], False), ([0, 1, 3], True)]
    assert found.evidence["groups"][0]["frames"] == IN_READ


def test_what_a_rank_did_not_join_is_said_until_a_step_ends(words: SnapshotAssertion) -> None:
    evaluator, at, [opened] = hanging(2)
    changes = answer(evaluator, 0, at + 1, frames=IN_ALL_REDUCE)
    changes += answer(evaluator, 1, at + 1, frames=IN_READ)
    changes += answer(evaluator, 0, at + 2, groups=[group(57, waits=True)])
    evaluator = restored(evaluator)
    changes += answer(evaluator, 1, at + 2, groups=[group(56)])
    changes += evaluator.tick(at + 3)
    assert {(change.kind, change.alert) for change in changes} == {("update", opened.alert)}
    hang, absent = evaluator.findings()
    assert (hang.rule, hang.ranks, absent.rule) == ("hang", [1], "rank_absent")
    assert (hang.message, absent.title, absent.message) == words
    assert absent.evidence["absent"]["waiting"] == [0]
    for rank in (0, 1):
        evaluator.take(frame({"step_time_s": [80.0]}, [21], rank=rank, ident=evaluator.upto + 1, received=at + 10))
    assert [(change.kind, change.alert) for change in evaluator.tick(at + 11)] == [("resolve", opened.alert)]
    assert evaluator.findings() == []
    waiting = at + 11
    while not (again := evaluator.tick(waiting)):
        waiting += 3.0
    assert [change.kind for change in again] == ["reopen"], "the scheduler asks the ranks at this, too"
    found = evaluator.verdict()
    assert (found.ranks, "groups" in found.evidence, found.cause) == ([0, 1], False, "")


def test_a_rank_that_does_not_answer_is_waited_for_then_named() -> None:
    evaluator, at, _ = hanging(3)
    for rank in (0, 1):
        answer(evaluator, rank, at + 1, frames=IN_BACKWARD)
    evaluator.tick(at + 3)
    assert "groups" not in evaluator.verdict().evidence
    evaluator.tick(at + 12)
    found = evaluator.verdict()
    assert (found.ranks, found.cause) == ([2], "a rank is silent")
    lost, at, _ = hanging(3)
    lost.silence({(1, 1): 31.0}, at)
    for rank in (0, 2):
        answer(lost, rank, at + 1, frames=IN_BACKWARD)
    assert lost.verdict().ranks == [1]


@pytest.mark.parametrize(
    ("frames", "groups", "cause"),
    [
        ([IN_READ], [], "one process"),
        ([IN_LOADER], [], "it waits for its loader"),
        ([IN_ALL_REDUCE] * 2, [group(57, waits=True)], "all ranks wait"),
    ],
    ids=["one process", "its loader", "the network"],
)
def test_the_line_where_all_stand_is_the_cause(
    frames: list[list[str]], groups: list[Any], cause: str, words: SnapshotAssertion
) -> None:
    evaluator, at, _ = hanging(len(frames))
    for rank, stack in enumerate(frames):
        answer(evaluator, rank, at + 1, frames=stack, groups=groups)
    [found] = evaluator.findings()
    assert (found.rule, found.cause, found.ranks) == ("hang", cause, [*range(len(frames))])
    assert found.message == words


def test_stacks_of_a_run_that_trains_are_no_sign_of_a_hang() -> None:
    evaluator = make_evaluator(rules=(Hang(), RankAbsent()))
    evaluator.take(frame({"step_time_s": [1.0] * 20}, range(1, 21), received=START))
    assert answer(evaluator, 0, START + 1, frames=IN_READ, groups=[group(3)]) == []
    assert evaluator.window.step == 20, "the event carries the step in progress"


IN_SAVE = [MAIN, f"{TORCH}/serialization.py:900 in save: opened_zipfile.write_record(name, storage)"]
IN_RECOMPUTE = [
    MAIN,
    f"{TORCH}/_dynamo/eval_frame.py:929 in _fn: return fn(*args, **kwargs)",
    f"{TORCH}/utils/checkpoint.py:490 in checkpoint: return next(gen)",
    "/home/me/job/train.py:30 in upload: [x for x in test_set]",
]
EVALUATES = {"within": "eval"}


@pytest.mark.parametrize(
    ("of_rank_1", "frames", "ranks"),
    [
        ({}, IN_READ, [1]),
        ({}, IN_RECOMPUTE, [1]),
        ({"goes_on": "computes"}, IN_READ, None),
        (EVALUATES, IN_READ, None),
        ({}, IN_SAVE, None),
        ({"within": "workers"}, IN_LOADER, None),
        ({}, IN_BACKWARD, None),
        ({"state": "stopped"}, [], [1]),
        ({"state": "runs"}, [], None),
    ],
    ids=[
        "it stands", "it computes again", "it computes", "it evaluates", "it saves", "its workers start", "all wait in one",
        "it is stopped", "it holds the interpreter",
    ],
)  # fmt: skip
def test_two_looks_tell_what_cannot_go_on_from_a_pause(
    of_rank_1: dict[str, Any], frames: list[str], ranks: list[int] | None
) -> None:
    evaluator = standing(3)
    changes: list[Change] = []
    for number, quiet in ((1, 5.0), (2, 10.0)):
        look = {"look": number, "quiet_s": quiet, "longest_s": 1.0, "goes_on": ""}
        for rank in range(3):
            if rank == 1 and frames:
                changes += answer(evaluator, 1, START + quiet, frames=frames, **{**look, **of_rank_1})
            elif rank != 1:
                others = {"others": {"1": of_rank_1.get("state", "stands")}}
                changes += answer(evaluator, rank, START + quiet, frames=IN_BACKWARD, **look, **others)
        changes += evaluator.tick(START + quiet + 1)
    opened = [change.finding for change in changes if change.kind == "fire"]
    assert [found.ranks for found in opened] == ([] if ranks is None else [ranks])
    if ranks is None:
        assert evaluator.tick(START + 59) == []
    elif frames:
        assert " Rank 1 waits for a lock." in opened[0].message


def test_a_run_that_stands_says_what_the_looks_show(words: SnapshotAssertion) -> None:
    evaluator = standing(2)
    for rank, frames, goes_on in ((0, IN_ALL_REDUCE, ""), (1, IN_READ, "computes")):
        answer(evaluator, rank, START + 5, frames=frames, look=1, quiet_s=5.0, longest_s=1.0, goes_on=goes_on)
    assert evaluator.tick(START + 70) == [], "what computes may come"
    found = evaluator.verdict()
    assert (found.rule, found.severity, found.cause, found.ranks) == ("hang", "info", "stands at a line", [1])
    assert (found.title, found.message) == words


def test_a_look_is_of_its_step_and_a_rank_that_looks_is_not_gone() -> None:
    evaluator = standing(2)
    look: dict[str, Any] = {"frames": IN_BACKWARD, "longest_s": 1.0, "goes_on": ""}
    columns = {"step_time_s": [1.0]}
    evaluator.take(frame(columns, [21], ident=evaluator.upto + 1, received=START + 80))
    assert answer(evaluator, 1, START + 83, look=5, quiet_s=80.0, **look) == [], "it looked before that step ended"
    evaluator.take(frame(columns, [22], ident=evaluator.upto + 1, received=START + 84))
    for rank in (0, 1):
        assert answer(evaluator, rank, START + 89, look=1, quiet_s=5.0, **look) == []
    assert answer(evaluator, 0, START + 94, look=2, quiet_s=10.0, others={"1": "gone"}, **look) == []
    assert evaluator.tick(START + 95.5) == [], "its second look is on its way"
    assert [change.kind for change in evaluator.tick(START + 99)] == ["fire"]


DATA, TENSOR, ONE, TWO = (
    {"name": name, "members": ids} for name, ids in (("dp", "02"), ("tp", "01"), ("1", "a"), ("2", "a"))
)


UNUSED = {**group(0, name="1"), "backend": "", "recent": []}


@pytest.mark.parametrize(
    ("answers", "kind", "ranks"),
    [
        # rank 1 did not come to the tensor-parallel group; rank 0 waits there, and so rank 2 waits for rank 0
        ([[group(10, waits=True, **TENSOR), group(4, **DATA)], [group(9, **TENSOR)], [group(5, waits=True, **DATA)]],
         "absent", [1]),
        ([[group(5 if rank < 2 else 3, waits=True, name="1", members=f"{rank // 2}")] for rank in range(4)], "", []),
        ([[group(1, waits=True, name="1")], [UNUSED]], "absent", [1]),
        ([[group(5, waits=True, **ONE), group(3, **TWO)], [group(4, **ONE), group(4, waits=True, is_new=True, **TWO)]],
         "order", [1]),
        ([[group(5, waits=True, op="broadcast" if rank == 2 else "all_reduce")] for rank in range(3)], "mismatch", [2]),
        ([[group(5, waits=True, sizes=f"[[{2 - rank}]]", is_new=not rank)] for rank in range(2)], "mismatch", [0]),
        ([[group(60, waits=True, op="broadcast")], [group(57)]], "absent", [1]),
        ([[group(5, waits=True, name="")], [group(4, name="")]], "absent", [1]),
    ],
    ids=[
        "one behind that waits elsewhere", "groups of one name", "never called", "other order", "other operation",
        "other shape", "the first", "without a name",
    ],
)  # fmt: skip
def test_collectives_tell_which_rank_is_missing(
    answers: list[list[dict[str, Any]]], kind: str, ranks: list[int], words: SnapshotAssertion
) -> None:
    absence = find_absence([(rank, groups, True) for rank, groups in enumerate(answers)])
    assert (absence.kind, absence.ranks) == (kind, ranks) if absence else not kind
    if absence is not None:
        told = absence.shown()
        figures = {"absent": told, "absent_ranks": ranks, "world_size": len(answers), "group": absence.group}
        assert said(RankAbsent().text(), "", figures).message == words


def test_calls_that_were_overwritten_make_no_rank_absent() -> None:
    assert find_absence([(0, [group(1, waits=True, name="1")], True), (1, [UNUSED], False)]) is None


def test_a_place_is_the_users_line_and_what_it_is_inside_of(words: SnapshotAssertion) -> None:
    stacks = (IN_ALL_REDUCE, ["<string>:1 in <module>"], [], ["/x/a.py:3 in Model.forward.<locals>.read"])
    assert [str(place_of(stack)) for stack in stacks] == words
    groups = groups_of([(IN_BACKWARD, [rank for rank in range(512) if rank != 300]), (IN_READ, [300])])
    assert [(one["kind"], len(one["ranks"])) for one in shown(groups, apart(groups))] == [("stands", 1), ("waits", 511)]
