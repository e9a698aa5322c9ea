"""One virtual environment per tracker, so that none changes another's versions; torch is stored once and shared.

torch and what it needs are linked into a folder that each environment sees through a `.pth` file, after its own
packages:
a tracker finds torch there and nothing else of ours.
"""

from __future__ import annotations

import compileall
import re
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

__all__ = ["REQUIREMENTS", "build", "python"]

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = {
    "perfagent": ["httpx", "msgspec", "nvidia-ml-py", "psutil"],
    "trackio": ["trackio==0.43.0", "psutil"],
    "tensorboard": ["tensorboard==2.21.0", "psutil"],
    "wandb": ["wandb==0.31.0", "psutil"],
}


def python(folder: Path, name: str) -> Path:
    return folder / name / "bin" / "python"


def build(folder: Path, names: list[str]) -> None:
    """Makes the environments that are not there yet. Raises CalledProcessError when an installation fails."""
    compileall.compile_dir(ROOT / "agent", quiet=2)  # as pip does with what it installs
    shared = folder / "shared"
    if not shared.exists():
        shared.mkdir(parents=True)
        _link_torch(shared)
    for name in names:
        ready = folder / name / "ready"
        if ready.exists():
            continue
        print(f"  environment of {name}: {', '.join(REQUIREMENTS[name])}", file=sys.stderr, flush=True)
        venv.create(folder / name, with_pip=True, clear=True)
        constraints = ["-c", str(ROOT / "constraints.txt")] if name == "perfagent" else []
        subprocess.run(
            [
                python(folder, name),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                *constraints,
                *REQUIREMENTS[name],
            ],
            check=True,
        )
        site = next((folder / name / "lib").glob("python*/site-packages"))
        (site / "zz_shared.pth").write_text(f"{shared}\n" + (f"{ROOT / 'agent'}\n" if name == "perfagent" else ""))
        ready.touch()


def _link_torch(shared: Path) -> None:
    """Links torch, its requirements (of the running environment) and their metadata."""
    todo, seen = ["torch", "numpy"], set()
    while todo:
        name = _canonical(todo.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # an optional or platform-specific requirement that is not installed here
        requires = [line for line in distribution.requires or () if "extra ==" not in line]
        todo += [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in requires]
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            source, link = Path(str(distribution.locate_file(top))), shared / top
            if source.exists() and not link.exists():
                link.symlink_to(source)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    build(Path(sys.argv[1]), list(REQUIREMENTS))
