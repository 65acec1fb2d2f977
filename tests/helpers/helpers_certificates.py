"""Certificates for tests: a CA of their own, and what it signs, made by the openssl program."""

from __future__ import annotations

import subprocess
from pathlib import Path

KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]


def openssl(*argv: str | Path) -> None:
    subprocess.run(["openssl", *map(str, argv)], check=True, capture_output=True, timeout=60)


def signed(folder: Path, *names: str) -> Authority:
    """Returns a CA in this folder that has signed certificates of these names, and of "locked",
    whose key has the password "secret"."""
    authority = Authority(folder)
    for name in names:
        authority.sign(name)
    authority.sign("locked", "secret")
    return authority


class Authority:
    """A CA in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "ca.pem"
        self._key = folder / "ca.key"
        openssl("req", "-x509", *KEY, "-nodes", "-keyout", self._key, "-out", self.file, "-days",
                "2", "-subj", "/CN=CA of a test")

    def sign(self, name: str, password: str = "") -> tuple[Path, Path]:
        """Returns files of a certificate for this machine, whose subject is `name`, and its key."""
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        request, extra = self.folder / f"{name}.csr", self.folder / "extra"
        secret = ["-passout", f"pass:{password}"] if password else ["-nodes"]
        openssl("req", *KEY, *secret, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        extra.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl("x509", "-req", "-in", request, "-CA", self.file, "-CAkey", self._key,
                "-CAcreateserial", "-out", certificate, "-days", "2", "-extfile", extra)
        return certificate, key
