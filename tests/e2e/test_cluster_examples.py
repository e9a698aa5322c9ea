"""The files of examples/cluster: they have their schemas, and what they run trains as one run. Ray Train, too."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import real_slurm
import yaml
from builders import ServerProcess, free_port, job_environment, sync, until
from e2e.launching import python

pytestmark = pytest.mark.real
EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = EXAMPLES / "cluster"
STEPS = 20


def only_run(server: ServerProcess, name: str, folder: Path) -> dict[str, object]:
    """The run of two ranks that this training made, finished."""
    sync(job_environment(folder, PERFAGENT_SERVER=server.url))
    [run] = [run for run in server.get("/runs")["runs"] if run["name"] == name]
    found: dict[str, object] = server.wait_for_state(run["run"], "finished")
    assert (found["step"], found["world_size"]) == (STEPS, 2)
    return found


def programs(folder: Path, **texts: str) -> str:
    """A PATH on which these programs come first, and this Python's own then."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o700)
    return f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin"


TORCHRUN = f'exec "{sys.executable}" -m torch.distributed.run "$@"'


def bash(script: str, example: str, folder: Path, environment: dict[str, str]) -> None:
    assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0
    command = ["bash", "-c", script, "job", str(EXAMPLES / example), "--steps", str(STEPS)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_the_sbatch_file_trains_and_its_run_is_named_by_the_job(shared_server: ServerProcess, tmp_path: Path) -> None:
    """srun starts the task as SLURM would."""
    path = programs(
        tmp_path / "bin",
        srun='SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1 exec "$@"', scontrol="echo 127.0.0.1", torchrun=TORCHRUN,
    )  # fmt: skip
    job = {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "node",
        "SLURM_GPUS_PER_NODE": "a:2",
    }
    job |= {"PERFAGENT_SERVER": shared_server.url, "PERFAGENT_KEY_FILE": str(tmp_path / "no key"), "PATH": path}
    bash((CLUSTER / "train.sbatch").read_text(), "ddp.py", tmp_path, job_environment(tmp_path, **job))
    assert only_run(shared_server, "ddp", tmp_path)["run"] == f"slurm-{job['SLURM_JOB_ID']}"


@pytest.mark.long
@pytest.mark.skipif(not real_slurm.IS_INSTALLED, reason="needs Debian's slurm-wlm and munge, and root")
def test_slurm_runs_it_and_a_requeued_job_is_one_run(shared_server: ServerProcess, tmp_path: Path) -> None:
    environment = job_environment(
        tmp_path, PERFAGENT_SERVER=shared_server.url, PERFAGENT_KEY_FILE=str(tmp_path / "no key")
    )
    environment["PATH"] = programs(tmp_path / "bin", torchrun=TORCHRUN)
    words = (
        "--nodes=1",
        "--gpus-per-node=2",
        "--cpus-per-task=2",
        "--chdir",
        str(tmp_path),
        str(CLUSTER / "train.sbatch"),
    )
    with real_slurm.slurm(tmp_path / "slurm") as slurm:
        job = slurm.submit(*words, str(EXAMPLES / "ddp.py"), "--steps", "100000", environment=environment)
        run = f"slurm-{job}"
        until(
            lambda: (shared_server.find(f"/runs/{run}") or {"step": 0})["step"] > 5,
            within_s=120,
            every_s=0.5,
            why=slurm.log,
        )
        slurm.ask("scontrol", "requeue", job)
        until(lambda: slurm.state(job) == "PENDING", within_s=60, every_s=0.5, why=slurm.state(job))
        slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # it would wait for two minutes
        again = until(
            lambda: (found := shared_server.get(f"/runs/{run}"))["attempts"] == 2 and found, within_s=180, every_s=0.5
        )
        assert again["world_size"] == 2
        slurm.ask("scancel", job)
        until(lambda: slurm.state(job) == "CANCELLED", within_s=60, every_s=0.5, why=slurm.state(job))
    assert shared_server.wait_for_state(run, "killed", "preempted", "failed")["attempts"] == 2


def test_the_skypilot_file_is_bash_and_names_our_variables() -> None:
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert [subprocess.run(["bash", "-n", "-c", task[part]]).returncode for part in ("setup", "run")] == [0, 0]
    assert set(task["envs"]) | set(task["secrets"]) == {"PERFAGENT_SERVER", "PERFAGENT_API_KEY"}


@pytest.mark.long
def test_the_skypilot_file_trains_on_one_node(shared_server: ServerProcess, tmp_path: Path) -> None:
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    node = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    node |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "PERFAGENT_SERVER": shared_server.url}
    environment = job_environment(tmp_path, **node, PATH=programs(tmp_path / "bin", torchrun=TORCHRUN))
    script = task["run"].replace("train.py", '"$@"').replace("29500", str(free_port()))
    bash(script, "torchrun.py", tmp_path, environment)
    only_run(shared_server, "torchrun", tmp_path)


@pytest.mark.long
def test_the_skypilot_file_has_the_schema_of_skypilot() -> None:
    if importlib.util.find_spec("sky") is None:
        pytest.skip("skypilot is not installed")
    import jsonschema
    from sky.utils import schemas

    jsonschema.validate(yaml.safe_load((CLUSTER / "skypilot.yaml").read_text()), schemas.get_task_schema())


def test_the_kubernetes_job_has_the_schema_and_meets_the_server() -> None:
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text("utf-8"))
    for resource in (service, job):
        kubernetes_validate.validate(resource, "1.33", strict=True)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert service["metadata"]["name"] == pod["subdomain"] and spec["completions"] == spec["parallelism"]
    assert f"--nnodes={spec['completions']}" in container["args"]
    assert f"--master-addr={job['metadata']['name']}-0.{pod['subdomain']}" in container["args"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    [served, *_] = yaml.safe_load_all((EXAMPLES.parent / "deploy" / "kubernetes" / "sqlite.yaml").read_text("utf-8"))
    [address] = [one["value"] for one in container["env"] if one["name"] == "PERFAGENT_SERVER"]
    assert address == f"http://{served['metadata']['name']}:{served['spec']['ports'][0]['port']}"


@pytest.mark.long
def test_ray_trains_and_its_workers_are_one_run(shared_server: ServerProcess, tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'ray[train]'")
    python(str(EXAMPLES / "ray_train.py"), "--steps", str(STEPS), folder=tmp_path, PERFAGENT_SERVER=shared_server.url)
    only_run(shared_server, "ray train", tmp_path)
