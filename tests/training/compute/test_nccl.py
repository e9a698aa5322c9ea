"""NCCL's environment: presets by today's names, and what replaced each old one."""

from __future__ import annotations

import os

import pytest

from perfagent_loop.compute.nccl import check_nccl_environment, nccl_preset


@pytest.mark.parametrize("name", ["default", "ethernet", "infiniband", "roce", "no-p2p", "debug"])
def test_a_preset_sets_only_names_that_are_read_today(name):
    interface = "eth0" if name in ("ethernet", "infiniband", "roce") else None
    preset = nccl_preset(name, interface=interface, apply=False)
    # of NVIDIA's and PyTorch's documentation of these variables
    assert set(preset) <= {
        "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_IB_ROCE_VERSION_NUM",
        "NCCL_P2P_DISABLE", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE",
        "TORCH_DISTRIBUTED_DEBUG",
    }  # fmt: skip
    assert check_nccl_environment(dict(preset)) == []
    assert ("=eth0" in preset.values()) == (interface is not None)


def test_a_preset_goes_into_the_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", {"NCCL_IB_TIMEOUT": "25"})
    preset = nccl_preset("infiniband", NCCL_IB_TC=106)
    assert os.environ == preset
    assert (preset["NCCL_IB_TIMEOUT"], preset["NCCL_NET"], preset["NCCL_IB_TC"]) == ("25", "IB", "106")
    nccl_preset("ethernet", apply=False)
    assert "NCCL_IB_DISABLE" not in os.environ


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}),
        ({"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"}, {"TORCH_NCCL_BLOCKING_WAIT": "0"}),
        ({"NCCL_IB_DISABLE": "0"}, {}),
        ({"NCCL_IB_GDR_LEVEL": "3"}, {"NCCL_NET_GDR_LEVEL": "PHB"}),
        ({"NCCL_NET_GDR_LEVEL": "5"}, {"NCCL_NET_GDR_LEVEL": "SYS"}),
        ({"NCCL_IB_CUDA_SUPPORT": "1"}, {"NCCL_NET_GDR_LEVEL": "SYS"}),
        ({"NCCL_CHECK_POINTERS": "1"}, {"NCCL_CHECK_MODE": "DEBUG_LOCAL"}),
        ({"NCCL_P2P_LEVEL": "2"}, {"NCCL_P2P_LEVEL": "PXB"}),
        ({"NCCL_BUFFSIZE": "4194304"}, {}),
        ({"NCCL_BUFFSIZE": "2097152"}, {}),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}, {"TORCH_FR_BUFFER_SIZE": "2000"}),
        ({"NCCL_BUFFSIZE": "8388608", "NCCL_IB_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL"}, None),
    ],
)
def test_old_names_and_what_replaced_them(old, today):
    environment = old | {"PATH": "/bin"}
    corrections = check_nccl_environment(environment, correct=True)
    assert environment == (old if today is None else today) | {"PATH": "/bin"}
    assert all(correction.why for correction in corrections)
    assert bool(corrections) == (today is not None)
    assert check_nccl_environment(environment) == []
    assert nccl_preset(apply=False, **old) == nccl_preset(apply=False) | (old if today is None else today)
