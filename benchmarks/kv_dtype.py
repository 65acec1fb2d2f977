"""What the dtype of the KV cache changes: perplexity of texts, greedy answers, and speed.

    python benchmarks/kv_dtype.py MODEL README.md docs/memory.md --json out.json

One engine for each dtype, over the same work. Perplexity is of the first `--tokens` of each text,
of all of them together. Answers are compared with those of the first dtype: how many are the same,
and how many tokens all have in common with theirs before the first that differs. Seconds of a
decode step are those of one sequence behind a prompt of `--tokens`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from actorium import Engine, SamplingParams

QUESTIONS = (
    "What is the capital of France?", "Explain why the sky is blue.", "Write a haiku about rain.",
    "List three uses of a paperclip.", "What is 12 times 7? Show your work.",
    "Who wrote Romeo and Juliet, and what is it about?", "Give me a recipe for pancakes.",
    "Translate to Spanish: the book is on the table.", "What does a database index do?",
    "Tell me a short story about a fox and a river.")


def measured(model: str, dtype: str, texts: list[str], tokens: int, answer: int) -> dict[str, Any]:
    """Of one engine."""
    with Engine(model=model, kv_cache_dtype=dtype, speculative="off", log_level="error") as engine:
        client = engine.client
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True)
        loss: list[float] = []
        for text in texts:
            ids = client.tokenize(text)[:tokens]
            told = client.generate(ids, params).prompt_logprobs or []
            loss += [-one.logprob for one in told if one is not None]
        greedy = SamplingParams(max_tokens=answer, temperature=0)
        answers = [client.chat([{"role": "user", "content": question}], greedy).token_ids
                   for question in QUESTIONS]
        prompt, more = client.tokenize("".join(texts))[:tokens], 64
        seconds = {}
        for count in (1, 1 + more, 1, 1 + more):  # the prompt is in the cache from the first on
            start = time.perf_counter()
            client.generate(prompt, SamplingParams(max_tokens=count, temperature=0,
                                                   ignore_eos=True))
            seconds[count] = time.perf_counter() - start
        step = (seconds[1 + more] - seconds[1]) / more
    return {"dtype": dtype, "tokens": len(loss), "perplexity": math.exp(sum(loss) / len(loss)),
            "loss": loss, "answers": answers, "step_ms": 1000 * step}


def compared(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the table, each beside the first."""
    base, rows = found[0], []
    for own in found:
        pairs = list(zip(own["answers"], base["answers"], strict=True))
        common = [next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                       min(len(a), len(b))) for a, b in pairs]
        change = [a - b for a, b in zip(own["loss"], base["loss"], strict=True)]
        rows.append({
            "dtype": own["dtype"], "tokens": own["tokens"],
            "perplexity": round(own["perplexity"], 4),
            "mean_change_of_loss": round(sum(change) / len(change), 5),
            "mean_absolute_change": round(sum(map(abs, change)) / len(change), 5),
            "same_answers": f"{sum(a == b for a, b in pairs)} of {len(pairs)}",
            "tokens_in_common": f"{sum(common)} of {sum(len(b) for _, b in pairs)}",
            "step_ms": round(own["step_ms"], 2)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--dtypes", default="auto,float32,fp8_e4m3,fp8_e5m2,int8")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    texts = [path.read_text() for path in given.texts]
    rows = compared([measured(given.model, dtype, texts, given.tokens, given.answer)
                     for dtype in given.dtypes.split(",")])
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
