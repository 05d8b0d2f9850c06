"""Prompts in, texts out, for one batch that is known from the start.

All prompts are prefilled together (in chunks, if they exceed the token budget of a step), then decoded together; a
request that ends leaves the batch. Every request owns its pages and its ring from the beginning to the end.
"""

from __future__ import annotations

import operator
import secrets
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from precede.model.batch import StepBatch
from precede.model.cache import CacheLayout, Caches
from precede.model.errors import shown

from .request import Request, RequestOutput
from .sampler import sample
from .sampling import RequestError, SamplingParams
from .tokenizer import Tokenizer, TokenizerError

Prompt = str | Sequence[int]


class Runnable(Protocol):
    """What LLM drives: an Engine, or a CompiledModel that was never saved."""

    @property
    def layout(self) -> CacheLayout:
        """Shapes and formats of the caches."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, if it has one."""
        ...

    def allocate(self, *, pages: int, rings: int) -> Caches:
        """Caches for that many pages and rings, the null ones included."""
        ...

    def __call__(self, batch: StepBatch, caches: Caches) -> torch.Tensor:
        """Logits [L, vocab] fp32 of one step."""
        ...


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step did, for progress displays."""

    kind: Literal["prefill", "decode"]
    rows: int
    requests: int
    finished: int
    seconds: float


class LLM:
    """Generates from a loaded engine. `max_step_tokens` bounds the rows of a prefill step."""

    def __init__(self, engine: Runnable, *, max_step_tokens: int = 2048) -> None:
        if not isinstance(max_step_tokens, int) or isinstance(max_step_tokens, bool) or max_step_tokens < 1:
            raise RequestError(f"max_step_tokens = {shown(max_step_tokens)}; it takes an integer of at least 1")
        self.engine = engine
        self.max_step_tokens = max_step_tokens

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: Callable[[Step], None] | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of `prompts` (strings or lists of token ids); `params` for all, or one a prompt.

        Raises RequestError before anything is computed if a prompt is empty, holds an id outside the vocabulary,
        leaves no position for an output, or is text while there is no tokenizer; also if the caches of all requests
        do not fit into memory.
        """
        started = time.perf_counter()
        requests = self._admit(prompts, params)
        page_size = self.engine.layout.page_size
        caches = self._allocate(pages=1 + sum(len(r.pages) for r in requests), rings=1 + len(requests))
        while running := [r for r in requests if r.finish_reason is None]:
            begin = time.perf_counter()
            plan = self._plan(running)
            batch = StepBatch.of([r.step(rows, page_size) for r, rows in plan], self.engine.layout)
            logits = self.engine(batch, caches)
            for request, rows in plan:
                request.computed += rows
            ready = [i for i, (request, _) in enumerate(plan) if request.remaining == 0]
            samples = sample(logits[ready], [plan[i][0].row for i in ready])
            now = time.perf_counter()
            decoding = bool(plan[0][0].output_ids)
            for i, chosen in zip(ready, samples, strict=True):
                request = plan[i][0]
                if request.output_ids:
                    request.token_seconds.append(now - begin)
                else:
                    request.prefill_seconds = now - started
                request.accept(chosen)
            if on_step is not None:
                on_step(
                    Step(
                        kind="decode" if decoding else "prefill",
                        rows=sum(rows for _, rows in plan),
                        requests=len(plan),
                        finished=sum(r.finish_reason is not None for r, _ in plan),
                        seconds=time.perf_counter() - begin,
                    )
                )
        return [r.output() for r in requests]

    def _allocate(self, *, pages: int, rings: int) -> Caches:
        try:
            return self.engine.allocate(pages=pages, rings=rings)
        except (RuntimeError, MemoryError):  # what torch raises depends on the device and on the size
            layout = self.engine.layout
            wanted = pages * layout.page_bytes() + rings * layout.ring_bytes()
            raise RequestError(
                f"the caches of these requests take {wanted:,} bytes, which could not be allocated; "
                "lower max_tokens or give fewer prompts"
            ) from None

    def _plan(self, running: list[Request]) -> list[tuple[Request, int]]:
        """Who computes how many rows: prompts first, up to the budget, then one row for each request."""
        plan: list[tuple[Request, int]] = []
        budget = self.max_step_tokens
        for request in running:
            if not request.output_ids and budget:
                rows = min(request.remaining, budget)
                plan.append((request, rows))
                budget -= rows
        return plan or [(request, 1) for request in running]

    def _admit(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        if not isinstance(prompts, list | tuple) or len(prompts) == 0 or isinstance(prompts[0], int):
            raise RequestError(
                f"prompts = {shown(prompts)}; it takes a list of texts or of token id lists, at least one"
            )
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not isinstance(params, list | tuple) or not all(isinstance(p, SamplingParams) for p in params):
            raise RequestError(f"params = {shown(params)}; it takes SamplingParams, or a list with one a prompt")
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts came with {len(params)} sampling parameters; give one each")
        layout = self.engine.layout
        c, page_size = layout.config, layout.page_size
        requests: list[Request] = []
        next_page = 1
        for number, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            ids = self._encode(prompt, number)
            self._check(ids, p, number)
            last = min(len(ids) + p.max_tokens, c.max_position_embeddings)
            count = -(-last // page_size)
            requests.append(
                Request(
                    prompt=prompt if isinstance(prompt, str) else None,
                    prompt_ids=ids,
                    params=p,
                    config=c,
                    seed=secrets.randbits(63) if p.seed is None else p.seed,
                    pages=range(next_page, next_page + count),
                    ring=number + 1,
                    tokenizer=self.engine.tokenizer,
                )
            )
            next_page += count
        return requests

    def _encode(self, prompt: Prompt, number: int) -> tuple[int, ...]:
        try:
            if isinstance(prompt, bytes | bytearray | Mapping | Set):
                raise TypeError
            ids = () if isinstance(prompt, str) else tuple(operator.index(i) for i in prompt)
            if len(prompt) == 0:
                raise RequestError(f"prompt {number} is empty; give at least one token")
        except TypeError:
            raise RequestError(f"prompt {number} is {shown(prompt)}; it takes a text or a list of token ids") from None
        if not isinstance(prompt, str):
            return ids
        if self.engine.tokenizer is None:
            raise RequestError(f"prompt {number} is text, but there is no tokenizer.json; give token ids")
        try:
            encoded = tuple(self.engine.tokenizer.encode(prompt))
        except TokenizerError as error:
            raise RequestError(f"prompt {number}: {error}") from None
        if not encoded:
            raise RequestError(f"prompt {number} has no tokens once encoded; give a text that the tokenizer keeps")
        return encoded

    def _check(self, ids: tuple[int, ...], params: SamplingParams, number: int) -> None:
        c = self.engine.layout.config
        named = (("", ids), ("logit_bias has ", params.logit_bias), ("stop_token_ids has ", params.stop_token_ids))
        for where, values in named:
            bad = next((i for i in values if not 0 <= i < c.vocab_size), None)
            if bad is not None:
                raise RequestError(
                    f"prompt {number}: {where}token id {shown(bad)} is outside the vocabulary of {c.vocab_size}"
                )
        if len(ids) >= c.max_position_embeddings:
            raise RequestError(
                f"prompt {number} has {len(ids)} tokens; the model has {c.max_position_embeddings} positions, "
                "and an output needs at least one"
            )
        if params.stop and self.engine.tokenizer is None:
            raise RequestError(f"prompt {number} has stop strings, but there is no tokenizer.json; use stop_token_ids")
