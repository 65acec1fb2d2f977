"""A certificate or key that cannot be used is reported by the setting that names it."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_certificates import Authority, signed

from actorium.actors.config.tree import GatewayConfig
from actorium.actors.errors import BadConfig
from actorium.actors.runtime.http.tls_context import server_context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = signed(tmp_path_factory.mktemp("tls"), "server", "other")
    both = (authority.folder / name for name in ("server.pem", "server.key"))
    (authority.folder / "both.pem").write_bytes(b"".join(file.read_bytes() for file in both))
    (authority.folder / "broken.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n")
    return authority


def context(authority: Authority, password: str | None = None, **settings: Any) -> Any:
    files = {name: str(authority.folder / value) if name in (
        "ssl_certfile", "ssl_keyfile", "ssl_ca_certs") else value
        for name, value in settings.items()}
    return server_context(GatewayConfig(**files), password)


@pytest.mark.parametrize(("settings", "password"), [
    ({"ssl_certfile": "server.pem", "ssl_keyfile": "server.key"}, None),
    ({"ssl_certfile": "both.pem"}, None),
    ({"ssl_certfile": "locked.pem", "ssl_keyfile": "locked.key"}, "secret"),
    ({"ssl_certfile": "both.pem", "ssl_ca_certs": "ca.pem", "ssl_cert_reqs": 2}, None),
    ({"ssl_certfile": "both.pem", "ssl_ciphers": "ECDHE+AESGCM"}, None)])
def test_good_files_are_taken(authority: Authority, settings: dict[str, Any],
                              password: str | None) -> None:
    assert context(authority, password, **settings).verify_mode == settings.get("ssl_cert_reqs", 0)


@pytest.mark.parametrize(("settings", "password", "error"), [
    ({"ssl_certfile": "none.pem"}, None, "ssl_certfile: cannot read"),
    ({"ssl_certfile": "server.key"}, None, "ssl_certfile: .* holds no BEGIN CERTIFICATE"),
    ({"ssl_certfile": "server.pem"}, None, "ssl_keyfile: needed, since .*server.pem holds no"),
    ({"ssl_certfile": "server.pem", "ssl_keyfile": "ca.pem"}, None, "ssl_keyfile: .* holds no"),
    ({"ssl_certfile": "server.pem", "ssl_keyfile": "other.key"}, None,
     "ssl_keyfile: .*other.key is not the key of the certificate in .*server.pem"),
    ({"ssl_certfile": "broken.pem", "ssl_keyfile": "server.key"}, None,
     "ssl_certfile: OpenSSL refuses"),
    ({"ssl_certfile": "locked.pem", "ssl_keyfile": "locked.key"}, None,
     "ssl_keyfile_password: .*locked.key is encrypted"),
    ({"ssl_certfile": "locked.pem", "ssl_keyfile": "locked.key"}, "wrong",
     "ssl_keyfile_password: does not open .*locked.key"),
    ({"ssl_certfile": "both.pem", "ssl_ciphers": "NONE-OF-IT"}, None, "ssl_ciphers: OpenSSL knows"),
    ({"ssl_certfile": "both.pem", "ssl_ca_certs": "broken.pem", "ssl_cert_reqs": 2}, None,
     "ssl_ca_certs: .*broken.pem")])
def test_a_bad_file_is_named_with_its_flag(authority: Authority, settings: dict[str, Any],
                                           password: str | None, error: str) -> None:
    with pytest.raises(BadConfig, match=f"^{error}"):
        context(authority, password, **settings)


def test_files_are_found_at_home(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(authority.folder))
    server_context(GatewayConfig(ssl_certfile="~/both.pem"), None)
