"""From an eager model and one step to a flat graph, without weights and without running anything.

`make_fx` records the ATen ops that `model(batch, caches)` calls, on fake tensors whose sizes T, R, P, K, L, pages and
rings are symbols. Parameters, buffers and caches are lifted to inputs: cache writes stay in place, nothing is read.

Layers repeat, so a submodule that has a `template_kind` is traced once per kind (see templates.py) and copied for the
others. The result equals the flat capture node for node.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from precede.model.batch import DIMS, StepBatch
from precede.model.cache import Caches
from precede.model.errors import PrecedeError

from . import _torch
from .errors import CaptureError
from .graph import META_KEYS, Graph, erase_dead
from .sizes import unify_sizes
from .templates import Modules

# Sizes that stand for the symbols if code asks about them: all different, far from any static size.
HINTS = {"T": 1009, "R": 101, "P": 211, "K": 503, "L": 307, "pages": 401, "rings": 701}
CACHE_DIMS = {"window": "rings", "group": "rings", "latent": "pages", "index_key": "pages"}


def capture(model: nn.Module, batch: StepBatch, caches: Caches, *, templates: bool = True) -> Graph:
    """Record `model(batch, caches)` as a Graph.

    `batch` and `caches` give dtypes, static sizes and the device (meta tensors are welcome); every named size becomes
    symbolic. `templates=False` traces every layer. Raises CaptureError for a batch whose fields disagree about a
    named size, caches that do not fit the model, tensors that the model holds outside parameters and buffers, and
    Python that depends on data or on a symbolic size.
    """
    state = lifted_state(model)
    cache_leaves, cache_spec = leaves_with_sources(caches, "cache")
    batch_leaves, batch_spec = leaves_with_sources(batch, "batch")
    _check_batch(batch)
    _check_caches(model, caches)
    mode = _torch.fake_mode()
    sizes = {name: _torch.new_symbol(mode, name, hint) for name, hint in HINTS.items()}
    device = batch.token_ids.device if batch.token_ids.device.type != "meta" else torch.device("cpu")

    def fake(source: str, t: torch.Tensor) -> torch.Tensor:
        role, _, rest = source.partition(".")
        if role == "batch":
            shape = [sizes[d] if isinstance(d, str) else t.shape[i] for i, d in enumerate(DIMS[rest])]
            return _torch.empty_fake(mode, shape, None, t.dtype, device)
        shape = [sizes[CACHE_DIMS[rest.partition(".")[0]]], *t.shape[1:]]
        return _torch.empty_fake(mode, shape, None, t.dtype, device)

    fakes = {name: _torch.empty_fake(mode, t.shape, t.stride(), t.dtype, device) for name, t in state.items()}
    fakes |= {name: fake(name, t) for name, t in {**cache_leaves, **batch_leaves}.items()}
    sources = list(fakes)
    aliases = _shared_names(model, state)
    modules = Modules(model, mode, aliases, templates)

    def run(*flat: torch.Tensor) -> torch.Tensor:
        _torch.record_helper_lines()
        tensors = dict(zip(sources, flat, strict=True))
        weights = {name: tensors[name] for name in state}
        step = pytree.tree_unflatten([tensors[n] for n in batch_leaves], batch_spec)
        stores = pytree.tree_unflatten([tensors[n] for n in cache_leaves], cache_spec)
        modules.begin(dict(zip(sources, _torch.live_graph().find_nodes(op="placeholder"), strict=True)))
        return torch.func.functional_call(model, weights, (step, stores))

    with _explained(modules), mode, modules.installed():
        traced = _torch.trace(run, [fakes[name] for name in sources])
    _check_guards(mode)
    roles = ["weight"] * len(state) + ["cache"] * len(cache_leaves) + ["batch"] * len(batch_leaves)
    for node, source, role in zip(traced.graph.find_nodes(op="placeholder"), sources, roles, strict=True):
        node.meta.update(source=source, role=role, ssa=source)
    symbols = {_torch.symbol(size): name for name, size in sizes.items()}
    return tidy(traced.graph, symbols)


def flat_inputs(model: nn.Module, batch: StepBatch, caches: Caches) -> list[torch.Tensor]:
    """The real tensors of a captured graph's placeholders, in order: what `Graph.run` takes."""
    tensors = [*lifted_state(model).values(), *leaves_with_sources(caches, "cache")[0].values()]
    return [*tensors, *leaves_with_sources(batch, "batch")[0].values()]


def lifted_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then buffers, each once, by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def leaves_with_sources(tree: Any, role: str) -> tuple[dict[str, torch.Tensor], pytree.TreeSpec]:
    """Tensor leaves of a pytree by source name (`cache.window.3`), and what unflattens them."""
    pairs, spec = pytree.tree_flatten_with_path(tree)
    named: dict[str, torch.Tensor] = {}
    for path, leaf in pairs:
        name = ".".join([role, *(str(getattr(k, "name", getattr(k, "idx", getattr(k, "key", k)))) for k in path)])
        if not isinstance(leaf, torch.Tensor):
            raise CaptureError(f"{name} is a {type(leaf).__name__}; every {role} leaf must be a tensor")
        named[name] = leaf
    return named, spec


def tidy(graph: fx.Graph, symbols: dict[Any, str]) -> Graph:
    """Make a fresh trace a Graph: one node a size, no unused values, only our metadata. Shared by both doors."""
    unify_sizes(graph)
    output = graph.output_node()
    result = output.args[0]
    if isinstance(result, list | tuple) and len(result) == 1:
        result = result[0]
        output.args = (result,)
    if not isinstance(result, fx.Node):
        raise CaptureError(f"the model returns {type(output.args[0]).__name__}; a captured forward returns one tensor")
    for node in list(graph.nodes):
        if node.op in ("get_attr", "call_module", "call_method"):
            raise CaptureError(
                f"{node.meta.get('module') or 'the model'} uses a tensor that is neither parameter nor buffer "
                f"({_line(node.meta.get('stack_trace'))}); register it with register_buffer"
            )
    erase_dead(graph)
    for node in graph.nodes:
        kept = {k: node.meta[k] for k in META_KEYS if k in node.meta}
        if node.op == "call_function":
            kept.setdefault("module", "")
            kept.setdefault("val", None)  # an op that only writes
            kept["layer"] = layer_of(kept["module"])
            kept["stack_trace"] = _line(node.meta.get("stack_trace"))
        node.meta = kept
    return Graph(graph, symbols)


def layer_of(module: str) -> int | None:
    """The layer number in a module path `layers.N...`, None elsewhere."""
    first, _, rest = module.partition(".")
    number = rest.partition(".")[0]
    return int(number) if first == "layers" and number.isdigit() else None


def _check_batch(batch: StepBatch) -> None:
    found: dict[str, tuple[str, int]] = {}
    for field, dims in DIMS.items():
        tensor = getattr(batch, field)
        if tensor.dim() != len(dims):
            raise CaptureError(
                f"batch.{field} has {tensor.dim()} dimensions, expected {len(dims)}; use StepBatch.of(...)"
            )
        for i, dim in enumerate(dims):
            if not isinstance(dim, str):
                continue
            first, size = found.setdefault(dim, (field, tensor.shape[i]))
            if size != tensor.shape[i]:
                raise CaptureError(
                    f"batch.{field} has {tensor.shape[i]} rows in dimension {i}, batch.{first} has {size}; both are "
                    f"{dim} and must be equal; build batches with StepBatch.of(...)"
                )


def _check_caches(model: nn.Module, caches: Caches) -> None:
    config = getattr(model, "config", None)
    if config is None:
        return
    sources = len(config.kv_source_layer_ids)
    groups = sum(config.compress_ratios[s] > 1 for s in config.kv_source_layer_ids)
    expected = {"window": config.num_hidden_layers, "latent": sources, "index_key": sources, "group": groups}
    for name, count in expected.items():
        if len(getattr(caches, name)) != count:
            raise CaptureError(
                f"caches.{name} has {len(getattr(caches, name))} tensors, the model needs {count}; "
                "allocate them with the layout of the model's own config"
            )


def _shared_names(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Every name of a parameter or buffer -> the name under which it is lifted (another for a shared tensor)."""
    by_id = {id(t): name for name, t in state.items()}
    names = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: by_id[id(t)] for name, t in names}


def _check_guards(mode: Any) -> None:
    found = _torch.guards(mode)
    if found:
        condition, where = found[0]
        raise CaptureError(
            f"the model's Python depends on a symbolic size: it asked whether {condition} ({where}); "
            f"a graph must hold for every size, so compute with tensors instead ({len(found)} such questions)"
        )


@contextmanager
def _explained(modules: Modules) -> Iterator[None]:
    """Turn whatever a model raises under tracing into one sentence with module and line."""
    try:
        yield
    except PrecedeError:
        raise
    except Exception as error:
        where = f"module {modules.failed_at}" if modules.failed_at else "the model"
        line = _model_line(error)
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
            reason = f"the result of {reason} is data, which a graph cannot branch on or size a tensor by"
        raise CaptureError(f"{where} cannot be captured ({line}): {type(error).__name__}: {reason}") from error


_OWN = str(Path(__file__).resolve().parent)
_TORCH = str(Path(torch.__file__).resolve().parent)


def _model_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if not f.filename.startswith((_OWN, _TORCH))]
    return f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "no source line"


@functools.cache
def _line(stack_trace: str | None) -> str:
    """`file:line in function` of the innermost frame outside torch and this folder."""
    if not stack_trace:
        return ""
    if not stack_trace.lstrip().startswith("File "):
        return stack_trace
    for text in reversed([s.strip() for s in stack_trace.splitlines() if s.strip().startswith("File ")]):
        filename = text.split('"')[1]
        if not filename.startswith((_OWN, _TORCH)):
            number, _, function = text.split('"')[2].removeprefix(", line ").partition(", in ")
            return f"{filename}:{number} in {function}"
    return ""
