"""What stands before the routes, without an engine."""

from __future__ import annotations

import msgspec
import pytest

from actorium.actors.config.tree import GatewayConfig
from actorium.actors.errors import CODES, from_code
from actorium.actors.gateway.api.chat_body import ChatBody
from actorium.actors.gateway.http import api_keys as module
from actorium.actors.gateway.http.bodies import decode
from actorium.actors.gateway.http.http_errors import HttpError, http_error


def Keys(api_key: str | None, admin_key: str | None) -> module.Keys:
    return module.Keys(GatewayConfig(api_key=api_key, admin_key=admin_key))


@pytest.mark.parametrize("given", [b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Basic secret",
                                   b"secret", b"Bearer secre\xc3\xa9", b"Bearer secret2"])
def test_a_wrong_key_is_refused(given: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        Keys("secret", None).check("/v1/models", given)
    assert caught.value.status == 401 and caught.value.code == "invalid_api_key"


def test_a_right_key_is_accepted() -> None:
    for given in (b"Bearer secret", b"bearer  secret"):
        Keys("secret", None).check("/v1/models", given)
    Keys("schl\u00fcssel", None).check("/v1/models", b"Bearer schl\xc3\xbcssel")
    Keys(None, None).check("/v1/models", b"")
    Keys("secret", None).check("/health", b"")


def test_administration_needs_its_own_key() -> None:
    keys = Keys("secret", "admin")
    with pytest.raises(HttpError):
        keys.check("/flush_cache", b"Bearer secret")
    keys.check("/flush_cache", b"Bearer admin")
    keys.check("/v1/models", b"Bearer admin")
    with pytest.raises(HttpError):
        Keys(None, "admin").check("/flush_cache", b"")
    Keys(None, "admin").check("/v1/models", b"")


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_error_of_the_engine_has_a_status(code: str) -> None:
    told = http_error(from_code(code, "why", "field"))
    assert 400 <= told.status < 600 and told.body()["error"]["message"] == "why"
    assert (told.retry_after > 0) == (told.status in (429, 503))


def test_unknown_fields_are_ignored_and_wrong_types_named() -> None:
    turn = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text",
                                                                        "text": "b"}]}]
    body = decode(msgspec.json.encode({"messages": turn, "strange": {"deep": [1]}}), ChatBody)
    assert [(turn.role, turn.content) for turn in body.turns()] == [("user", "ab")]
    with pytest.raises(HttpError, match=r"^messages\[0\]\.content"):
        decode(b'{"messages": [{"role": "user", "content": 3}]}', ChatBody)
    with pytest.raises(HttpError, match="^messages: is required"):
        decode(b"{}", ChatBody)
    for part, said in (({"type": "image_url"}, "image_url: must be a URL"),
                       ({"type": "input_audio"}, "input_audio")):
        body = {"messages": [{"role": "user", "content": [part]}]}
        with pytest.raises(HttpError, match=rf"^messages\[0\]\.content\[0\].*{said}"):
            decode(msgspec.json.encode(body), ChatBody).turns()
