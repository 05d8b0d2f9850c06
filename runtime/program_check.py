"""Is a part a program? Every name, operator, argument and result, checked before anything is built from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

import torch

from precede.lowering.errors import BundleError
from precede.lowering.operators import resolve_operator
from precede.lowering.part import GETITEM, SIZE_ARITHMETIC, InputSpec, NodeSpec, PartSpec, references, shorten
from precede.model.batch import StepBatch
from precede.model.cache import Caches

# What a value is: one tensor, a size, nothing, a list of unknown length, or a number of tensors.
Kind = Literal["tensor", "int", "none", "list"] | int

BATCH_FIELDS = frozenset(f.name for f in fields(StepBatch))
CACHE_STORES = frozenset(f.name for f in fields(Caches))

SIZE = "aten.sym_size.int"
_SCHEMA_TAGS = {"ScalarType": "dtype", "Layout": "layout", "MemoryFormat": "memory_format", "Device": "device"}


def check_part(part: PartSpec) -> dict[str, torch._ops.OpOverload]:
    """Check the whole part; returns node name -> operator (getitem and size arithmetic have none).

    Raises BundleError naming part, node and what is expected.
    """
    kinds: dict[str, Kind] = {}
    ranks: dict[str, int] = {}
    sources: dict[str, str] = {}
    operators: dict[str, torch._ops.OpOverload] = {}
    for spec in part.inputs:
        where = f"part {part.name}, input {spec.name}"
        if spec.name in kinds:
            raise BundleError(f"{where}: two inputs have this name")
        _check_input(spec, part, where)
        if spec.source in sources:
            raise BundleError(f"{where}: source {spec.source!r} is already input {sources[spec.source]}")
        kinds[spec.name] = "tensor"
        ranks[spec.name] = len(spec.shape)
        sources[spec.source] = spec.name
    later = {node.name for node in part.nodes}
    for node in part.nodes:
        where = f"part {part.name}, node {node.name} = {node.target}"
        if node.name in kinds:
            raise BundleError(f"{where}: the name is defined twice")
        for name in references([node.args, list(node.kwargs.values())]):
            if name not in kinds:
                why = "is used before it is defined" if name in later else "is not defined"
                raise BundleError(f"{where}: {name} {why}; a node may use inputs and nodes above it")
        if node.target == GETITEM:
            kind = _check_getitem(node, kinds, where)
        elif node.target in SIZE_ARITHMETIC:
            kind = _check_arithmetic(node, kinds, where)
        else:
            op = resolve_operator(node.target, where)
            _check_call(op, node, kinds, where)
            if node.target == SIZE:
                _check_size(node, ranks, where)
            operators[node.name] = op
            kind = _result_kind(op, where)
        kinds[node.name] = _check_declared(node, kind, where)
        if kinds[node.name] == "tensor" and node.shape is not None:
            ranks[node.name] = len(node.shape)
    measured = {d for spec in part.inputs for d in spec.shape if isinstance(d, str)}
    if not part.outputs:
        raise BundleError(f"part {part.name}: has no outputs")
    for output in part.outputs:
        if kinds.get(output.name) != "tensor":
            found = f"is {_words(kinds[output.name])}" if output.name in kinds else "is not defined"
            raise BundleError(f"part {part.name}: output {output.name} {found}; an output is a tensor")
        odd = next((d for d in output.shape if isinstance(d, str) and d not in measured), None)
        if odd is not None:
            raise BundleError(
                f"part {part.name}, output {output.name}: size {odd!r} is no size of a batch or cache input; "
                f"expected integers or {', '.join(sorted(measured))}"
            )
    return operators


def _check_input(spec: InputSpec, part: PartSpec, where: str) -> None:
    role, *rest = spec.source.split(".")
    if spec.role == "batch":
        known = role == "batch" and len(rest) == 1 and rest[0] in BATCH_FIELDS
        expected = "batch.FIELD with a field of StepBatch"
    elif spec.role == "cache":
        known = role == "cache" and len(rest) == 2 and rest[0] in CACHE_STORES
        known = known and rest[1].isascii() and rest[1].isdecimal()
        expected = f"cache.STORE.INDEX with a store of {', '.join(sorted(CACHE_STORES))}"
    else:
        known, expected = role not in ("batch", "cache"), "the name of a parameter or buffer"
    if not known:
        raise BundleError(f"{where}: {spec.source!r} is no {spec.role} source; expected {expected}")
    for dim in spec.shape:
        if isinstance(dim, str) and (dim not in part.symbols or spec.role == "weight"):
            allowed = "integers" if spec.role == "weight" else f"integers or {', '.join(part.symbols)}"
            raise BundleError(f"{where}: size {dim!r} is not allowed here; expected {allowed}")


def _check_getitem(node: NodeSpec, kinds: Mapping[str, Kind], where: str) -> Kind:
    if len(node.args) == 2 and not node.kwargs and _is_reference(node.args[0]):
        count, index = kinds[node.args[0]["ref"]], node.args[1]
        if isinstance(count, int) and type(index) is int:
            if 0 <= index < count:
                return "tensor"
            raise BundleError(f"{where}: index {index} is outside the {count} results of {node.args[0]['ref']}")
    raise BundleError(f"{where}: expected (reference to several tensors, index), got {shorten(node.args)}")


def _check_arithmetic(node: NodeSpec, kinds: Mapping[str, Kind], where: str) -> Kind:
    count = 1 if node.target == "sym.neg" else 2
    if len(node.args) != count or node.kwargs or not all(_is_size(a, kinds) for a in node.args):
        raise BundleError(
            f"{where}: expected {count} sizes (integers or references to sizes), got {shorten(node.args)}"
        )
    return "int"


def _check_size(node: NodeSpec, ranks: Mapping[str, int], where: str) -> None:
    if len(node.args) == 2 and not node.kwargs and _is_reference(node.args[0]):
        rank, dim = ranks.get(node.args[0]["ref"]), node.args[1]
        if rank is not None and type(dim) is int and -rank <= dim < rank:
            return
    raise BundleError(f"{where}: expected (reference to a tensor, one of its dimensions), got {shorten(node.args)}")


def _check_call(op: torch._ops.OpOverload, node: NodeSpec, kinds: Mapping[str, Kind], where: str) -> None:
    arguments = op._schema.arguments
    positional = [a for a in arguments if not a.kwarg_only]
    if len(node.args) > len(positional):
        raise BundleError(f"{where}: {len(node.args)} positional arguments; {op._schema} takes {len(positional)}")
    given: dict[str, Any] = {a.name: v for a, v in zip(positional, node.args, strict=False)}
    by_name = {a.name: a for a in arguments}
    for key, value in node.kwargs.items():
        if key not in by_name:
            raise BundleError(f"{where}: no argument {shorten(key)}; expected {op._schema}")
        if key in given:
            raise BundleError(f"{where}: argument {key} is given twice; expected {op._schema}")
        given[key] = value
    for argument in arguments:
        if argument.name not in given:
            if not argument.has_default_value() and argument.type.kind() != "OptionalType":
                raise BundleError(f"{where}: argument {argument.name} is missing; expected {op._schema}")
        elif not _accepts(argument.real_type, given[argument.name], kinds):
            found = shorten(given[argument.name])
            raise BundleError(f"{where}: argument {argument.name} must be {argument.real_type}, got {found}")


def _accepts(wanted: torch.JitType, value: Any, kinds: Mapping[str, Kind]) -> bool:
    """Whether torch would take the encoded `value` for an argument of the schema type `wanted`."""
    name, kind = str(wanted), wanted.kind()
    if kind == "OptionalType":
        return value is None or _accepts(wanted.getElementType(), value, kinds)
    if kind == "ListType":
        element = wanted.getElementType()
        if isinstance(value, list):
            plain = "Tensor" in str(element) and any(isinstance(item, int | float) for item in value)
            return not plain and all(_accepts(element, item, kinds) for item in value)
        # torch repeats a single number where a schema says int[2].
        return str(element) in ("int", "float") and _accepts(element, value, kinds)
    if name in _SCHEMA_TAGS:
        return isinstance(value, Mapping) and _SCHEMA_TAGS[name] in value
    if name == "Tensor":
        # A plain number stands for a zero-dimensional tensor, as in aten.mul.Tensor(x, 2).
        return (_is_reference(value) and kinds[value["ref"]] == "tensor") or isinstance(value, int | float)
    if name in ("int", "SymInt"):
        return _is_size(value, kinds)
    if name in ("float", "number"):
        tagged = isinstance(value, Mapping) and "float" in value
        return tagged or isinstance(value, int | float) or _is_size(value, kinds)
    return (name == "bool" and isinstance(value, bool)) or (name == "str" and isinstance(value, str))


def _result_kind(op: torch._ops.OpOverload, where: str) -> Kind:
    returns = [str(r.real_type) for r in op._schema.returns]
    if not returns:
        return "none"
    if returns == ["List[Tensor]"]:
        return "list"
    if returns in (["int"], ["SymInt"]):
        return "int"
    if set(returns) == {"Tensor"}:
        return "tensor" if len(returns) == 1 else len(returns)
    raise BundleError(f"{where}: gives {', '.join(returns)}; a program holds tensors and sizes only")


def _check_declared(node: NodeSpec, kind: Kind, where: str) -> Kind:
    """The kind of the node's value; a list's length is the declared one."""
    declared: Kind
    if isinstance(node.dtype, list):
        shapes = node.shape if isinstance(node.shape, list) else []
        if len(shapes) != len(node.dtype) or not all(isinstance(s, list) for s in shapes):
            raise BundleError(
                f"{where}: dtype has {len(node.dtype)} entries, so shape must be a list of as many shapes"
            )
        declared = len(node.dtype)
    elif node.dtype is None:
        declared = "none"
    else:
        declared = "int" if node.dtype == "int" and node.shape is None else "tensor"
    if declared != kind and not (kind == "list" and isinstance(declared, int)):
        raise BundleError(f"{where}: dtype and shape declare {_words(declared)}, the operator gives {_words(kind)}")
    return declared


def _is_reference(value: Any) -> bool:
    return isinstance(value, Mapping) and "ref" in value


def _is_size(value: Any, kinds: Mapping[str, Kind]) -> bool:
    return type(value) is int or (_is_reference(value) and kinds[value["ref"]] == "int")


def _words(kind: Kind) -> str:
    words = {"tensor": "a tensor", "int": "a size", "none": "no result", "list": "a list of tensors"}
    return words[kind] if isinstance(kind, str) else f"{kind} tensors"
