"""Rows that are decoded in one go are the rows that the careful way gives, or are left to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfagent_server.ingest.json_rows import MAX_ROWS, parse_rows, plain_rows
from perfagent_server.refusal import RefusalError
from perfagent_server.routes.log import parse_json
from perfagent_server.routes.problems import ApiError


def carefully(body: bytes) -> Any:
    try:
        return parse_rows(parse_json(body))
    except (RefusalError, ApiError):
        return "refused"


ROW = {"run": "a", "metrics": {"x": 1, "y": 2.5}}
PLAIN: list[Any] = [
    ROW, [ROW, ROW], [], {**ROW, "project": "p", "step": 3, "rank": 1}, {**ROW, "metrics": {}}, {**ROW, "else": [1]},
    {**ROW, "step": None}, {**ROW, "metrics": {"x": -0.0, "y": 2**60}}, [ROW] * MAX_ROWS,
]  # fmt: skip
ODD: list[Any] = [
    {**ROW, "metrics": {"x": "NaN"}}, {**ROW, "metrics": {"x": True}}, {**ROW, "metrics": {"x": None}}, {"run": "a"},
    {**ROW, "step": -1}, {**ROW, "step": 2**60}, {**ROW, "step": True}, {**ROW, "step": 3.5}, {**ROW, "rank": 2**31},
    {**ROW, "rank": None}, {**ROW, "time": 1e12}, {**ROW, "time": 1.7e9}, {**ROW, "run": ""}, {**ROW, "run": "x" * 257},
    {**ROW, "run": "é"}, {**ROW, "run": "a\n"}, {**ROW, "run": None}, {**ROW, "project": None}, {**ROW, "project": ""},
    {**ROW, "state": "finished"}, {**ROW, "state": "no state"}, {**ROW, "reason": 3}, {"run": "a", "state": "finished"}, 3,
    [[]], None, {}, [ROW, {}], [ROW] * (MAX_ROWS + 1),
]  # fmt: skip
NO_JSON = [b"", b"{", b"\xff", b'{"run": "a", "metrics": {"x": NaN}}', b'{"run": "\\ud800"}', b"[" * 9999]


def test_what_most_programs_send_is_decoded_in_one_go() -> None:
    for value in PLAIN:
        body = json.dumps(value).encode()
        assert plain_rows(body) == carefully(body) != "refused", str(value)[:90]


def test_anything_else_is_left_to_the_careful_way() -> None:
    for body in [*(json.dumps(value).encode() for value in ODD), *NO_JSON]:
        assert plain_rows(body) is None, body[:90]


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(["NaN", "starting"])
)
fields = st.sampled_from(["project", "run", "step", "metrics", "rank", "time", "state", "reason", "other"])
values = scalars | st.dictionaries(st.text(max_size=2), scalars, max_size=2) | st.lists(scalars, max_size=2)


@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_the_two_ways_never_differ(examples: int) -> None:
    @settings(deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.too_slow])  # a busy machine
    @given(st.dictionaries(fields, values))
    def same(fields_: dict[str, Any]) -> None:
        body = json.dumps({"run": "a", "metrics": {"x": 1.0}, **fields_}).encode()
        plain = plain_rows(body)
        assert plain is None or repr(plain) == repr(carefully(body))

    same()
