"""The routes of one gateway process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from starlette.routing import Route, Router
from starlette.types import ASGIApp

from actorium.actors.gateway.api import (
    adapter_routes,
    anthropic_messages,
    batches,
    embeddings,
    engine_routes,
    files,
    inference,
    llama_server,
    model_routes,
    ollama_models,
    pooling,
    responses,
    scoring,
    sglang,
    sleep_routes,
    stored_responses,
    tokens,
    weights_routes,
)
from actorium.actors.gateway.api.anthropic_messages import MessagesTurn
from actorium.actors.gateway.api.chat_completions import ChatTurn
from actorium.actors.gateway.api.completions import CompletionsTurn
from actorium.actors.gateway.api.inference import InferenceTurn
from actorium.actors.gateway.api.llama_completion import InfillTurn, LlamaCompletionTurn
from actorium.actors.gateway.api.ollama import OllamaChatTurn, OllamaGenerateTurn
from actorium.actors.gateway.api.ollama_models import OllamaModels
from actorium.actors.gateway.api.sglang import GenerateTurn
from actorium.actors.gateway.batch.batch_worker import BatchWorker
from actorium.actors.gateway.batch.line_caller import asking, requests_at_once
from actorium.actors.gateway.engine_call import keyed_id
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.http.guard import Guard
from actorium.actors.gateway.http.routes import ROUTES
from actorium.actors.gateway.page import documents
from actorium.actors.gateway.page.dashboard import Dashboard
from actorium.actors.gateway.page.openapi import OpenApi
from actorium.actors.runtime.http.allowed_hosts import AllowedHosts

Handler = Callable[..., Any]


def build_app(gateway: GatewayState, hosts: AllowedHosts | None = None) -> ASGIApp:
    """Builds the ASGI application; hosts: the host names that it accepts, None = any. A bare
    router: the guard answers errors."""
    handlers = handlers_of(gateway)
    return Guard(Router(redirect_slashes=False, routes=[
        whole_path(Route(path, handlers[route.name], methods=list(route.methods)))
        for route in ROUTES for path in route.paths]), gateway, hosts)


def whole_path(route: Route) -> Route:
    """Lets a route match whole paths alone. Starlette's patterns end in `$`, which also matches
    before a final newline: to them `/flush_cache%0A` is `/flush_cache`, to the guard, which looks
    up who may call, it is not."""
    route.path_regex = re.compile(route.path_regex.pattern.removesuffix("$") + r"\Z")
    return route


def handlers_of(gateway: GatewayState) -> dict[str, Handler]:
    """Returns the handlers by the routes' names."""
    several = gateway.models is not None
    ollama = OllamaModels(gateway)
    return {
        "page": documents.load(documents.PLAYGROUND).serve,
        "status": documents.load(documents.STATUS).serve,
        "docs": documents.load(documents.API).serve,
        "dashboard": Dashboard(gateway).serve,
        "chat": ChatTurn.handle,
        "completions": CompletionsTurn.handle,
        "render_chat": inference.render_chat,
        "render_completion": inference.render_completion,
        "inference": InferenceTurn.handle,
        "invocations": inference.invocations,
        "responses": responses.create,
        "input_tokens": stored_responses.input_tokens,
        "response": stored_responses.retrieve,
        "delete_response": stored_responses.delete,
        "cancel_response": stored_responses.cancel,
        "input_items": stored_responses.input_items,
        "files": files.listed,
        "upload_file": files.upload,
        "file": files.retrieve,
        "delete_file": files.delete,
        "file_content": files.content,
        "batches": batches.listed,
        "create_batch": batches.create,
        "batch": batches.retrieve,
        "cancel_batch": batches.cancel,
        "messages": MessagesTurn.handle,
        "count_tokens": anthropic_messages.count_tokens,
        "models": model_routes.models if several else engine_routes.models,
        "model": model_routes.model if several else engine_routes.model,
        "load_model": model_routes.load,
        "unload_model": model_routes.unload,
        "score": scoring.score,
        "rerank": scoring.rerank,
        "embeddings": embeddings.embeddings,
        "llama_embedding": embeddings.native,
        "encode": embeddings.encode,
        "tei_embed": embeddings.tei_embed,
        "pooling": pooling.pooling,
        "classify": pooling.classify,
        "tokenize": tokens.tokenize,
        "detokenize": tokens.detokenize,
        "generate": GenerateTurn.handle,
        "abort": sglang.abort,
        "llama_completion": LlamaCompletionTurn.handle,
        "infill": InfillTurn.handle,
        "apply_template": llama_server.apply_template,
        "props": llama_server.props,
        "slots": llama_server.slots,
        "lora_adapters": adapter_routes.listed,
        "flush_cache": engine_routes.flush_cache,
        "model_info": engine_routes.model_info,
        "server_info": engine_routes.server_info,
        "is_scaling": engine_routes.is_scaling,
        "scale": engine_routes.scale,
        "version": engine_routes.version,
        "ollama_chat": OllamaChatTurn.handle,
        "ollama_generate": OllamaGenerateTurn.handle,
        "ollama_tags": ollama.tags,
        "ollama_ps": ollama.running,
        "ollama_show": ollama.show,
        "ollama_version": ollama_models.version,
        "ollama_pull": ollama.pull,
        "ollama_embed": embeddings.ollama_embed,
        "ollama_embeddings": embeddings.ollama_embeddings,
        "ollama_delete": ollama_models.delete,
        "ollama_make": ollama_models.make,
        "health": engine_routes.health,
        "sleep": sleep_routes.sleep,
        "wake_up": sleep_routes.wake_up,
        "is_sleeping": sleep_routes.is_sleeping,
        "pause": sleep_routes.pause,
        "resume": sleep_routes.resume,
        "is_paused": sleep_routes.is_paused,
        "release_memory": sleep_routes.release_memory,
        "resume_memory": sleep_routes.resume_memory,
        "pause_generation": sleep_routes.pause_generation,
        "continue_generation": sleep_routes.continue_generation,
        "load_adapter": adapter_routes.load,
        "unload_adapter": adapter_routes.unload,
        "sglang_load_adapter": adapter_routes.sglang_load,
        "sglang_unload_adapter": adapter_routes.sglang_unload,
        "update_weights": weights_routes.from_disk,
        "update_tensors": weights_routes.from_tensor,
        "get_weights": weights_routes.by_name,
        "weight_version": weights_routes.version,
        "other_weights": weights_routes.refused,
        "openapi": OpenApi(gateway.settings).serve,
        "probe": engine_routes.probe,
    }


def batch_worker(gateway: GatewayState, app: ASGIApp) -> BatchWorker | None:
    """Returns what works on the gateway's batches from now on, by the application; None where there
    are none."""
    if gateway.files is None:
        return None

    async def abort(key: str, tenant: str) -> None:
        await gateway.abort(keyed_id(tenant, key.encode()), tenant)

    return BatchWorker(gateway.files, asking(app), abort, gateway.batches_changed,
                       requests_at_once(gateway.config.scheduler))
