"""From a checkpoint (or a model in memory) to a compiled model, and from there to an engine folder.

    load -> capture -> passes -> part -> CompiledModel -> save

A CompiledModel runs the very part that `save` writes, so what was compared with the eager model is what is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from precede.lowering.bundle import EngineContents, PartContents, PassContents, checkpoint_digests, write_bundle
from precede.lowering.explain import explain
from precede.lowering.manifest import CheckpointFile, Decision, PassMiss, PassReport, Refusal
from precede.lowering.part import PartSpec
from precede.lowering.reference import serialise
from precede.lowering.select import choose_backend, reference_decisions
from precede.lowering.target import TARGETS, Target
from precede.model.batch import StepBatch
from precede.model.cache import CacheLayout, Caches, allocate
from precede.model.checkpoint import Checkpoint, load_checkpoint
from precede.model.config import ModelConfig
from precede.model.errors import PrecedeError, shown
from precede.model.transformer import Transformer
from precede.options import CompileOptions, OptionsError
from precede.passes.capture import capture
from precede.passes.graph import Graph
from precede.passes.manager import Pass, PassContext, PassRecord, check_passes, run_passes
from precede.passes.pipeline import PIPELINE
from precede.report import Report, part_row
from precede.runtime.engine import MAIN
from precede.runtime.program import BoundProgram, Program
from precede.runtime.tokenizer import Tokenizer
from precede.weights import checkpoint_writer

Progress = Callable[[int, int, str], None]


class CompileError(PrecedeError):
    """Something that cannot be compiled, run or saved as asked; says what to do instead."""


class NoSuchPassError(CompileError, KeyError):
    """A record is asked for by the name of a pass that did not run."""

    __str__ = CompileError.__str__


class Passes(Mapping[str, PassRecord]):
    """The records of a compilation by pass name, in the order in which they ran."""

    def __init__(self, records: Mapping[str, PassRecord]) -> None:
        self._records = dict(records)

    def __getitem__(self, name: str) -> PassRecord:
        if name not in self._records:
            raise NoSuchPassError(f"no pass {name!r} ran; there are {', '.join(self._records)}")
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


class CompiledModel:
    """A model after the passes: `compiled(batch, caches)` gives logits fp32 [L, vocab] and writes the caches in place.

    config, options, layout   what it was compiled from and for; caches must have this layout
    graph                     the graph after the last pass
    passes                    what each pass did, by name: `compiled.passes["mega_gate"].diff`
    part                      the graph as the data that an engine folder holds
    """

    def __init__(
        self,
        *,
        options: CompileOptions,
        target: Target,
        backend: str,
        decisions: Sequence[Decision],
        model: Transformer,
        layout: CacheLayout,
        graph: Graph,
        records: Mapping[str, PassRecord],
        part: PartSpec,
        directory: Path | None,
        digests: Sequence[CheckpointFile] | None,
    ) -> None:
        self.options, self.target, self.backend = options, target, backend
        self.config, self.layout = model.config, layout
        self.graph, self.passes, self.part = graph, Passes(records), part
        self.decisions = tuple(decisions)
        self.directory, self._digests = directory, digests
        self._model = model

    def __call__(self, batch: StepBatch, caches: Caches) -> torch.Tensor:
        """One step. Raises EngineMismatch if caches or batch do not fit, BatchError if the batch trims rows,
        CompileError without weights.
        """
        batch.require_untrimmed()
        return self.step(caches, batch)

    @cached_property
    def step(self) -> BoundProgram:
        """The program with its weights bound; made at the first call."""
        weights = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        if any(t.is_meta for t in weights.values()):
            raise CompileError("the model was compiled without weights and cannot run; compile a checkpoint directory")
        return Program(self.part).bind({name: tensor.detach() for name, tensor in weights.items()})

    def allocate(self, *, pages: int, rings: int) -> Caches:
        """Zeroed caches; page 0 and ring 0 are included and belong to nobody."""
        return allocate(self.layout, pages=pages, rings=rings)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer; None if there is none."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        path = self.directory / "tokenizer.json" if self.directory is not None else None
        return Tokenizer.from_file(path) if path is not None and path.is_file() else None

    def diff(self, name: str) -> str:
        """What the pass changed, equal layers folded. Raises NoSuchPassError for a pass that did not run."""
        return str(self.passes[name].diff)

    def report(self) -> Report:
        """Passes, parts and decisions: tables when printed, data from `.json()`."""
        return Report(
            passes=tuple(pass_report(record).model_dump() for record in self.passes.values()),
            parts=(part_row(self.part, self.backend),),
            decisions=tuple(decision.model_dump() for decision in self.decisions),
        )

    def explain(self) -> str:
        """Which implementation serves which operator, why, and what was refused."""
        return explain(self.decisions)

    def save(self, path: str | Path, *, copy_weights: bool = False) -> None:
        """Write an engine folder, whole or not at all; an engine that is there is replaced.

        The folder points to the checkpoint directory, or holds a copy with `copy_weights`. Weights that exist in
        memory only are written along in the published layout. Raises BundleError for a place that cannot be written, or
        a checkpoint that has changed since it was compiled, CompileError for weights that are absent or that the
        published formats cannot hold exactly.
        """
        source: Path | Callable[[Path], None]
        if self.directory is not None:
            source = self.directory
        elif any(p.is_meta for p in self._model.parameters()):
            raise CompileError(
                "the model was compiled without weights and cannot be saved; compile a checkpoint directory"
            )
        else:
            source = checkpoint_writer(self._model)
        write_bundle(
            path,
            EngineContents(
                target=self.target.name,
                backend=self.backend,
                config=self.config,
                numerics=self.layout.numerics,
                options=self.options.to_json(),
                layout=self.layout,
                kv_format=self.options.kv_format,
                store="values",
                parts=[PartContents(spec=self.part, backend=self.backend, text=self.graph.text())],
                checkpoint=source,
                digests=self._digests,
                copy_weights=copy_weights,
                passes=[_pass_contents(record) for record in self.passes.values()],
                decisions=self.decisions,
            ),
        )


def compile_model(
    model: str | Path | nn.Module, options: CompileOptions | None = None, *, progress: Progress | None = None
) -> CompiledModel:
    """Capture a model, run the passes, and make it callable and saveable.

    model      a checkpoint directory, or a `precede.model` Transformer; one on the meta device gives a compilation
               for inspection, which can neither run nor be saved
    progress   called with (done, total, what) while weights are loaded, then for each stage

    Raises CheckpointError or ConfigError for a directory that cannot be loaded, CaptureError for a model that cannot
    be captured, PassError for a fusion that vanished or an unknown pass name, BackendUnavailable and
    UnsupportedOnTarget for what cannot be built here.
    """
    options = CompileOptions() if options is None else options
    if not isinstance(options, CompileOptions):
        raise OptionsError(f"options = {shown(options)}; it takes CompileOptions, as in CompileOptions(page_size=64)")
    numerics = options.resolved_numerics()
    target, backend, decisions = _choose(options)
    pipeline = _pipeline(options)
    directory: Path | None = None
    digests: Sequence[CheckpointFile] | None = None
    if isinstance(model, str | Path):
        # Absolute, and digested before it is read: the process may go elsewhere, and the files may change.
        directory = Path(model).absolute()
        Checkpoint.open(directory)
        digests = checkpoint_digests(directory) if directory.is_dir() else None
        model = load_checkpoint(directory, numerics, progress=progress)
    if not isinstance(model, Transformer):
        raise CompileError(f"a {type(model).__name__} cannot be compiled; give a checkpoint directory or a Transformer")
    if model.numerics != numerics:
        raise OptionsError(
            f"numerics = {options.numerics!r}, but the model computes in {model.numerics.describe()}; "
            "give the options the model's numerics"
        )
    if options.verify == "numerics" and any(p.is_meta for p in model.parameters()):
        raise OptionsError("verify = 'numerics' runs the graph and needs weights; use 'structure' for a config alone")
    say = progress or (lambda done, total, what: None)
    layout = CacheLayout.of(
        model.config, numerics, page_size=options.page_size, kv_format=options.kv_format, lookahead=options.lookahead
    )
    needed = 2 * layout.page_size + 2
    if needed > model.config.max_position_embeddings:
        raise OptionsError(
            f"page_size = {layout.page_size} is too large for a model of {model.config.max_position_embeddings} "
            f"positions: a sequence must be able to reach a third page, {needed} positions; choose a smaller page_size"
        )
    say(0, 3, "capture")
    graph = _capture(model, layout)
    say(1, 3, "passes")
    records = run_passes(
        graph,
        pipeline,
        PassContext(config=model.config, numerics=numerics, example=_example(model, layout, graph)),
        disable=options.disable,
        stop_after=options.stop_after,
        verify_level=options.verify,
        allow_misses=options.allow_misses,
    )
    say(2, 3, "program")
    part = serialise(graph, name=MAIN)
    say(3, 3, "")
    return CompiledModel(
        options=options,
        target=target,
        backend=backend,
        decisions=[*decisions, *reference_decisions(part)],
        model=model,
        layout=layout,
        graph=graph,
        records=records,
        part=part,
        directory=directory,
        digests=digests,
    )


def compile_config(
    config: ModelConfig, options: CompileOptions | None = None, *, progress: Progress | None = None
) -> CompiledModel:
    """Compile a config without weights, to look at the graph and the passes; the result cannot run or be saved."""
    options = options or CompileOptions()
    return compile_model(Transformer(config, options.resolved_numerics(), device="meta"), options, progress=progress)


def pass_report(record: PassRecord) -> PassReport:
    """What a pass did, as data."""
    return PassReport(
        name=record.name,
        numerics=record.numerics,
        matches=record.matches,
        expected=record.expected,
        misses=[PassMiss(node=miss.node, reason=miss.reason) for miss in record.misses],
        nodes_before=record.nodes_before,
        nodes_after=record.nodes_after,
        seconds=record.seconds,
    )


def _pass_contents(record: PassRecord) -> PassContents:
    return PassContents(report=pass_report(record), ir=record.after.text(), diff=str(record.diff))


def _choose(options: CompileOptions) -> tuple[Target, str, list[Decision]]:
    """Target and backend, each with its reason and what was refused."""
    gpus = "GPU kernels do not exist in this version"
    if options.target not in ("host", "cpu"):
        raise OptionsError(f"target = {options.target!r} is not implemented: {gpus}; use cpu")
    target = TARGETS["cpu"]
    why = "asked for by name" if options.target == "cpu" else "every host has one"
    refused = [Refusal(implementation=name, reason=gpus) for name in TARGETS if name != "cpu"]
    backend, decisions = choose_backend(options.backend, target)
    notes = [Decision(op="target", part="*", implementation="cpu", reason=why, refused=refused)]
    if options.swa_bounded_replay:
        notes.append(
            Decision(
                op="swa_bounded_replay",
                part="*",
                implementation="none",
                reason="all rows run through all layers: this version builds one part, without the replay split",
                refused=[],
            )
        )
    return target, backend, [*notes, *decisions]


def _pipeline(options: CompileOptions) -> tuple[Pass, ...]:
    """The built-in passes, then the user's. Names are checked here, before anything is loaded."""
    pipeline = (*PIPELINE, *options.extra_passes)
    check_passes(pipeline)
    names = [p.name for p in pipeline]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise OptionsError(f"extra_passes has {twice!r}, a name that another pass has; rename it")
    asked = [("disable", name) for name in options.disable]
    asked += [("stop_after", options.stop_after)] if options.stop_after is not None else []
    for option, name in asked:
        if name not in names:
            raise OptionsError(f"{option} names {name!r}, which is no pass; there are {', '.join(names)}")
    return pipeline


def _example(model: Transformer, layout: CacheLayout, graph: Graph) -> Callable[[], list[torch.Tensor]] | None:
    """Fresh inputs of the graph for verify="numerics": the model's weights, empty caches, the example step."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if any(t.is_meta for t in weights.values()):
        return None

    def inputs() -> list[torch.Tensor]:
        caches, batch = allocate(layout, pages=6, rings=4), StepBatch.example(layout)
        tensors = {name: tensor.detach() for name, tensor in weights.items()}
        for field in fields(caches):
            stores = getattr(caches, field.name)
            tensors |= {f"cache.{field.name}.{i}": store for i, store in enumerate(stores)}
        tensors |= {f"batch.{field.name}": getattr(batch, field.name) for field in fields(batch)}
        return [tensors[node.meta["source"]] for node in graph.placeholders()]

    return inputs


def _capture(model: Transformer, layout: CacheLayout) -> Graph:
    """Capture with caches of `layout`; the model keeps its own."""
    own = model.layout
    model.set_layout(layout)
    try:
        return capture(model, StepBatch.example(layout), allocate(layout, pages=6, rings=4, device="meta"))
    finally:
        model.set_layout(own)
