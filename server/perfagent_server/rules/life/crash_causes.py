"""What exceptions that many people meet are about, by their text: each has a remedy of its own (texts, `process_crash`)."""

from __future__ import annotations

import re

__all__ = ["cause_by_text"]

_CAUSES = tuple(
    (re.compile(pattern), cause)
    for pattern, cause in (
        (r"Too many open files|received 0 items of ancdata|unable to open shared memory object", "open files"),
        (r"Expected to have finished reduction in the prior iteration|marked as ready (twice|only once)", "unused parameters"),
        (r"before the\s+current process has finished its bootstrapping phase|has no .if __name__", "no main guard"),
        (r"unexpected pos \d+ vs|iostream error|PytorchStreamWriter failed|File size limit", "write failed"),
        (r"No space left on device|Disk quota exceeded", "no space"),
        (r"DataLoader worker \(pid\S* .*(exited unexpectedly|killed by signal)", "worker died"),
        (r"DataLoader timed out", "worker hangs"),
        (r"[Cc]an't pickle|cannot pickle|Can't get local object|has no attribute .* on <module '__m(p_)?main__'", "pickle"),
        (r"device-side assert", "device assert"),
        (r"illegal memory access|CUBLAS_STATUS|CUDNN_STATUS|misaligned address", "CUDA error"),
        (r"Expected all tensors to be on the same device|Input type .* and weight type .* should be the same", "devices"),
        (r"No CUDA GPUs are available|Torch not compiled with CUDA|CUDA driver version is insufficient", "no CUDA"),
        (r"Error\(s\) in loading state_dict|Missing key\(s\) in state_dict|Unexpected key\(s\)", "state_dict"),
        (r"shapes cannot be multiplied|size mismatch|must match the size of|[Ss]izes of tensors must", "shapes"),
        (r"shape '.*' is invalid for input", "shapes"),
        (r"one of the variables needed for gradient computation has been modified", "in place"),
        (r"Trying to backward through the graph a second time", "graph twice"),
        (r"does not require grad and does not have a grad_fn", "no graph"),
        (r"[Aa]ddress already in use|EADDRINUSE", "port taken"),
        (r"^(\w+\.)*FileNotFoundError|No such file or directory", "no file"),
        (r"^(\w+\.)*(ModuleNotFoundError|ImportError)", "no module"),
        (r"^(\w+\.)*KeyError", "KeyError"),
        (r"^(\w+\.)*IndexError|index out of range in self", "IndexError"),
    )
)  # fmt: skip
"""The first that is found counts: what says more comes before the name of an exception."""


def cause_by_text(text: str) -> str:
    """A key of the remedies; "exception" where the text is none of these."""
    return next((cause for pattern, cause in _CAUSES if pattern.search(text)), "exception")
