"""What deploy/ and the Dockerfile say is true: files have their schemas, and commands run as an unprivileged user."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from builders import free_port, job_environment

from perfagent_server.commands.gate import command as gate

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.real
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "perfagent.service"
GATE = ROOT / "examples" / "github_actions" / "gate.yml"
SITE = ROOT / ".github" / "workflows" / "site.yml"
USER = 10001  # that of the image


# --- schemas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda file: file.name)
def test_kubernetes_manifests_have_the_schema_and_restrict_pods(file: Path) -> None:
    kinds = []
    for resource in yaml.safe_load_all(file.read_text("utf-8")):
        kubernetes_validate.validate(resource, "1.33", strict=True)
        kinds.append(resource["kind"])
        if resource["kind"] in ("Deployment", "StatefulSet"):
            pod = resource["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"]
            for container in (*pod["containers"], *pod.get("initContainers", ())):
                assert container["securityContext"]["readOnlyRootFilesystem"], container["name"]
                assert container["securityContext"]["capabilities"]["drop"] == ["ALL"], container["name"]
            [server] = pod["containers"]
            assert server["readinessProbe"]["httpGet"]["path"] == "/readyz"
            assert server["livenessProbe"]["httpGet"]["path"] == "/livez"
            variables = {one["name"]: one.get("value") for one in server["env"]}
            assert variables["PERFAGENT_FORWARDED_ALLOW_IPS"], "everybody would have the address of the ingress"
            assert variables["PERFAGENT_DATA"] == server["args"][server["args"].index("--data") + 1]
            is_known_command(server["args"])
    assert {"Service", "Ingress"} <= set(kinds)


def test_sqlite_never_has_two_replicas() -> None:
    resources = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "sqlite.yaml").read_text("utf-8")))
    assert [one["spec"]["replicas"] for one in resources if "replicas" in one["spec"]] == [1]


def test_the_compose_file_has_the_schema_of_compose() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(ROOT / "docker-compose.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))["services"]
    is_known_command(services["perfagent"]["command"])


@pytest.mark.parametrize("file", [GATE, SITE], ids=lambda file: file.name)
def test_workflow_has_the_schema_of_github(file: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflow_of_the_gate_names_options_that_exist() -> None:
    [step] = [one for one in steps(GATE, "gate") if "gate" in one.get("run", "")]
    options = re.findall(r" (--[a-z-]+)", step["run"].partition("||")[0])
    parser = argparse.ArgumentParser()
    gate(parser)
    assert {"--base-dir", "--base-command"} <= set(options) - {"--steps"} <= {*parser._option_string_actions}


def test_workflow_of_the_site_publishes_what_the_script_builds() -> None:
    assert "scripts/site" in [step.get("run") for step in steps(SITE, "build")]
    [upload] = [step for step in steps(SITE, "build") if "upload-pages-artifact" in step.get("uses", "")]
    assert f"built: {upload['with']['path']}/index.html" in (ROOT / "scripts" / "site").read_text("utf-8")
    assert "secrets." not in SITE.read_text("utf-8"), "a fork would have to set one"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_the_unit_is_one_that_systemd_understands(tmp_path: Path) -> None:
    mine = tmp_path / "perfagent.service"
    mine.write_text(UNIT.read_text("utf-8").replace("/opt/perfagent/bin/perfagent", "/bin/true"), "utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(mine)], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "perfagent" in line]
    assert (done.returncode, said) == (0, [])


def steps(workflow: Path, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(workflow.read_text("utf-8"))["jobs"][job]["steps"]
    return found


def is_known_command(words: list[str]) -> None:
    from perfagent import cli

    assert words[0] == "perfagent"
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()):
        cli.main([*words[1:], "--help"])
    assert ended.value.code == 0


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def notices() -> Iterator[socket.socket]:
    """systemd's end of sd_notify."""
    folder = Path(tempfile.mkdtemp(prefix="perfagent-notify-"))  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(folder / "socket"))
        bound.settimeout(90)
        yield bound
    shutil.rmtree(folder)


def test_command_of_the_unit_tells_systemd_it_is_ready_and_stops(tmp_path: Path, notices: socket.socket) -> None:
    found = re.search(r"^ExecStart=(.*)$", UNIT.read_text("utf-8"), re.MULTILINE)
    assert found is not None
    words = (
        found[1].replace("/opt/perfagent/bin/perfagent", "perfagent").replace("${STATE_DIRECTORY}", f"{tmp_path}/data")
    )
    more = {"NOTIFY_SOCKET": notices.getsockname(), "WATCHDOG_USEC": "1000000", "PERFAGENT_PORT": str(free_port())}
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", *shlex.split(words)]
        process = subprocess.Popen(command, env=job_environment(tmp_path, **more), stdout=log, stderr=log)
    try:
        for message in ("READY=1", "WATCHDOG=1", "WATCHDOG=1", "STOPPING=1"):
            if message == "STOPPING=1":
                process.terminate()
            while notices.recv(1000).decode() != message:
                pass
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
    assert [json.loads(line)["level"] for line in (tmp_path / "log").read_text("utf-8").splitlines()] == ["WARNING"]


def instructions(name: str) -> list[str]:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text("utf-8"))
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)


def test_image_copies_files_that_are_there_and_starts_as_a_user() -> None:
    for copied in instructions("COPY"):
        if not copied.startswith("--from"):
            assert [source for source in copied.split()[:-1] if not (ROOT / source).exists()] == []
    [command] = instructions("CMD")
    is_known_command(json.loads(command))
    [check] = instructions("HEALTHCHECK")
    assert "/readyz" in check or "/livez" in check or "/healthz" in check
    assert instructions("USER") == [f"{USER}:{USER}"]
