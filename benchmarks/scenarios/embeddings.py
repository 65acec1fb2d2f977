"""Vectors of many texts on a CPU, by an engine and by sentence-transformers in one run.

sentence-transformers runs in a process of its own, with the Python of an environment that has it
(`--peer PYTHON`); without, the engine alone is measured. Both get the same words, and their vectors
are compared.
"""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from harness import Rows, scenario

from actorium import Engine, PoolingParams
from actorium.actors.client.requests import Request

PEER = """
import json, sys, time
import numpy as np, torch
from sentence_transformers import SentenceTransformer
task = json.loads(sys.stdin.readline())
torch.set_num_threads(task["threads"])
model = SentenceTransformer(task["model"], device="cpu")
for _ in range(task["runs"] + 1):
    began = time.perf_counter()
    found = model.encode(task["texts"], batch_size=task["batch"], normalize_embeddings=True,
                         show_progress_bar=False)
    print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
np.save(task["out"], found)
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


def by_peer(python: str, model: Path, texts: list[str], threads: int, runs: int, batch: int,
            out: Path) -> tuple[list[float], np.ndarray]:
    """The same by sentence-transformers."""
    task = {"model": str(model), "texts": texts, "threads": threads, "runs": runs, "batch": batch,
            "out": str(out)}
    done = subprocess.run([python, "-c", PEER], input=json.dumps(task) + "\n", text=True,
                          check=True, stdout=subprocess.PIPE)
    seconds = [json.loads(line)["seconds"] for line in done.stdout.splitlines()]
    return seconds[1:], np.load(out)


@scenario
def embeddings(model: Path, count: int = 1000, shortest: int = 126, longest: int = 126,
               threads: int = 2, dtypes: list[str] = ["float32", "bfloat16"],  # noqa: B006
               runs: int = 3, batch: int = 32, peer: str = "",
               out: Path = Path("build/peer_vectors.npy")) -> Rows:
    """Texts a second, tokenizing included: the median of runs behind one that warms up.
    shortest, longest: words of a text; batch: texts of a call of sentence-transformers; peer: the
    Python that has it."""
    texts = texts_of(count, shortest, longest)
    theirs = None
    if peer:
        out.parent.mkdir(parents=True, exist_ok=True)
        seconds, theirs = by_peer(peer, model, texts, threads, runs, batch, out)
        yield {"by": "sentence-transformers", "texts_per_s": round(count / median(seconds), 1)}
    for dtype in dtypes:
        seconds, ours = by_engine(model, texts, threads, dtype, runs)
        yield {"by": f"actorium {dtype}", "texts_per_s": round(count / median(seconds), 1),
               **({} if theirs is None else
                  {"least_cosine": round(float((ours * theirs).sum(1).min()), 6)})}
