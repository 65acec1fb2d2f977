"""The playground at `/`, the engine's state at `/status` and the list of routes at `/docs`: each is
one document, joined when the gateway starts from the files in `playground/`, `status/` and
`api_docs/` and those in `shared/` and `vendor/`; nothing is loaded from elsewhere.

A model's output is untrusted, so a document may run only its own script and use only its own style
(their hashes are in the policy), may connect to its own gateway alone, and may not turn strings
into markup at all (Trusted Types).
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

PLAYGROUND, STATUS, API = (Path(__file__).with_name(name)
                           for name in ("playground", "status", "api_docs"))
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w./]+\.css)">')
_SCRIPTS = re.compile(r'(?:<script src="[\w./]+\.js"></script>\s*)+')
_NAME = re.compile(r'src="([\w./]+\.js)"')
_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


class Page(NamedTuple):
    """A served document."""

    body: bytes
    etag: str
    policy: str
    """The Content-Security-Policy."""

    @property
    def headers(self) -> dict[str, str]:
        return {"etag": self.etag, "cache-control": "no-cache",
                "content-security-policy": self.policy, "x-frame-options": "DENY",
                "referrer-policy": "no-referrer", "cross-origin-opener-policy": "same-origin"}

    async def serve(self, http: HttpRequest) -> Response:
        """Handles the route."""
        if _matches(http.headers.get("if-none-match", ""), self.etag):
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers, media_type="text/html")


def load(folder: Path) -> Page:
    """Joins the files that `index.html` names. Raises `OSError` if one is missing."""
    def text(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    def style(found: re.Match[str]) -> str:
        return f"<style>\n{text(found[1])}</style>"

    def scripts(found: re.Match[str]) -> str:
        joined = "\n".join(text(name) for name in _NAME.findall(found[0]))
        return f"<script>\n{joined}</script>\n"

    document = _SCRIPTS.sub(scripts, _STYLE.sub(style, text("index.html")))
    body = document.encode()
    return Page(body, f'"{hashlib.sha256(body).hexdigest()[:32]}"', policy(document))


def policy(document: str) -> str:
    """Returns the strictest Content-Security-Policy under which the document works."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}
    for kind, content in _INLINE.findall(document):
        digest = b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return "; ".join((
        "default-src 'none'", f"script-src {' '.join(hashes['script'])}",
        f"style-src {' '.join(hashes['style'])}", "img-src data:", "media-src data:",
        "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'", "trusted-types 'none'"))


def _matches(given: str, etag: str) -> bool:
    """Returns whether an If-None-Match header names the tag."""
    names = [one.strip().removeprefix("W/") for one in given.split(",")]
    return etag in names or "*" in names
