"""transformers on the Llama shape: `generate`, static batches, sdpa; as its users run it."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from . import models, shapes
from .child import Bench


def run(bench: Bench) -> None:
    """Tokens a second while decoding; beside ours where this call has measured them."""
    import transformers as theirs

    theirs.logging.set_verbosity_error()
    raw = {k: v for k, v in models.shape_of(shapes.LLAMA, bench.toy).items()
           if k not in ("architectures", "model_type", "torch_dtype")}
    with torch.device(bench.device):
        model = theirs.AutoModelForCausalLM.from_config(
            theirs.LlamaConfig(**raw), dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    new = bench.size(32, 24)
    for own in shapes.DECODED:
        if own.name not in {row.name for row in bench.group.rows}:
            continue
        with bench.row(own.name) as go:
            if go:
                batch, context = own.small() if bench.toy else own
                spent = [_generate(bench, model, batch, context, count)
                         for count in (2, 2, new + 2)]
                step = (spent[2] - spent[1]) / new
                if step <= 0:
                    raise RuntimeError(f"{new} tokens more took no longer: {spent}")
                row: dict[str, Any] = {"batch": batch, "context": context, "step_us": step * 1e6,
                                       "tokens_s": batch / step}
                ours = {row["name"]: row for row in bench.record.group("longer and mixed")["rows"]}
                if own.name in ours:
                    row["ours_x"] = ours[own.name]["tokens_s"] * step / batch
                bench.record.add(own.name, **row)


def _generate(bench: Bench, model: Any, batch: int, context: int, count: int) -> float:
    """Seconds."""
    ids = torch.randint(0, model.config.vocab_size, (batch, context), device=bench.device)
    start = perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
                             eos_token_id=None)
        out[0, -1].item()
    return perf_counter() - start
