"""`/v1/score` and `/v1/rerank` against transformers' logits, and vectors against its last row, on a
tiny random model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from helpers_models import oracle_logits, write_checkpoint
from helpers_text import byte_level
from tokenizers import AddedToken

from actorium.actors.client.client import Client
from actorium.actors.client.relevance import INSTRUCTION, JUDGE, softmax
from actorium.actors.errors import InvalidRequest
from actorium.actors.gateway import actor
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.rundir import engine_dir

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}")
QUERY, DOCUMENTS = "what do cows eat?", ["Cows eat grass.", "Paris is in France.", "no", "¿qué?"]


class Scored:
    """The engine's HTTP API, and the same model in transformers."""

    def __init__(self, http: httpx.Client, client: Client, oracle: Any, tokenizer: Any) -> None:
        self.http, self.client, self.oracle, self.tokenizer = http, client, oracle, tokenizer
        self.labels = [tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")]

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refusal(self, path: str, **body: Any) -> str:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["message"])

    def logits(self, text: str) -> Any:
        """At the last position."""
        return oracle_logits(self.oracle, self.tokenizer.encode(text).ids)[-1].double()

    def vector(self, ids: list[int], dimensions: int | None = None) -> list[float]:
        """The last token's row behind the final norm, with the length 1."""
        with torch.no_grad():
            rows = self.oracle.model(torch.tensor([ids])).last_hidden_state[0]
        vector: list[float] = torch.nn.functional.normalize(rows[-1, :dimensions], dim=0).tolist()
        return vector

    def wanted(self, query: str, document: str, purpose: str = INSTRUCTION,
               labels: list[int] | None = None) -> float:
        """Probability of yes, written out as Qwen does."""
        logits = self.logits(
            f"<|system|>\n{JUDGE}<eos>\n<|user|>\n<Instruct>: {purpose}\n<Query>: {query}\n"
            f"<Document>: {document}<eos>\n<|assistant|>\n<think>\n\n</think>\n\n")
        return float(torch.softmax(logits[labels or self.labels], 0)[0])


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scored]:
    path: Path = tmp_path_factory.mktemp("reranker")
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("yes", special=False), AddedToken("no", special=False)])
    oracle = write_checkpoint(path, vocab_size=tokenizer.get_vocab_size(),
                              max_position_embeddings=1024)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(
        {"chat_template": TEMPLATE, "eos_token": "<eos>"}))
    with Engine(str(path), port=0, device="cpu", dtype="float32", log_level="error",
                served_model_name=("judge",)) as engine:
        found = actor.where(engine_dir(engine.name))
        assert found is not None
        with httpx.Client(base_url=found.url, timeout=60) as http:
            yield Scored(http, engine.client, oracle, tokenizer)


def test_a_reranking_has_the_probabilities_of_the_logits(scored: Scored) -> None:
    wanted = [scored.wanted(QUERY, text) for text in DOCUMENTS]
    assert len({round(each, 4) for each in wanted}) == len(wanted)  # else order says nothing
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        answer = scored.post(path, model="judge", query=QUERY, documents=documents)
        order = [one["index"] for one in answer["results"]]
        assert order == sorted(range(4), key=lambda i: -wanted[i])
        for one in answer["results"]:
            assert one["relevance_score"] == pytest.approx(wanted[one["index"]], abs=2e-5)
            assert one["document"] == {"text": DOCUMENTS[one["index"]]}
        assert answer["usage"]["total_tokens"] > 4 * 100 and answer["model"] == "judge"
    best = scored.post("/rerank", query=QUERY, documents=documents, top_n=2,
                       return_documents=False, instruct="Find the cow")
    again = [scored.wanted(QUERY, text, "Find the cow") for text in DOCUMENTS]
    assert [(one["index"], one.get("document")) for one in best["results"]] == [
        (i, None) for i in sorted(range(4), key=lambda i: -again[i])[:2]]


def test_scores_of_pairs(scored: Scored) -> None:
    one_to_many = scored.post("/v1/score", model="judge", text_1=QUERY, text_2=DOCUMENTS)
    assert [one["score"] for one in one_to_many["data"]] == pytest.approx(
        [scored.wanted(QUERY, text) for text in DOCUMENTS], abs=2e-5)
    assert (one_to_many["object"], one_to_many["data"][1]["index"]) == ("list", 1)
    assert one_to_many["data"][0]["object"] == "score"
    pairs = scored.post("/score", text_1=["a", "b"], text_2=["c", "d"])
    assert [one["score"] for one in pairs["data"]] == pytest.approx(
        [scored.wanted("a", "c"), scored.wanted("b", "d")], abs=2e-5)
    labels = scored.labels[::-1]
    turned = scored.post("/score", text_1="a", text_2="c", label_token_ids=labels)
    assert turned["data"][0]["score"] == pytest.approx(1 - scored.wanted("a", "c"), abs=2e-5)


def test_scores_of_labels_as_sglang_has_them(scored: Scored) -> None:
    labels, items = [5, 200, scored.labels[0]], [" grass", " stones"]
    rows = [torch.softmax(scored.logits(QUERY + item), 0)[labels] for item in items]
    plain = scored.post("/v1/score", model="judge", query=QUERY, items=items,
                        label_token_ids=labels)
    assert plain["object"] == "scoring"
    for got, row in zip(plain["scores"], rows, strict=True):
        assert got == pytest.approx(row.tolist(), rel=1e-3, abs=1e-7)
    among = scored.post("/v1/score", query=QUERY, items=items, label_token_ids=labels,
                        apply_softmax=True)
    for got, row in zip(among["scores"], rows, strict=True):
        assert got == pytest.approx((row / row.sum()).tolist(), abs=2e-5)
    ids = [scored.tokenizer.encode(text).ids for text in (QUERY, *items)]
    by_ids = scored.post("/v1/score", query=ids[0], items=ids[1:], label_token_ids=labels)
    assert by_ids["scores"][0] == pytest.approx(plain["scores"][0], rel=1e-3)
    first = scored.post("/v1/score", query=QUERY, items=[items[0]], label_token_ids=labels,
                        item_first=True)
    row = torch.softmax(scored.logits(items[0] + QUERY), 0)[labels]
    assert first["scores"][0] == pytest.approx(row.tolist(), rel=1e-3, abs=1e-7)


def test_vectors_of_a_model_that_generates(scored: Scored) -> None:
    ids = [scored.tokenizer.encode(text).ids for text in DOCUMENTS]
    close = pytest.approx
    answer = scored.post("/v1/embeddings", model="judge", input=DOCUMENTS)
    for one, tokens in zip(answer["data"], ids, strict=True):
        assert one["embedding"] == close(scored.vector(tokens), abs=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    by_ids = scored.post("/v1/embeddings", input=ids, dimensions=8)
    for one, tokens in zip(by_ids["data"], ids, strict=True):
        assert one["embedding"] == close(scored.vector(tokens, 8), abs=1e-5)
    long = scored.post("/api/embed", input=QUERY * 200)
    assert long["prompt_eval_count"] == 1024
    assert scored.refusal("/v1/embeddings", input=["a", QUERY * 200]).startswith("input[1]: ")
    assert scored.refusal("/v1/embeddings", input="a", dimensions=10**5).startswith("dimensions: ")
    assert scored.refusal("/classify", input="a").startswith("model: 'judge' does not classify")


def test_the_client_embeds_and_scores_as_http_does(scored: Scored) -> None:
    answer = scored.post("/v1/embeddings", input=DOCUMENTS)
    vectors = scored.client.embed(DOCUMENTS)
    for vector, one in zip(vectors, answer["data"], strict=True):
        assert vector.tolist() == pytest.approx(one["embedding"], abs=1e-5)
    assert scored.client.embed(DOCUMENTS[0], dimensions=4).tolist() == pytest.approx(
        scored.vector(scored.tokenizer.encode(DOCUMENTS[0]).ids, 4), abs=1e-5)
    assert scored.client.score(QUERY, DOCUMENTS) == pytest.approx(
        [scored.wanted(QUERY, text) for text in DOCUMENTS], abs=2e-5)
    with pytest.raises(InvalidRequest, match="texts: must not be empty"):
        scored.client.embed([])
    with pytest.raises(InvalidRequest, match="classify"):
        scored.client.classify("a")


@pytest.mark.parametrize(("path", "body", "message"), [
    ("/rerank", {"query": "q", "documents": []}, "documents: 1 to 1000 of them, got 0"),
    ("/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n: must not be negative"),
    ("/rerank", {"query": "q", "documents": ["a"], "label_token_ids": [1]},
     "label_token_ids: two of them, yes and no, got 1"),
    ("/rerank", {"query": "q", "documents": ["a"], "label_token_ids": [1, 10**6]},
     "label_token_ids: "),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1: one, or as many"),
    ("/score", {"text_1": "a"}, "text_1: text_1 and text_2 are needed"),
    ("/score", {"query": "q", "items": ["a"]}, "label_token_ids: needed with items"),
    ("/score", {"query": "q", "items": [[1]], "label_token_ids": [1]}, "items: texts and token"),
    ("/score", {"query": "q", "items": ["a"], "label_token_ids": [1, 1]}, "label_token_ids: at")])
def test_what_cannot_be_scored_is_refused_in_one_line(scored: Scored, path: str,
                                                      body: dict[str, Any], message: str) -> None:
    found = scored.refusal(path, **body)
    assert found.startswith(message) and "\n" not in found


def test_softmax_holds_for_far_apart_and_large_values() -> None:
    assert softmax([-1000.0, -1001.0]) == pytest.approx([1 / (1 + math.exp(-1)),
                                                         1 / (1 + math.e)])
    assert softmax([0.0, -2000.0]) == [1.0, 0.0]
