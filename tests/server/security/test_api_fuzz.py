"""schemathesis generates thousands of requests from the OpenAPI document. None may cause a 5xx."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from builders import ServerProcess, server_process, web
from prometheus_client.parser import text_string_to_metric_families

FEWEST = 10_000


def answers(server: ServerProcess) -> Counter[int]:
    """How many requests were answered with each status."""
    counted: Counter[int] = Counter()
    headers = {"Authorization": f"Bearer {server.admin_token}"}
    for family in text_string_to_metric_families(web().get(f"{server.url}/metrics", headers=headers).text):
        for sample in family.samples:
            if sample.name == "perfagent_http_requests_total":
                counted[int(sample.labels["status"])] += int(sample.value)
    return counted


@pytest.mark.long
@pytest.mark.fault
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="needs `scripts/install --all`")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("who", ["admin", "nobody"])
def test_x01_no_generated_request_makes_the_server_fail(tmp_path: Path, who: str) -> None:
    report = tmp_path / "report.json"
    with server_process(tmp_path / "server") as server:
        command = [
            str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json", "--seed", "1",
            "--checks", "not_a_server_error", "--max-examples", "150", "--no-shrink", "--no-color", "--warnings", "off",
            "--exclude-path", "/api/v1/ingest",  # MessagePack: tests/server/ingest sends it broken frames
            "--generation-database", "none", "--report-json-path", str(report),
        ]  # fmt: skip
        if who == "admin":
            command += ["-H", f"Authorization: Bearer {server.admin_token}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3500)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
        assert json.loads(report.read_text())["test_cases"]["generated"] >= FEWEST
        counted = answers(server)
        assert sum(counted.values()) >= FEWEST
        assert not [status for status in counted if status >= 500]
        assert counted[429] < sum(counted.values()) / 10, "a refusal for too many requests tests nothing"
        if who == "admin":
            assert counted[200] > FEWEST / 50
