"""The series of every layer of a model as one matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from api_builders import ADMIN, api, frame, send


def test_layers_stand_in_the_order_of_the_model_with_gaps(tmp_path: Path) -> None:
    with api(tmp_path) as client:

        def layers(run: str, family: str = "grad_norm") -> Any:
            return client.get(f"/api/v1/runs/{run}/layers", params={"family": family}, headers=ADMIN)

        values = {f"grad_norm/layers.{n}": [float(n), float(n) + 0.5] for n in (10, 2)}
        send(client, frame(values | {"loss": [1.0, 1.0]}))
        send(client, frame({"grad_norm/head": [7.0]}, seq=2, first_step=3))
        found = layers("r1").json()
        assert (found["layers"], found["step"], found["more"]) == (["head", "layers.2", "layers.10"], [1, 2, 3], 0)
        assert found["values"] == [["NaN", "NaN", 7.0], [2.0, 2.5, "NaN"], [10.0, 10.5, "NaN"]]
        send(client, frame({f"grad_norm/l.{n}": [1.0] for n in range(300)}, run="large"))
        found = layers("large").json()
        assert (len(found["layers"]), len(found["values"]), found["more"]) == (256, 256, 44)
        assert found["layers"][-1] == "l.255"
        send(client, frame({"loss": [1.0]}, run="bare"))
        empty = layers("bare").json()
        assert empty["layers"] == empty["step"] == empty["values"] == []
        wrong = layers("bare", "loss")
        assert (wrong.status_code, "'loss'; allowed are " in wrong.json()["error"]["message"]) == (422, True)
