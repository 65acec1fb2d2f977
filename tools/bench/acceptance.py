"""What speculative decoding did during a run, from counters read before and after it. Pure.

Three sources: the scheduler's gauges of an engine that we reach as a client, and over HTTP the
`/metrics` of vLLM (and of this engine), which counts by position, or of SGLang, which does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')
_ACCEPTED = "spec_decode_num_accepted_tokens_pos_"
_VLLM = {f"vllm:spec_decode_num_{name}_total": f"spec_decode_num_{name}"
         for name in ("drafts", "draft_tokens", "accepted_tokens")}
_SGLANG = ("sglang:spec_verify_calls_total", "sglang:generation_tokens_total",
           "sglang:spec_accept_rate", "sglang:spec_accept_length")


def counters(text: str) -> dict[str, float]:
    """The counters of Prometheus' text, by the names of this engine's gauges; of SGLang's by their
    own. Those of several engines behind one port are added up."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, value = sample.groups()
        if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
            position = _POSITION.search(labels or "")
            key = f"{_ACCEPTED}{position[1]}" if position else ""
        else:
            key = _VLLM.get(name, name if name in _SGLANG else "")
        if key:
            found[key] = found.get(key, 0.0) + _number(value)
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def acceptance(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Under vLLM's names (the rate in percent, the positions' as shares); {} if nothing was
    drafted, or nobody tells."""

    def more(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    drafts = more("spec_decode_num_drafts")
    tokens, accepted = (more(f"spec_decode_num_{name}") for name in ("draft_tokens",
                                                                     "accepted_tokens"))
    if drafts <= 0:
        return _of_sglang(more, after)
    places = sorted(int(name.removeprefix(_ACCEPTED)) for name in after
                    if name.startswith(_ACCEPTED))
    return {
        "spec_decode_acceptance_rate": 100 * accepted / max(tokens, 1.0),
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts), "spec_decode_draft_tokens": int(tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [
            more(f"{_ACCEPTED}{place}") / drafts for place in places]}


def _of_sglang(more: Any, after: Mapping[str, float]) -> dict[str, Any]:
    """Tokens for each time that drafts were verified; the rate is the server's own latest one."""
    calls = more("sglang:spec_verify_calls_total")
    if calls > 0:
        found = {"spec_decode_acceptance_length": more("sglang:generation_tokens_total") / calls,
                 "spec_decode_num_drafts": int(calls)}
    elif after.get("sglang:spec_accept_length"):
        found = {"spec_decode_acceptance_length": after["sglang:spec_accept_length"]}
    else:
        return {}
    if after.get("sglang:spec_accept_rate"):
        found["spec_decode_acceptance_rate"] = 100 * after["sglang:spec_accept_rate"]
    return found
