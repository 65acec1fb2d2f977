"""`null` for a field that may be absent means that it is absent: many clients write every field
that they know. Pure.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from msgspec import inspect


def without_nulls(value: Any, kind: Any) -> Any:
    """A copy of `value`, which JSON was decoded to, less the nulls of fields that have a default
    and whose type has no null. kind: the type that it is to become; values of type `Any` are left
    as they are."""
    return _typed(value, _info(kind))


@functools.cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _typed(value: Any, kind: inspect.Type) -> Any:
    if isinstance(value, dict):
        return _object(value, kind)
    if isinstance(value, list):
        items = _member(kind, inspect.ListType)
        if items is None or _plain(items.item_type):
            return value
        return [_typed(one, items.item_type) for one in value]
    return value


def _object(value: dict[str, Any], kind: inspect.Type) -> dict[str, Any]:
    struct = _member(kind, inspect.StructType)
    if struct is not None:
        fields = {field.encode_name: field for field in struct.fields}
        return {name: _typed(one, fields[name].type) if name in fields else one
                for name, one in value.items()
                if one is not None or name not in fields or not _absent(fields[name])}
    table = _member(kind, inspect.DictType)
    if table is not None and not _plain(table.value_type):
        return {name: _typed(one, table.value_type) for name, one in value.items()}
    return value


def _plain(kind: inspect.Type) -> bool:
    """Nothing of this type has fields: two million numbers are not looked at one by one."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return not any(isinstance(one, inspect.StructType | inspect.ListType | inspect.DictType)
                   for one in kinds)


def _absent(field: inspect.Field) -> bool:
    """Whether a null means that the field is not there."""
    return not field.required and _member(field.type, inspect.NoneType) is None \
        and not isinstance(field.type, inspect.AnyType)


def _member(kind: inspect.Type, wanted: type[Any]) -> Any:
    """The type itself, or the one of a union, if it is of the wanted sort."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return next((one for one in kinds if isinstance(one, wanted)), None)


def decode(body: bytes, kind: Any) -> Any:
    """JSON as a `kind`, nulls of absent fields left out. Raises as `msgspec.json.decode`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if "got `null`" not in str(error):
            raise
    # Seldom, so that only who writes such nulls pays for a second decoding.
    return msgspec.convert(without_nulls(msgspec.json.decode(body), kind), kind, str_keys=True)
