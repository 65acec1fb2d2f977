"""Whole models with random weights, in this process: plans made by hand, two under way, so that
nothing but the launch path and the device is measured. And transformers on the same shape.

A step's floor is the bytes of the weights that it reads and of the keys and values it attends to,
over the bandwidth of a copy in the same run.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from gpu_bench import Part

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.messages import Admit, StepPlan, StepResult
from actorium.actors.params import Resolved
from actorium.gpu.device import Opened, open_device
from actorium.gpu.pools import page_bytes
from actorium.gpu.runner import Runner
from actorium.gpu.timing import clock

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
         "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "hidden_act": "silu",
         "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 128_001}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
         "max_position_embeddings": 512, "eos_token_id": 127}
HYBRID = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
          "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
          "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
          "vocab_size": 248_320, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
          "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
          "eos_token_id": 248_044, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
          "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
          "mtp_num_hidden_layers": 1, "layer_types": (["linear_attention"] * 3
                                                      + ["full_attention"]) * 8,
          "rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
                              "partial_rotary_factor": 0.25}}
SMALL_HYBRID = SMALL | {"linear_key_head_dim": 16, "linear_value_head_dim": 16,
                        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                        "num_hidden_layers": 2, "rope_parameters": {
                            "rope_type": "default", "rope_theta": 1e4,
                            "partial_rotary_factor": 0.5},
                        "layer_types": ["linear_attention", "full_attention"]}
GRAPHS = "1,2,4,8,16,32,128,256"
SEGMENTS = "16,32,64,128,256,512"
"""One more than there are unless asked for: to see where they no longer help."""
WARM, STEPS = 8, 64
ACCEPTANCE = "0.8,0.6"
PAGE = 16


def shape_of(kind: dict[str, Any], toy: bool) -> dict[str, Any]:
    """config.json of LLAMA or HYBRID."""
    if not toy:
        return kind
    return kind | (SMALL if kind is LLAMA else SMALL_HYBRID)


def settings(toy: bool, path: Path, batch: int, speculative: str = "off") -> Config:
    """Of a model directory."""
    return Config(
        model=ModelConfig(model=str(path), load_format="dummy"),
        memory=MemoryConfig(memory_fraction=0.8, kv_cache_bytes=16 << 20, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=batch,
                                  max_num_batched_tokens=64 if toy else 8192),
        speculation=SpeculationConfig(speculative=speculative, force_acceptance=ACCEPTANCE
                                      if speculative != "off" else ""),
        device=DeviceConfig(device="cpu" if toy else "cuda", threads=1 if toy else 0,
                            kernels="torch" if toy else "auto", graph_batch_sizes=GRAPHS,
                            graph_token_counts=SEGMENTS))


@contextmanager
def opened(part: Part, kind: dict[str, Any], batch: int, speculative: str = "off",
           ) -> Iterator[tuple[Opened, dict[str, float]]]:
    """A device with a model of this shape, and the seconds that each phase took."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(shape_of(kind, part.toy)))
        seconds: dict[str, float] = {}
        config = settings(part.toy, Path(scratch), batch, speculative)
        yield open_device(config, 1, lambda phase, detail: None, seconds), seconds


class Driver:
    """Sequences of one length that decode. Two plans are under way, as with overlap."""

    def __init__(self, runner: Runner, batch: int, context: int, steps: int, drafts: int = 0,
                 budget: int = 8192) -> None:
        """steps: how many there will be. Raises `ValueError` if the pages do not suffice."""
        self.runner, self._drafts, self._number = runner, drafts, 0
        self._clock = clock(runner.moves.device)
        self._slots = np.arange(1, batch + 1, dtype=np.int32)
        most = runner.tables.max_len
        self._width = -(-min(context + (steps + 4) * (drafts + 1), most) // PAGE)
        pages = runner.pools[0].pages
        if batch * self._width >= pages:
            raise ValueError(f"{batch} x {context} tokens need {batch * self._width} pages, "
                             f"{pages - 1} are there")
        self._admit(batch, context, budget)

    def _admit(self, batch: int, context: int, budget: int) -> None:
        """Without recurrent layers what is cached is believed, so only the rest of the last page
        need be computed."""
        own = 1 + np.arange(batch * self._width, dtype=np.int32).reshape(batch, self._width)
        cached = 0 if self.runner.states is not None else (context - 1) // PAGE
        params = Resolved(max_tokens=1 << 20, temperature=0.0)
        tokens = (np.arange(context, dtype=np.int32) * 7919) % self.runner.tables.vocab
        groups = self.runner.tables.groups
        admits = [Admit(slot, tokens.tobytes(), context, cached * PAGE,
                        np.tile(own[i, :cached], groups).tobytes(), params, slot)
                  for i, slot in enumerate(self._slots.tolist())]
        rest = [(slot, index, *[own[i, index]] * groups)
                for i, slot in enumerate(self._slots.tolist())
                for index in range(cached, self._width)]
        left = np.full(batch, context - cached * PAGE)
        appends = np.array(rest, np.int32).tobytes()
        while left.any():
            room, extend = budget, []
            for i in np.flatnonzero(left).tolist():
                count = min(int(left[i]), room)
                if count:
                    extend.append((i + 1, count))
                    left[i] -= count
                    room -= count
            self._run(StepPlan(1, 0, admit=admits, page_appends=appends,
                               extend=np.array(extend, np.int32).tobytes(), drafts=self._drafts))
            admits, appends = [], b""

    def _run(self, plan: StepPlan) -> StepResult:
        return self._clock.launch(self.runner, plan).result()

    def prompt(self, tokens: int) -> None:
        """One more sequence, for `steps` to extend."""
        slot, used = len(self._slots) + 1, len(self._slots) * self._width
        pages = 1 + used + np.arange(-(-tokens // PAGE), dtype=np.int32)
        if pages[-1] >= self.runner.pools[0].pages:
            raise ValueError(f"{tokens} tokens need {len(pages)} pages more")
        prompt = (np.arange(tokens, dtype=np.int32) * 7919) % self.runner.tables.vocab
        params = Resolved(max_tokens=1, temperature=0.0)
        self._run(StepPlan(1, 0, admit=[Admit(
            slot, prompt.tobytes(), tokens, 0, np.tile(pages, self.runner.tables.groups).tobytes(),
            params, slot)]))

    def steps(self, count: int, extend: int = 0) -> dict[str, float]:
        """Figures of so many steps; extend: tokens of `prompt` in each of them."""
        waiting: deque[Any] = deque()
        results: list[StepResult] = []
        more = np.array([len(self._slots) + 1, extend], np.int32).tobytes() if extend else b""
        start = perf_counter()
        for _ in range(count):
            plan = StepPlan(1, 0, decode=self._slots.tobytes(), drafts=self._drafts, extend=more)
            waiting.append(self._clock.launch(self.runner, plan))
            if len(waiting) == 2:
                results.append(waiting.popleft().result())
        results += [timed.result() for timed in waiting]
        wall = perf_counter() - start
        busy, idle, late = (sum(getattr(r, name) for r in results)
                            for name in ("busy_us", "idle_us", "late_us"))
        tokens = sum(sum(r.counts) for r in results)
        return {"step_us": wall / count * 1e6, "device_us": statistics.median(
                    r.busy_us for r in results), "idle_ratio": (idle + late) / max(1, busy + idle),
                "tokens_s": tokens / wall, "tokens_a_step": tokens / count / len(self._slots)}

    def close(self) -> None:
        """The slots are free again."""
        taken = np.array(list(self.runner.tables.sequences), np.int32)
        self._run(StepPlan(1, 0, release=taken.tobytes()))


def measured(runner: Runner, batch: int, context: int, drafts: int, toy: bool) -> dict[str, float]:
    """A batch from its admission to its end."""
    warm, steps = (1, 3) if toy else (WARM, STEPS)
    driver = Driver(runner, batch, context, warm + steps, drafts, 64 if toy else 8192)
    try:
        driver.steps(warm)
        return driver.steps(steps)
    finally:
        driver.close()


def floor_us(opened_: Opened, batch: int, context: float, copy_gbs: float) -> float:
    """Of a decode step; see above. Embeddings are looked up, not read."""
    runner, shape = opened_.runner, opened_.runner.model.shape
    weights = opened_.footprint.measured["weights"]
    if not shape.tied:
        weights -= shape.vocab_size * shape.hidden * shape.dtype.itemsize
    kv = sum(page_bytes(shape, PAGE, pool.dtype, len(pool.layers)) for pool in runner.pools) / PAGE
    state = 0 if runner.states is None else 2 * batch * sum(
        layer.state[0].numel() * layer.state.element_size() for layer in runner.states.layers)
    return (weights + batch * context * kv + state) / copy_gbs / 1e3


def decode(part: Part, copy_gbs: float) -> None:
    """The Llama-3.1-8B shape: every batch and context, from graphs; some without them."""
    batches, contexts = ((1, 2), (40,)) if part.toy else ((1, 8, 32, 128, 256), (1024, 4096))
    with opened(part, LLAMA, batches[-1]) as (device, seconds):
        runner = device.runner
        part.facts |= {"seconds": seconds, "bytes": device.footprint.measured,
                       "planned": device.footprint.planned,
                       "graphs": len(runner.graphs.shapes) if runner.graphs else 0,
                       "segments": runner.segments.shapes if runner.segments else []}
        part.save()
        for pool in runner.pools:
            for layer in pool.layers:
                layer.normal_()  # zeros would let the device clock higher
        for context in contexts:
            for batch in batches:
                _row(part, device, batch, context, copy_gbs)
        graphs, runner.graphs = runner.graphs, None
        for batch in (1, 32) if graphs else ():
            _row(part, device, batch, contexts[0], copy_gbs)
        runner.graphs = graphs
        _mixed(part, device, contexts[0])


def _mixed(part: Part, device: Opened, context: int) -> None:
    """Steps of a piece of a prompt and some decodes: in segments, and operation by operation."""
    runner, batch = device.runner, 1 if part.toy else 8
    warm, steps = (1, 2) if part.toy else (3, 12)
    segments = runner.segments
    for tokens in (10, 40) if part.toy else (16, 32, 64, 128, 256, 512):
        for own in (segments, None) if segments else (None,):
            how = "segments" if own else "eager"
            with part.trying(f"mixed {tokens}, {how}", 0.0 if part.toy else 2.0) as go:
                if go:
                    runner.segments = own
                    driver = Driver(runner, batch, context, warm + steps)
                    driver.prompt((tokens - batch) * (warm + steps) + 1)
                    try:
                        driver.steps(warm, tokens - batch)
                        found = driver.steps(steps, tokens - batch)
                    finally:
                        driver.close()
                    part.add(batch=batch, context=context, tokens=tokens, how=how,
                             step_us=found["step_us"], device_us=found["device_us"],
                             idle_ratio=found["idle_ratio"])
    runner.segments = segments


def _row(part: Part, device: Opened, batch: int, context: int, copy_gbs: float) -> None:
    how = "graphs" if device.runner.graphs else "eager"
    with part.trying(f"decode {batch} x {context}, {how}", 0.0 if part.toy else 3.0) as go:
        if go:
            found = measured(device.runner, batch, context, 0, part.toy)
            floor = floor_us(device, batch, context + (WARM + STEPS / 2), copy_gbs)
            part.add(batch=batch, context=context, how=how, **found, floor_us=floor,
                     share=floor / found["step_us"])


def speculation(part: Part, copy_gbs: float) -> None:
    """A hybrid with an MTP layer: two drafts a step, accepted with fixed probabilities, beside none
    (which the ratio leaves out where it failed)."""
    batches, context = ((1, 2), 20) if part.toy else ((1, 4, 8), 1024)
    base: dict[int, float] = {}
    for drafts, speculative in ((0, "off"), (2, "mtp:2,fixed")):
        with part.trying(f"{drafts} drafts", 0.0 if part.toy else 30.0) as go:
            if go:
                _drafting(part, (drafts, speculative), batches, context, copy_gbs, base)


def _drafting(part: Part, how: tuple[int, str], batches: Sequence[int], context: int,
              copy_gbs: float, base: dict[int, float]) -> None:
    """One model; a function of its own, so that it is gone before the next one is loaded."""
    drafts, speculative = how
    with opened(part, HYBRID, batches[-1], speculative) as (device, _):
        for batch in batches:
            found = measured(device.runner, batch, context, drafts, part.toy)
            if not drafts:
                base[batch] = found["tokens_s"]
            floor = floor_us(device, batch, context, copy_gbs) if not drafts else 0.0
            ratio = {"ratio": found["tokens_s"] / base[batch]} if batch in base else {}
            share = {"share": floor / found["step_us"]} if floor else {}
            part.add(batch=batch, context=context, drafts=drafts, **found, **ratio, **share)


def transformers(part: Part) -> None:
    """`generate` of the Llama shape, static batches, sdpa: tokens a second while decoding."""
    import transformers as theirs

    theirs.logging.set_verbosity_error()
    raw = {k: v for k, v in shape_of(LLAMA, part.toy).items()
           if k not in ("architectures", "model_type", "torch_dtype")}
    with torch.device(part.device):
        model = theirs.AutoModelForCausalLM.from_config(
            theirs.LlamaConfig(**raw), dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    context, new = (20, 3) if part.toy else (1024, 32)
    for batch in (1, 2) if part.toy else (1, 8, 32, 128):
        with part.trying(f"transformers {batch} x {context}", 0.0 if part.toy else 8.0) as go:
            if go:
                spent = [_generate(part, model, batch, context, count) for count in (2, 2, new + 2)]
                step = max(1e-9, spent[2] - spent[1]) / new
                part.add(batch=batch, context=context, step_us=step * 1e6, tokens_s=batch / step)


def _generate(part: Part, model: Any, batch: int, context: int, count: int) -> float:
    """Seconds."""
    ids = torch.randint(0, model.config.vocab_size, (batch, context), device=part.device)
    start = perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
                             eos_token_id=None)
        out[0, -1].item()
    return perf_counter() - start
