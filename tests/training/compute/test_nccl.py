"""NCCL's environment: presets by today's names, and a sentence for each old one."""

from __future__ import annotations

import os

import pytest

import perfagent
from perfagent_loop.compute.nccl import check_nccl_environment, nccl_preset

READ_TODAY = {
    "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_IB_ROCE_VERSION_NUM", "NCCL_P2P_DISABLE",
    "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE", "TORCH_DISTRIBUTED_DEBUG",
}  # fmt: skip
"""Of NVIDIA's and PyTorch's documentation of these variables."""


@pytest.mark.parametrize("name", ["default", "ethernet", "infiniband", "roce", "no-p2p", "debug"])
def test_a_preset_sets_only_names_that_are_read_today(name):
    interface = "eth0" if name in ("ethernet", "infiniband", "roce") else None
    preset = nccl_preset(name, interface=interface, apply=False)
    assert set(preset) <= READ_TODAY
    assert check_nccl_environment(dict(preset)) == []
    interfaces = {value for name, value in preset.items() if name in ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")}
    assert interfaces <= {"=eth0"}


def test_a_preset_goes_into_the_environment(monkeypatch):
    for variable in READ_TODAY:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NCCL_IB_TIMEOUT", "25")
    preset = perfagent.nccl_preset("infiniband", NCCL_IB_TC=106)
    assert preset["NCCL_IB_TIMEOUT"] == os.environ["NCCL_IB_TIMEOUT"] == "25"
    assert os.environ["NCCL_NET"] == "IB"
    assert os.environ["NCCL_IB_TC"] == "106"
    for variable in preset:
        monkeypatch.delenv(variable)
    nccl_preset("ethernet", apply=False)
    assert "NCCL_IB_DISABLE" not in os.environ


def test_the_environment_is_put_right_in_place():
    environment = {
        "NCCL_BUFFSIZE": "2097152", "NCCL_NET_GDR_LEVEL": "5", "NCCL_P2P_LEVEL": "NVL", "PATH": "/bin",
        "NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_BLOCKING_WAIT": "0", "NCCL_BLOCKING_WAIT": "1",
    }  # fmt: skip
    assert check_nccl_environment(environment, correct=True)
    assert environment == {
        "PATH": "/bin",
        "NCCL_P2P_LEVEL": "NVL",
        "NCCL_NET_GDR_LEVEL": "SYS",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_BLOCKING_WAIT": "0",  # was there already, under its name of today
    }
    assert check_nccl_environment(environment) == []


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("NCCL_ASYNC_ERROR_HANDLING", "1", ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")),
        ("NCCL_IB_DISABLE", "0", None),
        ("NCCL_IB_GDR_LEVEL", "3", ("NCCL_NET_GDR_LEVEL", "PHB")),
        ("NCCL_IB_CUDA_SUPPORT", "1", ("NCCL_NET_GDR_LEVEL", "SYS")),
        ("NCCL_CHECK_POINTERS", "1", ("NCCL_CHECK_MODE", "DEBUG_LOCAL")),
        ("NCCL_P2P_LEVEL", "2", ("NCCL_P2P_LEVEL", "PXB")),
        ("NCCL_BUFFSIZE", "4194304", None),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000", ("TORCH_FR_BUFFER_SIZE", "2000")),
    ],
)
def test_old_names_and_what_replaced_them(name, value, instead):
    (correction,) = check_nccl_environment({name: value})
    assert correction.instead == instead
    assert correction.why
    assert nccl_preset(apply=False, **{name: value}) == nccl_preset(apply=False) | (dict([instead]) if instead else {})


def test_what_is_right_is_left_alone():
    for right in ({}, {"NCCL_BUFFSIZE": "8388608"}, {"NCCL_IB_DISABLE": "1"}, {"NCCL_NET_GDR_LEVEL": "PXB"}):
        assert check_nccl_environment(right) == []
