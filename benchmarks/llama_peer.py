"""llama.cpp on a GGUF file, for `peers.py`: run by the interpreter of an environment that has
`llama-cpp-python`, and nothing of ours.

    python benchmarks/llama_peer.py FILE [--threads 2] [--repeat 3]

One stream and 32 at once of 128 tokens in and 64 out, greedy, in batches of the library's own
continuous batching (every sequence's token in one `llama_decode`), and one prompt of 2,048. Prints
a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from statistics import median

import llama_cpp as llama
import numpy as np

INPUT, OUTPUT, STREAMS, PROMPT = 128, 64, 32, 2048


@llama.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    """What the library would log."""


class Session:
    """A context, and what is decoded in it."""

    def __init__(self, path: str, threads: int) -> None:
        llama.llama_log_set(_silent, None)
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        self.model = llama.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise SystemExit(f"{path}: llama.cpp does not load it")
        own = llama.llama_context_default_params()
        own.n_ctx = STREAMS * 256
        own.n_batch = own.n_ubatch = PROMPT
        own.n_seq_max = STREAMS
        own.kv_unified = True  # one sequence may have all of n_ctx
        own.n_threads = own.n_threads_batch = threads
        self.context = llama.llama_init_from_model(self.model, own)
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(max(PROMPT, STREAMS * INPUT), 0, 1)

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, whether sampled) and return the greedy tokens."""
        batch, wanted = self.batch, []
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, sampled) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = sampled
            if sampled:
                wanted.append(i)
        if llama.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        rows = (llama.llama_get_logits_ith(self.context, i) for i in wanted)
        return [int(np.ctypeslib.as_array(row, (self.vocabulary,)).argmax()) for row in rows]

    def forget(self) -> None:
        """Empty the cache."""
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def prompt(self, length: int) -> list[int]:
        """Random tokens."""
        return [random.randrange(self.vocabulary) for _ in range(length)]

    def streams(self, count: int) -> tuple[float, list[float]]:
        """(seconds in all, seconds of each step that decodes) of so many sequences at once."""
        self.forget()
        prompts = [self.prompt(INPUT) for _ in range(count)]
        began, tokens = time.perf_counter(), []
        for first in range(0, count, PROMPT // INPUT):
            part = range(first, min(count, first + PROMPT // INPUT))
            tokens += self.decode([(token, at, s, at == INPUT - 1) for s in part
                                   for at, token in enumerate(prompts[s])])
        gaps = []
        for at in range(INPUT, INPUT + OUTPUT - 1):
            before = time.perf_counter()
            tokens = self.decode([(token, at, s, True) for s, token in enumerate(tokens)])
            gaps.append(time.perf_counter() - before)
        return time.perf_counter() - began, gaps

    def whole_prompt(self) -> float:
        """Seconds to the first token of a prompt of PROMPT tokens."""
        self.forget()
        tokens, began = self.prompt(PROMPT), time.perf_counter()
        self.decode([(token, at, 0, at == PROMPT - 1) for at, token in enumerate(tokens)])
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    session = Session(args.file, args.threads)
    session.streams(1)
    one = [gap for _ in range(args.repeat) for gap in session.streams(1)[1]]
    many = [session.streams(STREAMS) for _ in range(args.repeat)]
    gaps = sorted(gap for _, own in many for gap in own)
    prompt = median(session.whole_prompt() for _ in range(args.repeat))
    print(json.dumps({
        "one stream, tok/s": 1 / median(one),
        "32 streams, tok/s": STREAMS * OUTPUT / median(seconds for seconds, _ in many),
        "prompt of 2,048, tok/s": PROMPT / prompt,
        "gap p50, ms": 1000 * gaps[len(gaps) // 2],
        "gap p99, ms": 1000 * gaps[len(gaps) * 99 // 100]}))


if __name__ == "__main__":
    main()
