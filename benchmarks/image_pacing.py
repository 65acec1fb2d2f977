"""Gaps between the tokens of a stream while others send new images, beside prompts of as many
tokens of text.

    python benchmarks/image_pacing.py [--seconds 20] [--turns 3] [--target-itl MS] [--json FILE]

Scheduler and runner in one process, over a small Qwen3-VL with random weights: one stream decodes
without end, and eight clients send one prompt each at a time, of which a token is wanted. Loads
take turns in one process; all times are the machine's own. What counts is the ratio of the p99
gaps: images must not cost a stream more than text does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import deque
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MediaConfig,
    MemoryConfig,
    ModelConfig,
    RecoveryConfig,
    SchedulerConfig,
)
from actorium.actors.core import Context
from actorium.actors.messages import MediaItem, Reset, StepPlan, Submit, TokenBatch
from actorium.actors.params import Resolved, TextParams
from actorium.actors.scheduler import scheduler_actor
from actorium.gpu.vision.media_steps import MediaSteps
from actorium.gpu.worker.device import open_device
from actorium.gpu.worker.timing import make_timer

CLIENTS, SIDE, MERGE = 8, 24, 2
TOKENS = SIDE * SIDE // MERGE**2
IMAGE, START, END = 1001, 1003, 1004
BEFORE, BEHIND = 16, 16
PIXELS = 3 * 2 * 16 * 16
SHAPE = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
    "image_token_id": IMAGE, "video_token_id": 1002, "dtype": "float32",
    "text_config": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
                    "vocab_size": 1024, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6,
                    "rope_theta": 1e6, "tie_word_embeddings": True,
                    "rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10]}},
    "vision_config": {"depth": 12, "hidden_size": 384, "intermediate_size": 1536, "num_heads": 6,
                      "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": MERGE,
                      "out_hidden_size": 256, "in_channels": 3, "num_position_embeddings": 576,
                      "deepstack_visual_indexes": [3, 7], "hidden_act": "gelu_pytorch_tanh"}}


class Load:
    """One run: the stream's gaps while the clients go on."""

    def __init__(self, images: bool, target: float | None, folder: str) -> None:
        scheduler = SchedulerConfig(max_num_seqs=16, target_itl=target)
        config = Config(
            model=ModelConfig(model=folder, load_format="dummy", max_model_len=65536),
            memory=MemoryConfig(max_total_tokens=1 << 17), scheduler=scheduler,
            device=DeviceConfig(device="cpu", threads=1),
            media=MediaConfig(max_encoder_tokens=1024),
            recovery=RecoveryConfig(restart=False))
        opened = open_device(config, 1, lambda *_: None, {})
        self.runner, self.images = opened.runner, images
        steps = self.runner.tables.images
        assert isinstance(steps, MediaSteps)
        steps.read = self._patches
        self.steps = steps
        self.core = scheduler_actor.build(Context(config, Path("/nowhere"), "scheduler", 1, 0))
        self.core.on_message(opened.ready, perf_counter())
        self.timer = make_timer(torch.device("cpu"))
        self.plans: deque[StepPlan] = deque()
        self.asked = self.answered = 0
        self.gaps: list[float] = []
        self.last = 0.0
        self._sids: dict[int, str] = {}
        self._rng = np.random.default_rng(7)
        self._one = self._rng.standard_normal((SIDE * SIDE, PIXELS)).astype(np.float32)

    def _patches(self, key: bytes) -> NDArray[np.float32]:
        return self._one

    def ask(self, stream: bool = False) -> None:
        """The next prompt, which is like no other."""
        self.asked += 1
        ids = self._rng.integers(5, 1000, BEFORE + TOKENS + BEHIND + 2).astype(np.int32)
        media = []
        if self.images and not stream:
            first = BEFORE + 1
            ids[first - 1], ids[first:first + TOKENS], ids[first + TOKENS] = START, IMAGE, END
            key = sha256(str(self.asked).encode()).digest()
            media = [MediaItem(key, False, 1, SIDE, SIDE, first, first + TOKENS)]
        self.core.on_message(Submit(
            "stream" if stream else f"r{self.asked}", b"c", ids.tobytes(), 1,
            Resolved(max_tokens=60000 if stream else 1, temperature=0.0), TextParams(), 1,
            media=media), perf_counter())

    def run(self, seconds: float) -> None:
        """Clients send, and each sends again once it is answered."""
        begun = perf_counter()
        while perf_counter() - begun < seconds:
            for send in self.core.on_wake(perf_counter()):
                message = send.message
                if isinstance(message, StepPlan):
                    self.plans.append(message)
                elif isinstance(message, Reset):
                    self.runner.reset()
                elif isinstance(message, TokenBatch):
                    self._heard(message)
                elif hasattr(message, "sid"):
                    self._sids[message.sid] = message.rid
            if self.plans:
                self.core.on_message(
                    self.timer.launch(self.runner, self.plans.popleft()).result(), perf_counter())

    def _heard(self, batch: TokenBatch) -> None:
        now = perf_counter()
        for sid in np.frombuffer(batch.sids, np.int64).tolist():
            if self._sids.get(sid) == "stream":
                if self.last:
                    self.gaps.append(now - self.last)
                self.last = now
        for event in batch.events:
            if event.finish_reason:
                assert event.error is None, event.error
                self.answered += 1
                self.ask()


def measured(target: float | None, seconds: float, turns: int) -> dict[str, Any]:
    """Of both loads, a figure for each turn."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        loads = {name: Load(name == "images", target, folder) for name in ("text", "images")}
        for own in loads.values():
            own.ask(stream=True)
            own.run(2)
            for _ in range(CLIENTS):
                own.ask()
            own.run(seconds / 2)  # the pacer learns
        for _ in range(turns):
            for name, own in loads.items():
                own.gaps, own.last, own.answered = [], 0.0, 0
                before = own.steps.encodings
                own.run(seconds)
                told = found.setdefault(name, {"p50": [], "p99": [], "max": [], "answers": [],
                                               "encodings": []})
                for part, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                    told[part].append(round(1e3 * float(np.quantile(own.gaps, share)), 2))
                told["answers"].append(own.answered)
                told["encodings"].append(own.steps.encodings - before)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--target-itl", type=float, default=None)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    found = measured(args.target_itl, args.seconds, args.turns)
    for name, told in found.items():
        print(f"{name:>8}: " + "; ".join(f"{part} {values}" for part, values in told.items()))
    ratio = float(np.median(found["images"]["p99"]) / np.median(found["text"]["p99"]))
    print(f"p99 with images over p99 without: {ratio:.3f}")
    if args.json:
        args.json.write_text(json.dumps({**found, "ratio": round(ratio, 4)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
