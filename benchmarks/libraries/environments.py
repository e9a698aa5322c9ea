"""Virtual environments that see the project's own packages and hold one family of libraries each."""

from __future__ import annotations

import re
import subprocess
import sysconfig
import venv
from pathlib import Path

from libraries.catalogue import Library

__all__ = ["NotInstalledError", "interpreter", "version"]

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("agent", "client", "dashboard", "server")


class NotInstalledError(Exception):
    """pip could not install a library, for the reason in the message."""


def interpreter(folder: Path, library: Library) -> Path:
    """The Python of the library's family below `folder`, with the library in it. Raises NotInstalledError."""
    place = folder / library.family
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True, symlinks=True)
    _see_the_project(python)  # each time: the folder may be kept longer than the project stays where it is
    if version(python, library) is None:
        pins = place / "constraints.txt"
        pins.write_text("".join(_pins(library)), "utf-8")
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-c", str(pins)]
        ended = subprocess.run([*pip, *library.requirements], capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            errors = [
                line for line in ended.stderr.splitlines() if line.startswith("ERROR:")
            ] or ended.stderr.splitlines()[-1:]
            raise NotInstalledError(
                errors[-1].removeprefix("ERROR:").strip() if errors else f"pip ended with {ended.returncode}"
            )
    return python


def version(python: Path, library: Library) -> str | None:
    """The installed version, without its local part; None where it is not installed."""
    question = f"import importlib.metadata as m; print(m.version({library.package!r}))"
    ended = subprocess.run([str(python), "-c", question], capture_output=True, text=True, check=False)
    return ended.stdout.strip().split("+")[0] if ended.returncode == 0 else None


def _pins(library: Library) -> list[str]:
    """The project's, so that nothing replaces its torch; but of what the library itself wants another version."""
    wanted = {re.split(r"[<>=!~]", requirement)[0] for requirement in library.requirements}
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines(keepends=True)
    return [line for line in lines if line.split("==")[0] not in wanted]


def _see_the_project(python: Path) -> None:
    """A .pth file: torch, transformers and the like are those of the environment that runs this, and are not installed
    again."""
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    theirs = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    ours = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    seen = [*(str(ROOT / source) for source in SOURCES), *ours]
    (theirs / "project.pth").write_text("".join(f"{path}\n" for path in seen), "utf-8")
