"""Which attention backends serve a model here: those that were asked for, or the fastest."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from actorium.actors.config.attention_names import asked_backends
from actorium.actors.config.tree import Config, DeviceConfig
from actorium.actors.errors import BadConfig
from actorium.gpu.attention.attention_backend import (
    AttentionBackend,
    NativeAttention,
    SageAttention,
    TorchAttention,
    TritonAttention,
)
from actorium.gpu.attention.capabilities import DECODE, EXTEND, HALVES, AttentionNeeds, needs_of
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.kernels.backends import takes_triton
from actorium.kernels.cpu.native_library import library

LOG = logging.getLogger("actorium.attention")
BACKENDS: dict[str, type[AttentionBackend]] = {
    own.card.name: own for own in (NativeAttention, TritonAttention, TorchAttention,
                                   SageAttention)}
"""Those that are built in."""
FIELDS = {EXTEND: "prefill_attention_backend", DECODE: "decode_attention_backend"}
WORDS = {EXTEND: "prompts", DECODE: "decodes"}


class StepAttention(NamedTuple):
    """What attends in the steps of a model."""

    extend: AttentionBackend
    decode: AttentionBackend
    pages: torch.dtype | None = None
    """Of the pages that it reads; None: as the model computes."""
    exact_states: bool = False
    """Recurrent layers, too, are to be exact: they take prompts token by token."""

    def __str__(self) -> str:
        if self.extend.name == self.decode.name:
            return self.decode.card.what
        return f"prompts {self.extend.card.what}, decodes {self.decode.card.what}"


class Choice(NamedTuple):
    """Of one part of a step."""

    name: str
    why: str
    """Why no other, for the log."""


def select_attention(shape: ModelShape, config: Config, device: torch.device, drafts: int = 0
                     ) -> StepAttention:
    """What attends, for a model of this shape; the log says what was chosen and why. drafts: that
    a step verifies, at most.

    Raises `BadConfig` where what is asked for cannot run: with the reason, and with what could.
    """
    needs = needs_of(shape, device.type, config.memory.kv_cache_dtype, config.memory.page_size,
                     drafts)
    exact = config.device.exact
    backends: dict[str, AttentionBackend] = {}
    for part in (EXTEND, DECODE):
        name, why = choose(part, needs, config.device, device)
        LOG.info("attention of %s: %s (%s)", WORDS[part], name, why)
        backends[part] = next((own for own in backends.values() if own.name == name),
                          None) or make_backend(
                              name, needs, exact != "off",
                              shape.max_model_len if exact == "on" else 0)
    return StepAttention(backends[EXTEND], backends[DECODE],
                         TORCH_DTYPES.get(config.memory.kv_cache_dtype),
                         exact == "on" or (exact == "auto" and not takes_triton(
                             device, config.device.kernels)))


def choose(part: str, needs: AttentionNeeds, asked: DeviceConfig, device: torch.device) -> Choice:
    """Of `EXTEND` or `DECODE`. Raises `BadConfig`."""
    both = asked_backends(asked)
    name, field = ((both.extend, both.extend_field) if part == EXTEND
                   else (both.decode, both.decode_field))
    if name != "auto":
        if fault := BACKENDS[name].fault(part, needs, device):
            raise BadConfig(f"{field}: {name} cannot serve {WORDS[part]}: {fault}; "
                            f"{_could(part, needs, device)}", f"device.{field}")
        return Choice(name, f"{field}: {getattr(asked, field)}")
    passed: list[str] = []
    for name, why in _preferred(asked, device):
        if fault := BACKENDS[name].fault(part, needs, device):
            passed.append(f"not {name}: {fault}")
        else:
            return Choice(name, "; ".join(["auto", *passed, why]))
    raise BadConfig(f"attention_backend: {'; '.join(passed)}; {_could(part, needs, device)}",
                    "device.attention_backend")


def _preferred(asked: DeviceConfig, device: torch.device) -> list[tuple[str, str]]:
    """What `auto` looks at, the fastest first, and why. On CUDA nothing falls back to torch, which
    is many times as slow, but where Triton itself is missing."""
    if asked.kernels != "auto":
        return [(asked.kernels, f"--kernels {asked.kernels}")]
    if device.type == "cuda":
        lacks = TritonAttention.missing(DECODE, device)
        return [("torch", lacks)] if lacks else [("triton", "the fastest on cuda")]
    torchs = ("torch", "the reference serves everything")
    if not asked.native_kernels:
        return [("torch", "--no-native-kernels")]
    return [("native", "the fastest on a CPU"), torchs]


def _could(part: str, needs: AttentionNeeds, device: torch.device) -> str:
    able = [name for name, own in BACKENDS.items() if not own.fault(part, needs, device)]
    return f"{' or '.join(able)} could" if able else "no backend could"


def make_backend(name: str, needs: AttentionNeeds, exact: bool = False, exact_for: int = 0
                 ) -> AttentionBackend:
    """One of `BACKENDS` that can serve these needs here. exact: its decodes have the bits of its
    extends, where it can do that and hardly gets slower; exact_for: whatever it costs, for
    sequences of so many tokens, 0 = not so."""
    if name == "native":
        lib = library()
        assert lib is not None
        extends = BACKENDS[name].fault(EXTEND, needs, torch.device("cpu")) == ""
        return NativeAttention(lib, torch.get_num_threads(), exact and extends, needs.latent_rank)
    if name == "sage":
        return SageAttention(needs.device)
    if name == "triton":
        can = needs.dtype in HALVES and not needs.latent_rank
        return TritonAttention(needs.latent_rank, exact_for if can else 0)
    return TorchAttention(needs.latent_rank)
