"""What goes when it is old, or when there is too much of it: by project and by resolution, small jobs at a time."""

from perfagent_server.store.retention.policy import (
    ALL_PROJECTS,
    DAY_S,
    FOREVER,
    KEEP_TAG,
    PROJECT_FIELDS,
    Policies,
    RetentionPolicy,
    drop_policy,
    set_policy,
    stored_policies,
)
from perfagent_server.store.retention.preview import Preview
from perfagent_server.store.retention.worker import Retention

__all__ = [
    "ALL_PROJECTS",
    "DAY_S",
    "FOREVER",
    "KEEP_TAG",
    "PROJECT_FIELDS",
    "Policies",
    "Preview",
    "Retention",
    "RetentionPolicy",
    "drop_policy",
    "set_policy",
    "stored_policies",
]
