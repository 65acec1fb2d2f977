"""`/v1/score` and `/v1/rerank`: how well documents answer a query (`client/relevance.py`).

Requests and answers have the shapes of vLLM (Jina's and Cohere's for reranking); for `query` with
`items` those of SGLang, for `texts` in the place of documents those of Text Embeddings Inference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import time
from typing import Any

from msgspec import Struct, structs
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.relevance import (
    PairScorer,
    PairScores,
    ScoringOptions,
    check_labels,
    label_params,
    label_values,
    softmax,
)
from actorium.actors.client.requests import Completion, Request
from actorium.actors.gateway.api.pooled_answers import (
    list_answer,
    pooled_usage,
    prompt_tokens_of,
)
from actorium.actors.gateway.engine_call import EngineCall, call_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import bad_field
from actorium.actors.gateway.http.replies import JsonReply
from actorium.actors.gateway.served_model import ServedModel

MAX_DOCUMENTS = 1000
"""Of one request."""
PAIR_FIELDS = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
"""vLLM's names of both sides of pairs."""


class ScoringBody(Struct, kw_only=True):
    """The fields of both scoring and reranking."""

    model: str | None = None
    instruct: str | None = None
    """The purpose of the query; of models that answer yes or no."""
    instruction: str | None = None
    """Another name of `instruct`."""
    label_token_ids: list[int] | None = None
    """The tokens of yes and of no, where they are others."""
    use_activation: bool | None = None
    """False = a cross-encoder's score as it is, without sigmoid; None = as the model says."""
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    timeout: float | None = None
    keep_alive: str | float | None = None
    """How long the model's engine stays after this request, where there are several models."""
    user: str | None = None
    request_id: str | None = None

    @property
    def options(self) -> ScoringOptions:
        """Returns how pairs are scored."""
        return ScoringOptions(instruct=self.instruct or self.instruction,
                              label_token_ids=self.label_token_ids,
                              use_activation=self.use_activation)


class ScoreBody(ScoringBody, kw_only=True):
    """Two sides of pairs (vLLM, by three pairs of names), or `query` and `items` (SGLang)."""

    text_1: str | list[str] | None = None
    """One text for all of `text_2`, or as many."""
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    query: str | list[int] | None = None
    """Stands before each of `items`, without a template."""
    items: str | list[str | list[int]] | None = None
    apply_softmax: bool = False
    """Scores of an item sum up to 1."""
    item_first: bool = False

    @property
    def pair_fields(self) -> tuple[str, str]:
        """Returns the names under which the pairs are given."""
        return next((names for names in PAIR_FIELDS
                     if any(getattr(self, name) is not None for name in names)), PAIR_FIELDS[0])

    def pairs(self) -> list[tuple[str, str]]:
        """Returns the pairs. Raises `HttpError`."""
        names = self.pair_fields
        sides = [[side] if isinstance(side, str) else side
                 for side in (getattr(self, name) for name in names)]
        first, second = sides
        if first is None or second is None:
            raise bad_field(names[0], f"{names[0]} and {names[1]} are needed, or query and items")
        _check_count(second, names[1])
        if len(first) not in (1, len(second)):
            raise bad_field(names[0],
                            f"one, or as many as {names[1]}: {len(second)}, got {len(first)}")
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


class RerankBody(ScoringBody, kw_only=True):
    query: str
    documents: list[str | RerankDocument] = []
    texts: list[str] | None = None
    """TEI's and llama-server's name of the documents; the answer is TEI's, too."""
    top_n: int | None = None
    """How many of the best results are returned; None or 0 = all."""
    return_documents: bool = True
    raw_scores: bool = False
    """TEI's: as `use_activation=false`."""
    return_text: bool = False
    """TEI's: the answer has the documents."""

    def given_texts(self) -> list[str]:
        """Returns the documents' texts. Raises `HttpError`."""
        documents = self.documents if self.texts is None else self.texts
        _check_count(documents, "documents" if self.texts is None else "texts")
        if self.top_n is not None and self.top_n < 0:
            raise bad_field("top_n", f"must not be negative, got {self.top_n}")
        return [one if isinstance(one, str) else one.text for one in documents]

    @property
    def options(self) -> ScoringOptions:
        return structs.replace(super().options, use_activation=False) if self.raw_scores \
            else super().options


def _check_count(texts: Sequence[object], field: str) -> None:
    if not 1 <= len(texts) <= MAX_DOCUMENTS:
        raise bad_field(field, f"1 to {MAX_DOCUMENTS} of them, got {len(texts)}")


# --- the routes -----------------------------------------------------------------------------------

async def score(http: HttpRequest) -> Response:
    """Handles `/v1/score`."""
    call, body = call_of(http), await bodies.read(http, ScoreBody)
    model = await call.chosen.model(body)
    if body.items is not None:
        return JsonReply(await _label_scores(call, model, body))
    pairs = body.pairs()
    scores, tokens = await _pair_scores(call, model, body, pairs, body.pair_fields[1])
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    return JsonReply(list_answer(call, model, "score", data, tokens))


async def rerank(http: HttpRequest) -> Response:
    """Handles `/v1/rerank`."""
    call, body = call_of(http), await bodies.read(http, RerankBody)
    model = await call.chosen.model(body)
    texts = body.given_texts()
    scores, tokens = await _pair_scores(
        call, model, body, [(body.query, text) for text in texts],
        "documents" if body.texts is None else "texts")
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[:body.top_n or None]
    if body.texts is not None:
        return JsonReply([{"index": i, "score": scores[i]}
                          | ({"text": texts[i]} if body.return_text else {}) for i in best])
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
    if body.return_documents:
        for one in results:
            one["document"] = {"text": texts[one["index"]]}
    return JsonReply({"id": f"rerank-{call.answer_id}", "model": model.name,
                      "results": results, "usage": pooled_usage(tokens)})


async def _pair_scores(call: EngineCall, model: ServedModel, body: ScoringBody,
                       pairs: Sequence[tuple[str, str]], field: str) -> PairScores:
    """field: the body's name of the documents, for errors."""
    call.fields = {"logprob_token_ids": "label_token_ids"} | dict.fromkeys(
        ("messages", "prompt", "text_pair"), field)
    if getattr(body, "raw_scores", False):
        call.fields["use_activation"] = "raw_scores"

    async def run(requests: list[Request]) -> list[Completion]:
        return [choices[0] for choices in await call.complete(requests)]

    scorer = PairScorer(model.info, run, call.engine.client.tokenize, **_fields(call, body))
    return await scorer.score(pairs, body.options)


async def _label_scores(call: EngineCall, model: ServedModel, body: ScoreBody) -> dict[str, Any]:
    """Returns SGLang's answer: the probabilities of labels behind each item."""
    model.check_task("generate")
    labels = check_labels(body.label_token_ids or [])
    call.fields = {"logprob_token_ids": "label_token_ids", "prompt": "items"}
    params, fields = label_params(labels), _fields(call, body)
    completions = [choices[0] for choices in await call.complete([
        Request(prompt=prompt, params=params, **fields) for prompt in body.prompts()])]
    values = [label_values(completion, labels) for completion in completions]
    scores = [softmax(each) if body.apply_softmax else [math.exp(value) for value in each]
              for each in values]
    return {"scores": scores, "model": model.name, "created": int(time()), "object": "scoring",
            "usage": pooled_usage(prompt_tokens_of(completions))}


def _fields(call: EngineCall, body: ScoringBody) -> dict[str, Any]:
    """Returns the fields of every request to the engine."""
    return {"tenant": call.tenant, "priority": body.priority, "timeout": body.timeout,
            "truncate_prompt_tokens": body.truncate_prompt_tokens}
