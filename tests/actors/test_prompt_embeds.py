"""Prompts given as embeddings: what is read, and what is refused with which words."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save

from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import MAX_EMBEDS, PromptEmbeds
from actorium.actors.prompt_embeds import checked, of_array, of_file
from actorium.actors.scheduler.cache.radix_cache import embeds_key

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def encoded(**tensors: Any) -> bytes:
    return save({name: torch.as_tensor(own) for name, own in tensors.items()})


def refusal(call: Any, *args: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        call(*args)
    assert caught.value.param == "prompt_embeds"
    return str(caught.value)


@pytest.mark.parametrize(("dtype", "kind"), [
    (torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")])
def test_arrays_and_files_are_read_alike(dtype: torch.dtype, kind: str) -> None:
    rows = torch.from_numpy(ROWS).to(dtype)
    found = of_array(rows)
    assert (found.hidden, found.rows, found.dtype) == (4, 3, kind)
    assert found == of_file(encoded(prompt_embeds=rows)) == of_array(rows[None])
    assert found == of_array(rows.T.contiguous().T), "rows in order, however they lie"
    if kind != "BF16":
        assert found == of_array(rows.numpy())
    whole = checked(found, 4)
    row = found.data[found.row_bytes:2 * found.row_bytes]
    assert whole.digests[32:64] == sha256(kind.encode() + row).digest()
    assert whole.behind(2) == PromptEmbeds(4, found.data[2 * found.row_bytes:], found.dtype)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=PromptEmbeds) == whole


def test_the_same_bytes_in_another_type_have_other_digests() -> None:
    one = of_array(torch.from_numpy(ROWS).half())
    other = msgspec.structs.replace(one, dtype="BF16")
    assert not {*zip(*[iter(checked(one, 4).digests)] * 32, strict=True)} & {
        *zip(*[iter(checked(other, 4).digests)] * 32, strict=True)}


@pytest.mark.parametrize(("given", "why"), [
    (ROWS.astype(np.float64), "must be float32, float16 or bfloat16, is F64"),
    (ROWS.astype(np.int32), "is int32"), (ROWS[0], r"shape [tokens, hidden], has [4]"),
    (np.zeros((0, 4), np.float32), "has [0, 4]"), (np.stack([ROWS, ROWS]), "has [2, 3, 4]"),
    ("text", "is str"), ([1.0], "is list"), (object(), "is object"),
    (np.zeros((1 << 11, 1 << 12), np.float32), f"at most {MAX_EMBEDS} are taken")])
def test_arrays_that_are_none(given: Any, why: str) -> None:
    assert why in refusal(of_array, given)


def file_of(header: Any, data: bytes = ROWS.tobytes(), length: int | None = None) -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(head) if length is None else length
    return size.to_bytes(8, "little") + head + data


def entry(**change: Any) -> dict[str, Any]:
    return {"prompt_embeds": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]} | change}


@pytest.mark.parametrize(("given", "why"), [
    (b"PK\3\4 and so on", "is a pickle, as torch.save writes it"),
    (b"\x80\2}q\0.", "is a pickle"), (b"", "base64 of a safetensors file"),
    (encoded(other=ROWS), "has no tensor prompt_embeds"),
    (encoded(prompt_embeds=ROWS, other=ROWS + 1), "must be all that the safetensors file holds"),
    (encoded(prompt_embeds=ROWS.astype(np.int32)), "is I32"),
    (encoded(prompt_embeds=ROWS[0]), "has [4]"),
    (file_of(entry(shape=[3, 5])), "48 bytes for the shape [3, 5]"),
    (file_of(entry(shape=[-3, -4])), "has [-3, -4]"),
    (file_of(entry(shape=[1 << 40, 1 << 40])), "at most"),
    (file_of(entry(data_offsets=[4, 52])), "must be all"),
    (file_of(entry(), ROWS.tobytes()[:-4]), "must be all"),
    (file_of(entry(), length=1 << 60), "has no tensor"), (file_of(b"{", length=1), "has no tensor"),
    (file_of({"prompt_embeds": 3}), "has no tensor"), (file_of(b"{" * 9000), "has no tensor")])
def test_files_that_are_none(given: bytes, why: str) -> None:
    assert why in refusal(of_file, given)


def test_rows_that_do_not_fit_the_model() -> None:
    found = of_array(ROWS)
    assert "start it with --enable-prompt-embeds" in refusal(checked, found, 0)
    assert "rows of 4 numbers; the model's embeddings have 8" in refusal(checked, found, 8)
    assert "no rows of 16" in refusal(checked, PromptEmbeds(4, found.data[:-1]), 4)
    assert "no rows of 16" in refusal(checked, PromptEmbeds(4, b""), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_infinities_are_refused(dtype: torch.dtype, bad: float) -> None:
    rows = torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype)
    checked(of_array(rows), 4)
    rows[2, 3] = bad
    assert "has infinities or NaNs" in refusal(checked, of_array(rows), 4)


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_pages_are_shared_where_rows_are(page_size: int) -> None:
    rows = np.random.default_rng(1).normal(size=(7, 4)).astype(np.float32)
    other = rows.copy()
    other[3] += 1
    tokens, size = np.zeros(9, np.int32).tobytes(), 4 * page_size
    keys = [embeds_key(tokens, checked(of_array(own), 4).digests, page_size)
            for own in (rows, other, rows)]
    pages = [[key[at:at + size] for at in range(0, 36 // size * size, size)] for key in keys]
    assert pages[0] == pages[2] and len(keys[0]) == len(tokens)
    same = [one == two for one, two in zip(*pages[:2], strict=True)]
    assert same == [number != 3 // page_size for number in range(len(same))], "only its own page"
    assert all(page[3] & 0x80 for page in pages[0][:-(-7 // page_size)]), "no text's page"
    emitted = np.array([0] * 7 + [1, 2], np.int32).tobytes()
    assert (embeds_key(emitted, checked(of_array(rows), 4).digests, page_size) == keys[0]) is False
