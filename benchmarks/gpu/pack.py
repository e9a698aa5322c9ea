"""Collects what scripts/gpu_check needs on a machine without a network: wheels, the checks, and itself.

    pack.py DIR [--python-version 3.12] [--platform NAME ...] [--torch VERSION | --no-torch]

The wheels are for Linux on x86-64 and the Python named (default: the one that runs this). With torch they are some
gigabytes; leave it out for a machine that has a torch of its own, which is used in any case.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17, 12, 5)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--python-version", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    parser.add_argument("--platform", nargs="+", default=PLATFORMS)
    torch = parser.add_mutually_exclusive_group()
    torch.add_argument("--torch", metavar="VERSION", help="such as 2.13.0; default: that of constraints.txt")
    torch.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for old in [*wheels.glob("perfagent-*.whl")]:
        old.unlink()
    pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT))
    ours = next(wheels.glob("perfagent-*.whl"))
    target = ["--only-binary=:all:", "--python-version", options.python_version, "--implementation", "cp"]
    target += [part for name in options.platform for part in ("--platform", name)]
    pip("download", "--dest", str(wheels), *target, f"{ours}[server]")
    if not options.no_torch:
        wanted = f"torch=={options.torch}" if options.torch else torch_requirement()
        pip("download", "--dest", str(wheels / "torch"), *target, wanted)
    # what an older one was unpacked to: its wheels have the same names
    shutil.rmtree(folder / "site", ignore_errors=True)
    code = folder / "check"
    shutil.rmtree(code, ignore_errors=True)
    code.mkdir()
    for file in sorted(HERE.glob("*.py")):
        if file.name != Path(__file__).name:
            shutil.copy(file, code)
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    (code / "VERSION").write_text(commit.stdout, "utf-8")
    shutil.copy(ROOT / "scripts" / "gpu_check", folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    sys.stdout.write(f"{folder}: {size / 2**20:.0f} MiB. There: sh {folder.name}/gpu_check\n")


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def torch_requirement() -> str:
    """As constraints.txt says."""
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return next(pin for pin in pins if pin.startswith("torch=="))


if __name__ == "__main__":
    main()
