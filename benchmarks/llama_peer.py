"""llama.cpp through its Python binding, in a process that stays: `PYTHON benchmarks/llama_peer.py`,
with the Python of an environment that has `llama-cpp-python`.

Each line of JSON on stdin is a task, answered by one line on stdout. A server would only add to
what these figures say of llama.cpp.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp as lib
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

PEER_BATCH, UBATCH = 2048, 512
"""Tokens of a call, and of a pass: llama.cpp's defaults."""
CELLS = {1: 4096, 32: 32 * 256}
"""Tokens that a context holds, by its sequences."""
LOG = lib.llama_log_callback(lambda level, text, _: level >= 4 and os.write(2, text))


def quantise(source: str, target: str, kind: int, pure: bool, columns: dict[str, int]) -> None:
    """Writes a file with its matrices in another type. kind: `llama_ftype`. columns: of each
    matrix; each column weighs the same where a type asks for an importance matrix."""
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.pure, params.nthread, params.allow_requantize = kind, pure, 2, True
    kept = [(name.encode(), np.ones(size, dtype=np.float32)) for name, size in columns.items()]
    weigh = (lib.llama_model_imatrix_data * (len(kept) + 1))()
    for entry, (name, numbers) in zip(weigh, kept, strict=False):
        entry.name, entry.size = name, len(numbers)
        entry.data = numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if columns:
        params.imatrix = weigh
    if lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise RuntimeError(f"{target}: llama.cpp does not quantise so")


class PeerContext:
    """A model's cache for so many sequences."""

    def __init__(self, model: Any, sequences: int, threads: int) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = CELLS[sequences], sequences, True
        params.n_batch, params.n_ubatch = PEER_BATCH, UBATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = lib.llama_init_from_model(model, params)
        self._batch = lib.llama_batch_init(PEER_BATCH, 0, 1)
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def clear(self) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> np.ndarray:
        """Runs (token, position, sequence, whether its logits are wanted), at most PEER_BATCH, and
        returns the logits, f32[wanted, vocabulary], until the next call."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if lib.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        count = sum(row[3] for row in rows)
        return np.ctypeslib.as_array(lib.llama_get_logits(self._context), (count, self._vocab))


class LlamaPeer:
    def __init__(self) -> None:
        self._model: Any = None
        self._contexts: dict[int, PeerContext] = {}
        self._chats: dict[tuple[Any, ...], Any] = {}

    def load(self, model: str, threads: int) -> str:
        """Loads a file in place of the last one, with a context for one sequence and one for 32."""
        self._contexts.clear()
        params = lib.llama_model_default_params()
        self._model = lib.llama_model_load_from_file(model.encode(), params)
        if not self._model:
            raise RuntimeError(f"{model}: llama.cpp cannot load it")
        self._contexts = {count: PeerContext(self._model, count, threads) for count in CELLS}
        return str(lib.__version__)

    def logits(self, windows: list[list[int]], target: str) -> None:
        """Writes f32[tokens, vocabulary], each window read on its own."""
        context, found = self._contexts[1], []
        for window in windows:
            context.clear()
            found.append(context.decode([(token, at, 0, True)
                                         for at, token in enumerate(window)]).copy())
        np.save(target, np.concatenate(found))

    def run(self, prompts: list[list[int]], output: int) -> dict[str, Any]:
        """Completes prompts of one length greedily, and returns tokens and seconds."""
        context = self._contexts[1 if len(prompts) == 1 else 32]
        began, length = time.perf_counter(), len(prompts[0])
        context.clear()
        rows = [(token, at, sequence, at == length - 1)
                for sequence, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
        last = np.concatenate([context.decode(rows[at:at + PEER_BATCH]).argmax(-1)
                               for at in range(0, len(rows), PEER_BATCH)]).tolist()
        tokens = [[token] for token in last]
        for at in range(length, length + output - 1):
            last = context.decode([(token, at, sequence, True)
                                   for sequence, token in enumerate(last)]).argmax(-1).tolist()
            for own, token in zip(tokens, last, strict=True):
                own.append(token)
        return {"seconds": time.perf_counter() - began, "tokens": tokens}


    def chat(self, model: str, messages: list[dict[str, str]], output: int, lookup: list[int],
             threads: int) -> dict[str, Any]:
        """Answers greedily; tokens, and seconds from the first piece to the last. lookup: drafts of
        the prompt's own text, 0 = none, and how many tokens are looked for."""
        if (model, *lookup) not in self._chats:
            drafts = LlamaPromptLookupDecoding(lookup[1], lookup[0]) if lookup[0] else None
            self._chats[model, *lookup] = lib.Llama(
                model, n_ctx=CELLS[1], n_threads=threads, n_threads_batch=threads,
                draft_model=drafts, logits_all=drafts is not None, verbose=False)
        pieces = self._chats[model, *lookup].create_chat_completion(
            messages, temperature=0, max_tokens=output, stream=True)
        times = [time.perf_counter() for piece in pieces
                 if piece["choices"][0]["delta"].get("content")]
        return {"tokens": len(times), "seconds": times[-1] - times[0]}


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    lib.llama_log_set(LOG, ctypes.c_void_p(0))
    lib.llama_backend_init()
    peer = LlamaPeer()
    tasks: dict[str, Callable[..., object]] = {
        "quantise": quantise, "load": peer.load, "logits": peer.logits, "run": peer.run,
        "chat": peer.chat}
    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer = {"answer": tasks[task.pop("task")](**task)}
        except RuntimeError as error:
            answer = {"error": str(error)}
        os.write(answers, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
