"""The server's own counters, under the names that Prometheus' users expect: `_total` for what only grows, base units."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NAMES", "Named"]


class Named(NamedTuple):
    """name: without the `_total` that Prometheus' client adds to counters. kind: counter or gauge. label: one, as (name,
    value)."""

    name: str
    kind: str
    help: str
    label: tuple[str, str] | None = None


def _deliveries(outcome: str) -> Named:
    return Named("deliveries", "counter", "Tries to deliver a message of an alert, by outcome.", ("outcome", outcome))


def _samples(outcome: str) -> Named:
    return Named("ingest_samples", "counter", "Samples that agents sent, by what became of them.", ("outcome", outcome))


def _limited(limit: str) -> Named:
    return Named(
        "limited_requests", "counter", "Requests that were refused for their sender's limit.", ("limit", limit)
    )


def _expired(kind: str) -> Named:
    return Named("retention_deleted", "counter", "What retention has deleted, by kind.", ("kind", kind))


NAMES: dict[tuple[str, str], Named] = {
    ("ingest", "frames"): Named("ingest_frames", "counter", "Frames that were acknowledged."),
    ("ingest", "samples"): _samples("stored"),
    ("ingest", "duplicate_samples"): _samples("duplicate"),
    ("ingest", "rejected_samples"): _samples("rejected"),
    ("ingest", "rejected_events"): Named(
        "ingest_rejected_events", "counter", "Events of agents that were wrong and not stored."
    ),
    ("ingest", "refused_frames"): Named("ingest_refused_frames", "counter", "Frames that were refused as a whole."),
    ("ingest", "commits"): Named("ingest_commits", "counter", "Transactions with frames."),
    ("ingest", "waiting"): Named("ingest_waiting_frames", "gauge", "Frames that wait for the writer."),
    ("limits", "refused_by_requests"): _limited("requests"),
    ("limits", "refused_by_samples"): _limited("samples"),
    ("limits", "refused_by_bytes"): _limited("bytes"),
    ("limits", "refused_by_runs"): _limited("runs"),
    ("live", "pages"): Named("live_clients", "gauge", "Open live connections of pages."),
    ("live", "messages"): Named("live_messages", "counter", "Messages sent to pages."),
    ("live", "bytes"): Named("live_sent_bytes", "counter", "Bytes sent to pages."),
    ("live", "dropped_messages"): Named("live_dropped_messages", "counter", "Messages dropped for slow pages."),
    ("live", "lagged"): Named("live_lagged", "counter", "Times that a page was told to read again."),
    ("live", "inbox_overflows"): Named("live_inbox_overflows", "counter", "Times that the hub had no room."),
    ("live", "errors"): Named("live_errors", "counter", "Updates of pages that failed."),
    ("rules", "frames"): Named("rules_judged_frames", "counter", "Frames that the rules have judged."),
    ("rules", "rounds"): Named("rules_rounds", "counter", "Rounds of the rules."),
    ("rules", "alerts"): Named("alerts_fired", "counter", "Alerts that fired."),
    ("rules", "checkpoints"): Named("rules_checkpoints", "counter", "Checkpoints of the rules."),
    ("rules", "failures"): Named("rules_failures", "counter", "Rounds of the rules that failed."),
    ("rules", "runs_in_memory"): Named("rules_runs_in_memory", "gauge", "Runs whose windows are in memory."),
    ("rules", "passed_over"): Named("rules_passed_over", "counter", "Frames and judgments that were left out."),
    ("rules", "dropped_alerts"): Named("alerts_dropped", "counter", "Alerts of users for which there was no room."),
    ("rules", "stopped"): Named("rules_stopped", "gauge", "1 while the rules do not judge."),
    ("rules", "set_aside"): Named("rules_set_aside_runs", "gauge", "Runs that the rules cannot judge for now."),
    ("rules", "left_out_frames"): Named(
        "rules_left_out_frames",
        "counter",
        "Frames of such runs that the tail held no longer when they were judged again.",
    ),
    ("rules", "late_runs"): Named(
        "rules_late_runs", "gauge", "Runs whose frames take long to judge, and wait for those of all others."
    ),
    ("rules", "lag_frames"): Named("rules_lag_frames", "gauge", "Frames that wait for the rules."),
    ("rules", "lag_s"): Named("rules_lag_seconds", "gauge", "How long the oldest of them waits."),
    ("outbox", "tries"): Named("delivery_tries", "counter", "Tries to deliver a message."),
    ("outbox", "delivered"): _deliveries("delivered"),
    ("outbox", "failed_tries"): _deliveries("failed"),
    ("outbox", "given_up"): _deliveries("given_up"),
    ("outbox", "disabled_channels"): Named("channels_disabled", "counter", "Channels that were disabled for failing."),
    ("outbox", "failures"): Named("outbox_failures", "counter", "Rounds of the outbox that failed."),
    ("compactor", "rows"): Named("compacted_rows", "counter", "Rows of the tail that became blocks."),
    ("compactor", "samples"): Named("compacted_samples", "counter", "Samples in them."),
    ("compactor", "blocks"): Named("compacted_blocks", "counter", "Blocks that were written."),
    ("compactor", "merged_blocks"): Named("compacted_merged_blocks", "counter", "Blocks that were written again."),
    ("compactor", "bundles"): Named("compacted_bundles", "counter", "Bundles that were written."),
    ("compactor", "failures"): Named("compaction_failures", "counter", "Compactions that failed."),
    ("replica", "servers"): Named("replicas", "gauge", "Servers on this database that this one knows of, itself too."),
    ("replica", "leases"): Named("replica_leases", "gauge", "What this server holds of the work that is divided."),
    ("replica", "lost"): Named("replica_lost_leases", "counter", "Leases that another server has taken over."),
    ("replica", "hints"): Named("replica_hints", "counter", "Notifications of other servers."),
    ("replica", "changes"): Named("replica_changes", "counter", "Changes that other servers have made."),
    ("replica", "frames"): Named("replica_frames", "counter", "Frames that other servers have stored."),
    ("replica", "failures"): Named("replica_failures", "counter", "Times that other servers were not heard."),
    ("retention", "blocks_thinned"): Named("retention_thinned_blocks", "counter", "Blocks that lost their samples."),
    ("retention", "runs_rolled_up"): Named(
        "retention_rolled_up_runs", "counter", "Runs whose cells were put together."
    ),
    ("retention", "runs_deleted"): _expired("runs"),
    ("retention", "events_deleted"): _expired("events"),
    ("retention", "profile_parts_deleted"): _expired("profile_parts"),
    ("retention", "profiles_deleted"): _expired("profiles"),
    ("retention", "media_deleted"): _expired("media"),
    ("retention", "alerts_deleted"): _expired("alerts"),
    ("retention", "notices_deleted"): _expired("notices"),
    ("retention", "audit_rows_deleted"): _expired("audit_rows"),
    ("retention", "pages_returned"): Named("retention_returned_pages", "counter", "Pages given back to the disk."),
    ("retention", "refused"): Named("retention_refused", "counter", "Times that nothing was deleted for a doubt."),
    ("retention", "budget_steps"): Named("retention_budget_steps", "counter", "Steps taken for a size budget."),
    ("retention", "over_budget_bytes"): Named(
        "retention_over_budget_bytes", "gauge", "What nothing could be found for."
    ),
    ("commands", "issued"): Named("commands_issued", "counter", "Commands to runs."),
    ("commands", "handed"): Named("commands_handed", "counter", "Commands that agents have taken."),
    ("commands", "answered"): Named("commands_answered", "counter", "Commands that agents have answered."),
    ("rule_profiles", "asked"): Named("rule_profiles_asked", "counter", "Profiles that alerts asked for."),
    ("rule_profiles", "held_back"): Named("rule_profiles_held_back", "counter", "Profiles that were too many."),
    ("database", "commits"): Named("database_commits", "counter", "Commits of the writer."),
    ("database", "jobs"): Named("database_jobs", "counter", "Jobs of the writer."),
    ("database", "waiting"): Named("database_waiting_jobs", "gauge", "Jobs that wait for the writer."),
    ("database", "full"): Named("database_full", "gauge", "1 while the disk is full."),
    ("access", "failures"): Named("access_failures", "counter", "Wrong keys and tokens."),
    ("server", "uptime_s"): Named("uptime_seconds", "gauge", "Since the server started."),
}
"""(part, counter) of Services.counters() -> what it is called here, after `perfagent_`."""
