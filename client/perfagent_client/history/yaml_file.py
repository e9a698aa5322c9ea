"""Reads the YAML files in which trackers and trainers keep settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["yaml_mapping"]

_PYTHON = re.compile(rb"(?<=[ \n])!!?python/\S+")
"""Tags of Python objects: their plain parts are read, the objects are never made."""


def yaml_mapping(path: Path, left_out: list[str]) -> dict[str, Any]:
    """What the file maps; what is wrong with it goes to `left_out`."""
    try:
        import yaml

        read = yaml.safe_load(_PYTHON.sub(b"", path.read_bytes()))
    except ImportError:
        left_out.append(f"{path.name} needs PyYAML: pip install pyyaml")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        left_out.append(f"{path.name} is no YAML: {error}".partition("\n")[0])
    else:
        return read if isinstance(read, dict) else {}
    return {}
