"""Names the settings that no longer exist. A new use of such a setting is an error, and stored revisions lose it."""

from __future__ import annotations

from typing import Any

REMOVED = frozenset({
    "alerts.min_calls", "alerts.pause_s", "alerts.window_s", "budget.warn_at", "cancel_grace_s", "cors.max_age_s",
    "max_jobs_bytes", "max_queue_bytes", "resources.pids", "response_cache.max_answer_bytes", "scale.price_waiting_s",
    "scale.standby", "source.backoff_s", "source.session_s", "source.visibility_s",
    # The gateway's settings.
    "body_timeout_s", "header_timeout_s", "keep_compiled_bytes", "keep_prefixes_bytes", "keep_revisions_bytes",
    "learn_upstreams", "log_max_bytes", "min_free_bytes", "price_disk_gb_hour",
})  # fmt: skip
"""The dotted keys. Constants have replaced these settings, except `scale.price_waiting_s`: the gateway's `price_waiting_s` has replaced it."""


def without_removed(stored: Any, key: str = "") -> Any:
    """Return a table of settings without the settings that no longer exist. `key` is the table's own key."""
    if isinstance(stored, list):
        return [without_removed(table, key) for table in stored]
    if not isinstance(stored, dict):
        return stored
    dotted = {name: f"{key}.{name}" if key else name for name in stored}
    return {
        name: without_removed(value, dotted[name])
        for name, value in stored.items()
        if dotted[name] not in REMOVED
    }
