"""Names of operators in program parts, and the operators that they stand for."""

from __future__ import annotations

import torch

import precede.model.ops  # noqa: F401  registers the precede operators

from .errors import BundleError
from .part import NAMESPACES, check_target

# An engine is data: an operator that reads files by name has no place in it.
REFUSED = frozenset({"aten.from_file.default", "aten.from_file.out"})


def resolve_operator(target: str, where: str) -> torch._ops.OpOverload:
    """The operator called NAMESPACE.NAME.OVERLOAD. Raises BundleError, starting with `where`, if there is none."""
    check_target(target, where)
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if namespace in NAMESPACES else None
    op = getattr(packet, overload, None)
    if not isinstance(op, torch._ops.OpOverload) or target in REFUSED:
        raise BundleError(
            f"{where}: no operator {target} in torch {torch.__version__} with this package's operators; "
            "compile the engine again with these versions"
        )
    return op


def operator_name(op: object) -> str | None:
    """NAMESPACE.NAME.OVERLOAD of an operator that a part may call, else None."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    name = f"{op.namespace}.{op.name().partition('::')[2].partition('.')[0]}.{op._overloadname}"
    return name if op.namespace in NAMESPACES and name not in REFUSED else None
