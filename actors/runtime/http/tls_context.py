"""The TLS of a server, as the flags have it."""

from __future__ import annotations

import ssl
from pathlib import Path

from actorium.actors.config.tree import GatewayConfig
from actorium.actors.errors import BadConfig

FILES = {"ssl_certfile": b"-----BEGIN CERTIFICATE-----", "ssl_keyfile": b"PRIVATE KEY-----",
         "ssl_ca_certs": b"-----BEGIN CERTIFICATE-----"}
"""Settings that name a file, and what must be in it."""


def tls_files(wanted: GatewayConfig) -> dict[str, Path]:
    """Returns the files that TLS is made of, by setting."""
    return {setting: Path(name).expanduser() for setting in FILES
            if (name := getattr(wanted, setting)) is not None}


def server_context(wanted: GatewayConfig, password: str | None) -> ssl.SSLContext:
    """Reads key and certificates. Raises `BadConfig`, naming the setting."""
    files = tls_files(wanted)
    for setting, path in files.items():
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _bad(setting, f"cannot read {path}: {error.strerror}") from None
        if FILES[setting] not in content:
            raise _bad(setting, f"{path} holds no {FILES[setting].decode().strip('-')} in PEM")
        if setting == "ssl_certfile" and not (files.keys() & {"ssl_keyfile"}
                                              or FILES["ssl_keyfile"] in content):
            raise _bad("ssl_keyfile", f"needed, since {path} holds no key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    certificate, key = files["ssl_certfile"], files.get("ssl_keyfile", files["ssl_certfile"])
    try:  # without a password OpenSSL would ask for one at the terminal
        context.load_cert_chain(certificate, key, lambda: password or "")
    except ssl.SSLError as error:
        raise _bad(*_chain_fault(error, certificate, key, password)) from None
    try:
        if wanted.ssl_ciphers is not None:
            context.set_ciphers(wanted.ssl_ciphers)
    except ssl.SSLError:
        raise _bad("ssl_ciphers", f"OpenSSL knows no cipher of {wanted.ssl_ciphers!r}") from None
    if "ssl_ca_certs" in files:
        try:
            context.load_verify_locations(files["ssl_ca_certs"])
        except ssl.SSLError as error:
            raise _bad("ssl_ca_certs", f"{files['ssl_ca_certs']}: {error}") from None
    context.verify_mode = ssl.VerifyMode(wanted.ssl_cert_reqs)
    return context


def _chain_fault(error: ssl.SSLError, certificate: Path, key: Path, password: str | None
                 ) -> tuple[str, str]:
    """Returns which setting is at fault, and why."""
    if error.reason == "KEY_VALUES_MISMATCH":
        return "ssl_keyfile", f"{key} is not the key of the certificate in {certificate}"
    if b"ENCRYPTED" in key.read_bytes():
        return "ssl_keyfile_password", (f"{key} is encrypted, and needs one" if password is None
                                        else f"does not open {key}")
    return "ssl_certfile", f"OpenSSL refuses {certificate} or its key, {key}: {error}"


def _bad(setting: str, why: str) -> BadConfig:
    return BadConfig(f"{setting}: {why}", f"gateway.{setting}")
