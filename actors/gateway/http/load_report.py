"""The engine's load in the head of an answer, as ORCA (Open Request Cost Aggregation) has it and
vLLM sends it: Envoy and gateways made of it weigh endpoints by that."""

from __future__ import annotations

import msgspec

from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.engine_call import EngineCall
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.health import cache_usage
from actorium.actors.runtime.roles import SCHEDULER

ASKED, REPORT = b"endpoint-load-metrics-format", b"endpoint-load-metrics"
"""The header of a request that asks, with TEXT or JSON; that of the answer."""
SECONDS = 1.0
"""How long an answer waits for the report."""


async def load_header(call: EngineCall, form: bytes) -> list[tuple[bytes, bytes]]:
    """Returns the header in a form that was asked for; none where the form is unknown, the engine
    does not answer at once, or, of several, none is chosen yet."""
    kind = form.strip().upper()
    if kind not in (b"TEXT", b"JSON"):
        return []
    try:
        status = await call.engine.client.status(SECONDS)
    except (ActoriumError, HttpError):
        return []
    gauges = next((actor.gauges for actor in status.actors if actor.role == SCHEDULER), {})
    named = {"kv_cache_usage_perc": cache_usage(gauges),
             "num_requests_waiting": float(gauges.get("waiting", 0.0)),
             "num_requests_running": float(gauges.get("running", 0.0))}
    if kind == b"JSON":
        report = msgspec.json.encode({"named_metrics": named})
    else:
        report = ", ".join(f"named_metrics.{name}={value}" for name, value in named.items()
                           ).encode()
    return [(REPORT, kind + b" " + report)]
