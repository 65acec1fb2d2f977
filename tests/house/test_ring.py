"""The ring that READING.md lists: its size, that it is there, and what it imports of the wings."""

from __future__ import annotations

import re

from helpers_code_facts import PACKAGES, ROOT, module_of, needs

MOST = 12_000
"""Lines that somebody reads in an evening."""
RING = re.findall(r"^\d+\. `([\w/]+\.py)`", (ROOT / "READING.md").read_text(), re.MULTILINE)
WINGS = (
    "actors.detokenizer.linear_regex", "actors.detokenizer.stop_regex",
    "actors.cluster", "actors.gateway", "actors.ledger", "actors.recorder", "actors.structured",
    "actors.launcher.crash_reports", "actors.launcher.engine",
    "actors.runtime.http", "actors.runtime.security", "actors.runtime.step_events",
    "actors.scheduler.draft_policy", "actors.scheduler.prefill_pacing",
    "actors.scheduler.queue_policies",
    "actors.scheduler.recovery", "actors.scheduler.request_metrics",
    "actors.media", "actors.watchdog.hangs", "actors.watchdog.metrics",
    "actors.watchdog.probe_routes", "actors.watchdog.probe_server",
    "gpu.graphs", "gpu.plan", "gpu.step.speculation", "gpu.worker.compilations",
    "gpu.worker.tracing", "gpu.worker.warmup", "kernels.triton", "tools",
)
JOINTS: dict[str, set[str]] = {
    "actors.detokenizer.output_sequence": {"actors.detokenizer.stop_regex"},
    "actors.runtime.main": {"actors.ledger.committer", "actors.runtime.security",
                            "actors.runtime.security.curve_gate",
                            "actors.runtime.security.private_paths",
                            "actors.runtime.step_events"},
    "actors.tokenizer.text_model": {"actors.structured.grammar_validator",
                                    "actors.media.prompt_media"},
    "gpu.worker.compute": {"actors.runtime.step_events", "gpu.worker.compilations",
                           "gpu.worker.tracing"},
}
"""Where the ring knows a wing all the same: the sequence whose stop expressions are searched for,
the one place that puts wings around a core, the tokenizer that refuses a grammar before it is
queued and counts the tokens of images, and the thread that a trace is of."""


def test_it_is_read_in_an_evening() -> None:
    assert len(RING) == len(set(RING)) >= 45
    assert sum(len((ROOT / name).read_text().splitlines()) for name in RING) <= MOST


def test_the_ring_imports_no_wing_but_at_the_joints() -> None:
    graph = needs(*PACKAGES)
    found = {}
    for name in RING:
        module = module_of(ROOT / name)
        wings = {other.removeprefix("actorium.") for other in graph[module]
                 if other.removeprefix("actorium.").startswith(WINGS)}
        if wings:
            found[module.removeprefix("actorium.")] = wings
    assert found == JOINTS
