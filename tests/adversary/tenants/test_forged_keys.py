"""Keys: wrong ones, half ones, and the files that they stand in."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_tenants import (
    ADMIN,
    ANN,
    BOB,
    key_file,
)

from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.http import api_keys as keys
from actorium.actors.gateway.http.http_errors import HttpError


def wrong_keys(draw: random.Random, right: bytes) -> Iterator[bytes]:
    """Authorization headers that are nearly right, without an end."""
    yield from (b"", b"Bearer", b"Bearer ", b"Bearer \t ", b"Bearer\t" + right, b"Basic " + right,
                b"Token " + right, b"Digest " + right, b"bearer:" + right, right,
                b"Bearer Bearer " + right, b"Bearer\x00" + right, b"Bearer " + right + b"\x00",
                b"Bearer \x00" + right, b"Bearer " + right + b"," + right, b"Bearer =" + right,
                b'Bearer "' + right + b'"', b"Bearer " + right.swapcase(), b"Bearer null",
                b"Bearer None", b"Bearer " + hashlib.sha256(right).hexdigest().encode(),
                b"Bearer sha256:" + hashlib.sha256(right).hexdigest().encode(),
                b"Bearer " + b"a" * (1 << 20), b"Bearer " + right * 1000, b"\xff\xfe" + right,
                b"Bearer " + right.decode().encode("utf-16"), b"Bearer \xc2\xa0" + right,
                b"Bearer " + right.replace(b"-", "\u2010".encode()), b"Bearer #" + right)
    for cut in range(1, len(right)):
        yield b"Bearer " + right[:cut]
        yield b"Bearer " + right[cut:]
    while True:
        data = bytearray(right)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(data))
            kind = draw.randrange(3)
            if kind == 0:
                data[at] = draw.randrange(256)
            elif kind == 1:
                data.insert(at, draw.randrange(256))
            elif len(data) > 1:
                del data[at]
        if bytes(data).strip() != right:
            yield b"Bearer " + bytes(data)


def test_only_the_whole_key_opens(tmp_path: Path, amount: Any, tried: Any) -> None:
    guard = keys.Keys(GatewayConfig(api_keys_file=key_file(tmp_path), api_key="sk-one-9a",
                                    admin_key=ADMIN))
    draw = random.Random(7)
    for key in (ANN, BOB, ADMIN, "sk-one-9a"):
        given = wrong_keys(draw, key.encode())
        for _ in range(amount(1_000, 30_000)):
            header = next(given)
            with pytest.raises(HttpError) as caught:
                guard.check("/v1/models", header)
            assert caught.value.status == 401 and not guard.is_admin(header)
            tried()
    assert guard.check("/v1/models", f"Bearer {ANN}".encode()) == "ann"
    assert guard.check("/v1/models", b"bEARER  sk-one-9a ") == ""


def test_every_digest_is_compared_whichever_fits(tmp_path: Path, tried: Any,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    usual = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        seen.append((len(one), len(other)))
        return usual(one, other)

    guard = keys.Keys(GatewayConfig(api_keys_file=key_file(tmp_path), admin_key=ADMIN))
    monkeypatch.setattr("actorium.actors.gateway.http.api_keys.hmac.compare_digest", compare)
    for key in (ANN, BOB, ADMIN, "", "x", ANN[:-1]):
        seen.clear()
        with contextlib.suppress(HttpError):
            guard.check("/v1/models", f"Bearer {key}".encode())
        assert seen == [(32, 32)] * 3, key
        tried()


def test_time_tells_nothing_of_a_key(tmp_path: Path, amount: Any, tried: Any) -> None:
    """Medians of headers that share nothing, half and all but one character with a key."""
    guard = keys.Keys(GatewayConfig(api_keys_file=key_file(tmp_path), admin_key=ADMIN))
    rounds = amount(0, 60_000)
    half = len(ANN) // 2
    near = [ANN[:-1] + "0", ANN[:half] + "0" * (len(ANN) - half), "0" * len(ANN)]
    times: list[list[int]] = [[] for _ in near]
    for _ in range(rounds):
        for each, key in zip(times, near, strict=True):
            header = f"Bearer {key}".encode()
            began = time.perf_counter_ns()
            try:
                guard.check("/v1/models", header)
            except HttpError:
                each.append(time.perf_counter_ns() - began)
            tried()
    if rounds:
        medians = [statistics.median(each) for each in times]
        assert max(medians) < 1.15 * min(medians), medians


GOOD_FILES: dict[str, tuple[bytes, set[str]]] = {
    "blank lines": (b"\n\n  \t\nann ka\n\n\n", {"ka"}),
    "CRLF": (b"ann ka\r\n\r\nbob kb\r\n", {"ka", "kb"}),
    "BOM": (b"\xef\xbb\xbfann ka\nbob kb\n", {"ka", "kb"}),
    "BOM and comment": (b"\xef\xbb\xbf# keys of all\nann ka\n", {"ka"}),
    "comments": (b"#ann no\n # bob no\nann ka\n", {"ka"}),
    "no end of line": (b"ann ka\nbob kb", {"ka", "kb"}),
    "tabs": (b"ann\tka\n\tbob\t\tkb\t\n", {"ka", "kb"}),
    "the same line twice": (b"ann ka\nann ka\n", {"ka"}),
    "two keys of one": (b"ann ka\nann kb\n", {"ka", "kb"}),
    "hashed": (b"ann sha256:" + hashlib.sha256(b"ka").hexdigest().upper().encode(), {"ka"}),
}
BAD_FILES: dict[str, bytes] = {
    "empty": b"", "blank": b"\n \n\r\n", "only comments": b"# ann ka\n",
    "a name alone": b"ann\n", "a name and a blank": b"ann \n", "three words": b"ann ka kb\n",
    "comment behind": b"ann ka # hers\n", "not UTF-8": b"ann \xff\xfe\n",
    "UTF-16": "ann ka\n".encode("utf-16"), "a long name": b"a" * 65 + b" ka\n",
    "a strange name": "\u00e4nn ka\n".encode(), "NUL in a name": b"a\0n ka\n",
    "half a hash": b"ann sha256:abcd\n", "no hash": b"ann sha256:\n",
    "another's key": b"ann ka\nbob ka\n", "another's, hashed": b"ann ka\nbob sha256:"
    + hashlib.sha256(b"ka").hexdigest().encode(),
    "the flag's key": b"ann sk-one\n", "the administrator's": b"ann sk-root\n",
    "cut off": b"#" * ((4 << 20) - 7) + b"\nann ka-and-more\n",
}


@pytest.mark.mended("a key file above 4 MiB was cut off, and half a key in its last line was a key")
@pytest.mark.mended("one key under two names belonged to the last one, without a word")
@pytest.mark.mended("a key file with a byte-order mark was refused")
def test_key_files(tmp_path: Path, tried: Any) -> None:
    path = tmp_path / "keys"
    settings = GatewayConfig(api_keys_file=str(path), api_key="sk-one", admin_key="sk-root")
    for name, (data, wanted) in GOOD_FILES.items():
        path.write_bytes(data)
        guard = keys.Keys(settings)
        for key in wanted:
            assert guard.check("/v1/models", f"Bearer {key}".encode()) in ("ann", "bob"), name
        for key in ("", " ", "#", "ann", "no", "\ufeff", "k", "ka\r"):
            if key.strip() not in wanted:
                with pytest.raises(HttpError):
                    guard.check("/v1/models", f"Bearer {key}".encode())
            tried()
    for name, data in BAD_FILES.items():
        path.write_bytes(data)
        with pytest.raises(BadConfig, match="api_keys_file: ") as caught:
            keys.Keys(settings)
        assert "ka" not in caught.value.message.replace(str(path), ""), name
        tried()


@pytest.mark.mended("an empty --api-key, as of a variable that is not set, left all doors open")
@pytest.mark.mended("an administrator's key equal to --api-key made everybody administrator")
def test_keys_that_nobody_could_mean(tried: Any) -> None:
    for key in ("", " ", "\n", "secret-a ", " secret-a", "secret-a\n", "secret\0a", "secret\ta"):
        for field in ("api_key", "admin_key"):
            with pytest.raises(BadConfig, match=f"^{field}: must be") as caught:
                validate(Config(gateway=GatewayConfig(**{field: key})))
            assert "secret" not in caught.value.message
            tried()
    with pytest.raises(BadConfig, match="^admin_key: must be another") as caught:
        validate(Config(gateway=GatewayConfig(api_key="secret-a", admin_key="secret-a")))
    assert "secret" not in caught.value.message
