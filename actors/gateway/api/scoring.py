"""`/v1/score` and `/v1/rerank`: how well a document answers a query, by the model's own yes and no.

As Qwen3-Reranker is made for (Zhang et al., "Qwen3 Embedding", 2025): the model is asked whether
the document meets the query, and the score is the softmax over the logits of "yes" and "no" at the
last position. Log-probabilities differ from logits by what is the same for all tokens there,
so theirs give the same softmax. Requests and answers have the shapes of vLLM (Jina's and Cohere's
for reranking), and for `query` with `items` those of SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import time
from typing import Any

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.requests import Completion, Request
from actorium.actors.gateway.engine_call import EngineCall, call_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.gateway.http.replies import JsonReply
from actorium.actors.params import MAX_LOGPROB_IDS, SamplingParams

MAX_DOCUMENTS = 1000
"""Of one request."""
YES, NO = "yes", "no"
JUDGE = ("Judge whether the Document meets the requirements based on the Query and the Instruct "
         'provided. Note that the answer can only be "yes" or "no".')
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class Judging(Struct, kw_only=True):
    """The fields of both scoring and reranking."""

    model: str | None = None
    instruct: str | None = None
    """The purpose of the query."""
    instruction: str | None = None
    """Another name of `instruct`."""
    label_token_ids: list[int] | None = None
    """The tokens of yes and of no, where they are others."""
    truncate_prompt_tokens: int | None = None
    priority: int = 0

    @property
    def purpose(self) -> str:
        """Returns the purpose of the query."""
        return self.instruct or self.instruction or INSTRUCTION


class ScoreBody(Judging, kw_only=True):
    """`text_1` and `text_2` (vLLM), or `query` and `items` (SGLang)."""

    text_1: str | list[str] | None = None
    """One text for all of `text_2`, or as many."""
    text_2: str | list[str] | None = None
    query: str | list[int] | None = None
    """Stands before each of `items`, without a template."""
    items: str | list[str | list[int]] | None = None
    apply_softmax: bool = False
    """Scores of an item sum up to 1."""
    item_first: bool = False

    def pairs(self) -> list[tuple[str, str]]:
        """Returns the pairs of `text_1` and `text_2`. Raises `HttpError`."""
        if self.text_1 is None or self.text_2 is None:
            raise bad_field("text_1", "text_1 and text_2 are needed, or query and items")
        first = self.text_1 if isinstance(self.text_1, list) else [self.text_1]
        second = self.text_2 if isinstance(self.text_2, list) else [self.text_2]
        _check_count(second, "text_2")
        if len(first) not in (1, len(second)):
            raise bad_field("text_1", f"one, or as many as text_2: {len(second)}, got {len(first)}")
        return list(zip(first * (len(second) // len(first)), second, strict=True))

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts of `query` and `items`. Raises `HttpError`."""
        items: list[Any] = [self.items] if isinstance(self.items, str) else list(self.items or [])
        _check_count(items, "items")
        if not self.label_token_ids:
            raise bad_field("label_token_ids", "needed with items")
        query: Any = self.query if self.query is not None else ""
        if any(isinstance(item, str) != isinstance(query, str) for item in items):
            raise bad_field("items", "texts and token ids are mixed with query's")
        return [item + query if self.item_first else query + item for item in items]


class RerankDocument(Struct):
    text: str


class RerankBody(Judging, kw_only=True):
    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    """How many of the best results are returned; None or 0 = all."""
    return_documents: bool = True

    def texts(self) -> list[str]:
        """Returns the documents' texts. Raises `HttpError`."""
        _check_count(self.documents, "documents")
        if self.top_n is not None and self.top_n < 0:
            raise bad_field("top_n", f"must not be negative, got {self.top_n}")
        return [one if isinstance(one, str) else one.text for one in self.documents]


def _check_count(found: Sequence[object], field: str) -> None:
    if not 1 <= len(found) <= MAX_DOCUMENTS:
        raise bad_field(field, f"1 to {MAX_DOCUMENTS} of them, got {len(found)}")


# --- the routes -----------------------------------------------------------------------------------

async def score(http: HttpRequest) -> Response:
    """Handles `/v1/score`."""
    call, body = call_of(http), await bodies.read(http, ScoreBody)
    model = await call.chosen.model(body)
    answer = {"model": model.name, "created": int(time())}
    if body.items is not None:
        labels = _checked_labels(body.label_token_ids or [])
        found = await _completions(call, body, labels, [
            {"prompt": prompt} for prompt in body.prompts()])
        values = [label_values(one, labels) for one in found]
        scores = [softmax(each) if body.apply_softmax else [math.exp(value) for value in each]
                  for each in values]
        return JsonReply({"scores": scores, **answer, "object": "scoring",
                          "usage": _usage(found)})
    pairs = body.pairs()
    labels = await _yes_and_no(call, body)
    found = await _completions(call, body, labels, [
        judging_prompt(body.purpose, query, text) for query, text in pairs])
    data = [{"index": i, "object": "score", "score": softmax(label_values(one, labels))[0]}
            for i, one in enumerate(found)]
    return JsonReply({"id": f"score-{call.answer_id}", "object": "list", **answer,
                      "data": data, "usage": _usage(found)})


async def rerank(http: HttpRequest) -> Response:
    """Handles `/v1/rerank`."""
    call, body = call_of(http), await bodies.read(http, RerankBody)
    model = await call.chosen.model(body)
    texts = body.texts()
    labels = await _yes_and_no(call, body)
    found = await _completions(call, body, labels, [
        judging_prompt(body.purpose, body.query, text) for text in texts])
    scores = [softmax(label_values(one, labels))[0] for one in found]
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[:body.top_n or None]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
    if body.return_documents:
        for one in results:
            one["document"] = {"text": texts[one["index"]]}
    return JsonReply({"id": f"rerank-{call.answer_id}", "model": model.name,
                      "results": results, "usage": _usage(found)})


def judging_prompt(purpose: str, query: str, document: str) -> dict[str, Any]:
    """Returns the prompt of Qwen3-Reranker, for the model's chat template, which ends it after an
    empty thought where it knows `enable_thinking`."""
    asked = f"<Instruct>: {purpose}\n<Query>: {query}\n<Document>: {document}"
    return {"messages": [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}],
            "template_args": {"enable_thinking": False}}


async def _yes_and_no(call: EngineCall, body: Judging) -> list[int]:
    """Returns the tokens of yes and no. Raises `HttpError` where one of them is not a single token.
    """
    if body.label_token_ids is not None:
        if len(body.label_token_ids) != 2:
            raise bad_field("label_token_ids", "two of them, yes and no, got "
                            f"{len(body.label_token_ids)}")
        return _checked_labels(body.label_token_ids)
    found = []
    for word in (YES, NO):
        ids = await call.engine.client.tokenize(word, False)
        if len(ids) != 1:
            raise HttpError(400, f'label_token_ids: needed, since "{word}" is {len(ids)} tokens of '
                            "this model", "label_token_ids")
        found += ids
    return found


def _checked_labels(labels: list[int]) -> list[int]:
    if len(labels) > MAX_LOGPROB_IDS or len(set(labels)) != len(labels):
        raise bad_field("label_token_ids", f"at most {MAX_LOGPROB_IDS}, all different")
    return labels


async def _completions(call: EngineCall, body: Judging, labels: list[int],
                       prompts: list[dict[str, Any]]) -> list[Completion]:
    """Returns one token for each prompt, with the log-probabilities of the labels."""
    call.fields = {"logprob_token_ids": "label_token_ids", "messages": "documents",
                   "prompt": "items"}
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True,
                            logprob_token_ids=labels or None)
    found = await call.complete([
        Request(params=params, tenant=call.tenant, priority=body.priority,
                truncate_prompt_tokens=body.truncate_prompt_tokens, **prompt)
        for prompt in prompts])
    return [choices[0] for choices in found]


# --- numbers --------------------------------------------------------------------------------------

def label_values(one: Completion, labels: Sequence[int]) -> list[float]:
    """Returns the labels' log-probabilities at the last position of a prompt."""
    entry = (one.logprobs or [])[0]
    by_token = {entry.token_id: entry.logprob, **dict(entry.top)}
    return [by_token[label] for label in labels]


def softmax(values: Sequence[float]) -> list[float]:
    """Returns the softmax of log-probabilities or logits."""
    greatest = max(values)
    parts = [math.exp(value - greatest) for value in values]
    return [part / sum(parts) for part in parts]


def _usage(found: Sequence[Completion]) -> dict[str, int]:
    tokens = sum(one.usage.prompt_tokens for one in found)
    return {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
