"""Trace a submodule once per kind, copy it for the rest.

While a trace runs, the forward of every submodule is wrapped: the nodes it makes get its path, and a submodule with a
`template_kind` is remembered. The next one of the same kind is not run: the remembered nodes are copied, reading the
new instance's parameters and arguments. Two calls are of one kind if class, `template_kind`, names, shapes and dtypes
of parameters and buffers, and the arguments' structure, sizes, dtypes and plain values are equal; so `template_kind`
must hold whatever else the forward's Python reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from . import _torch
from .errors import CaptureError


@dataclass(frozen=True, kw_only=True)
class Template:
    """What one traced call left behind; `inputs` are the nodes that a copy replaces, in a fixed order."""

    path: str
    inputs: tuple[fx.Node, ...]
    body: tuple[fx.Node, ...]
    result_spec: pytree.TreeSpec
    results: tuple[Any, ...]  # fx.Node for a tensor, the value itself otherwise
    values: tuple[Any, ...]  # the fake tensors of the results


class Modules:
    """Wraps the submodules of a model for the time of one trace.

    `failed_at` is the innermost module that raised, for messages.
    """

    def __init__(self, model: nn.Module, mode: Any, lifted: dict[str, str], templates: bool) -> None:
        self.model, self.mode, self.lifted, self.templates = model, mode, lifted, templates
        self.placeholders: dict[str, fx.Node] = {}
        self.known: dict[Hashable, Template] = {}
        self.failed_at = ""

    def begin(self, placeholders: dict[str, fx.Node]) -> None:
        """Start of the trace: the nodes of the lifted inputs by source."""
        self.placeholders = placeholders

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Forwards are wrapped inside, and restored after."""
        wrapped = [(path, m) for path, m in self.model.named_modules() if path and type(m).forward is not None]
        try:
            for path, module in wrapped:
                module.forward = self._wrap(path, module, module.forward)
            yield
        finally:
            for _, module in wrapped:
                module.__dict__.pop("forward", None)

    def _wrap(self, path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            graph = _torch.live_graph()
            last = next(iter(reversed(graph.nodes)))
            try:
                result = forward(*args, **kwargs)
            except Exception:
                self.failed_at = self.failed_at or path
                raise
            for node in _after(graph, last):
                node.meta.setdefault("module", path)
            return result

        kind = getattr(module, "template_kind", None) if self.templates else None
        if kind is None:
            return traced

        def templated(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            inputs, key = self._identify(path, module, kind, leaves, spec)
            template = self.known.get(key)
            if template is not None:
                return self._copy(template, path, inputs, leaves)
            last = next(iter(reversed(_torch.live_graph().nodes)))
            result = traced(*args, **kwargs)
            self.known[key] = self._remember(path, inputs, result, last)
            return result

        return templated

    def _identify(
        self, path: str, module: nn.Module, kind: Hashable, leaves: list[Any], spec: pytree.TreeSpec
    ) -> tuple[tuple[fx.Node, ...], Hashable]:
        """The nodes this call reads from outside, and what must be equal for a copy to be right."""
        state = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        nodes = [self.placeholders[self.lifted[f"{path}.{name}"]] for name, _ in state]
        facts: list[Hashable] = [(name, tuple(t.shape), t.dtype) for name, t in state]
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                node = _torch.node_of(leaf)
                if node is None:
                    raise CaptureError(f"argument {number} of {path} is a tensor that the model made outside forward")
                nodes.append(node)
                facts.append(_facts(leaf))
            else:
                facts.append(_plain(leaf, f"argument {number} of {path}"))
        order = {node: i for i, node in reversed(list(enumerate(nodes)))}
        sharing = tuple(order[node] for node in nodes)
        try:
            key = (type(module), kind, spec_key(spec), tuple(facts), sharing)
            hash(key)
        except TypeError as error:
            raise CaptureError(f"{path}: template_kind and plain arguments must be hashable: {error}") from None
        return tuple(nodes), key

    def _remember(self, path: str, inputs: tuple[fx.Node, ...], result: Any, last: fx.Node) -> Template:
        body = tuple(_after(_torch.live_graph(), last))
        leaves, spec = pytree.tree_flatten(result)
        inside = {*inputs, *body}
        for node in body:
            if _is_size(node):
                continue
            for read in node.all_input_nodes:
                if read not in inside and not _is_size(read):
                    raise CaptureError(
                        f"{path} reads {read.meta.get('source', read.name)}, which is neither its own parameter nor an "
                        "argument; a module with template_kind must be given what it reads"
                    )
        results = []
        for leaf in leaves:
            results.append(_torch.node_of(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        return Template(
            path=path, inputs=inputs, body=body, result_spec=spec, results=tuple(results), values=tuple(leaves)
        )

    def _copy(self, template: Template, path: str, inputs: tuple[fx.Node, ...], leaves: list[Any]) -> Any:
        graph = _torch.live_graph()
        mapping: dict[fx.Node, fx.Node] = dict(zip(template.inputs, inputs, strict=True))
        for node in template.body:
            if _is_size(node):  # named by its symbols, hence the same in every copy
                continue
            new = graph.node_copy(node, lambda n: mapping.get(n, n))
            inner = node.meta["module"]
            if inner == template.path or inner.startswith(template.path + "."):
                new.meta["module"] = path + inner[len(template.path) :]
            mapping[node] = new
        given = {_torch.node_of(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        results: list[Any] = []
        for node, value in zip(template.results, template.values, strict=True):
            if not isinstance(node, fx.Node):
                results.append(value)
                continue
            new = mapping.get(node, node)
            if new not in given:
                fresh = _torch.empty_like_fake(self.mode, value)
                _torch.track(fresh, new)
                given[new] = fresh
            results.append(given[new])
        return pytree.tree_unflatten(results, template.result_spec)


def spec_key(spec: pytree.TreeSpec) -> Hashable:
    """A hashable stand-in for a tree structure."""
    return str(spec)


def _after(graph: fx.Graph, last: fx.Node) -> list[fx.Node]:
    """Nodes that were appended after `last`, in order."""
    found: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        found.append(node)
    return found[::-1]


def _is_size(node: fx.Node) -> bool:
    return _torch.is_symbolic(node.meta.get("val"))


def _facts(t: torch.Tensor) -> Hashable:
    sizes = tuple(str(_torch.expression(d)) for d in t.shape)
    strides = tuple(str(_torch.expression(d)) for d in t.stride())
    return sizes, strides, str(t.storage_offset()), t.dtype, str(t.device)


def _plain(leaf: Any, what: str) -> Hashable:
    if _torch.is_symbolic(leaf):
        return "size", str(_torch.expression(leaf))
    if isinstance(leaf, float):
        return "float", leaf.hex()
    try:
        hash(leaf)
    except TypeError:
        raise CaptureError(f"{what} is a {type(leaf).__name__}, which is neither a pytree nor hashable") from None
    return type(leaf).__name__, leaf
