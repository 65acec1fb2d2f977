"""llama-server's routes beside its completions: properties, slots, the chat template, and those of
features that this engine does not have.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium import __version__
from actorium.actors.gateway.api.chat_completions import ChatTurn
from actorium.actors.gateway.api.llama_body import LlamaCompletionBody, generation_settings
from actorium.actors.gateway.api.tokens import prompt_ids, special_around
from actorium.actors.gateway.engine_call import engine_of
from actorium.actors.gateway.http.http_errors import SERVER, HttpError
from actorium.actors.gateway.http.replies import JsonReply
from actorium.actors.gateway.served_engine import ServedEngine
from actorium.actors.gateway.served_model import ServedModel
from actorium.actors.params import SamplingParams

FAIL_ON_NO_SLOT = "fail_on_no_slot"


async def props(http: HttpRequest) -> Response:
    """Handles `/props`. Raises `HttpError` 501 on a POST, which would change them."""
    if http.method == "POST":
        raise _missing("properties cannot be changed while the engine runs")
    engine = engine_of(http)
    model = await engine.served_model()
    info = model.info
    known = info.get("has_tokenizer", True)
    bos, _ = await special_around(engine.client) if known else ([], [])
    eos = info.get("eos_ids") or []
    return JsonReply({
        "default_generation_settings": {
            "n_ctx": model.max_model_len, "params": _default_settings(model)},
        "total_slots": _slots(engine), "model_alias": model.name,
        "model_path": info["model_path"], "chat_template": info.get("chat_template") or "",
        "modalities": dict.fromkeys(("vision", "video"), bool(info.get("media")))
        | {"audio": False},
        "bos_token": await engine.client.detokenize(bos) if bos else "",
        "eos_token": await engine.client.detokenize(eos[:1]) if eos and known else "",
        "endpoint_slots": True, "endpoint_props": False, "endpoint_metrics": True,
        "build_info": f"actorium-{__version__}", "is_sleeping": await engine.client.is_sleeping()})


async def slots(http: HttpRequest) -> Response:
    """Handles `/slots`: one entry for each sequence that may run at once. Sequences are not bound
    to slots, so the first entries stand for those that run. Raises `HttpError` 503 where none is
    free and the query asks for that."""
    engine = engine_of(http)
    model = await engine.served_model()
    status = await engine.client.status()
    running = next((int(actor.gauges.get("running", 0)) for actor in status.actors
                    if actor.role == "scheduler"), 0)
    total = _slots(engine)
    if http.query_params.get(FAIL_ON_NO_SLOT) and running >= total:
        raise HttpError(503, "no slot is free", None, SERVER, "unavailable")
    drafts = bool(model.info.get("speculation"))
    return JsonReply([{"id": i, "n_ctx": model.max_model_len, "speculative": drafts,
                       "is_processing": i < running} for i in range(total)])


async def apply_template(http: HttpRequest) -> Response:
    """Handles `/apply-template`."""
    turn = await ChatTurn.read(http)
    [request] = await turn.requests()
    ids = await prompt_ids(turn.engine.client, request)
    return JsonReply({"prompt": await turn.engine.client.detokenize(ids)})


async def embeddings(http: HttpRequest) -> Response:
    """Handles `/v1/embeddings` and its aliases. Raises `HttpError` 501."""
    raise _missing("embeddings are not supported: models generate text here")


def _missing(why: str) -> HttpError:
    return HttpError(501, why, None, SERVER, "not_supported")


def _slots(engine: ServedEngine) -> int:
    return engine.config.scheduler.max_num_seqs


def _default_settings(model: ServedModel) -> dict[str, Any]:
    return generation_settings(LlamaCompletionBody(prompt=""), SamplingParams(),
                               model.info.get("generation_defaults") or {})
