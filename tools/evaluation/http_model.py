"""A model behind any server that speaks OpenAI's API: `/v1/completions`, for conversations
`/v1/chat/completions`.

Servers differ in what they return. Log-probabilities of letters need `logprobs`, of texts `echo`
with `logprobs` (vLLM, SGLang, llama.cpp's Python server, this engine; not OpenAI's own). Where a
continuation's tokens begin is where those of the prompt alone end: `text_offset` would be shorter,
but servers count a beginning-of-text token and halves of characters differently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.tools.bench.http_client import Http, RefusedByServer
from actorium.tools.evaluation.rated_model import (
    AskedPrompt,
    Rating,
    first_difference,
    known_sum,
)

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
ALTERNATIVES = (20, 5)
"""Likeliest tokens asked for: what most servers allow, and OpenAI's limit for completions."""
BUSY = (429, 503)
WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before a busy server, or one that stopped answering, is asked again: engines and proxies
restart."""


class HttpModel:
    def __init__(self, http: Http, name: str, headers: str = "", patience: float = 600.0) -> None:
        """name: the model's, as the server calls it. headers: lines, each with its end. patience:
        seconds for the answer to a request."""
        self.name = name
        self.http, self._headers, self._patience = http, headers, patience
        self._counts: tuple[int, ...] = ALTERNATIVES
        """Counts of alternatives that the server has not refused."""
        self._answered = False

    async def letter_logprobs(self, prompt: AskedPrompt, letters: str) -> list[float | None]:
        *more, fewest = self._counts
        for count in more:
            try:
                return letter_values(await self._likeliest(prompt, count), letters)
            except RefusedByServer as error:
                if error.status not in (400, 422) or "logprobs" not in error.message:
                    raise
                self._counts = tuple(each for each in self._counts if each < count)
        return letter_values(await self._likeliest(prompt, fewest), letters)

    async def _likeliest(self, prompt: AskedPrompt, count: int) -> dict[str, float]:
        more = {"max_tokens": 1, "temperature": 0}
        if isinstance(prompt, str):
            choice, _ = await self.ask(COMPLETIONS, {"prompt": prompt, "logprobs": count, **more})
            logprobs = choice.get("logprobs") or {}
            told = logprobs.get("top_logprobs")
            if told == []:  # the text ended at once, for which llama.cpp's server returns nothing
                return {}
            found = (told or [None])[0]
        else:
            choice, _ = await self.ask(CHAT, {"messages": prompt, "logprobs": True,
                                               "top_logprobs": count, **more})
            content = (choice.get("logprobs") or {}).get("content") or [{}]
            found = {one["token"]: one["logprob"]
                     for one in reversed(content[0].get("top_logprobs") or [])}
        if not found:
            raise BadConfig(f"--method: the server at {self.http.url} tells no log-probabilities: "
                            "use --method generate", "method")
        return dict(found)

    async def ratings(self, prompt: str, continuations: Sequence[str]) -> list[Rating]:
        (before, _), *wholes = await asyncio.gather(*(
            self._echoed(text) for text in (prompt, *(prompt + more for more in continuations))))
        found = []
        for (tokens, values), text in zip(wholes, continuations, strict=True):
            told = values[first_difference(before, tokens):]
            found.append(Rating(known_sum(told), len(told), len(text)))
        return found

    async def _echoed(self, prompt: str | list[int]) -> tuple[list[str], list[float | None]]:
        """The prompt's tokens as the server writes them, and their log-probabilities."""
        choice, usage = await self.ask(COMPLETIONS, {
            "prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1})
        columns = choice.get("logprobs") or {}
        values, tokens = columns.get("token_logprobs"), columns.get("tokens")
        made = int(usage.get("completion_tokens", 1))
        if is_a_token_behind(tokens or [], prompt, usage):
            raise BadConfig(f"--method: the server at {self.http.url} tells of each token of a "
                            "prompt how likely it is once more behind itself, as llama.cpp's does "
                            "of models without a token for the beginning of a text: use --method "
                            "logits or generate", "method")
        if not values or not tokens or len(values) <= made:
            raise BadConfig(f"--method: the server at {self.http.url} tells no log-probabilities "
                            "of a prompt (echo): use --method logits or generate", "method")
        keep = len(values) - made
        return tokens[:keep], values[:keep]

    async def answer(self, prompt: AskedPrompt, max_tokens: int) -> str:
        more = {"max_tokens": max_tokens, "temperature": 0}
        if isinstance(prompt, str):
            choice, _ = await self.ask(COMPLETIONS, {"prompt": prompt, **more})
            return str(choice.get("text") or "")
        choice, _ = await self.ask(CHAT, {"messages": prompt, **more})
        return str((choice.get("message") or {}).get("content") or "")

    async def count_tokens(self, prompt: AskedPrompt) -> int:
        more: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
        text = isinstance(prompt, str)
        _, usage = await self.ask(COMPLETIONS if text else CHAT,
                                   {"prompt" if text else "messages": prompt, **more})
        return int(usage.get("prompt_tokens", 0))

    async def token_ids(self, text: str) -> list[int]:
        try:
            answer = await self._post(TOKENIZE, {"model": self.name, "prompt": text,
                                                 "add_special_tokens": False})
            return msgspec.convert(answer["tokens"], list[int])
        except (RefusedByServer, KeyError, msgspec.ValidationError) as error:
            raise BadConfig(f"--base-url: the server at {self.http.url} has no /tokenize as vLLM "
                            f"and this engine have it: {error}", "base_url") from None

    async def token_logprobs(self, ids: Sequence[int]) -> list[float]:
        _, values = await self._echoed(list(ids))
        return [known_sum([value]) for value in values[1:]]

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The first choice of an answer, and its usage."""
        answer = await self._post(path, {"model": self.name, **body})
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise EngineUnavailable(f"POST {path}: the answer has no choices: {str(answer)[:200]}")
        return choices[0], answer.get("usage") or {}

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Asks again as `WAITS` says. Raises `RefusedByServer`, `EngineUnavailable`."""
        for wait in (*WAITS, None):
            try:
                async with asyncio.timeout(self._patience):
                    data = b"".join([part async for part in
                                     self.http.events(path, body, self._headers)])
                self._answered = True
                break
            except TimeoutError:
                raise EngineUnavailable(f"{self.http.url}: POST {path}: no answer within "
                                        f"{self._patience:g} s (--patience)") from None
            except EngineUnavailable as error:
                again = (error.status in BUSY if isinstance(error, RefusedByServer)
                         else self._answered)
                if not again or wait is None:
                    raise
                await asyncio.sleep(wait)
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise EngineUnavailable(f"POST {path}: not JSON: {error}") from None


def is_a_token_behind(tokens: Sequence[str], prompt: str | list[int], usage: Mapping[str, Any]
                      ) -> bool:
    """Whether an echo lacks the tokens that were made. llama.cpp's Python server puts what follows
    each token in the token's own place, unless it has taken a beginning-of-text token off the
    prompt, and so has none for the last."""
    expected = int(usage.get("prompt_tokens", 0)) + int(usage.get("completion_tokens", 0))
    return isinstance(prompt, str) and "".join(tokens) == prompt and len(tokens) < expected


def letter_values(told: dict[str, float], letters: str) -> list[float | None]:
    """Returns for each letter the likelier of its spellings with and without a space; None if
    neither is among the tokens returned."""
    return [max((value for token, value in told.items() if token.strip() == letter), default=None)
            for letter in letters]
