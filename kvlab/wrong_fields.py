"""What pydantic finds wrong in a profile or a parameter, in lines for people."""

from __future__ import annotations

import difflib
import typing
from typing import Any

from pydantic import BaseModel, ValidationError

LIMITS = {
    "greater_than": "greater than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
}
KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text in quotes",
    "tuple_type": "a list in brackets",
    "list_type": "a list in brackets",
    "dict_type": "a table",
    "model_type": "a table",
}
SCALARS = ("str", "int", "float", "bool")  # the branches of a field that takes any of them


def lines(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line a wrong field, as `load.shapes.0.rounds: must be greater than 0, not -1`."""
    return list(dict.fromkeys(_line(entry, model) for entry in error.errors()))


def _line(entry: dict[str, Any], model: type[BaseModel]) -> str:
    path = list(entry["loc"])
    if len(path) > 1 and path[-1] in SCALARS:
        return f"{_dotted(path[:-1])}: must be a text, a number, or true or false, not {_shown(entry['input'])}"
    return f"{_dotted(path) or '(all)'}: {_why(entry, path, model)}"


def _why(entry: dict[str, Any], path: list, model: type[BaseModel]) -> str:
    kind, context = entry["type"], entry.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(path, model)
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return entry["msg"].removeprefix("Value error, ")
    if kind in LIMITS:
        return f"must be {LIMITS[kind].format(**context)}, not {_shown(entry['input'])}"
    if kind in KINDS:
        return f"must be {KINDS[kind]}, not {_shown(entry['input'])}"
    if kind == "too_short":
        return f"needs at least {context['min_length']}, and has {context['actual_length']}"
    said = entry["msg"].replace("Input should be", "must be").replace("String should", "should")
    return f"{said}, not {_shown(entry['input'])}"


def _unknown(path: list, model: type[BaseModel]) -> str:
    """An unknown field: the likely one, and the fields of its own table."""
    table, name = path[:-1], str(path[-1])
    known = list(_table(model, table).model_fields)
    near = difflib.get_close_matches(name, known, 1)
    guess = f"; did you mean {near[0]}?" if near else ";"
    where = _dotted([part for part in table if isinstance(part, str)])
    return f"there is no such field{guess} {f'[{where}]' if where else 'the file'} knows: {', '.join(known)}"


def _table(model: type[BaseModel], path: list) -> type[BaseModel]:
    """The model of a nested table."""
    for name in (part for part in path if isinstance(part, str) and part in model.model_fields):
        model = _model_in(model.model_fields[name].annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _model_in(part))), None)


def _dotted(path: list) -> str:
    return ".".join(map(str, path))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
