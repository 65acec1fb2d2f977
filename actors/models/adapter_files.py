"""What the files of a LoRA adapter hold: its modules, their ranks and scales, and where they lie.

Two forms are read: PEFT's folder (adapter_config.json and adapter_model.safetensors) and
llama.cpp's .gguf file. Whatever would make an adapter more than two matrices a module is refused by
name. No torch, and no tensor is looked at: the scheduler and the worker both start here.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actorium.actors.errors import BadModel, shown
from actorium.actors.models.gguf_file import GgufFile, read_gguf
from actorium.actors.models.model_files import check_file, open_file, read_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
MAX_CONFIG = 4 << 20
"""Bytes of adapter_config.json: those with a rank for each module have some hundred thousand."""
MAX_TENSORS = 1 << 17
MAX_BASE = 1024
"""Characters of a base model's name that are kept."""
DTYPES = ("F64", "F32", "F16", "BF16")
"""Of tensors in safetensors."""
PIECE = 1 << 20
"""Bytes that are hashed at once."""
PREFIX = "base_model.model."
"""Before the names of modules in PEFT's files."""
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_GGUF_TENSOR = re.compile(r"(?P<module>.+)\.weight\.lora_(?P<side>[ab])")
_PATTERN = re.compile(r"[\w-]+(\.[\w-]+)*")
"""Keys of rank_pattern and alpha_pattern that are names of modules, or ends of names."""
_NOT_SERVED = {
    "use_dora": "DoRA: whole weights are scaled",
    "modules_to_save": "whole modules beside the low-rank ones",
    "lora_bias": "biases beside the low-rank matrices",
    "layer_replication": "layers that are repeated",
    "trainable_token_indices": "new rows of the embedding",
    "target_parameters": "parameters that are no modules of their own",
    "use_qalora": "matrices over groups of columns (QA-LoRA)",
    "alora_invocation_tokens": "an adapter that begins at certain tokens (aLoRA)",
    "arrow_config": "a router of several adapters (Arrow)",
    "use_bdlora": "block-diagonal matrices (BD-LoRA)",
    "megatron_config": "Megatron's layers",
}
"""Fields of adapter_config.json that must be empty, and what they stand for."""
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of init_lora_weights of adapters that belong to a changed base model. (PEFT writes
true once such an adapter was converted.)"""


class AdapterTensor(NamedTuple):
    """A matrix of an adapter."""

    name: str
    """In its file."""
    dtype: str
    """F64, F32, F16 or BF16; of a GGUF file the name of its type."""
    shape: tuple[int, int]


class AdapterModule(NamedTuple):
    """What an adapter adds to a linear module with input x: scale * B(A x)."""

    a: AdapterTensor
    """[rank, inputs]"""
    b: AdapterTensor
    """[outputs, rank]"""
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class AdapterFiles(NamedTuple):
    """What an adapter's files say."""

    path: Path
    """The folder, or the .gguf file."""
    weights: Path
    """The file with the tensors: in safetensors, or GGUF."""
    modules: dict[str, AdapterModule]
    """By name: as in the base model (`model.layers.0.self_attn.q_proj`), in a GGUF file as there
    (`blk.0.attn_q`)."""
    digest: bytes
    """SHA-256 of the files' bytes."""
    base: str
    """Name of the base model that it was trained on; "" = not said."""

    @property
    def gguf(self) -> bool:
        return self.weights == self.path

    @property
    def rank(self) -> int:
        """The highest of its modules."""
        return max(module.rank for module in self.modules.values())


def read_adapter(path: Path, max_rank: int) -> AdapterFiles:
    """Reads the headers of an adapter's files, and hashes all of them. Raises `BadModel` where it
    is none, is damaged, is more than LoRA, or has modules of more than `max_rank`."""
    path = path.expanduser().absolute()
    if path.is_dir():
        adapter = _read_peft(path)
    elif path.is_file():
        adapter = _read_gguf(path)
    else:
        raise _bad(path, "there is no such folder or file")
    for name, module in adapter.modules.items():
        if module.rank > max_rank:
            raise _bad(path, f"{shown(name)} has rank {module.rank}, more than --max-lora-rank, "
                       f"which is {max_rank}")
    return adapter


# --- PEFT's folders ------------------------------------------------------------------------------

def _read_peft(path: Path) -> AdapterFiles:
    try:
        data = read_file(path / CONFIG, MAX_CONFIG)
    except FileNotFoundError:
        raise _bad(path, f"{CONFIG} is missing") from None
    try:
        config = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(path, f"{CONFIG} is not a JSON object: {error}") from None
    _check_kind(path, config)
    weights = path / WEIGHTS
    try:
        check_file(weights)
    except FileNotFoundError:
        pickled = f": {PICKLED} is pickled, which is never read" * (path / PICKLED).exists()
        raise _bad(path, f"{WEIGHTS} is missing{pickled}") from None
    pairs = _pairs(path, {tensor.name: tensor for tensor in _stored(weights)}, _TENSOR)
    scales = _Scales(path, config)
    modules = {}
    for name, (a, b) in pairs.items():
        name = name.removeprefix(PREFIX)
        modules[name] = AdapterModule(a, b, scales.of(name, a.shape[0]))
    base = config.get("base_model_name_or_path")
    return AdapterFiles(path, weights, modules, _digest(path / CONFIG, weights),
                        base[:MAX_BASE] if isinstance(base, str) else "")


def _check_kind(path: Path, config: dict[str, Any]) -> None:
    """Refuses what is not LoRA alone."""
    if (kind := config.get("peft_type")) != "LORA":
        raise _bad(path, f"peft_type: must be LORA, got {shown(kind)}")
    for field, what in _NOT_SERVED.items():
        if config.get(field):
            raise _bad(path, f"{field} ({what}): not served")
    if (bias := config.get("bias", "none")) not in ("none", None):
        raise _bad(path, f"bias: must be none, got {shown(bias)}: trained biases are not served")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise _bad(path, f"init_lora_weights: {shown(start)} changes the base model, too: convert "
                   "the adapter (PEFT's path_initial_model_for_weight_conversion)")


class _Scales:
    """The scale of each module, by adapter_config.json."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self._path = path
        self._rank = self._number(config, "r", 8)
        self._alpha = self._number(config, "lora_alpha", 8)
        self._ranks = self._pattern(config, "rank_pattern")
        self._alphas = self._pattern(config, "alpha_pattern")
        self._rank_stabilised = bool(config.get("use_rslora"))

    def of(self, module: str, rank: int) -> float:
        """Of a module whose matrices have this rank. Raises `BadModel` if the config says another
        one: then its scale is not known."""
        said = self._ranks.get(module, self._rank)
        if said != rank:
            raise _bad(self._path, f"{shown(module)} has rank {rank}, and {CONFIG} says "
                       f"{said:g}")
        alpha = self._alphas.get(module, self._alpha)
        return alpha / (math.sqrt(rank) if self._rank_stabilised else rank)

    def _number(self, values: dict[str, Any], key: str, default: float | None = None) -> float:
        value = values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) \
                or not 0 < value < 1e9:
            raise _bad(self._path, f"{shown(key)}: must be a number above 0, got {shown(value)}")
        return value

    def _pattern(self, config: dict[str, Any], field: str) -> _Pattern:
        """PEFT's keys are regular expressions; those that it writes are names."""
        table = config.get(field) or {}
        if not isinstance(table, dict):
            raise _bad(self._path, f"{field}: must be an object, got {shown(table)}")
        entries: dict[tuple[bool, str], tuple[int, float]] = {}
        for position, key in enumerate(table):
            name = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
            if not _PATTERN.fullmatch(name):
                raise _bad(self._path, f"{field}: {shown(key)}: names of modules are read, no "
                           "other expressions")
            whole = key.startswith("^")
            entries.setdefault((whole, name), (position, self._number(table, key)))
        return _Pattern(entries)


class _Pattern(NamedTuple):
    """Values by names of modules."""

    entries: dict[tuple[bool, str], tuple[int, float]]
    """(whether the name is whole, else it is the end of one), name -> (position, value)"""

    def get(self, module: str, default: float) -> float:
        """That of the first entry that names the module."""
        parts = module.split(".")
        ends = [(False, ".".join(parts[i:])) for i in range(len(parts))]
        matches = [self.entries[key] for key in ((True, module), *ends) if key in self.entries]
        return min(matches)[1] if matches else default


def _stored(file: Path) -> list[AdapterTensor]:
    """The tensors of a file in safetensors, after the library has checked its header."""
    from safetensors import SafetensorError, safe_open  # not for those who read a .gguf alone

    try:
        with safe_open(str(file), framework="numpy") as opened:
            names = list(opened.keys())
            if len(names) > MAX_TENSORS:
                raise _bad(file, f"has {len(names)} tensors, more than {MAX_TENSORS}")
            parts = [(name, opened.get_slice(name)) for name in names]
            found = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in parts]
    except (SafetensorError, OSError) as error:
        raise _bad(file, f"not a readable safetensors file: {error}") from None
    for name, dtype, _ in found:
        if dtype not in DTYPES:
            raise _bad(file, f"tensor {shown(name)} is {dtype}: served are {', '.join(DTYPES)}")
    return [AdapterTensor(*each) for each in found]


# --- GGUF ----------------------------------------------------------------------------------------

def _read_gguf(path: Path) -> AdapterFiles:
    gguf = read_gguf(path)
    for key, want in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (kind := gguf.text(key, "")) != want:
            raise gguf.bad(key, f"must be {want} in an adapter, got {shown(kind)}")
    if "adapter.alora.invocation_tokens" in gguf:
        raise gguf.bad("adapter.alora.invocation_tokens", "an adapter that begins at certain "
                       "tokens (aLoRA) is not served")
    alpha = gguf.real("adapter.lora.alpha", 0.0)
    tensors = {name: AdapterTensor(name, tensor.type.name, tensor.shape)  # type: ignore[arg-type]
               for name, tensor in gguf.tensors.items()}
    modules = {name: AdapterModule(a, b, alpha / a.shape[0] if alpha else 1.0)
               for name, (a, b) in _pairs(path, tensors, _GGUF_TENSOR).items()}
    return AdapterFiles(path, path, modules, _digest(path), _base_of(gguf))


def _base_of(gguf: GgufFile) -> str:
    key = "general.base_model.0.name"
    return gguf.text(key)[:MAX_BASE] if key in gguf else ""


# --- both ----------------------------------------------------------------------------------------

def _pairs(path: Path, tensors: dict[str, AdapterTensor], form: re.Pattern[str]
           ) -> dict[str, tuple[AdapterTensor, AdapterTensor]]:
    """The matrices A and B of each module. Raises `BadModel` for any other tensor."""
    sides: dict[str, dict[str, AdapterTensor]] = {}
    for name, tensor in tensors.items():
        if (match := form.fullmatch(name)) is None:
            raise _bad(path, f"tensor {shown(name)} is no matrix A or B of a linear module")
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise _bad(path, f"tensor {shown(name)} has shape {shown(list(tensor.shape))}: "
                       "matrices are needed")
        sides.setdefault(match["module"], {})[match["side"].lower()] = tensor
    if not sides:
        raise _bad(path, "it has no tensors")
    for module, pair in sides.items():
        for side in "ab":
            if side not in pair:
                raise _bad(path, f"{shown(module)} has no matrix {side.upper()}")
        if pair["a"].shape[0] != pair["b"].shape[1]:
            raise _bad(path, f"{shown(module)}: A {list(pair['a'].shape)} and "
                       f"B {list(pair['b'].shape)} have different ranks")
    return {module: (pair["a"], pair["b"]) for module, pair in sides.items()}


def _digest(*files: Path) -> bytes:
    """SHA-256 of the files' lengths and bytes."""
    whole = hashlib.sha256()
    for path in files:
        fd = open_file(path)
        try:
            whole.update(os.fstat(fd).st_size.to_bytes(8, "little"))
            with open(fd, "rb", closefd=False) as file:
                while piece := file.read(PIECE):
                    whole.update(piece)
        except OSError as error:
            raise _bad(path, error.strerror or str(error)) from None
        finally:
            os.close(fd)
    return whole.digest()


def _bad(path: Path, why: str) -> BadModel:
    text = "".join(c if c.isprintable() else "?" for c in why)
    return BadModel(f"adapter: {path}: {text}", "lora_path")
