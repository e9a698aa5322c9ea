"""Names by which other libraries' commands, variables, classes and operators are known.

Plain data, and two reads, for rooms that integrations/ stands above; all else that is true of one library stands there.
Integrations do not register them, because many are needed before their library is imported: a launcher's variables, say.
Imports nothing of ours, and none of the libraries.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = [
    "BATCHES_OF_GRAPHS", "COUNTLESS_OPERATORS", "ENVIRONMENT", "EXITS", "FIELDS", "LAUNCHERS", "MODEL_CONFIGURATIONS",
    "RECTIFIERS", "TENSOR_DICTS", "WORKERS_HAVE", "WRAPPERS", "precision", "unresolved",
]  # fmt: skip

LAUNCHERS = (
    "accelerate launch", "accelerate-launch", "accelerate.commands.launch", "deepspeed", "deepspeed.launcher.runner",
)  # fmt: skip
"""Commands and modules that start others to train."""
WORKERS_HAVE = ("ACCELERATE_MIXED_PRECISION",)
"""Variables that launchers set for the workers they start: Accelerate sets no rank where it starts only one."""
ENVIRONMENT = (
    "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "DS_SKIP_CUDA_CHECK",
    "HF_DATASETS_OFFLINE", "HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_OFFLINE",
)  # fmt: skip
"""Variables that say how a job was placed and tuned."""
EXITS = ("Exit",)
"""Exceptions that are a way to leave, as SystemExit is: click's and Typer's."""
FIELDS = ("model_fields", "__pydantic_fields__", "__attrs_attrs__")
"""Attributes of a class of pydantic or attrs, whose objects are their fields."""
MODEL_CONFIGURATIONS = ("PretrainedConfig", "PreTrainedConfig")
"""Classes of configurations that belong to a model and are shown with it: Transformers'."""
RECTIFIERS = ("ReLUSquaredActivation",)
"""Activations that are zero when off, and never negative: Transformers'."""
WRAPPERS = ("_forward_module",)
"""Parts that a wrapper adds to a parameter's path: Lightning Fabric's."""
BATCHES_OF_GRAPHS = "num_graphs"
"""The attribute of PyG's batches that has their size."""
TENSOR_DICTS = {"TensorDict": "_tensordict"}
"""Class of a batch -> the attribute with the dict that it wraps."""
COUNTLESS_OPERATORS = r"(flash_attn|xformers)\w*::.*|torch_sparse::spmm\w*|pyg::\w+_matmul\w*"
"""Operators of which a recording does not show how much they compute."""


def unresolved(config: Any) -> Any:
    """A configuration of OmegaConf as it is written, anything else as it is. `???` and a variable that is not set would
    raise, and resolving runs code and reads secrets from elsewhere."""
    if type(config).__module__.startswith("omegaconf."):
        return sys.modules["omegaconf"].OmegaConf.to_container(config, resolve=False)
    return config


def precision() -> str:
    """The dtype of Accelerate's mixed precision, which it turns on within the model's forward. "" where it is not used."""
    shared = getattr(getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None), "_shared_state", {})
    return {"bf16": "bfloat16", "fp16": "float16"}.get(str(shared.get("_mixed_precision", "")), "")
