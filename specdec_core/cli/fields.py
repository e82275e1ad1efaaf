"""The options of a pydantic config, in words."""

from __future__ import annotations

import enum
import types
import typing
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >=", "max_length": "length <="}


def describe_fields(config: type[BaseModel]) -> list[dict[str, Any]]:
    """Give every option's name, type, default and description."""
    return [
        {
            "option": field.alias or name,
            "type": _type(field),
            "default": None if field.is_required() else _default(field),
            "required": field.is_required(),
            "description": field.description or "",
        }
        for name, field in config.model_fields.items()
    ]


def _default(field: FieldInfo) -> Any:
    return to_jsonable_python(field.get_default(call_default_factory=True, validated_data={}), fallback=str)


def _type(field: FieldInfo) -> str:
    """Name a field's type and its bounds: `int >= 1`."""
    bounds = [
        f"{sign} {getattr(limit, key)}"
        for limit in field.metadata
        for key, sign in _BOUNDS.items()
        if getattr(limit, key, None) is not None
    ]
    return f"{_type_name(field.annotation)} {', '.join(bounds)}".strip()


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(map(str, arguments))
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin in (typing.Union, types.UnionType):  # None is what an option is that is not given
        return " | ".join(_type_name(one) for one in arguments if one is not type(None))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " | ".join(str(member.value) for member in annotation)
    if origin is not None:
        return str(annotation).replace("typing.", "")
    return {"str": "text"}.get(name := getattr(annotation, "__name__", str(annotation)), name)
