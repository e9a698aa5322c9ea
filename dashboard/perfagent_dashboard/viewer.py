"""What the viewer of a page may do, as GET /api/v1/session tells it: a button that would be refused is not shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["may_in"]


def may_in(session: Mapping[str, Any], scope: str, project: str = "") -> bool:
    """scope: read, ingest, operate or admin. project: empty for all projects, and for the server itself."""
    return scope in session["everywhere"] or scope in session["projects"].get(project, ())
