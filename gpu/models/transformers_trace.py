"""What a class of transformers does in a forward pass, found without its weights: on torch's meta
device it is run once, and each call of attention is looked at: its heads, scale and cap, and which
tokens its mask lets it see, since the mask and no argument is what transformers' own attention
obeys. And the parts of a model that are put in the place of its own."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actorium.actors.errors import BadModel
from actorium.gpu.parallel.rank_group import ALONE, RankPlace

PAGED, TRACED = "actorium", "actorium_traced"
"""Our names in transformers' interfaces: only under the second one it makes masks."""
TOKENS = 5
"""Of the row with which a class is tried."""
FARTHEST = 1 << 24
"""Tokens back to which masks are looked at."""
SINKS = "s_aux"
"""The argument of attention that has the scores of its sinks, [H]."""
NEAR = 2**-6
"""Of the largest number, two roundings to bfloat16."""
IGNORED = {SINKS, "dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids",
           "use_cache", "cache_position", "output_attentions", "output_hidden_states",
           "output_router_logits", "logits_to_keep", "return_dict", "attention_dropout",
           "num_items_in_batch", "position_embeddings"}
"""Arguments of attention that say nothing which its mask, its shapes or `AttentionCall` do not."""


class AttentionCall(NamedTuple):
    """One call of attention in a forward pass."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    """Tokens that a query sees, itself included; 0 = all."""
    scale: float
    cap: float
    sinks: bool
    """Scores beside the tokens' own, one for each head, take part in its softmax."""


class LinearWeight(NamedTuple):
    """That of a linear layer."""

    shape: tuple[int, int]
    across: int | None
    """What ranks share out of it: 0, its rows; 1, its columns; None: nothing."""


class Trace(NamedTuple):
    """What a class does in a forward pass."""

    calls: list[AttentionCall]
    """In order."""
    vocab: int
    """Width of its logits."""
    products: bool
    """It only calls its linear layers, so that others can stand in their place."""
    linears: dict[str, LinearWeight]
    """By name, of the whole model."""


Handler = Callable[..., tuple[Tensor, None]]
_current = threading.local()
"""`handler`: what serves calls of attention in this thread."""


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
            attention_mask: Any = None, **options: Any) -> tuple[Tensor, None]:
    """What transformers calls. query: [1, H, T, D]; key, value: [1, KVH, T, D] -> [1, T, H, D]."""
    answer: tuple[Tensor, None] = _current.handler(module, query, key, value, attention_mask,
                                                   **options)
    return answer


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Meanwhile this serves the calls of attention in this thread."""
    _current.handler = handler
    try:
        yield
    finally:
        del _current.handler


def register() -> None:
    """Makes our names known to transformers, and keeps it quiet."""
    import transformers

    transformers.AttentionInterface.register(PAGED, _attend)
    transformers.AttentionInterface.register(TRACED, _attend)
    transformers.AttentionMaskInterface.register(TRACED, _window_of)
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()


class Unserved(Exception):
    """The class asks for what pages, or ranks, cannot serve."""


# --- Parts in the place of a model's own ----------------------------------------------------------

class _BodyOutput:
    """What a body gives: its rows, and None for all else that a class may ask it for."""

    def __init__(self, rows: Tensor) -> None:
        self.last_hidden_state = rows

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _GivenRows(nn.Module):
    """Stands in a model where its body was: gives rows that were computed before, so that the
    model's own code makes logits of them, with all it does to these."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Tensor | None = None

    @property
    def decoder(self) -> _GivenRows:
        """OPT calls its body's."""
        return self

    def forward(self, *_: Any, **__: Any) -> _BodyOutput:
        assert self.rows is not None
        return _BodyOutput(self.rows)


def body_and_head(model: Any) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """What gives hidden rows, and what makes logits of them, [R, hidden] -> [R, vocab]."""
    given, body = _GivenRows(), getattr(model, model.base_model_prefix)
    setattr(model, model.base_model_prefix, given)

    def head(rows: Tensor) -> Tensor:
        given.rows = rows[None]
        logits: Tensor = model(inputs_embeds=given.rows, use_cache=False).logits[0]
        given.rows = None
        return logits

    return body, head


class _Product(nn.Module):
    """Stands in the place of a linear layer, or of a norm."""

    def __init__(self, product: Callable[[Tensor], Tensor], columns: int) -> None:
        super().__init__()
        self.product, self.columns = product, columns

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x.reshape(-1, self.columns))
        return y.view(*x.shape[:-1], y.shape[-1])


def replace_products(model: nn.Module, make: Callable[[str, nn.Linear], Callable[[Tensor], Tensor]],
                     dtype: torch.dtype) -> None:
    """Puts products of ours in the place of linear layers, one after the other, so that no more
    than one weight lies there twice. make: of a layer's name in what it is a part of."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and layer.weight.dtype is dtype:
                setattr(parent, name, _Product(make(name, layer), layer.in_features))


def replace_norms(model: nn.Module, norm: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Puts ours in the place of RMSNorms, of their weights or of these plus 1, which are tried to
    see that they give the same."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            held = [param.data for param in layer.parameters()]
            if not type(layer).__name__.endswith("RMSNorm") or len(held) != 1 \
                    or held[0].dtype is not dtype or held[0].dim() != 1:
                continue
            weight, eps = held[0], getattr(layer, "variance_epsilon", getattr(layer, "eps", 1e-6))
            given = torch.linspace(-3, 5, 3 * len(weight)).view(3, -1).sin().to(dtype)
            want = layer(given).float()
            for own in (weight, weight + 1):
                if float((norm(given, own, eps) - want).abs().max()) <= NEAR * float(
                        want.abs().max()):
                    setattr(parent, name, _Product(partial(norm, weight=own, eps=eps), len(own)))
                    break


# --- Parts of several ranks -----------------------------------------------------------------------

WHOLE = ("colwise_gather_output", "rowwise_split_input", "replicated_with_grad_allreduce",
         "embedding_rowwise", "local_params")
"""Kinds of a class's plan for ranks that make of a whole input a whole output, of which each rank
has the whole weight; and what is said of a module whose parameters have kinds of their own."""
LLAMA_PLAN = {**dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                               "mlp.gate_proj", "mlp.up_proj"), "colwise"),
              **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "rowwise")}
PLANS = dict.fromkeys(("Emu3ForCausalLM", "HunYuanDenseV1ForCausalLM"), LLAMA_PLAN)
"""Of classes without a plan of their own, of each layer."""
EXPERTS = "moe_tp_experts"
"""The kind of experts whose weights lie in one tensor, and whose inner width is shared out."""
SUMS = Callable[[Tensor], Tensor]


class _SummedPart(nn.Module):
    """A linear layer of which a rank has the columns that meet its part of the input."""

    def __init__(self, linear: nn.Linear, sums: SUMS) -> None:
        super().__init__()
        self.linear, self.sums = linear, sums

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return self.sums(y)


def _planned(model: Any) -> Iterator[tuple[str, Any, str]]:
    """(name, module or parameter, kind) of the parts that ranks share out by the class's own plan,
    or by ours. Raises `Unserved`."""
    own = PLANS.get(type(model).__name__, {})
    plan = {f"{model.base_model_prefix}.layers.*.{part}": kind
            for part, kind in own.items()} or model.tp_plan
    if not any(kind == "rowwise" for kind in plan.values()):
        raise Unserved("it has no plan for ranks (base_model_tp_plan; --tp)")
    kinds = {re.compile(re.escape(name).replace(r"\*", r"\w+")): kind
             for name, kind in plan.items()}
    alone = ((name, param) for name, param in model.named_parameters() if param.dim() == 1)
    for name, part in [*model.named_modules(), *alone]:
        kind = next((kind for own, kind in kinds.items() if own.fullmatch(name)), "replicated")
        if kind not in (*WHOLE, "replicated"):
            yield name, part, kind


def split_layers(model: Any, place: RankPlace, sums: SUMS) -> None:
    """Cuts linear layers and experts by the class's own plan for ranks. sums: over all of them.
    Raises `Unserved`, which `traced` names."""
    rank, size = place.rank, place.size
    for name, module, kind in list(_planned(model)):
        parent, _, own_name = name.rpartition(".")
        if isinstance(module, nn.Parameter) and kind == "colwise" and len(module) % size == 0:
            setattr(model.get_submodule(parent), own_name, nn.Parameter(
                module.data.chunk(size)[rank].clone(), False))  # a number for each head
            continue
        if kind == EXPERTS and _split_experts(module, place):
            module.register_forward_hook(lambda _, given, y: sums(y))
            continue
        if kind not in ("colwise", "rowwise") or type(module) is not nn.Linear:
            raise Unserved(f"{kind} of {name} is not served for several ranks (--tp)")
        across = int(kind == "rowwise")
        width = module.weight.shape[across]
        if width % size:
            raise Unserved(f"{name} has {width} {('rows', 'columns')[across]}, which {size} ranks "
                           "(--tp) cannot share out")
        part = module.weight.data.chunk(size, across)[rank]
        whole = part.untyped_storage().nbytes() > part.nbytes
        module.weight = nn.Parameter(part.clone() if whole else part, False)
        if module.bias is not None:
            bias = module.bias.data if across else module.bias.data.chunk(size)[rank]
            module.bias = nn.Parameter(bias * (not across or rank == 0), False)
        module.out_features, module.in_features = module.weight.shape
        if across:
            setattr(model.get_submodule(parent), own_name, _SummedPart(module, sums))


def _split_experts(module: Any, place: RankPlace) -> bool:
    """Leaves a rank its part of each expert's inner width: of `gate_up_proj`, [E, 2 * I, H], and
    `down_proj`, [E, H, I], or of both transposed. False where they are laid out otherwise."""
    own = {name: param.data for name, param in module.named_parameters()}
    if set(own) != {"gate_up_proj", "down_proj"}:
        return False
    gate_up, down = own["gate_up_proj"], own["down_proj"]
    rows, columns = (2, 1) if getattr(module, "is_transposed", False) else (1, 2)
    inner = down.shape[columns]
    if gate_up.dim() != 3 or gate_up.shape[rows] != 2 * inner or inner % place.size or (
            gate_up.shape[columns] != down.shape[rows]):
        return False
    halves = [half.chunk(place.size, rows)[place.rank] for half in gate_up.chunk(2, rows)]
    module.gate_up_proj = nn.Parameter(torch.cat(halves, rows), False)
    module.down_proj = nn.Parameter(down.chunk(place.size, columns)[place.rank].clone(), False)
    return True


# --- Tracing -------------------------------------------------------------------------------------

class _Window(NamedTuple):
    """Given to the class in the place of a mask."""

    tokens: int
    """0 = all."""


def _window_of(mask_function: Callable[..., Tensor], config: Any, **_: Any) -> _Window:
    """The window of a mask, which `mask_function` (batch, head, query, key) is. Asked at a few
    places, since transformers has no other masks than those that it is made of."""
    length, cpu = _current.length, torch.device("cpu")
    keys, zero = torch.arange(length, device=cpu), torch.tensor(0, device=cpu)

    def seen(query: int) -> Tensor:
        return mask_function(zero, zero, torch.tensor(query, device=cpu), keys).expand(length)

    window = int(seen(length - 1).sum())
    for query in {0, 1, length // 2, length - 2, length - 1}:
        if not torch.equal(seen(query), (keys <= query) & (keys > query - window)):
            raise Unserved("its masks are neither causal nor sliding windows")
    return _Window(0 if window == length else window)


def error_line(error: Exception) -> str:
    """What transformers raised, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def traced(kind: Any, full: Any, dtype: torch.dtype, length: int, where: Path,
           place: RankPlace = ALONE) -> Trace:
    """What the class does, or a rank's part of it. length: of the longest sequence. Raises
    `BadModel`."""
    _current.length = max(min(length, FARTHEST), TOKENS)
    try:
        try:
            return _trace(kind, full, dtype, True, place)
        except AttributeError:  # it looks at the weights of its linear layers
            return _trace(kind, full, dtype, False, place)
    except Unserved as error:
        why = str(error)
    except Exception as error:
        why = (f"it cannot be run {'in parts, ' * (place.size > 1)}without its weights "
               f"({error_line(error)})")
    raise BadModel(f"{where}: {kind.__name__} is not served by transformers' class "
                   f"(--model-impl): {why}")


def _trace(kind: Any, full: Any, dtype: torch.dtype, products: bool, place: RankPlace) -> Trace:
    """products: with others in the place of linear layers."""
    calls: list[AttentionCall] = []

    def attend(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any,
               **options: Any) -> tuple[Tensor, None]:
        calls.append(_call_of(query, key, value, mask, options))
        return query.transpose(1, 2).contiguous(), None

    with torch.device("meta"), handled_by(attend), torch.inference_mode():
        # Of the ways to run experts the one in which no shape follows from the numbers.
        model = kind._from_config(full, dtype=dtype, attn_implementation=TRACED,
                                  experts_implementation="batched_mm").eval()
        shared = {name: int(kind == "rowwise") for name, _, kind in _planned(model)
                  } if place.size > 1 else {}
        linears = {name: LinearWeight((own.out_features, own.in_features), shared.get(name))
                   for name, own in model.named_modules()
                   if type(own) is nn.Linear and own.weight.dtype is dtype}
        if place.size > 1:
            split_layers(model, place, lambda y: y)
        if products:
            replace_products(model, lambda _, own: partial(F.linear, weight=own.weight,
                                                           bias=own.bias), dtype)
        body, head = body_and_head(model)
        rows = body(input_ids=torch.zeros((1, TOKENS), dtype=torch.long), use_cache=False,
                    attention_mask=torch.ones((1, TOKENS), dtype=torch.bool),
                    position_ids=torch.arange(TOKENS)[None]).last_hidden_state[0]
        return Trace(calls, head(rows).shape[-1], products, linears)


def _call_of(query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
             ) -> AttentionCall:
    (_, heads, tokens, width), kv_heads = query.shape, key.shape[1]
    if not isinstance(mask, _Window):
        raise Unserved("it has attention without transformers' masks")
    if more := sorted(name for name, own in options.items() if own is not None
                      and own is not False and name not in IGNORED):
        raise Unserved(f"its attention takes {', '.join(more)}")
    if key.shape != value.shape or key.shape[3] != width:
        raise Unserved(f"its values have heads of {value.shape[3]} numbers, its queries of {width}"
                        " (attention over latents)")
    if key.shape[2] != tokens or heads % kv_heads:
        raise Unserved("its attention is not over keys and values of the same tokens")
    scale, sinks = options.get("scaling"), options.get(SINKS)
    if sinks is not None and sinks.shape != (heads,):
        raise Unserved(f"its sinks ({SINKS}) are not one for each head")
    return AttentionCall(heads, kv_heads, width, mask.tokens,
                         width**-0.5 if scale is None else float(scale),
                         float(options.get("softcap") or 0.0), sinks is not None)
