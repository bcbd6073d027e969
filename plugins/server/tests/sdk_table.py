"""Which methods of the official SDK the gateway supports: the table of the README, made by introspection."""

import inspect
from typing import Any

import pytest

tinker: Any = pytest.importorskip("tinker")

CLASSES = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")
LOCAL = "in the client"
REFUSED = "refused"
NOT_SUPPORTED: dict[str, str] = {
    "ServiceClient.copy_weights": REFUSED,
    "RestClient.assign_session_project": f"{REFUSED}: there are no projects",
    "RestClient.copy_weights": REFUSED,
    "RestClient.export_session_trace": f"{REFUSED}: there are no traces",
    "RestClient.get_audit_log": f"{REFUSED}: there are no accounts",
    "RestClient.get_billing_usage": f"{REFUSED}: there are no accounts",
    "RestClient.get_current_checkpoint_storage_usage": f"{REFUSED}: there are no accounts",
    "RestClient.publish_checkpoint_from_tinker_path": f"{REFUSED}: there are no other accounts",
    "RestClient.search_sessions": f"{REFUSED}: `list_sessions` lists them",
    "RestClient.unpublish_checkpoint_from_tinker_path": f"{REFUSED}: there are no other accounts",
    "RestClient.whoami": f"{LOCAL}, which refuses it: there are no accounts",
    "SamplingClient.from_sampler_handle": f"{LOCAL}",
    "SamplingClient.get_sampler_handle": f"{LOCAL}",
    "SamplingClient.on_queue_state_change": f"{LOCAL}",
    **{f"{name}.get_telemetry": f"{LOCAL}: the server drops it" for name in CLASSES},
    "ServiceClient.get_console_url": f"{LOCAL}: there is no such page",
    "TrainingClient.get_console_url": f"{LOCAL}: there is no such page",
}
"""What is not simply supported, and why."""


def methods() -> list[str]:
    """`Class.method` for every public method of the SDK. The old `*_async` forms call those without it."""
    found: list[str] = []
    for name in CLASSES:
        members = inspect.getmembers(getattr(tinker, name), callable)
        public = [method for method, _ in members if not method.startswith("_") and not method.endswith("_async")]
        found += [f"{name}.{method}" for method in public]
    return found


def table() -> str:
    """The table in Markdown."""
    rows = [f"| `{method}` | {NOT_SUPPORTED.get(method, 'supported')} |" for method in methods()]
    return "\n".join(["| method | this server |", "|---|---|", *rows])
