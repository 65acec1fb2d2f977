"""Classes and a cross-encoder's scores over HTTP and the SDK, against transformers on tiny random
models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from helpers_encoders import write_encoder
from helpers_pooling import write_classifier
from helpers_text import byte_level
from tokenizers.processors import TemplateProcessing

from actorium.actors.client.client import Client
from actorium.actors.gateway import actor
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.rundir import engine_dir

QUERY, DOCUMENTS = "what do cows eat?", ["Cows eat grass.", "Paris is in France.", "¿qué?"]


class Classifier:
    """An engine of a model with so many labels, and the same model in transformers: a decoder with
    several, or an encoder with one, which tells the texts of a pair apart."""

    def __init__(self, folder: Path, labels: int) -> None:
        self.tokenizer, self.folder = byte_level(), folder
        self.tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B:1")
        self.labels = [f"class-{i}" for i in range(labels)]
        sizes = {"vocab_size": self.tokenizer.get_vocab_size(),
                 "id2label": dict(enumerate(self.labels))}
        if labels == 1:
            self.oracle = write_encoder(folder, "BertForSequenceClassification", **sizes)
        else:
            self.oracle = write_classifier(folder, "LlamaForSequenceClassification",
                                           pad_token_id=None, **sizes)
        self.tokenizer.save(str(folder / "tokenizer.json"))

    def logits(self, *texts: str) -> Any:
        pair = self.tokenizer.encode(*texts)
        types = {"token_type_ids": torch.tensor([pair.type_ids])} if len(self.labels) == 1 else {}
        with torch.no_grad():
            return self.oracle(torch.tensor([pair.ids]), **types).logits[0]

    @contextmanager
    def served(self) -> Iterator[tuple[httpx.Client, Client]]:
        with Engine(str(self.folder), port=0, device="cpu", dtype="float32", log_level="error",
                    served_model_name=("it",)) as engine:
            found = actor.where(engine_dir(engine.name))
            assert found is not None
            with httpx.Client(base_url=found.url, timeout=60) as http:
                yield http, engine.client


def test_classes(tmp_path: Path) -> None:
    model = Classifier(tmp_path, 3)
    wanted = [torch.softmax(model.logits(text), 0).tolist() for text in DOCUMENTS]
    with model.served() as (http, client):
        data = http.post("/classify", json={"input": DOCUMENTS}).json()["data"]
        for one, probabilities in zip(data, wanted, strict=True):
            assert one["probs"] == pytest.approx(probabilities, abs=1e-5)
            assert one["label"] == f"class-{probabilities.index(max(probabilities))}"
        raw = http.post("/pooling", json={"input": DOCUMENTS[0], "use_activation": False}).json()
        assert raw["data"][0]["data"] == pytest.approx(model.logits(DOCUMENTS[0]).tolist(),
                                                       abs=1e-4)
        for one, probabilities in zip(client.classify(DOCUMENTS), wanted, strict=True):
            assert one == pytest.approx(dict(zip(model.labels, probabilities, strict=True)),
                                        abs=1e-5)
        chat = http.post("/v1/chat/completions", json={
            "messages": [{"role": "user", "content": "a"}]})
        assert chat.json()["error"]["message"].startswith("model: 'it' does not generate text")
        card = http.get("/v1/models").json()["data"][0]
        assert card["tasks"] == ["classify"]


def test_a_cross_encoder(tmp_path: Path) -> None:
    model = Classifier(tmp_path, 1)
    wanted = [torch.sigmoid(model.logits(QUERY, text)).item() for text in DOCUMENTS]
    assert len({round(one, 3) for one in wanted}) == len(DOCUMENTS)
    with model.served() as (http, client):
        answer = http.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()
        scores = {one["index"]: one["relevance_score"] for one in answer["results"]}
        assert [scores[i] for i in range(3)] == pytest.approx(wanted, abs=1e-5)
        assert list(scores) == sorted(range(3), key=lambda i: -wanted[i])
        assert client.score(QUERY, DOCUMENTS) == pytest.approx(wanted, abs=1e-5)
        raw = http.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS,
                                        "use_activation": False}).json()
        assert [one["score"] for one in raw["data"]] == pytest.approx(
            [model.logits(QUERY, text).item() for text in DOCUMENTS], abs=1e-4)
        shown = http.post("/api/show", json={"model": "it"}).json()
        assert shown["capabilities"] == []
