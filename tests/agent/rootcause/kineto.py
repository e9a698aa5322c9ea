"""Events of a profile as Kineto gives them, for what only a GPU records."""

from __future__ import annotations

from dataclasses import dataclass

GPU = "DeviceType.CUDA"


@dataclass
class Fake:
    """One event of Kineto. link: correlation of the operator that launched a kernel."""

    title: str
    start: int
    end: int
    device: str = "DeviceType.CPU"
    correlation: int = 0
    link: int = 0
    thread: int = 1

    def name(self) -> str:
        return self.title

    def start_ns(self) -> int:
        return self.start

    def end_ns(self) -> int:
        return self.end

    def start_thread_id(self) -> int:
        return self.thread

    def device_type(self) -> str:
        return self.device

    def correlation_id(self) -> int:
        return self.correlation

    def linked_correlation_id(self) -> int:
        return self.link

    def is_async(self) -> bool:
        return False

    def is_user_annotation(self) -> bool:
        return self.title.startswith(("ProfilerStep#", "enumerate(DataLoader)#"))

    def is_python_function(self) -> bool:
        return ".py(" in self.title
