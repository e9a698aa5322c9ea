"""The recipes run as they are printed, say what they are for, and are recognized by the agent."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_recorded import Recording
from builders import job_environment
from e2e.launching import python
from preloaded import run as run_preloaded

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
DALI = any(one.metadata["Name"].lower().startswith("nvidia-dali") for one in importlib.metadata.distributions())
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(folder: Path, name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> tuple[str, dict[str, Any]]:
    """What the recipe printed, and the techniques that its run told of itself."""
    record = folder / "record"
    environment = {"PERFAGENT_RECORD": str(record), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [str(RECIPES / f"{name}.py"), *arguments]
    if launcher:
        output = python(*launcher, *words, folder=folder, **environment)
    else:
        [ended] = run_preloaded(words, folder, [job_environment(folder, **environment)])
        assert ended.returncode == 0, ended
        output = ended.stdout
    if not record.exists():
        return output, {}
    configs = [context["config"] for context in Recording(record).events("context") if "config" in context]
    return output, dict(configs[-1].get("techniques", {}))


def figure(pattern: str, output: str) -> float:
    found = re.search(pattern, output)
    assert found is not None, output
    return float(found[1].replace(",", ""))


@pytest.mark.long
def test_lora_trains_a_tenth_of_the_parameters_and_merges(tmp_path: Path) -> None:
    output, techniques = run(tmp_path, "lora", "--steps", "15", "--output", str(tmp_path / "adapters"))
    share = figure(r"trainable: (\S+) %", output)
    assert share < 10.0
    assert figure(r"differ by (\S+)", output) < 1e-4
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
    assert (techniques["adapters"]["default"]["method"], techniques["adapters"]["default"]["rank"]) == ("LORA", 8)
    assert techniques["frozen"]["trainable_pct"] == pytest.approx(share, abs=0.01)
    assert techniques["frozen"]["saved_bytes"] > 0


@pytest.mark.long
def test_four_bit_weights_take_a_quarter_and_the_adapters_learn(tmp_path: Path) -> None:
    output, techniques = run(tmp_path, "quantized_4bit", "--steps", "4")
    assert figure(r"\((\S+) times less\)", output) == pytest.approx(4.0)
    assert figure(r"to (\S+)$", output.strip()) < figure(r"loss (\S+) to", output)
    assert (techniques["quantization"]["bits"], techniques["quantization"]["type"]) == (4, "nf4")
    assert techniques["adapters"]["default"]["method"] == "LORA"


def test_pruned_weights_stay_zero_and_training_makes_up_for_them(tmp_path: Path) -> None:
    output, techniques = run(tmp_path, "pruning", "--steps", "200")
    assert figure(r"zeros: (\S+) %", output) == 20.0
    assert figure(r"(\S+) trained on", output) < figure(r"(\S+) pruned", output)
    assert techniques["pruning"]["pruned_pct"] == pytest.approx(20.0, abs=0.1)


def test_the_student_comes_near_its_teacher(tmp_path: Path) -> None:
    output, techniques = run(tmp_path, "distillation", "--steps", "300")
    assert figure(r"student: (\S+)", output) > figure(r"teacher: (\S+)", output) - 0.1
    assert techniques["distillation"]["teacher_parameters"] == figure(r"with (\S+) parameters;", output)


def test_shards_are_written_and_read_in_an_epoch_of_known_length(tmp_path: Path) -> None:
    output, techniques = run(tmp_path, "webdataset_shards", "--steps", "25", "--samples", "1000")
    assert "4 shards, 25 steps of 32" in output
    assert techniques["loader"]["library"] == "WebDataset"


@pytest.mark.long
def test_the_stages_of_a_pipeline_learn_together(tmp_path: Path) -> None:
    output, _ = run(tmp_path, "pipeline_split", "--steps", "150", launcher=TWO)
    assert figure(r"to (\S+) in 150 steps", output) < 0.75 * figure(r"loss (\S+) to", output)


def test_a_rare_class_is_found_and_no_task_drowns_the_other(tmp_path: Path) -> None:
    output, _ = run(tmp_path, "losses", "--steps", "300")
    assert figure(r"found (\S+) %", output) > 50
    assert figure(r"off by ([\d.]+);", output) < 40  # it spreads over 100


def test_static_cache_gives_the_same_output_and_repetition_shows(tmp_path: Path) -> None:
    output, _ = run(tmp_path, "generation", "--tokens", "16", "--batch", "4")
    assert "same with both caches: True" in output
    assert figure(r"high repetition in (\d+)", output) == 4  # a model that was never trained


def test_nsight_script_trains_without_a_gpu_and_prints_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, _ = run(tmp_path, "nsight", "--steps", "30")
    assert "30 steps on c" in output
    # it only prints: no process of its own
    monkeypatch.setattr(sys, "argv", [str(RECIPES / "nsight.py"), "--print-command"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPES / "nsight.py"), run_name="__main__")
    assert not ended.value.code
    command = capsys.readouterr().out
    assert "--trace=cuda,cudnn,cublas,nvtx" in command
    assert "--capture-range=cudaProfilerApi" in command


def test_every_recipe_has_a_paragraph_and_a_test() -> None:
    page, tests = (ROOT / "docs" / "guides" / "recipes.md").read_text(), Path(__file__).read_text()
    for path in sorted(RECIPES.glob("*.py")):
        assert f"(../../examples/recipes/{path.name})" in page, f"{path.name} is missing in docs/guides/recipes.md"
        assert f'"{path.stem}"' in tests, f"{path.name} has no test"


@pytest.mark.skipif(DALI, reason="is about machines without DALI")
def test_dali_says_what_to_install_where_it_is_missing(tmp_path: Path) -> None:
    environment = {"PERFAGENT_DISABLED": "1"} | job_environment(tmp_path)
    command = [sys.executable, str(RECIPES / "dali_pipeline.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "pip install nvidia-dali-cuda120" in done.stderr


@pytest.mark.skipif(not DALI, reason="DALI takes 400 MB")
def test_dali_decodes_the_images_of_a_folder(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(8):
            (tmp_path / "images" / label / f"{number}.ppm").write_bytes(b"P6 8 8 255\n" + bytes(range(192)))
    output, techniques = run(tmp_path, "dali_pipeline", str(tmp_path / "images"), "--steps", "4", "--batch", "4")
    assert "4 steps of 4 images of 336 x 336" in output
    assert techniques["loader"]["library"] == "DALI"
