"""What deploy/ and the Dockerfile say is true: files have their schemas, and commands run as an unprivileged user."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from builders import free_port, job_environment, until

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "perfagent.service"
TOKEN = "a-token-of-the-deployment-test"
USER = 10001  # that of the image


# --- schemas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda file: file.name)
def test_kubernetes_manifests_have_the_schema_of_kubernetes_and_restrict_their_containers(file: Path) -> None:
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


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_the_unit_is_one_that_systemd_understands(tmp_path: Path) -> None:
    mine = tmp_path / "perfagent.service"
    mine.write_text(UNIT.read_text("utf-8").replace("/opt/perfagent/bin/perfagent", "/bin/true"), "utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(mine)], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "perfagent" in line]
    assert (done.returncode, said) == (0, [])


def is_known_command(words: list[str]) -> None:
    from perfagent import cli

    assert words[0] == "perfagent"
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()):
        cli.main([*words[1:], "--help"])
    assert ended.value.code == 0


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def notices(tmp_path: Path) -> Iterator[Notices]:
    folder = Path(tempfile.mkdtemp(prefix="perfagent-notify-"))  # the path of a socket must be short
    folder.chmod(0o755)
    with Notices(folder / "socket") as open_one:
        yield open_one
    shutil.rmtree(folder)


class Notices:
    """systemd's end of sd_notify."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        path.chmod(0o777)

    def __enter__(self) -> Notices:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def wait_for(self, message: str, within_s: float = 90.0) -> None:
        self._socket.settimeout(within_s)
        while self._socket.recv(1000).decode() != message:
            pass


def command_of_the_unit(data: Path, program: str) -> list[str]:
    found = re.search(r"^ExecStart=(.*)$", UNIT.read_text("utf-8"), re.MULTILINE)
    assert found is not None
    words = found[1].replace("/opt/perfagent/bin/perfagent", program).replace("${STATE_DIRECTORY}", str(data))
    return shlex.split(words)


def test_the_command_of_the_unit_tells_systemd_that_it_is_ready_well_and_stops(
    tmp_path: Path, notices: Notices
) -> None:
    environment = job_environment(tmp_path, NOTIFY_SOCKET=str(notices.path), WATCHDOG_USEC="1000000")
    environment["PERFAGENT_PORT"] = str(free_port())
    command = [sys.executable, "-m", *command_of_the_unit(tmp_path / "data", "perfagent")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        notices.wait_for("READY=1")
        notices.wait_for("WATCHDOG=1")
        notices.wait_for("WATCHDOG=1")
        process.terminate()
        notices.wait_for("STOPPING=1")
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
    assert [json.loads(line)["level"] for line in (tmp_path / "log").read_text("utf-8").splitlines()] == ["WARNING"]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_image_and_the_unit_run_from_a_fresh_environment_as_an_unprivileged_user(notices: Notices) -> None:
    """Each instruction of the Dockerfile is carried out below a folder: it sees only the files that it copies."""
    home = Path(tempfile.mkdtemp(prefix="perfagent-image-"))
    try:
        build(home)
        serve(home, image_command(home), image_check(home))
        serve(home, command_of_the_unit(home / "data", str(home / "opt/bin/perfagent")), image_check(home), notices)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def instructions(name: str) -> list[str]:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text("utf-8"))
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)


def build(home: Path) -> None:
    for folder in ("src", "data", "cache"):
        (home / folder).mkdir()
    for copied in instructions("COPY"):
        if copied.startswith("--from"):
            continue
        *sources, target = copied.split()
        for source in sources:
            there = home / "src" / (target if target != "./" else source)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, there, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, there)
    for path in (home, *home.rglob("*")):
        os.chown(path, USER, USER)
    home.chmod(0o755)
    for run in instructions("RUN"):
        if "useradd" not in run:  # the user is there: it is a number
            run = run.replace("/opt/perfagent", f"{home}/opt").replace("python -m venv", f"{interpreter()} -m venv")
            done = subprocess.run(
                run, shell=True, cwd=home / "src", env=environment_of(home), user=USER, group=USER, extra_groups=[],
                capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, f"{run}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    shutil.rmtree(home / "src")


def serve(home: Path, command: list[str], check: list[str], notices: Notices | None = None) -> None:
    """Runs the command until it is healthy, and stops it."""
    port = free_port()
    more = {"PERFAGENT_PORT": str(port), "PERFAGENT_ADMIN_TOKEN": TOKEN}
    if notices is not None:
        more["NOTIFY_SOCKET"] = str(notices.path)
    environment = environment_of(home) | more
    who: dict[str, Any] = {"user": USER, "group": USER, "extra_groups": [], "cwd": home, "env": environment}
    log = home / "data" / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, **who)
    try:
        until(lambda: subprocess.run(check, capture_output=True, **who).returncode == 0, within_s=120.0, every_s=1.0,
              why=log.read_text("utf-8"))  # fmt: skip
        if notices is not None:
            notices.wait_for("READY=1")
        page = httpx.get(
            f"http://127.0.0.1:{port}/api/v1/self", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False
        )
        assert page.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()


def image_command(home: Path) -> list[str]:
    [command] = [json.loads(words) for words in instructions("CMD")]
    return [word.replace("/data", f"{home}/data") for word in command]


def image_check(home: Path) -> list[str]:
    [words] = instructions("HEALTHCHECK")
    return list(json.loads(words.partition("CMD ")[2]))


def environment_of(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or "proxy" in name.lower()}
    own = {"HOME": str(home), "PIP_CACHE_DIR": str(home / "cache"), "PYTHONUNBUFFERED": "1"}
    return kept | own | {"PATH": f"{home}/opt/bin:/usr/local/bin:/usr/bin:/bin"}


def interpreter() -> str:
    """One that other users can run."""
    for candidate in (sys.executable, shutil.which("python3.11", path="/usr/local/bin:/usr/bin")):
        if candidate is None:
            continue
        with contextlib.suppress(PermissionError):
            subprocess.run(
                [candidate, "-c", "import ensurepip"], user=USER, group=USER, extra_groups=[], cwd="/", check=True
            )
            return candidate
    pytest.skip("no Python 3.11 that another user can run")
