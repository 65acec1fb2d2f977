"""What `mkdocs` is told of our pages beyond `mkdocs.yml`: the marks behind a block's language."""

from __future__ import annotations

import re
from typing import Any

MARKED = re.compile(r"^(\s*```\w+) (?:run|no-run:).*$", re.MULTILINE)
"""The first line of a fenced block that tests run, or do not (CONTRIBUTING.md, "A page"). GitHub
reads the language alone; mkdocs would take the rest for options that it does not know."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's text without the marks."""
    return MARKED.sub(r"\1", markdown)
