"""Prompts given as embeddings: read from arrays and from safetensors files, and checked. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.client.tensor_file import DTYPES, data_of
from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import MAX_EMBEDS, PromptEmbeds

FIELD = "prompt_embeds"
MAX_HEADER = 1 << 16
"""Bytes of the header of a safetensors file with one tensor."""
EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""Numpy's name for a number's bits, and those that are all set in infinities and NaNs alone."""


class TensorEntry(Struct):
    """What a safetensors file's header says of a tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def of_array(rows: Any) -> PromptEmbeds:
    """Returns the rows of an array of numpy or a tensor of torch, [tokens, hidden]. Raises
    `InvalidRequest`."""
    dtype = str(getattr(rows, "dtype", type(rows).__name__)).removeprefix("torch.")
    kind, _ = DTYPES.get(dtype, (dtype, 0))
    return _embeds_of(kind, getattr(rows, "shape", ()), lambda: bytes(data_of(rows)))


def of_file(file: bytes) -> PromptEmbeds:
    """Returns the rows of a safetensors file, whose only tensor is `prompt_embeds`. Raises
    `InvalidRequest`."""
    if file[8:9] != b"{":
        pickled = file.startswith((b"PK", b"\x80"))
        raise _bad("base64 of a safetensors file with the tensor prompt_embeds is taken" + (
            "; this is a pickle, as torch.save writes it, which runs code where it is read"
            if pickled else ""))
    end = 8 + int.from_bytes(file[:8], "little")
    try:
        tensors = msgspec.json.decode(file[8:min(end, MAX_HEADER)], type=dict[str, Any])
        tensors.pop("__metadata__", None)
        entry = msgspec.convert(tensors.pop(FIELD), TensorEntry)
    except (msgspec.MsgspecError, KeyError, RecursionError):
        raise _bad("the safetensors file has no tensor prompt_embeds") from None
    if tensors or entry.data_offsets != (0, len(file) - end):
        raise _bad("prompt_embeds must be all that the safetensors file holds")
    return _embeds_of(entry.dtype, entry.shape, lambda: file[end:])


def checked(embeds: PromptEmbeds, hidden: int) -> PromptEmbeds:
    """Returns the rows with their digests. hidden: width of the model's embeddings; 0 = they are
    not taken. Raises `InvalidRequest`."""
    import numpy as np

    if not hidden:
        raise _bad("this engine takes none: start it with --enable-prompt-embeds")
    if embeds.hidden != hidden:
        raise _bad(f"rows of {embeds.hidden} numbers; the model's embeddings have {hidden}")
    data, size = embeds.data, embeds.row_bytes
    if not data or len(data) % size:
        raise _bad(f"{len(data)} bytes are no rows of {size}")
    bits, exponent = EXPONENTS[embeds.dtype]
    if bool(((np.frombuffer(data, bits) & exponent) == exponent).any()):
        raise _bad("has infinities or NaNs")
    kind = embeds.dtype.encode()  # the same bytes are other numbers in another type
    return PromptEmbeds(hidden, data, embeds.dtype, b"".join(
        [sha256(kind + data[at:at + size]).digest() for at in range(0, len(data), size)]))


def _embeds_of(dtype: Any, shape: Sequence[int], data: Callable[[], bytes]) -> PromptEmbeds:
    """data: called once dtype and shape are known to be right."""
    if dtype not in EXPONENTS:
        raise _bad(f"must be float32, float16 or bfloat16, is {dtype[:40]}")
    own = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape  # of a batch of one
    if len(own) != 2 or min(own) < 1:
        raise _bad(f"must have the shape [tokens, hidden], has {list(shape)[:8]}")
    if (size := own[0] * own[1] * (4 if dtype == "F32" else 2)) > MAX_EMBEDS:
        raise _bad(f"{size} bytes; at most {MAX_EMBEDS} are taken")
    embeds = PromptEmbeds(own[1], data(), dtype)
    if len(embeds.data) != size:
        raise _bad(f"{len(embeds.data)} bytes for the shape {list(shape)}")
    return embeds


def _bad(what: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD}: {what}", FIELD)
