"""How well a document answers a query, by what the model can do.

- A cross-encoder reads both texts as a pair, and its one score counts (Nogueira and Cho, "Passage
  Re-ranking with BERT", 2019).
- A model that embeds: the cosine of the two vectors.
- A model that generates is asked whether the document meets the query, as Qwen3-Reranker is made
  for (Zhang et al., "Qwen3 Embedding", 2025), and the score is the softmax over the logits of "yes"
  and "no" at the last position. Log-probabilities differ from logits by what is the same for all
  tokens there, so theirs give the same softmax.

A chat template with turns of the roles query and document makes the prompt of the first and the
last kind, as sentence-transformers and vLLM write such templates; the purpose is its system turn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Sequence
from operator import mul
from typing import Any, NamedTuple

from msgspec import Struct

from actorium.actors.client.requests import Completion, Request
from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import Pooled
from actorium.actors.params import MAX_LOGPROB_IDS, PoolingParams, SamplingParams

YES, NO = "yes", "no"
JUDGE = ("Judge whether the Document meets the requirements based on the Query and the Instruct "
         'provided. Note that the answer can only be "yes" or "no".')
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

Run = Callable[[list[Request]], Awaitable[list[Completion]]]
"""Runs requests of one choice each; returns their completions in the same order."""
Tokens = Callable[[str, bool], Awaitable[list[int]]]
"""Returns the token ids of a text, with or without special tokens."""


class ScoringOptions(Struct, frozen=True, kw_only=True):
    """How pairs are scored, where that is not as the model does by itself."""

    instruct: str | None = None
    """The purpose of the query, for a model that generates or has a template for pairs; None = the
    template's, else `INSTRUCTION`."""
    label_token_ids: list[int] | None = None
    """The tokens of yes and of no, for a model that generates; None = those of the two words."""
    use_activation: bool | None = None
    """As in `PoolingParams`, for a cross-encoder."""


class PairScores(NamedTuple):
    """The scores of pairs, in their order."""

    scores: list[float]
    prompt_tokens: int
    """Tokens that were computed for them."""


class PairScorer:
    """Scores pairs of a query and a document."""

    def __init__(self, info: dict[str, Any], run: Run, tokens: Tokens, **fields: Any) -> None:
        """info: what the model can do (`server_info`); fields: of every `Request`."""
        self._tasks: list[str] = info.get("tasks") or ["generate"]
        self._answers: list[int] = (info.get("pooling") or {}).get("answers") or []
        self._templated = takes_pairs(info.get("chat_template") or "")
        self._run, self._tokens, self._fields = run, tokens, fields

    async def score(self, pairs: Sequence[tuple[str, str]], options: ScoringOptions) -> PairScores:
        """Returns the scores of (query, document) pairs. Raises `InvalidRequest` where the model
        cannot score them, or not with these options."""
        tasks = self._tasks
        if "generate" in tasks:
            return await self._judged(pairs, options)
        templated = self._templated and "classify" in tasks
        for name in ("instruct", "label_token_ids")[templated:]:
            if getattr(options, name) is not None:
                raise InvalidRequest(f"{name}: only of a model that answers yes or no; this one is "
                                     f"for {', '.join(tasks)}", name)
        if "classify" in tasks:
            return await self._classified(pairs, options)
        if options.use_activation is not None:
            raise InvalidRequest("use_activation: only of a model that classifies pairs; this one "
                                 f"is for {', '.join(tasks)}", "use_activation")
        if "embed" in tasks:
            return await self._compared(pairs)
        raise InvalidRequest("model: cannot score texts, since it does not generate, classify or "
                             f"embed; it is for {', '.join(tasks)}", "model")

    async def _classified(self, pairs: Sequence[tuple[str, str]],
                          options: ScoringOptions) -> PairScores:
        params = PoolingParams(task="classify", use_activation=options.use_activation)
        completions = await self._run([
            Request(pooling=params, **self._fields, **(
                pair_turns(options.instruct, query, document) if self._templated else
                {"prompt": query, "text_pair": document})) for query, document in pairs])
        scores = []
        for completion in completions:
            numbers = numbers_of(completion)
            if len(numbers) != 1:
                raise InvalidRequest(f"model: gives {len(numbers)} scores of a text; a pair needs "
                                     "a model with one", "model")
            scores += numbers
        return PairScores(scores, _prompt_tokens(completions))

    async def _compared(self, pairs: Sequence[tuple[str, str]]) -> PairScores:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        params = PoolingParams(task="embed", use_activation=True)
        completions = await self._run([
            Request(prompt=text, pooling=params, **self._fields) for text in texts])
        vectors = dict(zip(texts, map(numbers_of, completions), strict=True))
        scores = [sum(map(mul, vectors[query], vectors[document])) for query, document in pairs]
        return PairScores(scores, _prompt_tokens(completions))

    async def _judged(self, pairs: Sequence[tuple[str, str]],
                      options: ScoringOptions) -> PairScores:
        if options.use_activation is not None:
            raise InvalidRequest("use_activation: only of a model that classifies pairs; this one "
                                 "answers yes or no", "use_activation")
        labels = await self._labels(options.label_token_ids)
        params = label_params(labels)
        turns = pair_turns if self._templated else judging_prompt
        completions = await self._run([
            Request(params=params, **turns(options.instruct, query, document), **self._fields)
            for query, document in pairs])
        scores = [softmax(label_values(completion, labels))[0] for completion in completions]
        return PairScores(scores, _prompt_tokens(completions))

    async def _labels(self, given: list[int] | None) -> list[int]:
        """Returns the tokens of yes and no. Raises `InvalidRequest` where one of them is not a
        single token."""
        if given is not None:
            if len(given) != 2:
                raise InvalidRequest(f"label_token_ids: two of them, yes and no, got {len(given)}",
                                     "label_token_ids")
            return check_labels(given)
        if self._answers:
            return self._answers
        labels = []
        for word in (YES, NO):
            ids = await self._tokens(word, False)
            if len(ids) != 1:
                raise InvalidRequest(f'label_token_ids: needed, since "{word}" is {len(ids)} '
                                     "tokens of this model", "label_token_ids")
            labels += ids
        return labels


def check_labels(labels: list[int]) -> list[int]:
    """Returns the labels. Raises `InvalidRequest` on too many, or on the same one twice."""
    if len(labels) > MAX_LOGPROB_IDS or len(set(labels)) != len(labels):
        raise InvalidRequest(f"label_token_ids: at most {MAX_LOGPROB_IDS}, all different",
                             "label_token_ids")
    return labels


def label_params(labels: list[int]) -> SamplingParams:
    """Returns the parameters of a request for the labels' log-probabilities behind a prompt."""
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True,
                          logprob_token_ids=labels or None)


def takes_pairs(template: str) -> bool:
    """Returns whether a chat template has turns of the roles query and document."""
    return all(re.search(rf"role.{{0,40}}[\"']{role}[\"']", template)
               for role in ("query", "document"))


def pair_turns(purpose: str | None, query: str, document: str) -> dict[str, Any]:
    """Returns the prompt of such a template, which ends it by itself."""
    turns = [("system", purpose)] * bool(purpose) + [("query", query), ("document", document)]
    return {"messages": [{"role": role, "content": text} for role, text in turns],
            "add_generation_prompt": False}


def judging_prompt(purpose: str | None, query: str, document: str) -> dict[str, Any]:
    """Returns the prompt of Qwen3-Reranker, for the model's chat template, which ends it after an
    empty thought where it knows `enable_thinking`."""
    asked = f"<Instruct>: {purpose or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return {"messages": [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}],
            "template_args": {"enable_thinking": False}}


def label_values(completion: Completion, labels: Sequence[int]) -> list[float]:
    """Returns the labels' log-probabilities at the last position of a prompt."""
    entry = (completion.logprobs or [])[0]
    by_token = {entry.token_id: entry.logprob, **dict(entry.top)}
    return [by_token[label] for label in labels]


def softmax(values: Sequence[float]) -> list[float]:
    """Returns the softmax of log-probabilities or logits."""
    greatest = max(values)
    parts = [math.exp(value - greatest) for value in values]
    return [part / sum(parts) for part in parts]


def pooled_of(completion: Completion) -> Pooled:
    """Returns what a pooled request was answered with."""
    assert completion.pooled is not None, "a pooled request ends with what was asked for"
    return completion.pooled


def numbers_of(completion: Completion) -> list[float]:
    """Returns the numbers of a pooled text's vector or scores."""
    return pooled_of(completion).tolist()


def _prompt_tokens(completions: Sequence[Completion]) -> int:
    return sum(completion.usage.prompt_tokens for completion in completions)
