"""xid: the GPU's driver reported an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent.wire.limits import whole
from perfagent_server.rules.rule import Events, Life, Place, Question, Rule, Words
from perfagent_server.rules.window import Noted, Window

__all__ = ["Xid"]

_MILD = frozenset({13, 31, 43, 45, 63, 68, 92, 109})
"""Codes that are a warning, as in Meta's GPU cluster monitoring (gcm); all others are critical."""
_CAUSES = {
    **dict.fromkeys((13, 31, 43, 45, 68, 109), "the program"),
    **dict.fromkeys((48, 63, 64, 92, 94, 95), "memory of the GPU"),
    74: "NVLink",
    79: "fallen off the bus",
    **dict.fromkeys((119, 120), "GSP firmware"),
}


@dataclass(frozen=True, kw_only=True)
class Xid(Rule):
    """The driver reported an Xid error of a device that the run uses. Codes: NVIDIA's Xid catalogue.

    Not yet seen on a card: tested on recorded events.
    """

    id: ClassVar[str] = "xid"
    severities = ("warning", "critical")
    place = Place(Question.DOES_IT_MOVE, 2)
    reads = (Events("gpu"),)
    needs_card = True
    charts = ("gpu/xid",)
    life = Life(outlives_run=True)
    english = Words(
        name="GPU error (Xid)",
        meaning="The driver of a GPU that the run uses reported an error.",
        fires=(
            "When the driver reports an Xid error. The codes 13, 31, 43, 45, 63, 68, 92 and 109 are a warning, "
            "because most of them come from the program itself; all others are critical. The alert stays open until "
            "the run ends."
        ),
        remedies={
            "": (
                "Look the code up in NVIDIA's Xid catalogue, drain the node, and have the device checked before it "
                "is used again."
            ),
            "the program": (
                "The program caused it, most often by an access outside of an array: start it again with "
                "CUDA_LAUNCH_BLOCKING=1 and compute-sanitizer. If the same code runs elsewhere, have the device "
                "checked."
            ),
            "memory of the GPU": (
                "Memory of the GPU failed: drain the node, reset the device so that the bad row or page is replaced, "
                "and run the field diagnosis if it comes again."
            ),
            "NVLink": (
                "A link between GPUs failed: drain the node, reset its GPUs, and have cables, bridges and NVSwitch "
                "checked."
            ),
            "fallen off the bus": (
                "The device is gone: the job cannot go on. Drain the node, restart it, and have power, heat and the "
                "slot checked."
            ),
            "GSP firmware": (
                "The firmware of the device does not answer: reset it or restart the node, and update the driver."
            ),
        },
    )
    chinese = Words(
        name="GPU 错误（Xid）",
        meaning="运行所用 GPU 的驱动报告了错误。",
        fires=(
            "驱动报告 Xid 错误时触发。代码 13、31、43、45、63、68、92、109 为警告（多由程序自身引起），其余为严重；"
            "警报保持到运行结束。"
        ),
        remedies={
            "": "在 NVIDIA 的 Xid 目录中查询该代码，排空节点，并在再次使用前检查设备。",
            "the program": (
                "由程序引起，多半是数组越界访问：用 CUDA_LAUNCH_BLOCKING=1 和 compute-sanitizer 重新运行；"
                "若同样的代码在别处正常，请检查设备。"
            ),
            "memory of the GPU": "GPU 显存出现故障：排空节点，重置设备以替换坏行或坏页；若再次出现，请运行现场诊断。",
            "NVLink": "GPU 之间的链路故障：排空节点，重置 GPU，并检查线缆、桥接器和 NVSwitch。",
            "fallen off the bus": "设备已掉线，作业无法继续：排空并重启节点，检查供电、散热和插槽。",
            "GSP firmware": "设备固件没有响应：重置设备或重启节点，并更新驱动。",
        },
    )

    def judge(self, window: Window) -> Finding | None:
        errors = [(one, code) for one in window.events("gpu") if (code := _code_of(one)) is not None]
        if not errors:
            return None
        worst, code = next(((one, code) for one, code in errors if code not in _MILD), errors[0])
        meaning = str(worst.data.get("meaning") or "")[:200]
        device = whole(worst.data.get("index"))
        where = ("" if device is None else f" of GPU {device}") + (
            f" on rank {worst.rank}" if window.world_size > 1 else ""
        )
        more = f" {len(errors) - 1} more came with it." if len(errors) > 1 else ""
        return self.found(
            "warning" if code in _MILD else "critical",
            f"Xid {code}{where}",
            f"The driver reported Xid {code}{where}{': ' + meaning if meaning else ''}.{more}",
            cause=_CAUSES.get(code, ""),
            since_step=worst.step if worst.step is not None else window.step,
            ranks=sorted({one.rank for one, _ in errors}),
            evidence={
                "code": code, "meaning": meaning, "index": device, "uuid": worst.data.get("uuid"),
                "codes": sorted({one for _, one in errors}),
            },
        )  # fmt: skip


def _code_of(event: Noted) -> int | None:
    return whole(event.data.get("code")) if event.data.get("what") == "xid" else None
