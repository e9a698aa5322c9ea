from __future__ import annotations

import pytest

from perfagent.context.environment import environment


@pytest.mark.fault
def test_x10_only_what_is_on_the_list_is_told() -> None:
    told = {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "4"}
    others = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SLURM_JWT", "HOME", "PATH")
    assert environment(told | dict.fromkeys(others, "x")) == told
    assert environment({"NCCL_X": "y" * 5000}) == {"NCCL_X": "y" * 1000}
