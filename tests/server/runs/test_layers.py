"""The series of every layer of a model as one matrix."""

from __future__ import annotations

from pathlib import Path

from api_builders import ADMIN, api, frame, send


def test_layers_stand_in_the_order_of_the_model_with_a_gap_where_one_sent_nothing(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        values = {f"grad_norm/layers.{n}": [float(n), float(n) + 0.5] for n in (10, 2)}
        send(client, frame(values | {"loss": [1.0, 1.0]}))
        send(client, frame({"grad_norm/head": [7.0]}, seq=2, first_step=3))
        found = client.get("/api/v1/runs/r1/layers", params={"family": "grad_norm"}, headers=ADMIN).json()
    assert found["layers"] == ["head", "layers.2", "layers.10"]
    assert found["step"] == [1, 2, 3]
    assert found["values"] == [["NaN", "NaN", 7.0], [2.0, 2.5, "NaN"], [10.0, 10.5, "NaN"]]
    assert found["more"] == 0


def test_a_model_of_many_layers_is_cut_and_says_so(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({f"grad_norm/l.{n}": [1.0] for n in range(300)}))
        found = client.get("/api/v1/runs/r1/layers", params={"family": "grad_norm"}, headers=ADMIN).json()
    assert len(found["layers"]) == len(found["values"]) == 256
    assert found["layers"][-1] == "l.255"
    assert found["more"] == 44


def test_a_family_that_the_run_lacks_is_empty_and_one_that_is_none_is_refused(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0]}))
        empty = client.get("/api/v1/runs/r1/layers", params={"family": "grad_norm"}, headers=ADMIN).json()
        wrong = client.get("/api/v1/runs/r1/layers", params={"family": "loss"}, headers=ADMIN)
    assert empty["layers"] == empty["step"] == empty["values"] == []
    assert wrong.status_code == 422
    assert "family is 'loss'; allowed are " in wrong.json()["error"]["message"]
