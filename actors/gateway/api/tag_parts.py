"""Parts of a structural tag (`actors/structured/structural_tags.py`). Pure."""

from __future__ import annotations

from actorium.actors.structured.structural_tags import Node

ANY_TEXT: Node = {"type": "any_text"}
NOTHING: Node = {"type": "const_string", "value": ""}


def token(text: str) -> Node:
    """Returns a special token."""
    return {"type": "token", "text": text}


def const(text: str) -> Node:
    """Returns a fixed text."""
    return {"type": "const_string", "value": text}


def tag(begin: str, content: Node, end: str) -> Node:
    """Returns a part between two fixed texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*parts: Node) -> Node:
    """Returns the parts one behind the other."""
    return {"type": "sequence", "elements": list(parts)}


def one_of(*parts: Node) -> Node:
    """Returns one of the parts."""
    return {"type": "or", "elements": list(parts)}


def separated(tags: list[Node], separator: str, many: bool) -> Node:
    """Returns tags with a fixed text between them."""
    return {"type": "tags_with_separator", "tags": tags, "separator": separator,
            "at_least_one": True, "stop_after_first": not many}
