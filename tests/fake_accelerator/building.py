"""Compiles the fake accelerator, once a machine: a minute on one core. As a program: `building.py FOLDER` compiles into it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["NAME", "Missing", "library"]

NAME = "fakegpu"
_HERE = Path(__file__).parent
_SOURCES = sorted(_HERE.glob("*.cpp"))
_TORCH = (2, 13)
"""The first version with the interfaces that the sources fill in."""


class Missing(Exception):  # noqa: N818 - its text is why a test is skipped
    """This machine cannot have the fake accelerator."""


def library() -> Path:
    """The compiled library. Processes that ask at once wait for the first of them.

    Raises Missing where there is no compiler, or an older torch; subprocess.CalledProcessError where it does not compile.
    """
    version = importlib.metadata.version("torch")
    if tuple(int(part) for part in version.split(".")[:2]) < _TORCH:
        raise Missing(f"the fake accelerator needs torch {'.'.join(map(str, _TORCH))} or later, not {version}")
    folder = Path(tempfile.gettempdir()) / f"perfagent-{NAME}-{os.getuid()}"  # HOME differs from test to test
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / _fingerprint(version) / f"{NAME}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which the kernel takes back from a process that is killed
        if not built.exists():
            for program in (os.environ.get("CXX", "g++"), "ninja"):
                if shutil.which(program, path=_path()) is None:
                    raise Missing(f"the fake accelerator is compiled: install {program}")
            _build(built.parent)
    return built


def _fingerprint(version: str) -> str:
    digest = hashlib.sha256(f"{version} {sys.version}".encode())
    for source in [*_SOURCES, _HERE / "device.h"]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _path() -> str:
    """Where programs are; those that came with Python packages, too."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _build(folder: Path) -> None:
    """In a process of its own, since what compiles also loads; and elsewhere first, as it may be killed."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        command = [sys.executable, str(Path(__file__)), made]
        subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"MAX_JOBS": "2", "PATH": _path()})
        folder.mkdir(exist_ok=True)
        (Path(made) / f"{NAME}.so").rename(folder / f"{NAME}.so")


if __name__ == "__main__":
    from torch.utils.cpp_extension import load

    load(
        name=NAME,
        sources=[str(source) for source in _SOURCES],
        extra_cflags=["-O1", "-g0", "-Wno-unused-parameter"],
        build_directory=sys.argv[1],
        is_python_module=False,
    )
