"""What the ranks of a run that hangs answer: which of them is named, with its line and the collective it did not join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from judging import START, fired, frame, make_evaluator, restored, state

from perfagent.wire import Event
from perfagent_server.alerts.state_machine import Change
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.life.absent_ranks import find_absence
from perfagent_server.rules.life.hang import Hang
from perfagent_server.rules.life.rank_absent import RankAbsent
from perfagent_server.rules.life.stack_groups import apart, groups_of, place_of, sentence

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
    evaluator: Evaluator, rank: int, at: float, *, frames: Sequence[str] = (), groups: Sequence[dict[str, Any]] = ()
) -> list[Change]:
    step = evaluator.window.step
    threads = [
        {"name": "pin", "training": False, "main": False, "frames": ["x.py:1 in pin"]},
        {"name": "MainThread", "training": True, "main": True, "frames": list(frames)},
    ]
    events = []
    if frames:
        events.append(event("stacks", at, step + 1, {"command": "c", "step": step, "threads": threads}))
    if groups:
        events.append(event("collectives", at, step + 1, {"command": "c", "groups": list(groups), "complete": True}))
    return evaluator.take(frame({}, [], rank=rank, ident=evaluator.upto + 1, received=at, events=events))


def hanging(ranks: int, *, for_s: float = 60.0) -> tuple[Evaluator, float, list[Change]]:
    """A run of so many ranks that has just been called hanging."""
    evaluator = make_evaluator(rules=(Hang(for_s=for_s), RankAbsent()))
    for rank in range(ranks):
        evaluator.take(frame({}, [], rank=rank, ident=rank + 1, events=[state("starting", world_size=ranks)]))
    for rank in range(ranks):
        columns = {"step_time_s": [1.0] * 20}
        evaluator.take(frame(columns, range(1, 21), rank=rank, ident=evaluator.upto + 1, received=START))
    at, changes = START, []
    while not changes:
        at += 3.0
        changes = evaluator.tick(at)
    return evaluator, at, changes


def test_the_rank_that_stands_apart_is_named_with_its_line_in_the_alert_that_is_open() -> None:
    evaluator, at, [opened] = hanging(4)
    changes = []
    for rank in range(4):
        changes += answer(evaluator, rank, at + 1, frames=IN_READ if rank == 2 else IN_BACKWARD)
    [told] = changes
    assert (told.kind, told.alert) == ("update", opened.alert)
    found = evaluator.verdict()
    assert (found.rule, found.ranks, found.cause) == ("hang", [2], "a rank stands apart")
    assert found.title == "No step has ended since step 20: rank 2 stands at shards.py:12 in read"
    assert (
        "Rank 2 stands at shards.py:12 in read: file.read(); ranks 0, 1 and 3 wait at train.py:39 in train"
        in found.message
    )
    assert [(one["ranks"], one["waits"]) for one in found.evidence["groups"]] == [([2], False), ([0, 1, 3], True)]
    assert found.evidence["groups"][0]["frames"] == IN_READ
    assert "at the line where that rank stands" in found.fix


def test_what_it_did_not_join_is_said_in_the_same_alert() -> None:
    evaluator, at, [opened] = hanging(2)
    changes = answer(evaluator, 0, at + 1, frames=IN_ALL_REDUCE)
    changes += answer(evaluator, 1, at + 1, frames=IN_READ)
    changes += answer(evaluator, 0, at + 2, groups=[group(57, waits=True)])
    changes += answer(evaluator, 1, at + 2, groups=[group(56)])
    changes += evaluator.tick(at + 3)
    assert {change.alert for change in changes} == {opened.alert}
    assert {change.kind for change in changes} == {"update"}
    found = evaluator.verdict()
    assert (found.rule, found.ranks) == ("hang", [1])
    said = "Rank 1 did not join all_reduce number 57 of process group 0 (default_pg), in which rank 0 waits"
    assert said in found.message
    assert "the last one that it called there is number 56 (all_reduce)" in found.message
    assert [one.rule for one in evaluator.findings()] == ["hang", "rank_absent"]
    absent = evaluator.findings()[1]
    assert absent.title == "Rank 1 did not join all_reduce of group 0 (default_pg)"
    assert absent.message.endswith("Rank 1 stands at shards.py:12 in read: file.read().")
    assert absent.evidence["absent"]["waiting"] == [0]


def test_both_are_over_when_a_step_ends_and_a_later_hang_is_asked_and_told_anew() -> None:
    evaluator, at, [opened] = hanging(2)
    for rank, seq, frames in ((0, 57, IN_ALL_REDUCE), (1, 56, IN_READ)):
        answer(evaluator, rank, at + 1, frames=frames, groups=[group(seq, waits=rank == 0)])
    for rank in (0, 1):
        columns = {"step_time_s": [80.0]}
        evaluator.take(frame(columns, [21], rank=rank, ident=evaluator.upto + 1, received=at + 10))
    over = evaluator.tick(at + 11)
    assert [(change.kind, change.alert) for change in over] == [("resolve", opened.alert)]
    assert evaluator.findings() == []
    waiting = at + 11
    while not (again := evaluator.tick(waiting)):
        waiting += 3.0
    assert [change.kind for change in again] == ["reopen"], "the scheduler asks the ranks at this, too"
    found = evaluator.verdict()
    assert (found.ranks, "groups" in found.evidence, found.cause) == ([0, 1], False, "")


def test_a_restart_of_the_server_between_two_answers_loses_none() -> None:
    evaluator, at, _ = hanging(2)
    answer(evaluator, 0, at + 1, frames=IN_ALL_REDUCE, groups=[group(57, waits=True)])
    evaluator = restored(evaluator)
    answer(evaluator, 1, at + 2, frames=IN_READ, groups=[group(56)])
    found = evaluator.verdict()
    assert found.ranks == [1]
    assert "did not join all_reduce number 57" in found.message


def test_a_rank_that_does_not_answer_is_waited_for_and_then_named() -> None:
    evaluator, at, _ = hanging(3)
    for rank in (0, 1):
        answer(evaluator, rank, at + 1, frames=IN_BACKWARD)
    evaluator.tick(at + 6)
    assert "groups" not in evaluator.verdict().evidence
    evaluator.tick(at + 12)
    found = evaluator.verdict()
    assert found.message.endswith(
        "(inside torch/autograd/graph.py:824 in _engine_run_backward). Rank 2 did not answer."
    )
    assert (found.ranks, found.cause, found.title) == (
        [2],
        "a rank is silent",
        "No step has ended since step 20: rank 2 did not answer",
    )


def test_a_rank_that_is_lost_is_named_by_those_that_wait_for_it() -> None:
    evaluator, at, _ = hanging(3)
    evaluator.silence({(1, 1): 31.0}, at)
    for rank in (0, 2):
        answer(evaluator, rank, at + 1, frames=IN_BACKWARD)
    assert evaluator.verdict().ranks == [1]


def test_of_one_process_the_line_is_named() -> None:
    evaluator, at, _ = hanging(1)
    answer(evaluator, 0, at + 1, frames=IN_READ)
    found = evaluator.verdict()
    assert found.title == "No step has ended since step 20, at shards.py:12 in read"
    assert found.message.endswith(" It stands at shards.py:12 in read: file.read().")


def test_one_that_waits_for_its_loader_gets_advice_on_its_workers() -> None:
    evaluator, at, _ = hanging(1)
    answer(evaluator, 0, at + 1, frames=IN_LOADER)
    found = evaluator.verdict()
    assert (found.cause, "DataLoader timeout=60" in found.fix) == ("it waits for its loader", True)
    assert "train.py:31 in train: for batch in loader: (inside queue.py:180 in get)" in found.message


def test_ranks_that_all_wait_in_the_same_collective_are_told_to_look_at_the_network() -> None:
    evaluator, at, _ = hanging(2)
    for rank in (0, 1):
        answer(evaluator, rank, at + 1, frames=IN_ALL_REDUCE, groups=[group(57, waits=True)])
    found = evaluator.verdict()
    assert (found.cause, found.ranks) == ("all ranks wait", [0, 1])
    assert [one.rule for one in evaluator.findings()] == ["hang"]


def test_stacks_that_somebody_asks_for_while_the_run_trains_are_no_sign_of_a_hang_or_of_a_step() -> None:
    evaluator = make_evaluator(rules=(Hang(), RankAbsent()))
    evaluator.take(frame({"step_time_s": [1.0] * 20}, range(1, 21), received=START))
    assert answer(evaluator, 0, START + 1, frames=IN_READ, groups=[group(3)]) == []
    assert evaluator.window.step == 20, "the event carries the step in progress"
    evaluator.take(frame({"step_time_s": [1.0]}, [21], ident=9, received=START + 2))
    assert fired(evaluator.tick(START + 5)) == []


# --- by the stacks alone


@pytest.mark.parametrize(
    ("stacks", "named"),
    [
        ([(IN_BACKWARD, [0, 1, 2]), (IN_READ, [3])], [3]),
        ([(IN_ALL_REDUCE, [0]), (IN_READ, [1])], [1]),
        ([(IN_ALL_REDUCE, [0]), (IN_READ, [1]), (IN_LOADER, [2])], [1, 2]),
        ([(IN_ALL_REDUCE, [0]), (IN_BACKWARD, [1, 2, 3])], [0]),
        ([(IN_READ, [0]), (IN_LOADER, [1])], []),
        ([(IN_READ, [0, 1])], []),
    ],
    ids=["of four", "of two", "two of three", "all in collectives", "nobody waits", "all alike"],
)
def test_who_is_waited_for_by_the_stacks(stacks: list[tuple[list[str], list[int]]], named: list[int]) -> None:
    assert sorted(rank for one in apart(groups_of(stacks)) for rank in one.ranks) == named


def test_a_place_is_the_users_line_and_what_it_is_inside_of() -> None:
    assert str(place_of(IN_ALL_REDUCE)) == (
        "train.py:41 in train: dist.all_reduce(loss) (inside torch/distributed/distributed_c10d.py:3000 in all_reduce)"
    )
    assert str(place_of(["<string>:1 in <module>"])) == "<string>:1 in <module>"
    assert str(place_of([])) == "an unknown line"
    assert str(place_of(["/x/a.py:3 in Model.forward.<locals>.read"])) == "a.py:3 in read"


def test_many_ranks_make_a_short_sentence() -> None:
    groups = groups_of([(IN_BACKWARD, [rank for rank in range(512) if rank != 300]), (IN_READ, [300])])
    said = sentence(groups, apart(groups), 512)
    assert said.startswith(
        "Rank 300 stands at shards.py:12 in read: file.read(); the other 511 ranks wait at train.py:39"
    )


# --- by the collectives alone


def test_a_rank_behind_that_waits_elsewhere_is_no_culprit() -> None:
    """Rank 1 did not come to the tensor-parallel group; rank 0 waits there, and so rank 2 waits for rank 0."""
    tensor, data = {"name": "tp", "members": "01"}, {"name": "dp", "members": "02"}
    absence = find_absence(
        [
            (0, [group(10, waits=True, **tensor), group(4, **data)], True),
            (1, [group(9, **tensor)], True),
            (2, [group(5, waits=True, **data)], True),
        ]
    )
    assert absence is not None
    assert (absence.kind, absence.ranks, absence.group, absence.waiting) == ("absent", [1], "tp", [0])


def test_ranks_of_another_group_of_the_same_name_are_not_compared() -> None:
    first, second = {"name": "1", "members": "01"}, {"name": "1", "members": "23"}
    answers = [
        (rank, [group(5 if rank < 2 else 3, waits=True, **(first if rank < 2 else second))], True) for rank in range(4)
    ]
    assert find_absence(answers) is None


def test_a_rank_that_has_called_nothing_in_a_group_yet_is_absent_from_it() -> None:
    unused = {**group(0, name="1"), "backend": "", "recent": []}
    absence = find_absence([(0, [group(1, waits=True, name="1")], True), (1, [unused], True)])
    assert absence is not None
    assert absence.sentence() == (
        "Rank 1 did not join all_reduce number 1 of process group 1, in which rank 0 waits; it has called none there yet."
    )
    unknown = find_absence([(0, [group(1, waits=True, name="1")], True), (1, [unused], False)])
    assert unknown is None, "older calls were overwritten: perhaps it has called it"


def test_ranks_that_call_collectives_in_different_orders_wait_for_each_other() -> None:
    one, two = {"name": "1", "members": "a"}, {"name": "2", "members": "a"}
    absence = find_absence(
        [
            (0, [group(5, waits=True, **one), group(3, **two)], True),
            (1, [group(4, **one), group(4, waits=True, **two)], True),
        ]
    )
    assert absence is not None
    assert (absence.kind, absence.ranks) == ("order", [0])
    assert "it waits in another group for the others" in absence.sentence()


def test_another_collective_under_the_same_number_is_a_mismatch() -> None:
    answers = [(rank, [group(5, waits=True, op="broadcast" if rank == 2 else "all_reduce")], True) for rank in range(3)]
    absence = find_absence(answers)
    assert absence is not None
    assert absence.sentence() == (
        "Rank 2 called broadcast where ranks 0 and 1 wait in all_reduce number 5 of process group 0 (default_pg)."
    )


def test_the_first_collective_that_was_missed_is_named_where_the_others_went_on_without_waiting() -> None:
    absence = find_absence([(0, [group(60, waits=True, op="broadcast")], True), (1, [group(57)], True)])
    assert absence is not None
    assert (absence.operation, absence.number) == ("all_reduce", 58)


@pytest.mark.parametrize("odd", [None, 7, [], {}, [None], [{"group": 3}], [{"group": "0", "seq": "x", "recent": []}]])
def test_an_answer_that_is_none_says_nothing(odd: Any) -> None:
    evaluator, at, _ = hanging(1)
    events = [
        event("collectives", at, 21, {"groups": odd, "complete": odd}),
        event("stacks", at, 21, {"threads": odd}),
    ]
    evaluator.take(frame({}, [], ident=evaluator.upto + 1, received=at, events=events))
    evaluator.tick(at + 20)
    assert "groups" not in evaluator.verdict().evidence
