"""What a script logs by other means than `perfagent.log` appears in its run by itself.

libraries.py says which call of which library carries which scalars; what all of them have in common is in capture.py. A
library is watched only in a process that imports it by itself, before `attach` or after. Our own files for TensorBoard
(perfagent.mirror) are written without its SummaryWriter, so that they are not met here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from perfagent.boundary.dynamo import keep_out_of_frames
from perfagent.integrations import functions

if TYPE_CHECKING:
    from perfagent.integrations.functions import Patch, WhenImported

__all__ = ["install"]


def install(patch: Patch, when_imported: WhenImported) -> None:
    """Each now if its library is there, else when the script's own import of it is complete."""
    from perfagent.integrations.loggers.libraries import LOGGERS, patch_mlflow

    functions.install(patch, when_imported, LOGGERS, then=_out_of_frames)

    def mlflow() -> None:
        patch_mlflow(patch)
        _out_of_frames()

    when_imported("mlflow", mlflow)


def _out_of_frames() -> None:
    """For torch.compile, as the hooks in torch do; a process without torch has no need of it."""
    if hasattr(sys.modules.get("torch"), "compile"):
        keep_out_of_frames()
