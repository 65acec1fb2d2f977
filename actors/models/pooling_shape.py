"""What a checkpoint makes of a prompt beside a completion: which tasks it is for, which rows are
pooled and how, and what comes behind. Tokenizer and worker read it alike.

It says so by the class that its config.json names (`...ForSequenceClassification`), by the modules
of sentence-transformers in its folder (`modules.json`), or else it is a decoder that generates, of
which the last token's row is the vector.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from actorium.actors.config.tree import ModelConfig
from actorium.actors.errors import BadConfig, BadModel, shown
from actorium.actors.models.encoders import ENCODERS, attends_to_both_sides, encoder_family
from actorium.actors.models.gguf_config import GGUF
from actorium.actors.models.gritlm import (
    GRITLM,
    INSTRUCTION_END,
    as_embedder,
    completes,
    is_gritlm,
)
from actorium.actors.models.model_classes import MAX_INT32, architecture
from actorium.actors.models.model_dir import read_json, text_config
from actorium.actors.models.sentence_files import (
    answer_tokens,
    longest_text,
    module_folder,
    module_kind,
    read_modules,
    text_prompts,
)
from actorium.actors.params import PoolingTask

PoolingKind = Literal["last", "mean", "cls"]
"""Whose row is pooled: the last token's, the mean of all, the first token's."""
Activation = Literal["none", "softmax", "sigmoid"]
ACTIVATIONS = {"Identity": "none", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu",
               "Sigmoid": "sigmoid"}
"""torch's modules behind a dense layer, by the last part of their names."""
VECTORS: tuple[PoolingTask, ...] = ("embed", "token_embed")


class NormShape(NamedTuple):
    """A LayerNorm behind a dense layer."""

    name: str
    """Its tensors are `name`.weight and, with a bias, `name`.bias."""
    width: int
    bias: bool
    eps: float

    @property
    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """As of `DenseShape`."""
        size: tuple[int, ...] = (self.width,)
        return [("weight", size), ("bias", size)][:1 + self.bias]


class DenseShape(NamedTuple):
    """A dense layer behind the pooled row."""

    name: str
    """Its tensors are `name`.weight and, with a bias, `name`.bias."""
    rows: int
    columns: int
    bias: bool
    activation: str = "none"
    """One of the values of `ACTIVATIONS`."""
    folder: str = ""
    """Folder of the checkpoint that its tensors lie in; "" = with all others."""
    norm: NormShape | None = None
    """Of what the activation gives; None = it stays."""

    @property
    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """What its tensors are called behind `name`, and their shapes."""
        weight = "weight", (self.rows, self.columns)
        return [weight, ("bias", (self.rows,))] if self.bias else [weight]


class PoolingShape(Struct, frozen=True, kw_only=True):
    """How prompts are pooled."""

    tasks: tuple[PoolingTask, ...]
    width: int
    """Numbers of a vector, of the tasks embed and token_embed; 0: config.json does not tell."""
    generates: bool = False
    """It completes prompts as well; else there is no head over the vocabulary."""
    kind: PoolingKind = "last"
    normalize: bool = True
    """Vectors get the length 1 where a request does not say."""
    causal: bool = True
    """False: tokens attend to all of the prompt, so that it is computed in one step."""
    dense: tuple[DenseShape, ...] = ()
    """What pooled vectors go through."""
    head: tuple[DenseShape, ...] = ()
    """What makes scores of pooled rows; () = there are no scores."""
    activation: Activation = "none"
    """Of scores, where a request does not say."""
    labels: tuple[str, ...] = ()
    """Names of the scores."""
    longest: int | None = None
    """Tokens of the longest text that it was trained for; None: as many as it has positions."""
    lower_case: bool = False
    """Texts are in lower case before they are encoded."""
    prompts: tuple[tuple[str, str], ...] = ()
    """(name, text) of what sentence-transformers puts before texts that are asked for by name."""
    skips_instruction: bool = False
    """The mean leaves out the rows of the instruction that a prompt begins with."""
    instruction_end: str = ""
    """Text that ends such an instruction; "" = a request says what it is."""
    answers: tuple[int, ...] = ()
    """The tokens of yes and of no, of a decoder that rates pairs of texts by them."""

    def every_row(self, task: PoolingTask) -> bool:
        """Whether the result depends on the rows of all tokens."""
        return self.kind != "last" or not self.causal or task not in ("embed", "classify")

    @property
    def scores(self) -> int:
        """Numbers of a row of scores."""
        return self.head[-1].rows if self.head else 0


def served_tasks(pooling: PoolingShape | None) -> list[str]:
    """Returns what requests may ask for: "generate", and names of `params.PoolingTask`."""
    if pooling is None:
        return ["generate"]
    return [*["generate"] * pooling.generates, *pooling.tasks]


def pooling_info(shape: PoolingShape | None) -> dict[str, Any]:
    """Returns the fields of ServerInfo."""
    return {"tasks": served_tasks(shape), "pooling": None if shape is None else {
        "kind": shape.kind, "width": shape.width or None, "normalize": shape.normalize,
        "labels": list(shape.labels), "activation": shape.activation,
        "prompts": dict(shape.prompts), "answers": list(shape.answers)}}


def read_pooling(path: Path, raw: dict[str, Any], model: ModelConfig) -> PoolingShape | None:
    """How the checkpoint in the folder `path` pools; raw: its config.json. None: it only generates.

    Raises `BadModel` naming file and field, and `BadConfig` for settings that do not fit.
    """
    grit = is_gritlm(raw)
    if grit and completes(raw, model):
        return None
    raw = as_embedder(raw)
    found = _of_class(path / "config.json", raw) or _of_modules(path, raw) or _of_encoder(
        path / "config.json", raw)
    if attends_to_both_sides(raw, architecture(raw)):
        found = replace(found or PoolingShape(tasks=VECTORS, kind="mean", width=_hidden(
            path / "config.json", raw)), causal=False)
    if grit and found is not None:
        found = replace(found, skips_instruction=True, instruction_end=INSTRUCTION_END)
    if model.runner == "generate":
        if found is not None:
            raise BadConfig(f"runner: {path.name} does not generate, its tasks are "
                            f"{', '.join(found.tasks)}", "model.runner")
        return None
    if found is None:
        found = PoolingShape(tasks=VECTORS, width=_hidden(path / "config.json", raw),
                             generates=model.runner == "auto" and model.convert in ("auto", "none"),
                             answers=answer_tokens(path))
    if model.convert not in ("auto", "none") and model.convert not in found.tasks:
        raise BadConfig(f"convert: {path.name} has no weights for {model.convert}, its tasks are "
                        f"{', '.join(found.tasks)}", "model.convert")
    if model.enable_return_hidden_states:
        found = replace(found, tasks=(*found.tasks, "hidden_states"))
    return _overridden(found, model.pooler_config)


def generating_class(name: str) -> str:
    """The class that has the layers of a class for pooling alone: Qwen3ForCausalLM of
    Qwen3ForSequenceClassification, BertModel of BertForMaskedLM; of others the name itself."""
    if name == GRITLM:
        return "MistralForCausalLM"
    if family := encoder_family(name):
        return f"{family}Model"
    parts = _class_parts(name)
    return name if parts is None else f"{parts[0]}ForCausalLM"


_SUFFIXES = ("ForSequenceClassification", "ForTokenClassification", "ForRewardModel",
             "ForProcessRewardModel")


def _class_parts(name: str) -> tuple[str, str] | None:
    """(family, what it is for) of a class that does not generate."""
    suffix = next((own for own in _SUFFIXES if name.endswith(own)), None)
    return None if suffix is None else (name.removesuffix(suffix).removesuffix("Text"), suffix)


# --- classes of transformers ---------------------------------------------------------------------

def _of_class(where: Path, raw: dict[str, Any]) -> PoolingShape | None:
    parts = _class_parts(architecture(raw))
    if parts is None:
        return None
    suffix, hidden, labels = parts[1], _hidden(where, raw), _labels(where, raw)
    if not hidden:
        raise BadModel(f"{where}: hidden_size: must say how wide rows are", "model")
    if suffix.endswith("RewardModel"):
        process = suffix == "ForProcessRewardModel"
        count = 2 if process else 1
        return PoolingShape(
            tasks=("token_classify",) if process else ("classify", "token_classify"), width=hidden,
            head=(DenseShape("score.0", hidden, hidden, True, "relu"),
                  DenseShape("score.2", count, hidden, True)),
            activation="softmax" if process else "none",
            labels=labels if len(labels) == count else tuple(f"LABEL_{i}" for i in range(count)))
    tokens = suffix == "ForTokenClassification"
    if encoder_family(parts[0] + suffix):
        return _of_scoring_encoder(where, raw, hidden, labels, tokens)
    return PoolingShape(
        tasks=("token_classify",) if tokens else ("classify",), width=hidden, labels=labels,
        head=(DenseShape("score", len(labels), hidden, tokens),),
        activation=_activation(where, raw, len(labels), tokens))


def _of_encoder(where: Path, raw: dict[str, Any]) -> PoolingShape | None:
    """Of one without a head or modules: the first token's row is the vector, as for vLLM, unless
    a GGUF file says otherwise."""
    if not encoder_family(architecture(raw)):
        return None
    return PoolingShape(tasks=VECTORS, width=_hidden(where, raw),
                        kind=raw.get(GGUF, {}).get("pooling", "cls"))


POOLED: dict[Any, PoolingKind] = {"cls": "cls", "bos": "cls", "mean": "mean"}
"""What configs call what is classified (`classifier_pooling`)."""


def _of_scoring_encoder(where: Path, raw: dict[str, Any], hidden: int, labels: tuple[str, ...],
                        tokens: bool) -> PoolingShape:
    """A dense layer, perhaps normed, and the product that makes scores."""
    family = encoder_family(architecture(raw))
    own, head = ENCODERS[family], DenseShape("score", len(labels), hidden, True)
    layers, named = [head], raw.get("classifier_pooling", "late" if family == "EuroBert" else "cls")
    if not tokens and named not in POOLED:
        raise BadModel(f"{where}: classifier_pooling: {shown(named)} is not supported: "
                       f"{', '.join(POOLED)} are", "model")
    if own.tokens or not tokens:
        eps = raw.get("norm_eps", 1e-5)
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise BadModel(f"{where}: norm_eps: must be between 0 and 1, got {shown(eps)}",
                           "model")
        norm = NormShape("head.norm", hidden, raw.get("norm_bias") is True, eps)
        layers.insert(0, DenseShape("head.dense", hidden, hidden,
                                    own.biased or raw.get("classifier_bias") is True,
                                    own.activation, norm=norm if own.norm else None))
    return PoolingShape(
        tasks=("token_classify",) if tokens else ("classify",), width=hidden, labels=labels,
        head=tuple(layers), kind="cls" if tokens else POOLED[named],
        activation=_activation(where, raw, len(labels), tokens))


def _labels(where: Path, raw: dict[str, Any]) -> tuple[str, ...]:
    names, count = raw.get("id2label"), raw.get("num_labels")
    if isinstance(names, dict) and names:
        found = tuple(names.get(str(i), names.get(i)) for i in range(len(names)))
        if not all(isinstance(name, str) for name in found):
            raise BadModel(f"{where}: id2label: must name labels 0, 1, ..., got {shown(names)}",
                           "model")
        return tuple(map(str, found))
    count = 2 if count is None else count
    if not isinstance(count, int) or not 1 <= count <= MAX_INT32:
        raise BadModel(f"{where}: num_labels: must be a count, got {shown(count)}", "model")
    return tuple(f"LABEL_{i}" for i in range(count))


def _activation(where: Path, raw: dict[str, Any], labels: int, tokens: bool) -> Activation:
    """As transformers' `problem_type` says, and sentence-transformers of a cross-encoder."""
    own = raw.get("sentence_transformers")
    named = (own.get("activation_fn") if isinstance(own, dict) else None) \
        or raw.get("sbert_ce_default_activation_function")
    if named is not None:
        found = ACTIVATIONS.get(str(named).rpartition(".")[2])
        if found not in ("none", "sigmoid"):
            raise BadModel(f"{where}: activation_fn: {shown(named)} is not supported", "model")
        return "none" if found == "none" else "sigmoid"
    problem = raw.get("problem_type")
    if problem == "regression":
        return "none"
    several = labels > 1 or tokens
    return "sigmoid" if problem == "multi_label_classification" or not several else "softmax"


def _hidden(where: Path, raw: dict[str, Any]) -> int:
    """The width of a row; 0 where the config leaves that to its class."""
    text = text_config(raw)
    name, size = next(((name, text[name]) for name in ("hidden_size", "n_embd", "d_model", "dim")
                       if text.get(name) is not None), ("hidden_size", 0))
    if not isinstance(size, int) or not 0 <= size <= MAX_INT32:
        raise BadModel(f"{where}: {name}: must be a size, got {shown(size)}", "model")
    return size


# --- modules of sentence-transformers ------------------------------------------------------------

def _of_modules(path: Path, raw: dict[str, Any]) -> PoolingShape | None:
    """Transformer, Pooling, Dense layers, Normalize; without Pooling, each token has a vector."""
    where = path / "modules.json"
    if not where.is_file() or answer_tokens(path):
        return None
    kind: PoolingKind | None = None
    normalize = skips = False
    width, dense = _hidden(path / "config.json", raw), list[DenseShape]()
    for i, module in enumerate(read_modules(where)):
        name, folder = module_kind(module), module_folder(where, module)
        if (name == "Transformer") != (i == 0) or normalize or (
                name == "Pooling" and (kind is not None or dense)):
            raise BadModel(f"{where}: {shown(module.get('type'))} at place {i}: only Transformer, "
                           "Pooling, Dense and Normalize are supported, in this order", "model")
        if name == "Pooling":
            kind, width, skips = _pooling(folder / "config.json", width)
        elif name == "Dense":
            dense.append(_dense(folder, width, "token_embeddings" if kind is None
                                else "sentence_embedding"))
            width = dense[-1].rows
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise BadModel(f"{where}: {shown(module.get('type'))} is not supported: only "
                           "Transformer, Pooling, Dense and Normalize are", "model")
    tasks: tuple[PoolingTask, ...] = ("token_embed",) if kind is None else VECTORS
    settings = read_json(path / "sentence_bert_config.json", optional=True)
    return PoolingShape(
        tasks=tasks, width=width, kind=kind or "last", normalize=normalize, dense=tuple(dense),
        longest=longest_text(path, settings), lower_case=settings.get("do_lower_case") is True,
        prompts=text_prompts(path), skips_instruction=skips)


KINDS: dict[str, PoolingKind] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


def _pooling(where: Path, hidden: int) -> tuple[PoolingKind, int, bool]:
    """The kind, the width of a vector, and whether instructions are left out."""
    raw = read_json(where)
    given = raw.get("pooling_mode")
    modes = given if isinstance(given, list) else [given] if given else [
        key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for key, on in raw.items() if key.startswith("pooling_mode_") and on]
    if len(modes) != 1 or modes[0] not in KINDS:
        raise BadModel(f"{where}: pooling_mode: one of cls, mean and lasttoken is supported, got "
                       f"{shown(modes)}", "model")
    skips = raw.get("include_prompt") is False
    if skips and modes[0] == "cls":  # versions of the library differ in which token it is then
        raise BadModel(f"{where}: include_prompt: false is not supported with cls", "model")
    size = raw.get("word_embedding_dimension", raw.get("embedding_dimension", hidden))
    if not isinstance(size, int) or size < 1 or size != (hidden or size):
        raise BadModel(f"{where}: word_embedding_dimension: must be the hidden size {hidden}, got "
                       f"{shown(size)}", "model")
    return KINDS[modes[0]], size, skips


def _dense(folder: Path, columns: int, takes: str) -> DenseShape:
    """takes: what the library calls its input."""
    where = folder / "config.json"
    raw = read_json(where)
    rows, found = raw.get("out_features"), raw.get("in_features")
    if not isinstance(rows, int) or not 0 < rows <= MAX_INT32 or found != columns:
        raise BadModel(f"{where}: must lead from in_features {columns} to out_features, got "
                       f"{shown(found)} and {shown(rows)}", "model")
    if raw.get("module_input_name", takes) != takes or raw.get("use_residual"):
        raise BadModel(f"{where}: module_input_name, use_residual: must be {takes} and false",
                       "model")
    named = str(raw.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = ACTIVATIONS.get(named.rpartition(".")[2])
    if activation is None:
        raise BadModel(f"{where}: activation_function: {shown(named)} is not supported", "model")
    return DenseShape("linear", rows, columns, raw.get("bias", True) is True, activation,
                      folder.name)


# --- settings ------------------------------------------------------------------------------------

def _overridden(shape: PoolingShape, given: dict[str, Any]) -> PoolingShape:
    """The shape with vLLM's pooler config, in which `activation` and `softmax` are earlier names of
    `use_activation`."""
    changes: dict[str, Any] = {}
    if kind := given.get("seq_pooling_type", given.get("pooling_type")):
        changes["kind"] = kind.lower()
    on = given.get("use_activation", given.get("activation", given.get("softmax")))
    if on is not None and not shape.head:
        changes["normalize"] = on
    elif on is not None:
        usual = "softmax" if shape.scores > 1 else "sigmoid"
        changes["activation"] = "none" if not on else usual if shape.activation == "none" \
            else shape.activation
    if "normalize" in given:
        changes["normalize"] = given["normalize"]
    return replace(shape, **changes)
