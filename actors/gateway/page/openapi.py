"""`/openapi.json`: the routes as an OpenAPI 3.1 document, made from the bodies' types."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium import __version__
from actorium.actors.config.tree import GatewayConfig
from actorium.actors.gateway.api.adapter_routes import LoadAdapterBody, UnloadAdapterBody
from actorium.actors.gateway.api.anthropic_body import CountTokensBody, MessagesBody
from actorium.actors.gateway.api.batches import BatchBody
from actorium.actors.gateway.api.chat_body import ChatBody
from actorium.actors.gateway.api.chat_completions import ChatCompletion
from actorium.actors.gateway.api.completions import CompletionBody, TextCompletion
from actorium.actors.gateway.api.embeddings import (
    EmbeddingsBody,
    EncodeBody,
    OllamaEmbedBody,
    TeiBody,
)
from actorium.actors.gateway.api.inference import (
    InferenceAnswer,
    InferenceBody,
    InvocationBody,
)
from actorium.actors.gateway.api.llama_body import InfillBody, LlamaCompletionBody
from actorium.actors.gateway.api.model_routes import ModelBody
from actorium.actors.gateway.api.ollama import OllamaLine
from actorium.actors.gateway.api.ollama_body import (
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaOptions,
)
from actorium.actors.gateway.api.ollama_models import NamedModel, PullBody
from actorium.actors.gateway.api.pooling import ClassifyBody, PoolingBody
from actorium.actors.gateway.api.responses_body import InputBody, ResponsesBody
from actorium.actors.gateway.api.sampling_fields import UNSUPPORTED, unsupported_in
from actorium.actors.gateway.api.scoring import RerankBody, ScoreBody
from actorium.actors.gateway.api.sglang import AbortBody
from actorium.actors.gateway.api.sglang_body import GenerateBody
from actorium.actors.gateway.api.sleep_routes import OccupationBody, PauseBody
from actorium.actors.gateway.api.tokens import DetokenizeBody, TokenizeBody
from actorium.actors.gateway.api.weights_routes import TensorBody, UpdateBody
from actorium.actors.gateway.batch.file_store import BatchObject, FileObject
from actorium.actors.gateway.http.api_keys import Keys
from actorium.actors.gateway.http.replies import JsonReply
from actorium.actors.gateway.http.routes import PARAMETER, ROUTES, ErrorStyle, Route

REF = "#/components/schemas/{name}"


class ErrorFields(Struct):
    """The fields of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """The body of every answer that is an error."""

    error: ErrorFields


class AnthropicErrorFields(Struct):
    """The fields of an error, in Anthropic's format."""

    type: str
    message: str


class AnthropicErrorBody(Struct):
    """The body of `/v1/messages` errors."""

    error: AnthropicErrorFields
    type: Literal["error"] = "error"
    request_id: str | None = None


class OllamaErrorBody(Struct):
    """The body of errors below `/api/`."""

    error: str


OneOrSeveral = dict[str, Any] | list[dict[str, Any]]
"""Of routes whose body may ask for several completions."""


class Operation(NamedTuple):
    """The description of one route."""

    summary: str
    body: type | None = None
    answer: Any = dict[str, Any]
    streams: bool = False


OPERATIONS: dict[str, Operation] = {
    "chat": Operation("Complete a conversation", ChatBody, ChatCompletion, True),
    "completions": Operation("Complete texts", CompletionBody, TextCompletion, True),
    "render_chat": Operation("The prompt that a conversation becomes", ChatBody),
    "render_completion": Operation("The prompts of texts", CompletionBody, list[dict[str, Any]]),
    "inference": Operation("Complete token ids by token ids", InferenceBody, InferenceAnswer,
                           True),
    "invocations": Operation("Any of the bodies that ask for a completion", InvocationBody,
                             OneOrSeveral, True),
    "responses": Operation("Make a response", ResponsesBody, streams=True),
    "input_tokens": Operation("Tokens of a response's prompt", InputBody),
    "response": Operation("A stored response"),
    "delete_response": Operation("Forget a stored response"),
    "cancel_response": Operation("End a response that goes on in the background"),
    "input_items": Operation("The input of a stored response"),
    "files": Operation("The files that are stored"),
    "upload_file": Operation("Store a file", answer=FileObject),
    "file": Operation("What is known of a file", answer=FileObject),
    "delete_file": Operation("Delete a file"),
    "file_content": Operation("What a file holds"),
    "batches": Operation("The batches, the newest first"),
    "create_batch": Operation("Answer a file of requests", BatchBody, BatchObject),
    "batch": Operation("How far a batch is", answer=BatchObject),
    "cancel_batch": Operation("End a batch", answer=BatchObject),
    "messages": Operation("Complete a conversation, as Anthropic's API does", MessagesBody,
                          streams=True),
    "count_tokens": Operation("Tokens of a conversation", CountTokensBody),
    "models": Operation("The models that are served"),
    "model": Operation("One of them"),
    "load_model": Operation("Begin to load a model of a server of several", ModelBody),
    "unload_model": Operation("End a model's engine as soon as nobody uses it", ModelBody),
    "score": Operation("How well texts fit a query", ScoreBody),
    "rerank": Operation("Documents in the order in which they fit a query", RerankBody),
    "embeddings": Operation("Vectors of texts", EmbeddingsBody),
    "llama_embedding": Operation("Vectors of texts, as llama-server has them", EmbeddingsBody,
                                 list[dict[str, Any]]),
    "encode": Operation("Vectors of texts, as SGLang has them", EncodeBody, OneOrSeveral),
    "tei_embed": Operation("Vectors of texts, as Text Embeddings Inference has them", TeiBody,
                           list[list[float]]),
    "pooling": Operation("What a model for embedding or classifying makes of texts", PoolingBody),
    "classify": Operation("Classes of texts, with their probabilities", ClassifyBody),
    "tokenize": Operation("Token ids of texts or of a conversation", TokenizeBody),
    "detokenize": Operation("Text of token ids", DetokenizeBody),
    "generate": Operation("Complete prompts, as SGLang does", GenerateBody, OneOrSeveral, True),
    "abort": Operation("End requests", AbortBody),
    "llama_completion": Operation("Complete prompts, as llama-server does", LlamaCompletionBody,
                                  OneOrSeveral, True),
    "infill": Operation("Fill in the middle, as llama-server does", InfillBody, OneOrSeveral, True),
    "apply_template": Operation("The text that a conversation becomes", ChatBody),
    "props": Operation("The model and the defaults, as llama-server has them"),
    "slots": Operation("How many sequences run", answer=list[dict[str, Any]]),
    "lora_adapters": Operation("The LoRA adapters, as llama-server lists them",
                               answer=list[dict[str, Any]]),
    "load_adapter": Operation("Load a LoRA adapter, as vLLM does", LoadAdapterBody),
    "unload_adapter": Operation("Unload a LoRA adapter, as vLLM does", UnloadAdapterBody),
    "sglang_load_adapter": Operation("Load a LoRA adapter, as SGLang does", LoadAdapterBody),
    "sglang_unload_adapter": Operation("Unload a LoRA adapter, as SGLang does",
                                       UnloadAdapterBody),
    "flush_cache": Operation("Forget cached prefixes"),
    "model_info": Operation("What the model is"),
    "server_info": Operation("Configuration and gauges"),
    "is_scaling": Operation("Whether devices are being added or taken away"),
    "scale": Operation("Not supported"),
    "version": Operation("The version"),
    "ollama_chat": Operation("Complete a conversation, as Ollama's API does", OllamaChatBody,
                             OllamaLine, True),
    "ollama_generate": Operation("Complete a prompt, as Ollama's API does", OllamaGenerateBody,
                                 OllamaLine, True),
    "ollama_tags": Operation("The models that are served, in Ollama's form"),
    "ollama_ps": Operation("The models that are loaded"),
    "ollama_show": Operation("What a model is", NamedModel),
    "ollama_version": Operation("The version of Ollama's API"),
    "ollama_pull": Operation("Fetch a model", PullBody),
    "ollama_embed": Operation("Vectors of texts, as Ollama's API has them", OllamaEmbedBody),
    "ollama_embeddings": Operation("The vector of one text", OllamaEmbedBody),
    "ollama_delete": Operation("Not supported"),
    "ollama_make": Operation("Not supported"),
    "health": Operation("Whether a request that came now would be served"),
    "sleep": Operation("Give back the memory of weights and pages"),
    "wake_up": Operation("Load the model again"),
    "is_sleeping": Operation("Whether the engine sleeps"),
    "pause": Operation("Hold requests back"),
    "resume": Operation("Let requests go on"),
    "is_paused": Operation("Whether the engine is paused"),
    "release_memory": Operation("As /sleep at level 1, when nothing runs", OccupationBody),
    "resume_memory": Operation("As /wake_up", OccupationBody),
    "pause_generation": Operation("As /pause", PauseBody),
    "continue_generation": Operation("As /resume"),
    "update_weights": Operation("Read the model's weights anew, while it serves", UpdateBody),
    "update_tensors": Operation("Take over tensors of the model, from a safetensors file"),
    "get_weights": Operation("The first rows of a tensor", TensorBody, list[Any]),
    "weight_version": Operation("The version of the weights"),
    "other_weights": Operation("Not supported"),
    "openapi": Operation("This"),
    "probe": Operation("A probe of the watchdog"),
}
"""By the routes' names."""
PAGES = frozenset({"page", "status", "docs", "dashboard"})
"""Routes for people, which the document leaves out."""
PROBES: dict[str, dict[str, Any]] = {
    "/metrics": {"text/plain": {"schema": {}}},
    "/get_load": {"application/json": {"schema": {"type": "array", "items": {"type": "object"}}}}}
"""Answers of the watchdog's probes that are no JSON objects."""
STREAMS = {ErrorStyle.OLLAMA: "application/x-ndjson"}
"""Of APIs whose streams are not server-sent events."""


def document(guarded: Callable[[str], bool] = lambda path: False) -> dict[str, Any]:
    """Returns the whole document. guarded: whether a path requires a key."""
    types = [kind for one in OPERATIONS.values() for kind in (one.body, one.answer)
             if kind is not None]
    schemas, components = msgspec.json.schema_components(
        [*types, ErrorBody, AnthropicErrorBody, OllamaErrorBody], ref_template=REF)
    for component in components.values():
        for name in (*UNSUPPORTED, *unsupported_in(GenerateBody), *unsupported_in(OllamaOptions),
                     *unsupported_in(LlamaCompletionBody), "_debug_render_only"):
            if "anyOf" not in component.get("properties", {}).get(name, {}):
                component.get("properties", {}).pop(name, None)
    refusals = dict(zip(ErrorStyle, schemas[-len(ErrorStyle):], strict=True))
    found = iter(schemas)
    shapes = {name: (next(found) if one.body is not None else None, next(found))
              for name, one in OPERATIONS.items()}
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        for path in route.paths if route.name not in PAGES else ():
            for method in route.methods:
                made = _operation(path, method, route, *shapes[route.name])
                if guarded(path):
                    made["security"] = [{"key": []}]
                made["responses"]["default"] = {
                    "description": "Why there is none", "content": {
                        "application/json": {"schema": refusals[route.errors]}}}
                paths.setdefault(PARAMETER.sub(r"{\1}", path), {})[method.lower()] = made
    return {
        "openapi": "3.1.0",
        "info": {"title": "actorium", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer"}}}}


def _operation(path: str, method: str, route: Route, body: Any, answer: Any) -> dict[str, Any]:
    one, first = OPERATIONS[route.name], next(own for own in ROUTES if path in own.paths)
    content = dict(PROBES.get(path, {"application/json": {"schema": answer}}))
    if one.streams:
        content[STREAMS.get(route.errors, "text/event-stream")] = {"schema": {"type": "string"}}
    words = re.sub(r"\W+", "_", PARAMETER.sub(r"\1", path)).strip("_")
    operation: dict[str, Any] = {
        "summary": one.summary if path == route.paths[0] else f"As {route.paths[0]}",
        "operationId": words if method == route.methods[0] and route is first else
        f"{words}_{method.lower()}",
        "responses": {"200": {"description": "The answer", "content": content}}}
    if body is not None and method in ("POST", "PUT"):
        operation["requestBody"] = {
            "required": True, "content": {"application/json": {"schema": body}}}
    names = [("path", found[1], True) for found in PARAMETER.finditer(path)]
    if one.streams:
        headers = ("Idempotency-Key", "Last-Event-ID")[:1 if route.errors in STREAMS else 2]
        names += [("header", name, False) for name in headers]
    if names:
        operation["parameters"] = [{"name": name, "in": where, "required": needed,
                               "schema": {"type": "string"}} for where, name, needed in names]
    return operation


class OpenApi:
    """Serves the document, which it makes at the first request."""

    def __init__(self, settings: GatewayConfig) -> None:
        self._settings = settings
        self._made = b""

    async def serve(self, http: HttpRequest) -> Response:
        """Handles `/openapi.json`."""
        if not self._made:
            self._made = msgspec.json.encode(document(Keys(self._settings).guard))
        return JsonReply(self._made)
