"""The settings `attention_backend` and its like: names of backends, ours and other engines'."""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.config.tree import DeviceConfig
from actorium.actors.errors import BadConfig

NAMES: dict[str, tuple[str, ...]] = {
    "auto": (),
    "torch": ("torch_native", "torch_sdpa"),
    "native": ("cpu_attn", "intel_amx"),
    "triton": ("triton_attn", "triton_mla"),
    "sage": ("sage_attn",),
}
"""Backends that are built in -> what vLLM and SGLang call such a one, in lower case."""

NOT_BUILT: dict[str, tuple[str, ...]] = {
    "flashinfer": ("flashinfer_mla", "trtllm_mha", "trtllm_mla"),
    "flash_attn": ("fa", "fa2", "fa3", "fa4", "flash_attn_mla", "dual_chunk_flash_attn",
                   "triton_flash_attn"),
    "flashmla": ("flashmla_sparse",),
    "cutlass_mla": (),
    "flex_attention": (),
    "xformers": (),
    "nsa": ("dsa",),
    "aiter": ("wave", "rocm_attn", "rocm_aiter_fa", "rocm_aiter_unified_attn", "rocm_aiter_mla"),
    "intel_xpu": (),
    "ascend": (),
}
"""Backends of other engines that are not: refused, rather than replaced without a word."""

FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


class AskedBackends(NamedTuple):
    """Of prompts and of decodes: a built-in backend's name, or auto."""

    extend: str
    extend_field: str
    """Which setting says so."""
    decode: str
    decode_field: str


def asked_backends(device: DeviceConfig) -> AskedBackends:
    """What is asked for. Raises `BadConfig`."""
    both, extend, decode = (backend_named(getattr(device, field), field) for field in FIELDS)
    return AskedBackends(extend or both, FIELDS[bool(extend)],
                         decode or both, FIELDS[2 * bool(decode)])


def backend_named(text: str, field: str) -> str:
    """The backend that a text names; "" of an empty one. Raises `BadConfig` on what is not built
    in, and on what is no name at all."""
    name, could = text.strip().lower().replace("-", "_"), ", ".join(NAMES)
    if not name and field != FIELDS[0]:
        return ""
    for ours, others in NAMES.items():
        if name == ours or name in others:
            return ours
    for theirs, others in NOT_BUILT.items():
        if name == theirs or name in others:
            raise BadConfig(f"{field}: {theirs} is not built in: must be one of {could}, "
                            f"got {text!r}", f"device.{field}")
    raise BadConfig(f"{field}: must be one of {could}, got {text!r}", f"device.{field}")
