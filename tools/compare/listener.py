"""Asks a server what a comparison needs of it: `/v1/completions` with `logprobs` and `echo`, as
vLLM, SGLang, llama.cpp's Python server (`--logits_all true`) and this engine have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actorium.actors.errors import BadConfig
from actorium.tools.compare.comparison import ModelAnswer, Reading
from actorium.tools.evaluation.choice_run import side_by_side
from actorium.tools.evaluation.http_model import COMPLETIONS, HttpModel, is_a_token_behind

TOP = 20
"""Likeliest tokens of a position; the most that servers commonly return."""
ID = "token_id:"
"""Prefix of tokens named by id."""


class Listener:
    """Asks a model for its likeliest tokens."""

    def __init__(self, model: HttpModel, by_id: bool = True) -> None:
        """by_id: tokens are named by id if the server can: different ones may have the same text,
        as pieces of characters do."""
        self._model = model
        self._form = {"return_tokens_as_token_ids": True} if by_id else {}

    async def hear(self, prompts: Sequence[str], texts: Sequence[str] | None, max_tokens: int,
                   parallel: int, say: Callable[[int], None]) -> list[ModelAnswer]:
        """What it says to each prompt. texts: the answers to read behind the prompts; None = its
        own. say: called with the number done. Raises `ActoriumError`."""
        async def ask(i: int) -> ModelAnswer:
            return await self._answer(prompts[i], None if texts is None else texts[i], max_tokens)

        return await side_by_side(range(len(prompts)), ask, parallel, say)

    async def _answer(self, prompt: str, text: str | None, max_tokens: int) -> ModelAnswer:
        choice, decode = await self._read(prompt, max_tokens, False)
        own = str(choice.get("text") or "")
        whole = prompt + (own if text is None else text)
        _, extend = await self._read(whole, 1, True)
        _, cached = await self._read(whole, 1, False)
        return ModelAnswer(prompt, own, decode, extend, cached,
                           str(choice.get("finish_reason") or ""))

    async def _read(self, prompt: str, max_tokens: int, echo: bool
                    ) -> tuple[dict[str, Any], Reading]:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
                                "logprobs": TOP, "echo": echo, **self._form}
        choice, usage = await self._model.ask(COMPLETIONS, body)
        columns = choice.get("logprobs") or {}
        tokens, tops = columns.get("tokens"), columns.get("top_logprobs")
        if not tokens or not tops:
            raise BadConfig(f"the server at {self._model.http.url} tells no log-probabilities"
                            f"{' of a prompt (echo)' if echo else ''}", "base_url")
        if echo and is_a_token_behind(tokens, prompt, usage):
            tokens, tops = [*tokens, str(choice.get("text"))[len(prompt):]], [None, *tops]
        return choice, Reading(tokens, [
            None if own is None else likeliest(own, TOP) for own in tops])


def names_ids(heard: Sequence[ModelAnswer]) -> bool:
    """Whether a server named tokens by id, as asked; one that knows only texts must be compared by
    text."""
    return all(token.startswith(ID) for own in heard for token in own.decode.tokens)


def likeliest(told: Mapping[str, float], count: int) -> dict[str, float]:
    """So many of these tokens. Servers add the token that was read, which may be any: what they do
    not name is less likely than the last of these, not than that one."""
    return dict(sorted(told.items(), key=lambda item: -item[1])[:count])
