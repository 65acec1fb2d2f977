"""Vectors of many texts on a CPU, by an engine, sentence-transformers and vLLM in one run.

Peers run in processes of their own, each with the Python of an environment that has it (`--peer`,
`--vllm`); without, the engine alone is measured. All get the same words, and the vectors are
compared.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from harness import Rows, scenario
from scenarios.peers import peer_environment

from actorium import AsyncClient, Engine, PoolingParams, SamplingParams
from actorium.actors.client.requests import Request

SENTENCE_TRANSFORMERS = """
import json, sys, time
import numpy as np, torch
from sentence_transformers import SentenceTransformer
task = json.load(open(sys.argv[1]))
torch.set_num_threads(task["threads"])
model = SentenceTransformer(task["model"], device="cpu")
for _ in range(task["runs"] + 1):
    began = time.perf_counter()
    found = model.encode(task["texts"], batch_size=task["batch"], normalize_embeddings=True,
                         show_progress_bar=False)
    print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
np.save(task["out"], found)
"""
VLLM = """
import json, sys, time
import numpy as np
from vllm import LLM
if __name__ == "__main__":
    task = json.load(open(sys.argv[1]))
    model = LLM(task["model"], runner="pooling")
    for _ in range(task["runs"] + 1):
        began = time.perf_counter()
        found = model.embed(task["texts"], use_tqdm=False)
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
    np.save(task["out"], np.array([own.outputs.embedding for own in found], np.float32))
"""
WORDS = ("the sky is blue and grass green water stone river mountain house tree of a city people "
         "walk under old bridges while rain falls on quiet streets")


def texts_of(count: int, shortest: int, longest: int, seed: int = 1) -> list[str]:
    """So many texts of so many common words each, of which most are a token."""
    dice = random.Random(seed)
    return [" ".join(dice.choices(WORDS.split(), k=dice.randint(shortest, longest)))
            for _ in range(count)]


def by_engine(model: Path, texts: list[str], threads: int, dtype: str, runs: int
              ) -> tuple[list[float], np.ndarray]:
    """(seconds of each run, f32[texts, width])."""
    asked = [Request(prompt=text, pooling=PoolingParams(task="embed")) for text in texts]
    seconds, vectors = [], np.zeros(0, np.float32)
    with Engine(model=str(model), threads=threads, dtype=dtype, device="cpu") as engine:
        for _ in range(runs + 1):
            began, rows = perf_counter(), {}
            for number, answer in engine.client.run(asked, window=len(asked)):
                if isinstance(answer, Exception):
                    raise answer
                rows[number] = answer[0].pooled.data
            seconds.append(perf_counter() - began)
        vectors = np.stack([np.frombuffer(rows[i], np.float32) for i in range(len(asked))])
    return seconds[1:], vectors


def by_peer(python: str, code: str, task: dict[str, Any], folder: Path
            ) -> tuple[list[float], np.ndarray]:
    """The same by a peer's code, which is told its task by a file."""
    program, told = folder / "peer.py", folder / "task.json"
    program.write_text(code)
    told.write_text(json.dumps(task | {"out": str(folder / "vectors.npy")}))
    done = subprocess.run([python, program, told], text=True, stdout=subprocess.PIPE,
                          env=peer_environment())  # vLLM may crash at its end, behind its answers
    seconds = [json.loads(line)["seconds"] for line in done.stdout.splitlines()
               if line.startswith('{"seconds"')]
    return seconds[1:], np.load(folder / "vectors.npy")


@scenario
def embeddings(model: Path, count: int = 1000, shortest: int = 126, longest: int = 126,
               threads: int = 2, dtypes: list[str] = ["float32", "bfloat16"],  # noqa: B006
               runs: int = 3, batch: int = 32, peer: str = "", vllm: str = "") -> Rows:
    """Texts a second, tokenizing included: the median of runs behind one that warms up.
    shortest, longest: words of a text; batch: texts of a call of sentence-transformers; peer: the
    Python that has it; vllm: the Python that has vLLM, which chooses dtype and threads by itself.
    """
    texts, vectors = texts_of(count, shortest, longest), []
    task = {"model": str(model), "texts": texts, "threads": threads, "runs": runs, "batch": batch}
    for name, python, code in (("sentence-transformers", peer, SENTENCE_TRANSFORMERS),
                               ("vLLM", vllm, VLLM)):
        if python:
            with tempfile.TemporaryDirectory() as folder:
                seconds, found = by_peer(python, code, task, Path(folder))
            yield _row(name, seconds, found, vectors)
    for dtype in dtypes:
        yield _row(f"actorium {dtype}", *by_engine(model, texts, threads, dtype, runs), vectors)


def _row(by: str, seconds: list[float], found: np.ndarray, vectors: list[np.ndarray]
         ) -> dict[str, Any]:
    """Vectors are compared with those of the first that made any, the only one in `vectors`."""
    first = vectors[0] if vectors else found
    vectors[:] = [first]
    return {"by": by, "texts_per_s": round(len(found) / median(seconds), 1),
            "least_cosine": round(float((found * first).sum(1).min()), 6)}


@scenario
def beside(model: Path, streams: int = 4, count: int = 400, words: int = 126, at_once: int = 32,
           tokens: int = 4000, threads: int = 2, dtype: str = "bfloat16") -> Rows:
    """Gaps between tokens of chat streams, alone and beside texts that are pooled.
    count, words: of the texts; at_once: texts that are asked for at a time; tokens: most of a
    stream."""
    with Engine(model=str(model), threads=threads, dtype=dtype, device="cpu") as engine:
        for name, texts in (("streams alone", 0), ("beside texts", count)):
            asked = texts_of(texts, words, words, seed=2)
            yield {"what": name} | asyncio.run(_gaps(engine.name, streams, asked, at_once, tokens))


async def _gaps(engine: str, streams: int, texts: list[str], at_once: int, tokens: int
                ) -> dict[str, float]:
    """Milliseconds, from when all streams run until all texts are pooled (without: 20 seconds)."""
    gaps: list[float] = []
    begun = asyncio.Semaphore(0)
    async with AsyncClient(engine) as client, AsyncClient(engine) as pooling:
        async def stream(seed: int) -> None:
            params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True)
            last = 0.0
            async for delta in client.stream("Once upon a time", params):
                if delta.token_ids:
                    now = perf_counter()
                    if last:
                        gaps.append(1e3 * (now - last))
                    else:
                        begun.release()
                    last = now

        running = [asyncio.create_task(stream(seed)) for seed in range(streams)]
        for _ in range(streams):
            await begun.acquire()
        await asyncio.sleep(2)
        gaps.clear()
        start = perf_counter()
        if texts:
            asked = [Request(prompt=text, pooling=PoolingParams(task="embed")) for text in texts]
            async for _, answer in pooling.run(asked, window=at_once):
                if isinstance(answer, Exception):
                    raise answer
        else:
            await asyncio.sleep(20)
        seconds, found = perf_counter() - start, sorted(gaps)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return {"p50_ms": round(found[len(found) // 2], 1),
            "p99_ms": round(found[len(found) * 99 // 100], 1), "max_ms": round(found[-1], 1),
            "tokens_per_s": round(len(found) / seconds, 1),
            "texts_per_s": round(len(texts) / seconds, 1)}
