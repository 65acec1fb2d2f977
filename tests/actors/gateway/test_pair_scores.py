"""Scores and rerankings by cross-encoders and by vectors, over an engine of known numbers. (By yes
and no: `test_gateway_scoring.py`.)"""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers_pooled import PooledEngine, pair_score, post, vector

from actorium.actors.client.relevance import takes_pairs
from actorium.actors.errors import ContextOverflow
from actorium.actors.params import PoolingParams

QUERY, DOCUMENTS = "what do cows eat?", ["Cows eat grass.", "Paris", "no", "Cows eat what cows do"]


def cosine(first: str, second: str) -> float:
    return sum(a * b for a, b in zip(vector(first), vector(second), strict=True))


ENGINES = {"classify": pair_score, "embed": cosine}


@pytest.mark.parametrize("task", ENGINES)
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/reranking"])
def test_a_reranking_is_in_the_order_of_the_scores(task: str, path: str) -> None:
    engine = PooledEngine(task)
    wanted = [ENGINES[task](QUERY, text) for text in DOCUMENTS]
    order = sorted(range(4), key=lambda i: -wanted[i])
    assert order != list(range(4)) and len(set(wanted)) == 4
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    answer = post(engine, path, {"model": "demo", "query": QUERY, "documents": documents,
                                 "top_n": 3}).json()
    assert [one["index"] for one in answer["results"]] == order[:3]
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(wanted[one["index"]], abs=1e-6)
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
    assert answer["usage"]["total_tokens"] == sum(len(one.prompt or "") for one in engine.asked)
    assert engine.calls == [4 if task == "classify" else 5]  # vectors of each text once


@pytest.mark.parametrize("task", ENGINES)
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"),
                                   ("data_1", "data_2")])
def test_scores_of_pairs(task: str, names: tuple[str, str]) -> None:
    for first in (QUERY, ["a b", "c", "d", "e"]):
        answer = post(PooledEngine(task), "/v1/score", {names[0]: first, names[1]: DOCUMENTS})
        sides = [first] * 4 if isinstance(first, str) else first
        assert [one["score"] for one in answer.json()["data"]] == pytest.approx(
            [ENGINES[task](*pair) for pair in zip(sides, DOCUMENTS, strict=True)], abs=1e-6)


def test_teis_shape() -> None:
    engine = PooledEngine("classify")
    body = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True, "return_text": True}
    answer = post(engine, "/rerank", body).json()
    wanted = [pair_score(QUERY, text) for text in DOCUMENTS]
    order = sorted(range(4), key=lambda i: -wanted[i])
    assert answer == [{"index": i, "score": wanted[i], "text": DOCUMENTS[i]} for i in order]
    assert {one.pooling for one in engine.asked} == {
        PoolingParams(task="classify", use_activation=False)}
    assert set(post(engine, "/rerank", {"query": "a", "texts": ["b"]}).json()[0]) == {
        "index", "score"}


@pytest.mark.parametrize(("tasks", "path", "body", "message"), [
    (["embed"], "/rerank", {"instruct": "x"}, "instruct: only of a model that answers yes or no; "
     "this one is for embed"),
    (["classify"], "/rerank", {"label_token_ids": [1, 2]}, "label_token_ids: only of a model"),
    (["embed"], "/rerank", {"use_activation": True}, "use_activation: only of a model that"),
    (["generate"], "/rerank", {"use_activation": True}, "use_activation: only of a model that"),
    (["embed"], "/rerank", {"texts": ["a"], "raw_scores": True}, "raw_scores: only of a model"),
    (["token_embed"], "/rerank", {}, "model: cannot score texts"),
    (["embed"], "/v1/score", {"items": ["a"], "label_token_ids": [1]},
     "model: 'demo' does not generate text; it is for embed"),
    (["classify"], "/v1/score", {"text_1": "a"}, "text_1: text_1 and text_2 are needed"),
    (["classify"], "/v1/score", {"queries": ["a", "b"], "documents": ["a"]},
     "queries: one, or as many as documents: 1, got 2")])
def test_what_does_not_fit_the_model_is_refused_by_name(
        tasks: list[str], path: str, body: dict[str, Any], message: str) -> None:
    body = ({"query": "q", "documents": ["a"]} if path == "/rerank" else {}) | body
    answer = post(PooledEngine(*tasks), path, body)
    assert answer.status_code == 400 and json.loads(answer.text)["error"]["message"].startswith(
        message), answer.text


def test_a_classifier_of_several_classes_has_no_one_score() -> None:
    answer = post(PooledEngine("classify", labels=["a", "b", "c"]), "/rerank", {
        "query": "q", "documents": ["a"]})
    assert answer.json()["error"]["message"] == \
        "model: gives 3 scores of a text; a pair needs a model with one"


def test_an_error_names_the_documents() -> None:
    engine = PooledEngine("classify")
    engine.failing[1] = ContextOverflow("prompt: is too long", "prompt")
    answer = post(engine, "/rerank", {"query": "q", "documents": ["a", "b"]})
    assert answer.json()["error"]["message"] == "documents: is too long"


PAIRS = "{% for m in messages if m.role in ['system', 'query', 'document'] %}{{ m.content }}"


@pytest.mark.parametrize(("template", "pairs"), [
    (PAIRS, True), ('{{ messages | selectattr("role", "eq", "document") }}', False),
    ('{{ messages | selectattr("role", "eq", "query") }}{% if m["role"] == "document" %}', True),
    ('{% if m.role == "user" %}\n{"query": "a", "document": 1}', False), ("", False)])
def test_templates_for_pairs(template: str, pairs: bool) -> None:
    assert takes_pairs(template) == pairs


@pytest.mark.parametrize("instruct", [None, "Find the cow"])
def test_a_template_for_pairs_makes_a_classifier_s_prompt(instruct: str | None) -> None:
    engine = PooledEngine("classify")
    engine.template = PAIRS
    body = {"query": QUERY, "documents": DOCUMENTS[:1], "instruct": instruct}
    assert post(engine, "/rerank", body).status_code == 200
    (request,) = engine.asked
    assert request.prompt is None and request.text_pair is None
    assert not request.add_generation_prompt and request.messages is not None
    assert [tuple(turn.values()) for turn in request.messages] == [
        *[("system", instruct)] * bool(instruct), ("query", QUERY), ("document", DOCUMENTS[0])]
    assert post(engine, "/rerank", body | {"label_token_ids": [1, 2]}).status_code == 400
