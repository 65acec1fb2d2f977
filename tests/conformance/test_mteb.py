"""mteb, the benchmark of vectors: a task of its own kind over texts that stand here, since its
published ones are downloaded, by an encoder that asks the engine through the openai package."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from wire import Server

mteb = pytest.importorskip("mteb")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.conformance
PAIRS = [("A fox sleeps.", "The fox rests.", 4.5), ("A dog runs.", "One cat sits.", 1.0),
         ("Cows eat grass.", "Cows eat grass.", 5.0), ("It rains.", "The sun shines.", 0.5),
         ("Two boys play.", "Children are playing.", 3.5)]


class Encoder:
    """What mteb asks for vectors."""

    mteb_model_meta = None

    def __init__(self, server: Server) -> None:
        self._model = server.model
        self._client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)

    def encode(self, inputs: Any, **_: Any) -> Any:
        return np.concatenate([self._vectors(list(batch["text"])) for batch in inputs])

    def _vectors(self, texts: list[str]) -> Any:
        answer = self._client.embeddings.create(model=self._model, input=texts)
        return np.array([one.embedding for one in answer.data])

    def similarity(self, first: Any, second: Any) -> Any:
        return first @ second.T

    def similarity_pairwise(self, first: Any, second: Any) -> Any:
        return (first * second).sum(-1)


def task() -> Any:
    """How similar sentences are, beside what people say."""
    from datasets import Dataset, DatasetDict
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    unknown = dict.fromkeys((
        "reference", "date", "domains", "task_subtypes", "license", "annotations_creators",
        "dialect", "sample_creation", "bibtex_citation"))

    class LocalSTS(AbsTaskSTS):
        metadata = TaskMetadata(
            name="LocalSTS", description="Pairs of sentences", type="STS", category="t2t",
            modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"],
            main_score="cosine_pearson", dataset={"path": "none", "revision": "1"}, **unknown)
        min_score, max_score = 0, 5

        def load_data(self, **_: Any) -> None:
            self.dataset = DatasetDict({"test": Dataset.from_list([
                {"sentence1": first, "sentence2": second, "score": score}
                for first, second, score in PAIRS])})
            self.data_loaded = True

    return LocalSTS()


def test_a_task(server: Server) -> None:
    [result] = mteb.evaluate(Encoder(server), [task()], cache=None).task_results
    first, second = (np.array(server.client.embed([pair[side] for pair in PAIRS]))
                     for side in (0, 1))
    cosines = (first * second).sum(-1)
    wanted = np.corrcoef(cosines, [score for _, _, score in PAIRS])[0, 1]
    assert result.scores["test"][0]["main_score"] == pytest.approx(wanted, abs=1e-4)
