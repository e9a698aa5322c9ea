"""What we promise about the repository itself."""

from __future__ import annotations

import ast
import functools
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

import pytest
from documents import ROOT, tracked_files
from faults.matrix import FAULTS

pytestmark = pytest.mark.real

MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 450, 70
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources(*folders: str) -> list[pathlib.Path]:
    """The files of Python below these folders."""
    return [path for path in tracked_files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders]


def text_of(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""


def test_no_file_leans_on_something_outside_the_repository() -> None:
    outside = re.compile(r"\.\./" + "sha" + r"red\b|/wo" + r"rk/")
    assert [path.relative_to(ROOT) for path in tracked_files() if outside.search(text_of(path))] == []


def test_constraints_pin_every_version_and_name_no_index() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line


def test_no_source_file_has_a_name_that_says_nothing() -> None:
    vague = {"util", "utils", "helper", "helpers", "common", "misc", "base"}
    assert [path.name for path in tracked_files() if path.suffix == ".py" and path.stem in vague] == []


def test_no_file_or_function_of_the_agent_is_too_long() -> None:
    too_long = []
    for path in sources("agent"):
        tree = ast.parse(path.read_text())
        spans = [
            (node.name, node.end_lineno or 0, node.lineno) for node in ast.walk(tree) if isinstance(node, FUNCTIONS)
        ]
        too_long += [f"{path.name}: {name}" for name, end, begin in spans if end - begin >= MOST_LINES_OF_A_FUNCTION]
        too_long += [path.name] if len(path.read_text().splitlines()) > MOST_LINES_OF_A_FILE else []
    assert too_long == []


@pytest.mark.fault
def test_x04_the_server_never_unpickles_and_never_evaluates_text() -> None:
    banned = re.compile(r"\b(pickle\.loads?|marshal\.loads?|yaml\.load|eval|exec)\(")
    readers = sources("server", "client", "dashboard")
    assert [str(path.relative_to(ROOT)) for path in readers if banned.search(text_of(path))] == []


def test_gradients_are_read_on_the_training_thread_only() -> None:
    """`parameter.grad` from another thread corrupts the heap while backward runs (probes/memory_table.py tells
    why)."""
    on_the_training_thread = {
        "hooks/grad_clipping.py", "hooks/optimizer_step.py",
        "hooks/selection/joint_step.py", "integrations/api.py", "causes/nonfinite.py", "causes/oom.py",
        "measure/gradients.py", "measure/gradient_schedule.py", "measure/step_witness.py",
        "measure/clearing.py", "measure/untrained.py", "measure/updates.py",
    }  # fmt: skip
    reads = re.compile(r"\.grad\b(?!\s*=[^=])|attrgetter\(\"grad\"")
    agent = ROOT / "agent/perfagent"
    files = [path for path in sources("agent") if path.is_relative_to(agent)]
    found = {str(path.relative_to(agent)) for path in files if reads.search(code_of(path))}
    assert found <= on_the_training_thread


LIBRARIES = re.compile(
    "(?<![a-z])(absl|accelerate|apex|attrs|bitsandbytes|click|colossalai|dali|datasets|deepspeed|diffusers|fairscale|fastai|"
    "flash_attn|gym|gymnasium|hf|horovod|huggingface|hydra|ignite|lightning|megatron|mlflow|monai|omegaconf|peft|poutyne|pyg|"
    "pydantic|ray|safetensors|skorch|stable_baselines3|tensordict|timm|tokenizers|torch_geometric|torch_sparse|torchao|trackio|"
    "transformers|trl|typer|ultralytics|wandb|webdataset|xformers|"
    "forward_module|num_graphs|PretrainedConfig|ReLUSquaredActivation)(?![a-z])",  # and names of theirs that do not say whose
    re.IGNORECASE,
)
MAY_NAME_LIBRARIES = {
    "__init__.py": "waits for two trainers, and must load nothing, not even the table",
    "libraries.py": "is the table of their names",
    "redaction/names.py": "knows what secrets are called, those of services among them",
    "redaction/shapes.py": "likewise, around a key in a text",
    "redaction/structure.py": "likewise, around a key in a dict",
    "redaction/values.py": "knows how the keys of services begin",
    "wire/configuration.py": "has the keys under which the configuration is sent",
}


def test_libraries_are_named_in_integrations_only() -> None:
    agent = ROOT / "agent/perfagent"
    naming: dict[str, set[str]] = {}
    for path in sources("agent"):
        if path.is_relative_to(agent) and path.relative_to(agent).parts[0] not in ("integrations", "trackers"):
            own = re.sub(r"perfagent[\w.]*", "", " ".join(strings_and_imports(path)))
            if found := set(LIBRARIES.findall(own)):
                naming[str(path.relative_to(agent))] = found
    assert naming.keys() == MAY_NAME_LIBRARIES.keys(), naming


def strings_and_imports(path: pathlib.Path) -> Iterator[str]:
    """What the code of a file says in strings that are no docstrings, and which modules it imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and isinstance(child.value, str) and not isinstance(node, ast.Expr):
                yield child.value


def code_of(path: pathlib.Path) -> str:
    """A source file without comments and docstrings, each operator apart."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    kept = [t.string for t in tokens if t.type != tokenize.COMMENT and not t.string.endswith('"""')]
    return " ".join(kept).replace(" . ", ".").replace(" ( ", "(")


@functools.cache
def named_tests() -> list[tuple[str, str]]:
    """The file and name of each test."""
    return [
        (str(path.relative_to(ROOT / "tests")), name)
        for path in sources("tests")
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", text_of(path), re.MULTILINE)
    ]


def test_tests_have_names_of_at_most_60_characters() -> None:
    long = [f"{file}: {name}" for file, name in named_tests() if len(name) > 60]
    assert long == [], "\n".join(["say subject, condition, result:", *long])


def test_approved_words_belong_to_tests_that_are_there() -> None:
    approved = re.findall(r"^# name: (\w+).* in (\S+)$", text_of(ROOT / "tests" / "words.ambr"), re.MULTILINE)
    assert approved
    gone = sorted({(file, test) for test, file in approved} - set(named_tests()))
    assert gone == [], "take them out of tests/words.ambr: pytest --snapshot-update"


def test_every_fault_of_agent_server_and_attacks_has_a_test() -> None:
    named = {name.split("_")[1].upper() for _, name in named_tests()}
    assert {fault for fault in FAULTS if fault[0] in "ASX"} - named == set()
