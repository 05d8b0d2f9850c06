"""One prompt on its way to an output: what it may use, what it has produced, why it ended."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from precede.model.batch import StepRequest
from precede.model.config import ModelConfig

from .sampler import Sample, SamplingRow
from .sampling import SamplingParams
from .tokenizer import Detokenizer, Tokenizer

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Wall-clock seconds of one request.

    prefill_seconds  from the call to the first token
    token_seconds    of each later token: the duration of the step that made it
    """

    prefill_seconds: float
    token_seconds: tuple[float, ...]

    @property
    def seconds_per_token(self) -> float | None:
        """Median step time after the first token; None if there was no second token."""
        return statistics.median(self.token_seconds) if self.token_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first one by the time they took; None if there was no second token."""
        return len(self.token_seconds) / sum(self.token_seconds) if self.token_seconds else None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What came of one prompt.

    text           the output, without the stop string or the stop token's text; "" where no tokenizer is at hand
    token_ids      the produced ids, a stop token included
    finish_reason  "stop": end of sequence, stop token or stop string; "length": max_tokens or the model's positions;
                   "error": the logits held NaN or nothing finite
    stop_reason    the stop string or stop token id; None for the end of sequence and for the other reasons
    samples        a token's log-probability and its rivals', if asked for
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    samples: tuple[Sample, ...]
    timings: Timings


@dataclass(kw_only=True)
class Request:
    """A running request. `pages` and `ring` are its own; `computed` positions are in the caches."""

    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    config: ModelConfig
    seed: int
    pages: Sequence[int]
    ring: int
    tokenizer: Tokenizer | None
    computed: int = 0
    output_ids: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prefill_seconds: float = 0.0
    token_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        p = self.params
        ends = set(p.stop_token_ids) | (set() if p.ignore_eos else {self.config.eos_token_id})
        self.row = SamplingRow(p, self.seed, self.prompt_ids, self.config.vocab_size, frozenset(ends))
        self._text: list[str] = []
        self._reader = (
            Detokenizer(self.tokenizer, stop=p.stop, skip_special_tokens=p.skip_special_tokens)
            if self.tokenizer is not None
            else None
        )

    @property
    def remaining(self) -> int:
        """Known positions that are not in the caches yet."""
        return len(self.prompt_ids) + len(self.output_ids) - self.computed

    def step(self, rows: int, page_size: int) -> StepRequest:
        """The next `rows` rows of this request."""
        end = self.computed + rows
        return StepRequest(
            token_ids=(*self.prompt_ids, *self.output_ids)[:end],
            start=self.computed,
            pages=self.pages[: -(-end // page_size)],
            ring=self.ring,
        )

    def accept(self, sample: Sample) -> None:
        """Take the token that was chosen after the last row, and see whether it ends the output."""
        if sample.token is None:
            return self._finish("error", None)
        token, p = sample.token, self.params
        self.output_ids.append(token)
        self.samples.append(sample)
        self.row.push(token)
        may_stop = len(self.output_ids) >= p.min_tokens
        if may_stop and token in p.stop_token_ids:
            return self._finish("stop", token)
        if may_stop and token == self.config.eos_token_id and not p.ignore_eos:
            return self._finish("stop", None)
        if self._reader is not None:
            self._text.append(self._reader.push(token, may_stop=may_stop))
            if self._reader.stopped is not None:
                return self._finish("stop", self._reader.stopped)
        total = len(self.prompt_ids) + len(self.output_ids)
        if len(self.output_ids) >= p.max_tokens or total >= self.config.max_position_embeddings:
            self._finish("length", None)

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        if self._reader is not None:
            self._text.append(self._reader.flush())
        self.finish_reason, self.stop_reason = reason, stop_reason

    def output(self) -> RequestOutput:
        """The finished request as what the caller gets."""
        assert self.finish_reason is not None, "the request is still running"
        asked = self.params.logprobs is not None
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            text="".join(self._text),
            token_ids=tuple(self.output_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            samples=tuple(self.samples) if asked else (),
            timings=Timings(prefill_seconds=self.prefill_seconds, token_seconds=tuple(self.token_seconds)),
        )
