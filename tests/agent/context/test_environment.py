from __future__ import annotations

import pytest

from perfagent.context.environment import environment


@pytest.mark.fault
def test_x10_only_what_is_on_the_list_is_told() -> None:
    told = {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "4"}
    secret = {
        "HF_TOKEN": "x",
        "WANDB_API_KEY": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "SLURM_JWT": "x",
        "HOME": "/root",
        "PATH": "/bin",
    }
    assert environment(told | secret) == told
    assert environment({"NCCL_X": "y" * 5000}) == {"NCCL_X": "y" * 1000}
