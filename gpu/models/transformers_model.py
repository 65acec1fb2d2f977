"""A model that transformers' own class runs, over our pages.

The class gets a step as one row of all its tokens, with their positions; what it asks of attention
goes through transformers' attention interface to the pages and the backend that our own layers use.
The shape follows from what the class does when it is tried (`transformers_trace`), before any
weight is read: what pages cannot serve is refused by name. Once the weights are there, a token is
changed to see that nothing but attention brings tokens together. On a CPU the C kernels multiply
where the class has linear layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models.gguf_folder import gguf_source
from actorium.gpu.attention.backend_choice import StepAttention, select_attention
from actorium.gpu.families.architectures import unsupported
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.stored_weights import HEAD
from actorium.gpu.families.transformers_config import any_decoder
from actorium.gpu.families.weight_formats import ONLINE
from actorium.gpu.models.decoder import LoadedModel
from actorium.gpu.models.forward_context import GroupContext
from actorium.gpu.models.pooler import load_pooler
from actorium.gpu.models.transformers_trace import (
    PAGED,
    SINKS,
    TOKENS,
    AttentionCall,
    Trace,
    body_and_head,
    error_line,
    handled_by,
    replace_norms,
    replace_products,
    split_layers,
    traced,
)
from actorium.gpu.models.transformers_weights import (
    StoredRows,
    completed,
    read_model,
    read_stored,
    stored_checkpoint,
)
from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.plan.graph_memory import BY_TRANSFORMERS
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.states import RecurrentBatch
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.gpu.weights.fp8_weights import quantised
from actorium.gpu.weights.lazy_tensors import materialised
from actorium.gpu.weights.loader import Progress
from actorium.gpu.weights.online_quantisation import quantised_rows
from actorium.gpu.weights.safetensors_reader import checkpoint_files
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.linear import Reordered
from actorium.kernels.reference.kv import write_kv

LOG = logging.getLogger("actorium.model")
ROUTERS = ("gate", "router")
"""What linear layers are called that choose experts, which stay as they are."""
MIXED = 0.01
"""Relative change of a row by that of the token before it: more is no rounding."""


class TransformersModel(LoadedModel):
    """A class of transformers with its weights. Rows are those after its final norm."""

    no_graphs = BY_TRANSFORMERS

    def __init__(self, shape: ModelShape, device: torch.device, attention: StepAttention,
                 model: Any, trace: Trace, native: bool, kernels: str, group: RankGroup) -> None:
        """model: of transformers, for text generation, on the CPU unless it was made on the device;
        trace: of its class."""
        import transformers

        super().__init__(shape, device, attention, native, kernels, group)
        if group.place.size > 1:
            split_layers(model, group.place, lambda y: group.reduce_to(y.flatten(0, -2), y.dtype
                                                                       ).view(y.shape))
        made = shape.grouped or shape.fp8 or any(hasattr(own, "stored") for own in model.modules())
        if trace.products and (made or isinstance(self.ops, NativeOps)):
            head = model.get_output_embeddings()
            replace_products(model, lambda name, own: self._product(name, own, own is head),
                             self.dtype)
        model.to(device)
        if isinstance(self.ops, NativeOps):
            replace_norms(model, self.ops.rms_norm, self.dtype)
        self.layers_by = f"transformers {transformers.__version__}"
        self._body, self._head = body_and_head(model)
        self._places = [(*shape.group_and_index(i), call.scale / shape.attention_scale)
                        for i, call in enumerate(trace.calls)]

    def _product(self, name: str, layer: nn.Linear, head: bool) -> Callable[[Tensor], Tensor]:
        """Ours in the place of a linear layer. name: that of the layer alone."""
        bias = None if layer.bias is None else layer.bias.data.to(self.device)
        stored = getattr(layer, "stored", None) or StoredRows(layer.weight.data, None)
        weight = materialised(stored.weight).to(self.device)
        if weight.is_floating_point():
            weight = self._weight_rows(name, weight, head)
        product = self.ops.linear(weight, bias)
        return product if stored.order is None else Reordered(product, stored.order)

    def _weight_rows(self, name: str, weight: Tensor, head: bool) -> Tensor:
        """The weight as `--quantization` makes it."""
        shape = self.shape
        if name in ROUTERS or head and (shape.tied or shape.grouped is None):
            return weight
        if shape.fp8 is not None:
            return quantised(weight, shape.fp8) if shape.fp8.online else weight
        made = shape.grouped if shape.grouped and shape.grouped.source == ONLINE else None
        form = made.format(HEAD if head else name) if made else None
        form = form.fitting(weight.shape[1]) if form else None
        return weight if form is None else quantised_rows(weight, form, self.device)

    @property
    def waits(self) -> bool:
        return False

    @torch.inference_mode()
    def forward(self, batches: Sequence[ForwardBatch], pools: Sequence[KVPagePool],
                recurrent: RecurrentBatch | None = None) -> Tensor:
        batch = batches[0]
        whole = [replace(own, all_rows=True) for own in batches]
        groups, places = self.group_contexts(whole, pools), iter(self._places)

        def attend(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any,
                   **options: Any) -> tuple[Tensor, None]:
            group, index, scale = next(places)
            sinks = options.get(SINKS)
            return self._attend(groups[group], index, scale, query, key, value,
                                None if sinks is None else sinks.float()), None

        with handled_by(attend):
            hidden: Tensor = self._body(input_ids=batch.tokens[None], use_cache=False,
                                        position_ids=batch.turned_to[None]).last_hidden_state[0]
        if next(places, None) is not None:
            raise RuntimeError(f"{self.shape.architecture}: fewer calls of attention than before")
        return hidden if batch.all_rows else hidden.index_select(0, batch.logit_rows)

    def _attend(self, group: GroupContext, index: int, scale: float, query: Tensor, key: Tensor,
                value: Tensor, sinks: Tensor | None) -> Tensor:
        pages, scales = group.layer(index, None)
        kv = torch.cat((key, value), 1)[0].transpose(0, 1).to(self.dtype)
        write_kv(pages, kv, group.kv_index, scales)
        q = (query if scale == 1 else query * scale)[0].transpose(0, 1).to(self.dtype)
        return group.plan.attend(q.contiguous(), pages, None, scales, sinks)[None]

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        return self._head(rows).float()

    def norm_rows(self, rows: Tensor) -> Tensor:
        return rows

    def head_logits(self, normed: Tensor) -> Tensor:
        return self.logits(normed)


# --- Loading -------------------------------------------------------------------------------------

def load_transformers(path: Path, config: Config, device: torch.device, shape: ModelShape,
                      progress: Progress, group: RankGroup) -> TransformersModel:
    """The model at `path`, ready on the device, or a rank's part of it. shape: as `read_shape` has
    it. Raises `BadModel` and `BadConfig`, before weights are read where the class or a flag is at
    fault."""
    where = path / "config.json"
    _require_flags(config)
    kind = _class_of(shape.architecture, where)
    if gguf_source(path) is not None:
        raise BadModel(f"{path}: transformers' classes (--model-impl) are not served from GGUF")
    full = completed(kind, path)
    raw = {**full.to_dict(), "architectures": [shape.architecture]}
    raw["dtype"] = shape.dtype
    shape = replace(any_decoder(raw, where, shape.dtype), max_model_len=shape.max_model_len,
                    by_transformers=shape.by_transformers, grouped=shape.grouped, fp8=shape.fp8,
                    pooling=shape.pooling)
    if (stored := stored_checkpoint(path, config, device, shape)) is not None:
        shape = replace(shape, fp8=stored.fp8_shape)
    part = shape.split(group.place.size)
    _require_fixed_ropes(full, shape, where)
    dtype = TORCH_DTYPES[shape.dtype]
    trace = traced(kind, full, dtype, shape.max_model_len, where, group.place)
    if (shape.grouped or shape.fp8) and not trace.products and stored is None:
        raise BadConfig(f"quantization: {config.model.quantization} is not served for "
                        f"{shape.architecture}, which looks at the weights of its linear layers",
                        "model.quantization")
    shape = _shape_of(trace.calls, replace(part, vocab_size=trace.vocab), where)
    attention = select_attention(shape, config, device)
    if config.model.load_format == "dummy":
        model = _random(kind, full, dtype, device, config.model.seed)
        progress("dummy", 1, 1)
    elif stored is not None:
        model = read_stored(kind, full, dtype, path, stored, trace, group.place, progress)
    else:
        checkpoint_files(path)  # says what is wrong with an index or a file
        progress("transformers", 0, 1)
        model = read_model(kind, full, dtype, path)
        progress("transformers", 1, 1)
    model.eval().requires_grad_(False)
    made = TransformersModel(shape, device, attention, model, trace, config.device.native_kernels,
                             config.device.kernels, group)
    try:
        mixes = _mixes(made)
    except Exception as error:
        raise BadModel(f"{where}: {shape.architecture}: transformers' class cannot run it: "
                       f"{error_line(error)}") from error
    if mixes:
        raise BadModel(f"{where}: {shape.architecture} brings tokens together outside attention, "
                       "which transformers' classes (--model-impl) are not served with")
    if shape.pooling is not None:
        made.pooler = load_pooler(shape.pooling, path, device, {})
    LOG.info("%s is run by the class of %s: slower than classes of ours, without passes and graphs",
             shape.architecture, made.layers_by)
    return made


def _require_flags(config: Config) -> None:
    device, why = config.device, "models that transformers' classes run (--model-impl)"
    for field, wrong, says in (
            ("passes", device.passes not in ("auto", "none", "all"), f"{why} have none"),
            ("dump_passes", device.dump_passes is not None, f"{why} have no passes"),
            ("exact", device.exact == "on", f"{why} are not exact (--exact auto serves them)"),
            ("exact_ranks", device.exact_ranks != 1, f"{why} are not exact")):
        if wrong:
            raise BadConfig(f"{field}: {says}", f"device.{field}")


def _class_of(name: str, where: Path) -> Any:
    """The class of transformers. Raises `BadModel` where it cannot be served."""
    import transformers

    kind = getattr(transformers, name)
    if not getattr(kind, "_supports_attention_backend", False):
        raise BadModel(f"{where}: {unsupported(name)}; nor is it by transformers' class "
                       "(--model-impl), which does not support its attention interface")
    return kind


def _random(kind: Any, full: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """The model with random weights, as its class draws them. Raises `BadModel`."""
    cards = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(cards), torch.device(device):
            torch.manual_seed(seed)
            return kind._from_config(full, dtype=dtype, attn_implementation=PAGED)
    except Exception as error:
        raise BadModel(f"{kind.__name__}: transformers cannot make it: {error_line(error)}"
                       ) from error


def _require_fixed_ropes(full: Any, shape: ModelShape, where: Path) -> None:
    """Raise `BadModel` where a rope's frequencies follow the longest sequence of a step: what a
    sequence's keys were turned by would depend on its neighbours."""
    text = full.get_text_config()
    given = getattr(text, "rope_parameters", None) or {}
    limit = getattr(text, "max_position_embeddings", None) or shape.max_model_len
    for own in (given, *(part for part in given.values() if isinstance(part, dict))):
        kind = own.get("rope_type")
        most = limit if kind == "dynamic" else own.get("original_max_position_embeddings") or \
            getattr(text, "original_max_position_embeddings", None) or limit
        if kind in ("dynamic", "longrope") and shape.max_model_len > most:
            raise BadModel(f"{where}: rope_type: {kind} beyond {most} tokens is not served by "
                           f"transformers' classes (--max-model-len {most} serves it)")


def _shape_of(calls: list[AttentionCall], shape: ModelShape, where: Path) -> ModelShape:
    """The shape with what attention is. Each call has pages of its own: some layers attend twice.
    Raises `BadModel`."""
    why = ""
    if len(calls) < shape.layers:
        why = f"{shape.layers - len(calls)} of its {shape.layers} layers have no attention"
    elif len({call[:3] for call in calls}) > 1:
        why = "the heads of its layers differ in number or size"
    elif len({(call.cap, call.sinks) for call in calls}) > 1:
        why = "the caps of its layers' scores, or whether they have sinks, differ"
    if why:
        raise BadModel(f"{where}: {shape.architecture} is not served by transformers' class "
                       f"(--model-impl): {why}")
    first = calls[0]
    return replace(shape, layers=len(calls), heads=first.heads, kv_heads=first.kv_heads,
                   head_dim=first.head_dim, windows=tuple(call.window for call in calls),
                   attention_scale=first.scale, attention_cap=first.cap, sinks=first.sinks)


def _mixes(model: TransformersModel) -> bool:
    """Whether a token changes what is computed of the next one though attention, here to themselves
    alone, does not bring them together: as convolutions and shifts do."""
    vocab, repeats = model.shape.vocabulary, model.shape.heads // model.shape.kv_heads

    def alone(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any,
              **options: Any) -> tuple[Tensor, None]:
        return value.repeat_interleave(repeats, 1).transpose(1, 2).contiguous(), None

    def changed(first: int) -> bool:
        with handled_by(alone), torch.inference_mode():
            before, after = (model._body(
                input_ids=torch.tensor([[token, *(i % vocab for i in range(3, 7))]],
                                       device=model.device),
                position_ids=torch.arange(TOKENS, device=model.device)[None], use_cache=False,
            ).last_hidden_state[0, 1].float() for token in (first % vocab, (first + 1) % vocab))
        return bool((after - before).norm() > MIXED * before.norm())

    return changed(0) and changed(1)
