"""The file format of a program part: a graph as plain data.

`parts/NAME.json` holds one object:

    schema   "precede.part/1"
    name     the part's name
    symbols  {"T": [1, null], ...}   named sizes with their least and greatest value (null: no bound)
    inputs   {name, role, source, dtype, shape}; role weight | cache | batch
             source: a parameter's or buffer's name, cache.STORE.INDEX, batch.FIELD
    nodes    {name, target, args, kwargs, dtype, shape, stream}, in order of execution
    outputs  {name, dtype, shape}

A target is `aten.NAME.OVERLOAD`, `prims.NAME.OVERLOAD`, `precede.NAME.OVERLOAD`, `getitem`, or integer arithmetic on
sizes from the closed list `SIZE_ARITHMETIC`. An argument is a JSON scalar, a list of arguments, or one of

    {"ref": NAME}             an earlier input or node
    {"float": "inf"}          or "-inf", "nan", which JSON cannot say
    {"dtype": "bfloat16"}     {"layout": "strided"}     {"memory_format": "contiguous_format"}
    {"device": "program"}     the device that the program runs on; or "cpu", always the host

A tensor's dtype and shape are a name and a list (sizes are integers or expressions in symbols); several tensors have a
list of each; a size has dtype "int" and shape null; an operator without a result has null for both. Nothing in the file
is ever executed or imported; whoever builds a callable from it resolves every name against a closed set.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import BundleError

SCHEMA = "precede.part/1"

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
)
LAYOUTS = ("strided",)
MEMORY_FORMATS = ("contiguous_format", "preserve_format")
DEVICES = ("program", "cpu")
FLOATS = ("inf", "-inf", "nan")
NAMESPACES = ("aten", "prims", "precede")
SIZE_ARITHMETIC = ("sym.add", "sym.sub", "sym.mul", "sym.floordiv", "sym.mod", "sym.neg", "sym.max", "sym.min")
GETITEM = "getitem"
MAX_DEPTH = 4

_TAGS: dict[str, tuple[str, ...]] = {
    "float": FLOATS,
    "dtype": DTYPES,
    "layout": LAYOUTS,
    "memory_format": MEMORY_FORMATS,
    "device": DEVICES,
}
_TARGET = re.compile(rf"(?:{'|'.join(NAMESPACES)})\.[A-Za-z_]\w*\.[A-Za-z_]\w*", re.ASCII)
NAME_PATTERN = r"^[A-Za-z0-9_.\-]{1,256}$"

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Dim = int | Annotated[str, Field(min_length=1, max_length=400)]
Shape = list[Dim]
Dtype = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
ResultDtype = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)}|int)$")]


class Record(BaseModel):
    """Base of everything read from an engine folder: no conversions, no unknown keys, no changes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class InputSpec(Record):
    """A tensor that a part is given; sizes are integers or single symbols."""

    name: Name
    role: Literal["weight", "cache", "batch"]
    source: Annotated[str, Field(min_length=1, max_length=256)]
    dtype: Dtype
    shape: Shape


class OutputSpec(Record):
    """A value that a part returns."""

    name: Name
    dtype: Dtype
    shape: Shape


class NodeSpec(Record):
    """One operator call; `dtype` and `shape` follow the operator's result (see the module's text)."""

    name: Name
    target: Annotated[str, Field(min_length=1, max_length=256)]
    args: list[Any]
    kwargs: dict[str, Any]
    dtype: ResultDtype | list[Dtype] | None
    shape: Shape | list[Shape] | None
    stream: Annotated[int, Field(ge=0)] = 0


class PartSpec(Record):
    """A whole part, as read from its file or as made from a graph."""

    schema_: Annotated[Literal["precede.part/1"], Field(alias="schema")] = SCHEMA
    name: Name
    symbols: dict[str, tuple[int, int | None]]
    inputs: list[InputSpec]
    nodes: list[NodeSpec]
    outputs: list[OutputSpec]

    @classmethod
    def parse(cls, data: str | bytes | Mapping[str, Any], *, source: str = "part") -> PartSpec:
        """Read a part and check its form: keys, types, targets' namespaces, argument encodings.

        `source` names the file in messages. Names and operators are resolved later, by the program.
        Raises BundleError.
        """
        if isinstance(data, str | bytes):
            data = parse_json(data, source)
        # JSON has no tuples, which strict models insist on.
        if isinstance(data, Mapping) and isinstance(data.get("symbols"), Mapping):
            symbols = {k: tuple(v) if isinstance(v, list) else v for k, v in data["symbols"].items()}
            data = {**data, "symbols": symbols}
        try:
            part = cls.model_validate(data)
        except ValidationError as error:
            raise BundleError(f"{source}: {describe(error, data)}") from None
        for node in part.nodes:
            where = f"{source}, node {node.name}"
            check_target(node.target, where)
            for position, value in enumerate(node.args):
                check_argument(value, f"{where}, argument {position}")
            for key, value in node.kwargs.items():
                check_argument(value, f"{where}, argument {key}")
        return part

    def to_json(self) -> str:
        """The file's text: one input, node or output a line, so that two parts can be compared by lines."""
        head = {"schema": self.schema_, "name": self.name, "symbols": self.symbols}
        lines = ["{"]
        lines += [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        for key in ("inputs", "nodes", "outputs"):
            rows = [json.dumps(row.model_dump(), allow_nan=False) for row in getattr(self, key)]
            lines += [f'"{key}": [', ",\n".join(rows), "]" if key == "outputs" else "],"]
        return "\n".join([*lines, "}", ""])

    def targets(self) -> dict[str, int]:
        """How often each operator is called, in order of first call; size arithmetic and getitem left out."""
        counts: dict[str, int] = {}
        for node in self.nodes:
            if _TARGET.fullmatch(node.target):
                counts[node.target] = counts.get(node.target, 0) + 1
        return counts


def check_target(target: str, where: str) -> None:
    """Raises BundleError unless `target` has the form of an operator, getitem, or known size arithmetic."""
    if target == GETITEM or target in SIZE_ARITHMETIC or _TARGET.fullmatch(target):
        return
    allowed = ", ".join(f"{n}.NAME.OVERLOAD" for n in NAMESPACES)
    raise BundleError(f"{where}: target {target!r} is not allowed; targets are {allowed}, {GETITEM} and sym.*")


def check_argument(value: Any, where: str, depth: int = 0) -> None:
    """Raises BundleError unless `value` is an argument in the encoding of this format."""
    if depth > MAX_DEPTH:
        raise BundleError(f"{where}: lists are nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | int | float | str):
        if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
            raise BundleError(f'{where}: {value} must be written {{"float": "{value}"}}')
        return
    if isinstance(value, list):
        for item in value:
            check_argument(item, where, depth + 1)
        return
    if isinstance(value, Mapping) and len(value) == 1:
        ((tag, content),) = value.items()
        if tag == "ref" and isinstance(content, str):
            return
        if tag in _TAGS:
            if content in _TAGS[tag]:
                return
            raise BundleError(f"{where}: {tag} {content!r} is unknown; expected one of {', '.join(_TAGS[tag])}")
    raise BundleError(f"{where}: {shorten(value)} is no JSON scalar, list, reference or tagged value")


def references(value: Any) -> Iterator[str]:
    """Names that an argument refers to, in order, repeats included."""
    if isinstance(value, Mapping):
        if "ref" in value:
            yield value["ref"]
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def parse_json(data: str | bytes, source: str) -> Any:
    """Parse JSON text with finite numbers; a fault is a BundleError that names `source`, and the line if known."""
    try:
        return json.loads(data, parse_constant=_refuse_number, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise BundleError(f"{source}: not JSON: {error.msg} at line {error.lineno}; save the engine again") from None
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{source}: not JSON: {error}; save the engine again") from None


def _refuse_number(text: str) -> float:
    raise ValueError(f"{shorten(text)} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def describe(error: ValidationError, data: Any) -> str:
    """The first fault of a validation as one sentence, with the path to the value and the value itself."""
    first = error.errors()[0]
    path, at = "", data
    for step in first["loc"]:
        if isinstance(step, str) and not isinstance(at, Mapping):
            continue  # a member of a union, not a key of the file
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
        if isinstance(at, list) and isinstance(step, int) and step < len(at):
            at = at[step]
            if isinstance(at, Mapping) and isinstance(at.get("name"), str):
                path += f" ({at['name']})"
        elif isinstance(at, Mapping):
            at = at.get(step)
    message = first["msg"]
    if first["type"] == "missing":
        return f"{path} is missing"
    if first["type"] == "extra_forbidden":
        return f"{path} is not a key of this format"
    return f"{path or 'the file'}: {message[0].lower()}{message[1:]}, got {shorten(first.get('input'))}"


def shorten(value: Any) -> str:
    """`repr`, cut to a length that fits into a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
