"""One static batch, driven through a stand-in model that checks who reads and writes what."""

from __future__ import annotations

import pytest
import torch

from precede.model.batch import StepBatch
from precede.model.cache import CacheLayout, Caches, allocate
from precede.model.config import ModelConfig
from precede.runtime.llm import LLM, Step
from precede.runtime.sampling import RequestError, SamplingParams
from precede.runtime.tokenizer import Tokenizer

CONFIG = ModelConfig.preset("nano")
LAYOUT = CacheLayout.of(CONFIG, "exact32", page_size=8)
EOS = CONFIG.eos_token_id


class Successor:
    """The next token is the sum of all tokens so far (mod 400) + 20, read back from the pages it wrote itself."""

    layout = LAYOUT

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer
        self.batches: list[StepBatch] = []
        self.say: dict[int, torch.Tensor] = {}

    def allocate(self, *, pages: int, rings: int) -> Caches:
        self.owner = torch.zeros(pages, dtype=torch.int64)
        self.rings = rings
        self.ids = torch.full((pages * LAYOUT.page_size,), -1)
        return allocate(LAYOUT, pages=pages, rings=rings)

    def __call__(self, batch: StepBatch, caches: Caches) -> torch.Tensor:
        self.batches.append(batch)
        batch.require_untrimmed()
        assert sorted(set(batch.ring.tolist())) == sorted(batch.ring.tolist())
        assert 0 < int(batch.ring.min()) <= int(batch.ring.max()) < self.rings
        for row, request in enumerate(batch.request_of_row.tolist()):
            slot, ring = int(batch.token_slot[row]), int(batch.ring[request])
            page = slot // LAYOUT.page_size
            assert page > 0
            assert self.owner[page] in (0, ring)
            self.owner[page] = ring
            assert self.ids[slot] == -1
            self.ids[slot] = batch.token_ids[row]
        logits = torch.zeros(len(batch.logit_rows), CONFIG.vocab_size)
        for request in range(len(batch.ring)):
            length = int(batch.length[request])
            slots = [
                int(batch.page_table[request, p // LAYOUT.page_size]) * LAYOUT.page_size + p % LAYOUT.page_size
                for p in range(length)
            ]
            seen = self.ids[slots]
            assert (seen >= 0).all()
            logits[request, int(seen.sum()) % 400 + 20] = 5.0
            logits[request] += self.say.get(length, 0)
        return logits


def expected(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(sum(ids) % 400 + 20)
    return ids[len(prompt) :]


GREEDY = SamplingParams(max_tokens=5, temperature=0)


@pytest.mark.parametrize("budget", [1, 3, 7, 2048])
def test_chunks_change_nothing(budget):
    prompts = [[3, 4, 5], list(range(20)), [7], [9] * 8]
    outputs = LLM(Successor(), max_step_tokens=budget).generate(prompts, GREEDY)
    assert [list(o.token_ids) for o in outputs] == [expected(p, 5) for p in prompts]
    assert {o.finish_reason for o in outputs} == {"length"}


def test_steps_are_one_prefill_then_joint_decodes():
    engine, steps = Successor(), list[Step]()
    params = [SamplingParams(max_tokens=n, temperature=0) for n in (1, 3, 2)]
    outputs = LLM(engine).generate([[3] * 9, [4], [5] * 2], params, on_step=steps.append)
    assert [(s.kind, s.rows, s.requests, s.finished) for s in steps] == [
        ("prefill", 12, 3, 1),
        ("decode", 2, 2, 1),
        ("decode", 1, 1, 1),
    ]
    assert [b.page_table.shape[1] for b in engine.batches] == [2, 1, 1]
    assert [len(o.timings.token_seconds) for o in outputs] == [0, 2, 1]
    assert outputs[0].timings.tokens_per_second is None
    assert outputs[1].timings.tokens_per_second > 0
    assert all(o.timings.prefill_seconds > 0 for o in outputs)


def test_a_request_is_the_same_alone_and_in_company():
    params = SamplingParams(max_tokens=6, seed=5)
    alone = LLM(Successor()).generate([[8, 9]], params)[0]
    company = LLM(Successor()).generate([[1, 2, 3], [8, 9], [4]], [SamplingParams(seed=1), params, GREEDY])[1]
    assert company.token_ids == alone.token_ids
    other = LLM(Successor()).generate([[8, 9]], SamplingParams(max_tokens=6, seed=6))[0]
    assert other.token_ids != alone.token_ids


def end_at(engine: Successor, length: int, token: int) -> Successor:
    engine.say[length] = torch.zeros(CONFIG.vocab_size)
    engine.say[length][token] = 100.0
    return engine


def test_end_of_sequence_and_its_switches():
    assert LLM(end_at(Successor(), 4, EOS)).generate([[5, 6]], GREEDY)[0].token_ids[-1] == EOS
    stopped = LLM(end_at(Successor(), 4, EOS)).generate([[5, 6]], GREEDY)[0]
    assert (len(stopped.token_ids), stopped.finish_reason, stopped.stop_reason) == (3, "stop", None)
    going = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    assert len(LLM(end_at(Successor(), 4, EOS)).generate([[5, 6]], going)[0].token_ids) == 5
    later = SamplingParams(max_tokens=5, temperature=0, min_tokens=4)
    output = LLM(end_at(Successor(), 4, EOS)).generate([[5, 6]], later)[0]
    assert EOS not in output.token_ids
    assert output.finish_reason == "length"


def test_stop_token_ids():
    params = SamplingParams(max_tokens=5, temperature=0, stop_token_ids=(30,))
    output = LLM(end_at(Successor(), 3, 30)).generate([[5, 6]], params)[0]
    assert (output.token_ids[-1], output.finish_reason, output.stop_reason) == (30, "stop", 30)


def test_nan_ends_one_request_with_error():
    engine = Successor()
    engine.say[4] = torch.full((CONFIG.vocab_size,), torch.nan)
    outputs = LLM(engine).generate([[5, 6, 7], [5] * 9], GREEDY)
    assert outputs[0].finish_reason == "error"
    assert len(outputs[0].token_ids) == 1
    assert list(outputs[1].token_ids) == expected([5] * 9, 5)


def test_output_ends_at_the_last_position():
    prompt = [3] * (CONFIG.max_position_embeddings - 2)
    output = LLM(Successor()).generate([prompt], GREEDY)[0]
    assert len(output.token_ids) == 2
    assert output.finish_reason == "length"


def test_logprobs_come_with_every_token():
    output = LLM(Successor()).generate([[5]], SamplingParams(max_tokens=3, temperature=0, logprobs=1))[0]
    assert [s.token for s in output.samples] == list(output.token_ids)
    assert all(s.top[0] == (s.token, s.logprob) for s in output.samples)
    assert LLM(Successor()).generate([[5]], GREEDY)[0].samples == ()


def test_text_and_stop_strings(tiny_tokenizer: Tokenizer):
    ids = tiny_tokenizer.encode("hello")
    engine = Successor(tiny_tokenizer)
    for i, token in enumerate(tiny_tokenizer.encode("wörld!")):
        end_at(engine, len(ids) + i, token)
    params = SamplingParams(max_tokens=7, temperature=0, stop=("ld!", "never"))
    output = LLM(engine).generate(["hello"], params)[0]
    assert output.prompt == "hello"
    assert output.prompt_token_ids == tuple(ids)
    assert output.text == "wör"
    assert (output.finish_reason, output.stop_reason) == ("stop", "ld!")
    cut = LLM(engine).generate(["hello"], SamplingParams(max_tokens=2, temperature=0))[0]
    assert cut.text == "w\ufffd"


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([], None, "it takes a list"),
        ("text", None, "it takes a list"),
        ([3, 4], None, "it takes a list"),
        (5, None, "prompts = 5; it takes a list"),
        (None, None, "prompts = None; it takes a list"),
        (iter([[1]]), None, "prompts = .*; it takes a list"),
        ({0: [1]}, None, "prompts = .*; it takes a list"),
        ([b"text"], None, "prompt 0 is b'text'; it takes a text"),
        ([{3: 4}], None, "prompt 0 is .*; it takes a text"),
        ([iter([1])], None, "prompt 0 is .*; it takes a text"),
        ([[10**5000]], None, "prompt 0: token id a int that cannot be printed is outside"),
        ([[1]], {"max_tokens": 3}, "params = .*; it takes SamplingParams"),
        ([[1]], [None], r"params = \[None\]; it takes SamplingParams"),
        ([[]], None, "prompt 0 is empty"),
        ([[1], []], None, "prompt 1 is empty"),
        ([""], None, "prompt 0 is empty"),
        ([[1.5]], None, "prompt 0 is \\[1.5\\]; it takes a text or a list of token ids"),
        ([None], None, "prompt 0 is None; it takes a text"),
        (["text"], None, "prompt 0 is text, but there is no tokenizer"),
        ([[1, 512]], None, "prompt 0: token id 512 is outside the vocabulary of 512"),
        ([[-1]], None, "prompt 0: token id -1 is outside"),
        ([[3] * 1024], None, "prompt 0 has 1024 tokens; the model has 1024 positions"),
        ([[1]], [GREEDY, GREEDY], "1 prompts came with 2 sampling parameters"),
        ([[1]], SamplingParams(logit_bias={600: 1.0}), "prompt 0: logit_bias has token id 600"),
        ([[1]], SamplingParams(stop_token_ids=(600,)), "prompt 0: stop_token_ids has token id 600"),
        ([[1]], SamplingParams(stop=("x",)), "prompt 0 has stop strings, but there is no tokenizer"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(prompts, params, message):
    engine = Successor()
    with pytest.raises(RequestError, match=message):
        LLM(engine).generate(prompts, params)
    assert engine.batches == []


@pytest.mark.parametrize("budget", [0, "x", 2.5, True, None])
def test_budget_must_be_positive(budget):
    with pytest.raises(RequestError, match=r"max_step_tokens = .*; it takes an integer of at least 1"):
        LLM(Successor(), max_step_tokens=budget)


@pytest.mark.parametrize("text", ["a\ud800", "\udcff"])
def test_a_text_that_is_no_utf8_is_refused(text: str, tiny_tokenizer: Tokenizer):
    with pytest.raises(RequestError, match="prompt 0: the text cannot be written as UTF-8"):
        LLM(Successor(tiny_tokenizer)).generate([text])


def test_a_text_that_encodes_to_nothing_is_refused(tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny_tokenizer, "encode", lambda text: [])
    with pytest.raises(RequestError, match="prompt 0 has no tokens once encoded"):
        LLM(Successor(tiny_tokenizer)).generate(["x"])


@pytest.mark.parametrize("error", [RuntimeError("not enough memory"), MemoryError()])
def test_caches_that_do_not_fit_are_named_by_their_bytes(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def full(self: Successor, **_: int) -> Caches:
        raise error

    monkeypatch.setattr(Successor, "allocate", full)
    wanted = 2 * (LAYOUT.page_bytes() + LAYOUT.ring_bytes())
    with pytest.raises(RequestError, match=f"take {wanted:,} bytes, which could not be allocated"):
        LLM(Successor()).generate([[1]], SamplingParams(max_tokens=3))
