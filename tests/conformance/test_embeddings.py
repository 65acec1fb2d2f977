"""Vectors and rankings by the clients of OpenAI's, Ollama's and Cohere's APIs: openai, langchain,
llama-index, litellm, ollama, cohere; and mteb's tasks over the openai package."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import rankers
from wire import Server

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would look for one on the net
cohere = pytest.importorskip("cohere")
langchain = pytest.importorskip("langchain_openai")
langchain_ollama = pytest.importorskip("langchain_ollama")
litellm = pytest.importorskip("litellm")
llama_index = pytest.importorskip("llama_index.embeddings.openai")
ollama = pytest.importorskip("ollama")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.conformance
TEXTS = ["Once there was a fox.", "The dog sleeps.", "¿Qué comen las vacas?"]
QUERY = "what do cows eat?"


def wanted(server: Server, texts: list[str] = TEXTS, **more: Any) -> Any:
    """What the SDK says; equal to what differs by a client's own arithmetic, or by that of another
    batch."""
    return pytest.approx(np.array(server.client.embed(texts, **more)), rel=1e-2, abs=1e-3)


@pytest.fixture
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


def test_openai(server: Server, client: Any) -> None:
    for more in ({}, {"encoding_format": "float"}):
        found = client.embeddings.create(model=server.model, input=TEXTS, **more)
        assert [one.embedding for one in found.data] == wanted(server)
        assert found.usage.prompt_tokens == found.usage.total_tokens > 10
    cut = client.embeddings.create(model=server.model, input=TEXTS, dimensions=16)
    assert [one.embedding for one in cut.data] == wanted(server, dimensions=16)
    ids = [server.client.tokenize(text) for text in TEXTS]
    assert [one.embedding for one in client.embeddings.create(
        model=server.model, input=ids).data] == wanted(server)
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]"):
        client.embeddings.create(model=server.model, input=["a", "a b" * 30_000])
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="no-such-model", input="a")


def test_openai_asynchronously(server: Server) -> None:
    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
            return await asyncio.gather(*(client.embeddings.create(
                model=server.model, input=text) for text in TEXTS))

    assert [one.data[0].embedding for one in asyncio.run(run())] == wanted(server)


def test_langchain(server: Server) -> None:
    given = {"model": server.model, "base_url": f"{server.url}/v1", "api_key": "-",
             "max_retries": 0}
    # Without the switch it counts tokens by a vocabulary of OpenAI's, which it would download.
    model = langchain.OpenAIEmbeddings(check_embedding_ctx_length=False, **given)
    assert model.embed_documents(TEXTS) == wanted(server)
    assert [model.embed_query(TEXTS[0])] == wanted(server, TEXTS[:1])
    assert asyncio.run(langchain.OpenAIEmbeddings(
        check_embedding_ctx_length=False, dimensions=8, **given).aembed_documents(TEXTS)
        ) == wanted(server, dimensions=8)


def test_llama_index(server: Server) -> None:
    model = llama_index.OpenAIEmbedding(model_name=server.model, api_base=f"{server.url}/v1",
                                        api_key="-", max_retries=0)
    assert model.get_text_embedding_batch(TEXTS) == wanted(server)
    assert [model.get_query_embedding(TEXTS[0])] == wanted(server, TEXTS[:1])


@pytest.mark.parametrize("kind", ["openai", "hosted_vllm"])
def test_litellm(server: Server, kind: str) -> None:
    given = {"model": f"{kind}/{server.model}", "api_base": f"{server.url}/v1", "api_key": "-",
             "input": TEXTS, "encoding_format": "float"}
    found = litellm.embedding(**given)
    assert [one["embedding"] for one in found.data] == wanted(server)
    assert found.usage.prompt_tokens > 10


def test_ollama(server: Server) -> None:
    client = ollama.Client(host=server.url)
    found = client.embed(server.model, TEXTS)
    assert [list(one) for one in found.embeddings] == wanted(server)
    assert found.prompt_eval_count > 10 and found.total_duration > 0
    cut = client.embed(server.model, TEXTS[0], dimensions=8)
    assert [list(cut.embeddings[0])] == wanted(server, TEXTS[:1], dimensions=8)
    old = client.embeddings(server.model, TEXTS[0]).embedding
    assert [list(old)] == wanted(server, TEXTS[:1], normalize=False)
    with pytest.raises(ollama.ResponseError, match="context length"):
        client.embed(server.model, "a b" * 30_000, truncate=False)
    assert len(client.embed(server.model, "a b" * 30_000).embeddings) == 1


def test_langchain_ollama(server: Server) -> None:
    model = langchain_ollama.OllamaEmbeddings(model=server.model, base_url=server.url)
    assert model.embed_documents(TEXTS) == wanted(server)


# --- a cross-encoder ------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rankers.Ranker]:
    """An engine of a tiny cross-encoder, and the same model in transformers."""
    with rankers.serving_ranker(tmp_path_factory.mktemp("ranker")) as served:
        yield served


def in_order(ranker: rankers.Ranker) -> list[int]:
    scores = [ranker.score(QUERY, text) for text in TEXTS]
    return sorted(range(len(TEXTS)), key=lambda i: -scores[i])


def test_cohere(ranker: rankers.Ranker) -> None:
    for client in (cohere.Client(api_key="-", base_url=ranker.server.url),
                   cohere.ClientV2(api_key="-", base_url=ranker.server.url)):
        found = client.rerank(model=ranker.server.model, query=QUERY, documents=TEXTS)
        assert [one.index for one in found.results] == in_order(ranker)
        for one in found.results:
            assert one.relevance_score == pytest.approx(ranker.score(QUERY, TEXTS[one.index]),
                                                        abs=2e-3)
        best = client.rerank(model=ranker.server.model, query=QUERY, documents=TEXTS, top_n=1)
        assert [one.index for one in best.results] == in_order(ranker)[:1]


@pytest.mark.parametrize("kind", ["cohere", "hosted_vllm", "jina_ai"])
def test_litellm_reranks(ranker: rankers.Ranker, kind: str) -> None:
    base = f"{ranker.server.url}/v1/rerank" if kind == "cohere" else f"{ranker.server.url}/v1"
    found = litellm.rerank(model=f"{kind}/{ranker.server.model}", query=QUERY, documents=TEXTS,
                           api_base=base, api_key="-", top_n=2)
    assert [one["index"] for one in found.results] == in_order(ranker)[:2]
