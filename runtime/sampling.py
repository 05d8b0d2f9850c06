"""How the next token of a request is chosen, as a checked record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from precede.model.errors import PrecedeError, shown

GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20
FORBIDDEN = float("-inf")
LARGEST_BIAS = 1e30  # stays finite in fp32 whatever the logit


class RequestError(PrecedeError):
    """A request that cannot be served as asked; names the field or the prompt and what is accepted."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. Raises RequestError for a value out of range.

    max_tokens          most tokens to generate
    temperature         0 (or below 1e-5): the likeliest token, ties to the lowest id
    top_p, top_k, min_p what may be drawn: the smallest set of mass top_p, the top_k likeliest (0: all), those with at
                        least min_p times the likeliest one's probability
    repetition_penalty  divides positive and multiplies negative logits of ids in prompt or output
    presence_penalty    taken off the logit of each id in the output
    frequency_penalty   the same, times the id's count
    logit_bias          id -> added to its logit; -inf forbids the id
    seed                draws depend on (seed, output index) only; None: one drawn for the request
    stop                strings that end the text; the string itself is not returned
    stop_token_ids      ids that end the output; the id is kept in token_ids, its text is not returned
    min_tokens          tokens before which nothing may stop the output
    ignore_eos          go on after the end-of-sequence id
    logprobs            None, or how many of the likeliest ids to report beside the chosen one (0 to 20)
    n                   outputs of a prompt; only 1 is implemented
    skip_special_tokens leave special tokens out of the text
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, low, high in _INTEGERS:
            value = getattr(self, name)
            if value is None and name in ("seed", "logprobs"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                upper = "" if high == _ANY else f" and at most {high}"
                raise RequestError(f"{name} = {shown(value)}; it takes an integer of at least {low}{upper}")
        for name, low, high, open_low in _NUMBERS:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not low <= value <= high or (open_low and value == low):
                interval = f"{'(' if open_low else '['}{low}, {high}]"
                raise RequestError(f"{name} = {shown(value)}; it takes a number in {interval}")
        for name in ("ignore_eos", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(f"{name} = {shown(value)}; it takes True or False")
        if self.n != 1:
            raise RequestError(f"n = {self.n} is not implemented; ask for n = 1 and repeat the prompt with other seeds")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, _COLLECTIONS) or not all(isinstance(s, str) and s for s in stop):
            given = list(stop) if isinstance(stop, _COLLECTIONS) else stop
            raise RequestError(f"stop = {shown(given)}; it takes strings that are not empty")
        ids = self.stop_token_ids
        if not isinstance(ids, _COLLECTIONS) or not all(_is_id(i) for i in ids):
            raise RequestError(f"stop_token_ids = {shown(ids)}; it takes a list of token ids")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias = {shown(self.logit_bias)}; it takes a mapping from token id to number")
        for token, bias in self.logit_bias.items():
            number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not _is_id(token) or not number or not (abs(bias) <= LARGEST_BIAS or bias == FORBIDDEN):
                raise RequestError(
                    f"logit_bias has {shown(token)}: {shown(bias)}; it maps token ids to numbers in "
                    f"[-{LARGEST_BIAS}, {LARGEST_BIAS}] or to {FORBIDDEN}"
                )
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken without drawing."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_COLLECTIONS = (list, tuple, set, frozenset)
_ANY = 2**63 - 1
_INTEGERS = (
    ("max_tokens", 1, _ANY),
    ("top_k", 0, _ANY),
    ("min_tokens", 0, _ANY),
    ("n", 1, _ANY),
    ("seed", 0, _ANY),
    ("logprobs", 0, MAX_LOGPROBS),
)
_NUMBERS = (
    ("temperature", 0.0, 100.0, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, 100.0, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
)
