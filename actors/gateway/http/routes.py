"""The routes of a gateway and their requirements: one table for the router, the guard, the keys and
the OpenAPI document. Pure data: `app` and `openapi` map the routes' names to handlers and bodies.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class Access(Enum):
    """Who may call, where the gateway has keys."""

    OPEN = "open"
    """Anybody, also while the engine stops."""
    KEY = "key"
    ADMIN = "admin"
    """Callers with the administrator's key, if there is one, else with any key."""


class ErrorStyle(Enum):
    """Which API's format errors have."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


GET, POST, DELETE = ("GET",), ("POST",), ("DELETE",)
BOTH = ("GET", "POST")
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


class Route(NamedTuple):
    """One operation and its paths."""

    name: str
    """Name of its handler and its operation."""
    methods: tuple[str, ...]
    paths: tuple[str, ...]
    """The first is the one that documents use, the others mean the same."""
    access: Access = Access.KEY
    generates: bool = False
    """Needs a running engine: requests wait while it recovers."""
    errors: ErrorStyle = ErrorStyle.OPENAI
    acts: bool = False
    """Changes something even with GET."""

    def changes(self, method: str) -> bool:
        """Returns whether a request with this method may change or cost something."""
        return method not in SAFE or (self.acts and method != "OPTIONS")


def _probe(path: str, access: Access, methods: tuple[str, ...] = GET) -> Route:
    return Route("probe", methods, (path,), access)


ROUTES: tuple[Route, ...] = (
    Route("page", GET, ("/",), Access.OPEN),
    Route("status", GET, ("/status",), Access.OPEN),
    Route("docs", GET, ("/docs", "/redoc"), Access.OPEN),
    Route("dashboard", GET, ("/dashboard/events",)),
    Route("chat", POST, ("/v1/chat/completions", "/chat/completions"), generates=True),
    Route("completions", POST, ("/v1/completions", "/completions"), generates=True),
    Route("render_chat", POST, ("/v1/chat/completions/render", "/chat/completions/render")),
    Route("render_completion", POST, ("/v1/completions/render", "/completions/render")),
    Route("inference", POST, ("/inference/v1/generate",), generates=True),
    Route("invocations", POST, ("/invocations",), generates=True),
    Route("responses", POST, ("/v1/responses", "/responses"), generates=True),
    Route("input_tokens", POST, ("/v1/responses/input_tokens", "/responses/input_tokens")),
    Route("response", GET, ("/v1/responses/{id}", "/responses/{id}")),
    Route("delete_response", DELETE, ("/v1/responses/{id}", "/responses/{id}")),
    Route("cancel_response", POST, ("/v1/responses/{id}/cancel", "/responses/{id}/cancel")),
    Route("input_items", GET, ("/v1/responses/{id}/input_items", "/responses/{id}/input_items")),
    Route("files", GET, ("/v1/files", "/files")),
    Route("upload_file", POST, ("/v1/files", "/files")),
    Route("file", GET, ("/v1/files/{id}", "/files/{id}")),
    Route("delete_file", DELETE, ("/v1/files/{id}", "/files/{id}")),
    Route("file_content", GET, ("/v1/files/{id}/content", "/files/{id}/content")),
    Route("batches", GET, ("/v1/batches", "/batches")),
    Route("create_batch", POST, ("/v1/batches", "/batches")),
    Route("batch", GET, ("/v1/batches/{id}", "/batches/{id}")),
    Route("cancel_batch", POST, ("/v1/batches/{id}/cancel", "/batches/{id}/cancel")),
    Route("messages", POST, ("/v1/messages", "/messages"), generates=True,
          errors=ErrorStyle.ANTHROPIC),
    Route("count_tokens", POST, ("/v1/messages/count_tokens", "/messages/count_tokens"),
          errors=ErrorStyle.ANTHROPIC),
    Route("models", GET, ("/v1/models", "/models")),
    Route("model", GET, ("/v1/models/{name:path}", "/models/{name:path}")),
    Route("load_model", POST, ("/models/load",), Access.ADMIN),
    Route("unload_model", POST, ("/models/unload",), Access.ADMIN),
    Route("score", POST, ("/v1/score", "/score"), generates=True),
    Route("rerank", POST, ("/v1/rerank", "/rerank", "/v2/rerank", "/reranking", "/v1/reranking"),
          generates=True),
    Route("embeddings", POST, ("/v1/embeddings", "/embeddings"), generates=True),
    Route("llama_embedding", POST, ("/embedding",), generates=True),
    Route("encode", ("POST", "PUT"), ("/encode",), generates=True),
    Route("tei_embed", POST, ("/embed",), generates=True),
    Route("pooling", POST, ("/pooling",), generates=True),
    Route("classify", POST, ("/classify", "/v1/classify"), generates=True),
    Route("tokenize", POST, ("/tokenize", "/v1/tokenize")),
    Route("detokenize", POST, ("/detokenize", "/v1/detokenize")),
    Route("generate", ("POST", "PUT"), ("/generate",), generates=True),
    Route("abort", POST, ("/abort_request",)),
    Route("llama_completion", POST, ("/completion",), generates=True),
    Route("infill", POST, ("/infill",), generates=True),
    Route("apply_template", POST, ("/apply-template",)),
    Route("props", BOTH, ("/props",)),
    Route("slots", GET, ("/slots",)),
    Route("lora_adapters", GET, ("/lora-adapters",)),
    Route("flush_cache", BOTH, ("/flush_cache",), Access.ADMIN, acts=True),
    Route("model_info", GET, ("/model_info", "/get_model_info")),
    Route("server_info", GET, ("/server_info", "/get_server_info")),
    Route("version", GET, ("/version",), Access.OPEN),
    Route("ollama_chat", POST, ("/api/chat",), generates=True, errors=ErrorStyle.OLLAMA),
    Route("ollama_generate", POST, ("/api/generate",), generates=True, errors=ErrorStyle.OLLAMA),
    Route("ollama_tags", GET, ("/api/tags",), errors=ErrorStyle.OLLAMA),
    Route("ollama_ps", GET, ("/api/ps",), errors=ErrorStyle.OLLAMA),
    Route("ollama_show", POST, ("/api/show",), errors=ErrorStyle.OLLAMA),
    Route("ollama_version", GET, ("/api/version",), Access.OPEN, errors=ErrorStyle.OLLAMA),
    Route("ollama_pull", POST, ("/api/pull",), Access.ADMIN, errors=ErrorStyle.OLLAMA),
    Route("ollama_embed", POST, ("/api/embed",), generates=True, errors=ErrorStyle.OLLAMA),
    Route("ollama_embeddings", POST, ("/api/embeddings",), generates=True,
          errors=ErrorStyle.OLLAMA),
    Route("ollama_delete", DELETE, ("/api/delete",), errors=ErrorStyle.OLLAMA),
    Route("ollama_make", POST, ("/api/create", "/api/copy", "/api/push"),
          errors=ErrorStyle.OLLAMA),
    Route("health", GET, ("/health", "/v1/health"), Access.OPEN),
    Route("is_scaling", BOTH, ("/is_scaling_elastic_ep",)),
    Route("scale", POST, ("/scale_elastic_ep",), Access.ADMIN),
    Route("sleep", POST, ("/sleep",), Access.ADMIN),
    Route("wake_up", POST, ("/wake_up",), Access.ADMIN),
    Route("is_sleeping", GET, ("/is_sleeping",)),
    Route("pause", POST, ("/pause",), Access.ADMIN),
    Route("resume", POST, ("/resume",), Access.ADMIN),
    Route("is_paused", GET, ("/is_paused",)),
    Route("release_memory", POST, ("/release_memory_occupation",), Access.ADMIN),
    Route("resume_memory", POST, ("/resume_memory_occupation",), Access.ADMIN),
    Route("pause_generation", POST, ("/pause_generation",), Access.ADMIN),
    Route("continue_generation", POST, ("/continue_generation",), Access.ADMIN),
    Route("load_adapter", POST, ("/v1/load_lora_adapter",), Access.ADMIN),
    Route("unload_adapter", POST, ("/v1/unload_lora_adapter",), Access.ADMIN),
    Route("sglang_load_adapter", POST, ("/load_lora_adapter",), Access.ADMIN),
    Route("sglang_unload_adapter", POST, ("/unload_lora_adapter",), Access.ADMIN),
    Route("update_weights", POST, ("/update_weights_from_disk",), Access.ADMIN),
    Route("update_tensors", POST, ("/update_weights_from_tensor",), Access.ADMIN),
    Route("get_weights", POST, ("/get_weights_by_name",), Access.ADMIN),
    Route("weight_version", GET, ("/get_weight_version",)),
    Route("other_weights", POST, (
        "/init_weights_update_group", "/destroy_weights_update_group",
        "/update_weights_from_distributed", "/update_weights_from_ipc",
        "/init_weight_transfer_engine", "/update_weights", "/collective_rpc"), Access.ADMIN),
    Route("openapi", GET, ("/openapi.json",), Access.OPEN),
    _probe("/livez", Access.OPEN),
    _probe("/readyz", Access.OPEN),
    _probe("/startupz", Access.OPEN),
    _probe("/ping", Access.OPEN, BOTH),
    _probe("/metrics", Access.KEY),
    _probe("/load", Access.KEY),
    _probe("/get_load", Access.KEY),
    _probe("/health_generate", Access.KEY, BOTH),
)
OF_THE_SERVER = frozenset({"page", "status", "docs", "dashboard", "models", "model", "load_model",
                           "unload_model", "version", "health", "openapi", "probe", "ollama_tags",
                           "ollama_ps", "ollama_show", "ollama_version", "ollama_pull",
                           "ollama_delete", "ollama_make", "files", "upload_file", "file",
                           "delete_file", "file_content", "batches", "create_batch", "batch",
                           "cancel_batch"})
"""Names of routes about the server and not about one of its models: where it has several, `?model=`
chooses the engine of all others."""
PARAMETER = re.compile(r"\{(\w+)(:path)?\}")
"""Of a path: its name, and whether it may hold slashes."""
_NO_KEY = Route("", GET, ("/favicon.ico",), Access.OPEN)
"""Browsers request these by themselves, without a key."""
_UNKNOWN = Route("", (), ())
_EXACT = {path: route for route in (*ROUTES, _NO_KEY) for path in route.paths if "{" not in path}


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(PARAMETER.sub(lambda m: ".+" if m[2] else "[^/]+", path))


_PATTERNS = [(_pattern(path), route) for route in ROUTES for path in route.paths if "{" in path]
_STYLES = {"/api/": ErrorStyle.OLLAMA} | {
    path: route.errors for route in ROUTES if route.errors is ErrorStyle.ANTHROPIC
    for path in route.paths}
"""Beginnings of paths, also of unknown ones, and the format of their errors."""


_SLASHES = re.compile(r"/{2,}")


def canonical(path: str) -> str:
    """Returns the path of a route for one that differs from it in doubled slashes or in one at the
    end, as base URLs are put together (`/v1/` and `/chat/completions`); any other as it is. No
    redirect says so: clients that follow one drop the body or the key."""
    if path in _EXACT:
        return path
    found = _SLASHES.sub("/", path)
    if (exact := found.removesuffix("/")) in _EXACT:
        return exact  # also where this is the name of a model
    if _known(path) is not None:
        return path
    found = found if _known(found) is not None else found.removesuffix("/")
    return path if _known(found) is None else found


def _known(path: str) -> Route | None:
    found = _EXACT.get(path)
    return found if found is not None else next(
        (route for pattern, route in _PATTERNS if pattern.fullmatch(path)), None)


def find(path: str) -> Route:
    """Returns the route of a path. An unknown path needs a key, as most do: callers without one do
    not learn what is served."""
    found = _known(path)
    if found is not None:
        return found
    return _UNKNOWN._replace(errors=next(
        (style for begin, style in _STYLES.items() if path.startswith(begin)), ErrorStyle.OPENAI))


def asks_an_engine(path: str, method: str) -> bool:
    """Returns whether a request is one about a model's engine: of several, its query may name it,
    which starts the engine."""
    name = find(path).name
    return bool(name) and name not in OF_THE_SERVER and method in allowed_methods(path)


def allowed_methods(path: str) -> tuple[str, ...]:
    """Returns the methods of a path, sorted; HEAD wherever GET is. Empty for an unknown path."""
    routes = [route for pattern, route in _PATTERNS if pattern.fullmatch(path)]
    routes += [route for route in (*ROUTES, _NO_KEY) if path in route.paths]
    found = {method for route in routes for method in route.methods}
    return tuple(sorted(found | {"HEAD"} if "GET" in found else found))
