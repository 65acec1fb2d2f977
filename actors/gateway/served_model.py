"""The gateway's view of the model: its names, limits, parsers, and the texts of its tokens."""

from __future__ import annotations

import asyncio
import copy
from pathlib import PurePath
from typing import Any

import msgspec

from actorium.actors.config.retention import TOKEN_TEXTS
from actorium.actors.config.tree import Config
from actorium.actors.detokenizer.incremental import byte_of_char
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.parsers.parser_factory import ModelTemplates, ParserFactory
from actorium.actors.models import model_dir
from actorium.actors.models.fim_tokens import FimTokens
from actorium.actors.models.model_names import repository_of

DEFAULT = "default"
"""What clients of single-model engines write where a name is required."""
GENERATE = "generate"
TASK_VERBS = {
    GENERATE: "does not generate text", "embed": "does not embed texts",
    "classify": "does not classify texts", "token_embed": "does not embed tokens",
    "token_classify": "does not classify tokens",
    "hidden_states": "gives no hidden states without --enable-return-hidden-states"}
"""What a model lacks, by the name of the task."""
LATEST = ":latest"
"""The tag that Ollama's clients add to a name without one."""


class ModelNames:
    """The served names of one engine's model."""

    def __init__(self, config: Config, model: str) -> None:
        """model: the name that answers show."""
        started_with = config.model.model.rstrip("/")
        self.served = config.model.served_model_name or (model,)
        """The names that `/v1/models` lists; answers show the first."""
        self._known = {name.rstrip("/") for name in self.served}
        if not config.gateway.strict_model_name:
            repository = repository_of(PurePath(started_with))
            self._known |= {name for path in (started_with, repository)
                            for name in (path, PurePath(path).name) if path} | {DEFAULT}

    def known(self, name: str | None) -> bool:
        """Returns whether a request for this model name is served. No name, or an empty one, means
        any."""
        return not name or any(one.rstrip("/") in self._known
                               for one in (name, name.removesuffix(LATEST)))


class ServedModel:
    """The model's fixed properties, and how its answers are parsed."""

    def __init__(self, info: dict[str, Any], config: Config) -> None:
        """info: what `AsyncClient.server_info` returns."""
        settings = config.gateway
        self.info = info
        self.names = ModelNames(config, info["model"])
        self.templates = ModelTemplates.of(info)
        self.parsing = ParserFactory(settings.tool_call_parser, settings.reasoning_parser,
                                     self.templates, config.model.default_chat_template_kwargs)
        self.name: str = info["model"]
        self.max_model_len: int = info["max_model_len"]
        self.fim: FimTokens | None = msgspec.convert(info.get("fim_tokens"), FimTokens | None)
        """Tokens for filling in the middle; None = the model has none."""
        self.meta: dict[str, Any] = {}
        """What `/v1/models` shows of its files; empty until they are read."""
        self.thought_end: list[int] = []
        """Token ids of the mark that ends reasoning; none where the model does not reason."""
        self.adapter: str | None = None
        """The LoRA adapter that a request names as its model."""
        self.tasks: list[str] = info.get("tasks") or [GENERATE]
        """What the model does: "generate", or a `PoolingTask`."""
        pooling = info.get("pooling") or {}
        self.labels: list[str] = pooling.get("labels") or []
        """Names of its classes, of a model that classifies."""
        self.text_prompts: dict[str, str] = pooling.get("prompts") or {}
        """What stands before texts for a purpose, by its name, of a model that embeds."""

    def with_adapter(self, name: str) -> ServedModel:
        """Returns the model as a request sees it that names an adapter."""
        other = copy.copy(self)
        other.name = other.adapter = name
        return other

    def check_task(self, task: str) -> None:
        """Raises `HttpError` 400 where the model does not do that."""
        if task not in self.tasks:
            raise HttpError(400, f"model: {self.name!r} {TASK_VERBS[task]}; it is for "
                            f"{', '.join(self.tasks)}", "model", code="unsupported_task")


class TokenTexts:
    """Loads the tokenizer at first use: most requests want no log-probabilities."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tokenizer: Any = None
        self._byte_of: dict[str, int] = {}
        self._special: frozenset[int] = frozenset()
        self._bytes: dict[int, bytes] = {}
        self._loading = asyncio.Lock()

    async def ready(self) -> None:
        """Loads in a thread, unless loaded; does nothing where the engine has no tokenizer."""
        if self._tokenizer is not None or self._config.model.skip_tokenizer:
            return
        async with self._loading:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(self._load)

    def _load(self) -> Any:
        from actorium.actors.tokenizer.tokenizer_json import load_tokenizer

        tokenizer = load_tokenizer(model_dir.resolve(self._config.model.model))
        if "ByteLevel" in repr(tokenizer.decoder):
            self._byte_of = byte_of_char()
        self._special = frozenset(tokenizer.get_added_tokens_decoder())
        return tokenizer

    def bytes_of(self, token: int) -> bytes:
        """Returns the token's own bytes, which may be a part of a character."""
        found = self._bytes.get(token)
        if found is None:
            found = self._look_up(token)
            if len(self._bytes) >= TOKEN_TEXTS:
                self._bytes.clear()
            self._bytes[token] = found
        return found

    def _look_up(self, token: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token}".encode()
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if token in self._special:
            return str(written).encode()
        if written.startswith("<0x") and written.endswith(">") and len(written) == 6:
            return bytes([int(written[3:5], 16)])
        if self._byte_of and all(letter in self._byte_of for letter in written):
            return bytes(self._byte_of[letter] for letter in written)
        return str(written).replace("\u2581", " ").encode()

    def written(self, token: int) -> str:
        """Returns the token as the vocabulary writes it."""
        found = None if self._tokenizer is None else self._tokenizer.id_to_token(token)
        return f"token_id:{token}" if found is None else str(found)

    def text_of(self, token: int) -> str:
        """Returns the token's text; bytes that are no character become U+FFFD."""
        return self.bytes_of(token).decode(errors="replace")

    def name_of(self, token: int) -> str:
        """Returns the token's name in log-probabilities."""
        return self.text_of(token)


class TokenIdTexts:
    """Names tokens by their ids: texts of different tokens can be equal."""

    def __init__(self, texts: TokenTexts) -> None:
        self.bytes_of, self.text_of = texts.bytes_of, texts.text_of

    def name_of(self, token: int) -> str:
        """Returns the token's name in log-probabilities."""
        return f"token_id:{token}"


AnyTokenTexts = TokenTexts | TokenIdTexts
