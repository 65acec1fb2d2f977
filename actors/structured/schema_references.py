"""References within a JSON schema: what they lead to, and how they are rewritten where the schema
becomes a part of another. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urljoin

from actorium.actors.structured.schema_keywords import REFERENCES, VALUES

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
IDS = ("$id", "id", "$anchor", "$dynamicAnchor")
"""Keywords that give a schema a name."""


class References:
    """The places of one schema by the names that references use."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._named: dict[str, str] | None = None
        """`$id` and `#$anchor` -> pointer; None until they are asked for."""

    def pointer(self, reference: str) -> str | None:
        """Returns the pointer, such as #/$defs/a, of what a reference leads to; None = it is not
        in this schema."""
        if reference == "#" or reference.startswith("#/"):
            return reference.rstrip("/") if reference == "#/" else reference
        if self._named is None:
            self._named = dict(_names(self._root))
        if reference in self._named:
            return self._named[reference]
        base = self._root.get("$id") if isinstance(self._root, Mapping) else None
        whole, _, part = reference.partition("#")
        place = self._named.get(whole)
        if place is None and isinstance(base, str):
            place = self._named.get(urljoin(base, whole))
        if place is None:
            return None
        if part and not part.startswith("/"):
            return self._named.get(f"#{part}")
        return place + part

    def target(self, reference: str) -> Any:
        """Returns what a reference leads to. Raises `LookupError` where that is nothing."""
        pointer = self.pointer(reference)
        if pointer is None:
            raise LookupError(f"{reference[:200]!r} is not in this schema, and no other is read")
        found = self._root
        for part in parts(pointer):
            if isinstance(found, Mapping) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            else:
                raise LookupError(f"{reference[:200]!r} leads to nothing")
        return found


def parts(pointer: str) -> list[str]:
    """Returns the names that a pointer consists of."""
    return [unquote(part).replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def under(schema: Any, prefix: str) -> Any:
    """Returns a copy of a schema whose references are right where it stands at the pointer
    `prefix`, such as "#/$defs/tool-3", of another schema; names of its own are left out. Raises
    `ValueError` where it is too deep."""
    try:
        return _Moved(References(schema), prefix).moved(schema)
    except RecursionError:
        raise ValueError("a schema is too deep") from None


class _Moved:
    def __init__(self, references: References, prefix: str) -> None:
        self._references, self._prefix = references, prefix

    def moved(self, value: Any, names: bool = False) -> Any:
        """names: whether the keys of the value are names."""
        if isinstance(value, list):
            return [self.moved(own) for own in value]
        if not isinstance(value, dict):
            return value
        if names:
            return {key: self.moved(own) for key, own in value.items()}
        made = {key: own if key in VALUES else self.moved(own, key in MAPS)
                for key, own in value.items()
                if key not in IDS or not isinstance(own, str)}
        for key in ("$ref", *REFERENCES):
            if isinstance(value.get(key), str):
                pointer = self._references.pointer(value[key])
                made[key] = value[key] if pointer is None else self._prefix + pointer[1:]
        return made


def _names(root: Any) -> Iterator[tuple[str, str]]:
    """Yields the names that schemas give themselves, and their pointers."""
    todo: list[tuple[Any, str, bool]] = [(root, "#", False)]
    while todo:
        value, pointer, names = todo.pop()
        if isinstance(value, list):
            todo += [(own, f"{pointer}/{number}", False) for number, own in enumerate(value)]
        if not isinstance(value, dict):
            continue
        for key, own in value.items():
            if not names and key in IDS and isinstance(own, str):
                yield (own if key in ("$id", "id") else f"#{own}"), pointer
            if names or key not in VALUES:
                step = quote(key.replace("~", "~0").replace("/", "~1"), safe="$~")
                todo.append((own, f"{pointer}/{step}", not names and key in MAPS))


def shown(pointer: str) -> str:
    """Returns the place of a pointer as errors name it, with dots."""
    return ".".join(parts(pointer))
