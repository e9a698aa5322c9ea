"""What agents find out, in words: made of the facts that they send, in the language of who reads them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from perfagent.wire import Event, Finding, to_json
from perfagent.wire.evidence import ITSELF, MemoryEvidence
from perfagent_server.alerts.causes import cause_of, join
from perfagent_server.engine.reports import of_the_user
from perfagent_server.rules.causes import cause_words, profile_words, reason_words
from perfagent_server.rules.causes.memory import plans
from perfagent_server.rules.texts import LANGUAGES
from perfagent_server.rules.texts.spoken import spoken

GIB = 2**30
HEAD = {"module": "head", "module_class": "Linear"}
BAD = {"of": 10, "nonfinite": 3, "first": [{"name": "head.weight"}], "last": "head.weight"}
EVERY = {**BAD, "nonfinite": 10}
READ = [{"step": step, "loss": 1.0} for step in range(1, 15)]
BATCH = {"step": 15, "from": "x", "hash": "h", "tensors": [{"name": "x", "nonfinite": 2, "minus_infinite": 2}]}
DIV = {"operator": "Div", "made": "nan", "read_by": "Mul", "after": "a.weight", "before": "b.weight"}
BLOCK = {"module": "head", "step": 16, "share": 1 / 16, "inputs_finite": False, "dtype": "float32", "shape": [6, 16]}

NONFINITE: dict[str, dict[str, Any]] = {
    "parameter": {**HEAD, "parameter": "head.weight", "parameters_before": BAD, "shared": {"head.weight": ["embed.weight"]}},
    "a parameter, seen after": {**HEAD, "cause": "parameter", "parameter": "head.weight", "parameters_after": BAD},
    "loaded": {**HEAD, "cause": "parameter", "parameter": "head.weight", "parameters_before": BAD, "loaded": True},
    "backward": {**HEAD, "parameter": "head.weight", "good_from": "tail.weight", "gradients_began": {**BAD, "step": 14}},
    "backward inside": {**HEAD, "cause": "backward", "parameter": "head.bias", "good_from": "head.weight"},
    "batch": {"batch_tensor": "inputs", "batch_step": 15},
    "ignored_labels": {"batch_tensor": "labels", "batch_step": 1500},
    "zero_eps": {"eps": 1e-8, "eps_dtype": "float16", "began": {"first": 14, "last": 14, "by": "eps"}},
    "left_out": {
        "module": "attention", "module_class": "MultiheadAttention", "parameter": "head.weight", "finite": "head.bias",
        "began": {"first": 14, "last": 14, "by": "gradient"},
    },
    "buffer": {**HEAD, "buffer": "head.running_var", "operator": {"read_by": "NativeBatchNorm"}},
    "operator": {**HEAD, "operator": DIV, "after_module": "a", "before_module": "b"},
    "in the loss": {"cause": "operator", "operator": {"operator": "Log", "minus_infinity": {"from": "Mul"}}},
    "in the model": {"cause": "operator", "module": ITSELF, "operator": {"operator": "Log", "minus_infinity": {}}},
    "after a parameter": {"cause": "operator", "operator": {"operator": "Exp", "after": "w"}, "after_module": ITSELF},
    "unseen": {"cause": "operator", "operator": {"operator": "Softmax", "inputs_unseen": True}, "before_module": "b"},
    "the only one": {"cause": "operator", "operator": {"operator": "Log", "is_the_only_one": True}, "after_module": "a"},
    "forward": {"parameters_before": {**BAD, "nonfinite": 0}},
    "from outside": {**HEAD, "cause": "operator", "operator": {"read_by": "Addmm"}},
    "compiled": {"cause": "operator", "operator": {"operator": "CompiledFunction"}},
    "module": {**HEAD, "first_module": BLOCK},
    "every one before": {"cause": "spread", "parameters_before": EVERY, "world_size": 8},
    "every one by then": {**HEAD, "cause": "spread", "first_module": BLOCK, "parameters_after": {**BAD, "spread": True}},
    "every one after": {"cause": "spread", "parameters_after": EVERY, "looked_after_step": 16},
    "gradient": {**HEAD, "parameter": "head.weight", "gradients": BAD},
    "one gradient": {**HEAD, "cause": "gradient", "parameter": "head.weight", "gradients_began": {"step": 14, "nonfinite": 1}},
    "nothing": {"cause": "unknown"},
    "nothing later": {"cause": "unknown", "steps_checked_after": 3, "batch": BATCH},
    "nothing, too late": {"cause": "unknown", "steps_after": 2, "looked_after_step": 17},
}  # fmt: skip
BEGAN: dict[str, dict[str, Any]] = {
    "measured": {"first": 14, "last": 14, "by": "gradient", "measured": True},
    "by a gradient": {"first": 14, "last": 14, "by": "gradient"},
    "by one of several": {"first": 12, "last": 14, "by": "gradient"},
    "written": {"first": 14, "last": 15, "by": "weights"},
    "right after": {"first": 14, "last": 14},
}
LATE: dict[str, dict[str, Any]] = {
    "after": {"first": 15, "last": 15},
    "in the update": {"first": 14, "last": 15},
    "in an update": {"first": 11, "last": 15},
}
MEMORY: MemoryEvidence = {
    "step": 6, "device": "cpu", "error": "", "where": "forward", "number": 1, "tried_bytes": 20 * GIB, "dtypes": ["float32"],
    "categories": {"activations_and_other": 30 * GIB, "optimizer_state": 8 * GIB, "parameters": 4 * GIB},
    "host": {"rss_bytes": 50 * GIB, "limit_bytes": 60 * GIB, "total_bytes": 64 * GIB},
}  # fmt: skip
ON_GPU: MemoryEvidence = {
    **MEMORY, "device": "cuda:0", "host": {}, "world_size": 4, "capacity_bytes": 80 * GIB,
    "allocator": {"reserved_bytes.all.current": 79 * GIB, "allocated_bytes.all.current": 70 * GIB},
}  # fmt: skip
PROFILE: dict[str, Any] = {
    "profile": "ab12", "rank": 3, "steps": [4, 5], "gaps": {"of": "device", "idle_pct": 45.0},
    "shares": {
        "steps_s": 0.5, "loader_s": 0.1, "operators_s": 0.3, "communication_s": 0.05, "communication_alone_s": 0.02,
        "copies_s": 0.0, "outside_s": 0.1, "h2d_s": 0.05, "d2h_s": 0.025, "d2d_s": 0.0, "device_wait_s": 0.165,
    },
    "operators": [
        {"name": "gemm", "calls": 4, "self_cpu_s": 0.01, "total_cpu_s": 0.01, "self_device_s": 0.2, "total_device_s": 0.2},
        {"name": "aten::linear", "calls": 4, "self_cpu_s": 0.01, "total_cpu_s": 0.2, "total_device_s": 0.2},
    ],
}  # fmt: skip
IN_LOADER = {
    "steps_s": 2.0, "loader_s": 1.5, "operators_s": 0.3, "communication_s": 0.0, "communication_alone_s": 0.0, "copies_s": 0.01,
    "outside_s": 0.2,
}  # fmt: skip


def nonfinite(cause: str, facts: dict[str, Any]) -> dict[str, Any]:
    return {"step": 15, "rank": 0, "steps_checked_after": 0, "history": READ, "loss": math.nan, "cause": cause, **facts}


def evidence() -> dict[str, dict[str, Any]]:
    spoilt = {"parameters_before": EVERY}
    seen = {"parameters_after": EVERY, "looked_after_step": 16}
    return {
        **{name: nonfinite(name, facts) for name, facts in NONFINITE.items()},
        **{f"began {name}": nonfinite("spread", {**spoilt, "began": began}) for name, began in BEGAN.items()},
        **{f"began {name}": nonfinite("spread", {**seen, "began": began}) for name, began in LATE.items()},
        "host memory": {**MEMORY},
        "addresses": {**MEMORY, "where": "between steps", "host": {"address_limit_bytes": 60 * GIB, "virtual_bytes": 50 * GIB}},
        "a worker": {**MEMORY, "worker": 4711, "tried_bytes": 65 * GIB},
        "memory of a GPU": {**ON_GPU},
        "a profile of a GPU": PROFILE,
        "a profile": {**PROFILE, "shares": IN_LOADER, "gaps": {"of": "operators"}},
    }  # fmt: skip


def test_facts_are_said_in_every_language(words: SnapshotAssertion) -> None:
    said = []
    for name, facts in evidence().items():
        said.append(f"# {name}")
        for language in LANGUAGES:
            found = cause_words(facts, language)
            assert found is not None and found == cause_words(json.loads(to_json(facts)), language), name
            said += [
                found.message,
                *([f"-> {found.fix}"] if found.fix else []),
                *(f"+ {one}" for one in found.says[1:]),
            ]
    assert "\n".join(said) == words


def alert_of(facts: dict[str, Any], **data: Any) -> Finding:
    """The finding of a rule that such a finding of an agent has joined."""
    found = Finding(
        rule="nonfinite_loss", severity="critical", message="The loss became NaN in step 15.", since_step=15, fix="Stop the run.",
        evidence={"series": "loss", "value": "NaN", "step": 15},
    )  # fmt: skip
    cause = cause_of({"explains": ["nonfinite_loss"], "evidence": facts, "since_step": 15, **data}, 0, 15)
    assert cause is not None and join([cause], found)
    return found


def test_a_joined_cause_is_read_in_the_readers_language() -> None:
    facts = nonfinite("batch", NONFINITE["batch"])
    found, (english, chinese) = alert_of(facts), (cause_words(facts, one) for one in LANGUAGES)
    assert english is not None and chinese is not None
    assert (found.message.endswith(english.message), found.fix) == (True, english.fix)
    told = spoken(found, "zh")
    assert (told.message.endswith(chinese.message), told.fix) == (True, chinese.fix)
    assert english.message not in told.message
    assert [one["message"] for one in told.evidence["causes"]] == [chinese.message]
    assert spoken(told, "en") == told


def test_what_a_profile_shows_is_read_in_the_readers_language() -> None:
    found = replace(alert_of(PROFILE), rule="data_bound")
    assert found.evidence["causes"][0]["says"] == profile_words(PROFILE)
    assert spoken(found, "zh").evidence["causes"][0]["says"] == profile_words(PROFILE, "zh")
    assert found.fix == "Stop the run."


@pytest.mark.parametrize(
    "reason",
    [
        {"key": "cut_short_size", "bytes": 129 * 2**20, "whole": 0, "of": 50},
        {"key": "profiler_failed", "error": "RuntimeError: {x}"},
        {"key": "trace_unwritten", "error": ""},
        {"key": "trace_too_large", "bytes": 2**30, "most_bytes": 2**26},
        {"key": "process_ended", "state": "lost"},
    ],
)
def test_reasons_are_read_in_the_readers_language_also_from_json(reason: dict[str, object]) -> None:
    english, chinese = (reason_words(reason, language) for language in LANGUAGES)
    assert len({english, chinese, str(reason)}) == 3
    assert reason_words(json.dumps(reason)) == english


@pytest.mark.parametrize("reason", ["not stoppable", "", "[1]", '{"key": "of a newer agent"}', '{"key": "steps"}'])
def test_a_reason_that_is_no_known_facts_stands_as_it_is(reason: str) -> None:
    assert reason_words(reason, "zh") == reason


@pytest.mark.parametrize(
    "facts",
    [
        {"module": "head"},
        nonfinite("operator", {}),
        {**MEMORY, "remedies": []},
        {**PROFILE, "shares": {}},
        {"cause": [1]},
    ],
    ids=["no cause", "no operator", "of an older agent", "no shares", "odd"],
)
def test_where_facts_are_missing_the_agents_own_words_stand(facts: dict[str, Any]) -> None:
    found = alert_of(facts, message="It began in 'head'.", fix="Look there.")
    assert (found.message, found.fix) == ("The loss became NaN in step 15. It began in 'head'.", "Look there.")
    assert "It began in 'head'." in spoken(found, "zh").message


def test_processes_that_are_not_recorded_are_an_alert(words: SnapshotAssertion) -> None:
    said = []
    for number in (1, 3):
        found = of_the_user(Event(kind="alert", time=1.0, data={"level": "info", "unrecorded": number}), 0, 1.0, 5)
        told = spoken(found, "zh")
        said += [found.title, found.message, told.title, told.message]
    assert "\n".join(said) == words


def names(**more: Any) -> list[str]:
    return [plan.name for plan in plans({**MEMORY, **more})]  # type: ignore[typeddict-item]


def test_remedies_that_are_enough_come_first_if_they_apply() -> None:
    held = {"parameters": 10, "gradients": 10, "optimizer_state": 20, "activations_and_other": 4}
    found = plans({**ON_GPU, "categories": held, "allocator": {}, "dtypes": ["bfloat16"], "tried_bytes": 16})
    assert [(plan.name, plan.saves_bytes, plan.is_enough) for plan in found] == [
        ("sharding", 30, True), ("smaller_batch", 2, False), ("checkpointing", 2, False), ("smaller_state", 15, False),
    ]  # fmt: skip
    assert "sharding" not in names(), "there is one rank"
    assert "mixed_precision" in names()


def test_on_the_host_what_is_kept_of_every_step_comes_first() -> None:
    """No smaller batch helps a list of losses that keep their graphs."""
    assert names(categories={"parameters": 4})[:2] == ["kept", "smaller_batch"]
    assert "kept" not in [plan.name for plan in plans(ON_GPU)]
    assert names(tried_bytes=65 * GIB)[0] == "too_large", "one such allocation fits nowhere"
    assert names(worker=7) == ["smaller_samples", "fewer_workers", "smaller_batch"], "nothing of the model helps"
