"""The sampler against plain statements of what each parameter means."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precede.runtime.sampler import Sample, SamplingRow, sample, uniform
from precede.runtime.sampling import RequestError, SamplingParams

VOCAB = 12


def row(seed: int = 0, *, prompt=(1,), produced=(), ends=(), **params) -> SamplingRow:
    made = SamplingRow(SamplingParams(**params), seed, prompt, VOCAB, ends)
    for token in produced:
        made.push(token)
    return made


def draws(logits: torch.Tensor, count: int = 400, **params) -> set[int]:
    return {sample(logits[None], [row(seed, **params)])[0].token for seed in range(count)}  # type: ignore[misc]


LOGITS = torch.linspace(0, 3, VOCAB)


def test_greedy_takes_the_lowest_id_of_equals():
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 7]] = 2.0
    assert sample(logits, [row(temperature=0)])[0].token == 4
    assert sample(logits, [row(temperature=1e-6)])[0].token == 4


def test_input_logits_are_left_alone():
    logits = LOGITS.repeat(2, 1)
    before = logits.clone()
    sample(logits, [row(logit_bias={3: 5.0}), row(temperature=0, repetition_penalty=2.0, min_tokens=2, ends=(11,))])
    assert torch.equal(logits, before)


def test_draws_follow_the_distribution():
    count = 4000
    hits = torch.zeros(VOCAB)
    for seed in range(count):
        hits[sample(LOGITS[None], [row(seed)])[0].token] += 1  # type: ignore[index]
    expected = torch.softmax(LOGITS, -1)
    sigma = (expected * (1 - expected) / count).sqrt()
    assert ((hits / count - expected).abs() < 5 * sigma).all()


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 1}, {11}),
        ({"top_k": 3}, {9, 10, 11}),
        ({"min_p": 1.0}, {11}),
        ({"min_p": math.exp(-0.6)}, {9, 10, 11}),
        ({"top_p": 1e-9}, {11}),
        ({"temperature": 0.01}, {11}),
    ],
)
def test_filters_keep_exactly_what_they_say(params, allowed):
    assert draws(LOGITS, **params) == allowed


def test_top_p_is_the_smallest_sufficient_set():
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125]))
    rows = [SamplingRow(SamplingParams(top_p=p), s, (0,), 4) for p in (0.5, 0.6, 0.8) for s in range(200)]
    tokens = [s.token for s in sample(logits.repeat(len(rows), 1), rows)]
    assert set(tokens[:200]) == {0}
    assert set(tokens[200:400]) == {0, 1}
    assert set(tokens[400:]) == {0, 1, 2}


def test_top_p_counts_the_mass_left_by_top_k():
    logits = torch.log(torch.tensor([0.3, 0.3, 0.2, 0.2]))
    rows = [SamplingRow(SamplingParams(top_k=2, top_p=0.45), s, (0,), 4) for s in range(200)]
    assert {s.token for s in sample(logits.repeat(200, 1), rows)} == {0}


def test_ties_at_the_top_k_border_go_to_the_lower_id():
    assert draws(torch.zeros(VOCAB), top_k=3) == {0, 1, 2}


def test_penalties():
    logits = torch.zeros(1, VOCAB)
    logits[0, :3] = torch.tensor([2.0, 1.5, -1.0])
    prompt_only = row(temperature=0, prompt=(0,), repetition_penalty=2.0)
    assert sample(logits, [prompt_only])[0].token == 1  # 2.0 / 2 < 1.5
    present = row(temperature=0, prompt=(0,), produced=(0,), presence_penalty=0.6)
    assert sample(logits, [present])[0].token == 1  # 1.4 < 1.5
    prompt_does_not_count = row(temperature=0, prompt=(0,), presence_penalty=0.6)
    assert sample(logits, [prompt_does_not_count])[0].token == 0
    once = row(temperature=0, produced=(0,), frequency_penalty=0.3)
    twice = row(temperature=0, produced=(0, 0), frequency_penalty=0.3)
    assert [s.token for s in sample(logits.repeat(2, 1), [once, twice])] == [0, 1]
    work = logits[0].clone()
    row(prompt=(2,), repetition_penalty=2.0).modify(work)
    assert work[2] == -2.0


def test_bias_may_force_and_forbid():
    forced = row(temperature=0, logit_bias={2: 100.0})
    forbidden = row(temperature=0, logit_bias={11: -math.inf})
    assert [s.token for s in sample(LOGITS.repeat(2, 1), [forced, forbidden])] == [2, 10]


def test_min_tokens_holds_back_what_would_end():
    held = row(temperature=0, min_tokens=2, produced=(1,), ends=(11,))
    free = row(temperature=0, min_tokens=2, produced=(1, 1), ends=(11,))
    assert [s.token for s in sample(LOGITS.repeat(2, 1), [held, free])] == [10, 11]


def test_logprobs_are_those_of_the_unmodified_logits():
    got = sample(LOGITS[None], [row(temperature=0, logit_bias={2: 100.0}, logprobs=2)])[0]
    expected = torch.log_softmax(LOGITS, -1)
    assert got.token == 2
    assert got.logprob == pytest.approx(float(expected[2]))
    assert [i for i, _ in got.top] == [11, 10]
    assert got.top[0][1] == pytest.approx(float(expected[11]))
    assert sample(torch.zeros(1, VOCAB), [row(temperature=0, logprobs=3)])[0].top[2][0] == 2
    assert sample(LOGITS[None], [row(temperature=0)])[0].logprob is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_rows_give_no_token_and_disturb_nobody(temperature, bad):
    logits = LOGITS.repeat(3, 1)
    logits[0, 5] = bad
    logits[1] = -math.inf
    rows = [row(s, temperature=temperature) for s in range(3)]
    got = sample(logits, rows)
    assert got[:2] == [Sample(None), Sample(None)]
    assert got[2] == sample(LOGITS[None], [row(2, temperature=temperature)])[0]


def test_nan_is_seen_under_a_suppressed_id():
    logits = LOGITS[None].clone()
    logits[0, 11] = math.nan
    assert sample(logits, [row(temperature=0, min_tokens=1, ends=(11,))])[0].token is None


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 5)), min_size=1, max_size=6), st.integers(0, 99))
def test_a_request_draws_the_same_in_every_batch(requests, data):
    logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(data))
    kinds = [{}, {"top_p": 0.7}, {"top_k": 4, "temperature": 0.5}, {"min_p": 0.1}, {"temperature": 0}, {"top_p": 0.9}]
    rows = [row(seed, produced=(1,) * (seed % 4), **kinds[kind]) for seed, kind in requests]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [r])[0] for i, r in enumerate(rows)]
    assert together == alone


def test_uniform_depends_on_seed_and_index_only():
    assert uniform(7, 3) == uniform(7, 3)
    values = [uniform(s, i) for s in range(50) for i in range(50)]
    assert len(set(values)) == 2500
    assert all(0 <= v < 1 for v in values)
    assert abs(sum(values) / 2500 - 0.5) < 0.03


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens = 0; it takes an integer of at least 1"),
        ({"temperature": -0.1}, "temperature = -0.1; it takes a number"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"top_p": 0.0}, r"top_p = 0.0; it takes a number in \(0.0, 1.0\]"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"top_k": -1}, "top_k = -1"),
        ({"min_p": 2.0}, "min_p = 2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0"),
        ({"presence_penalty": 3.0}, "presence_penalty = 3.0"),
        ({"frequency_penalty": -3.0}, "frequency_penalty = -3.0"),
        ({"seed": -1}, "seed = -1"),
        ({"logprobs": 21}, "logprobs = 21; it takes an integer of at least 0 and at most 20"),
        ({"n": 2}, "n = 2 is not implemented"),
        ({"stop": ("",)}, "stop = "),
        ({"stop_token_ids": (-1,)}, "stop_token_ids = "),
        ({"logit_bias": {"a": 1.0}}, "logit_bias has 'a'"),
        ({"logit_bias": {True: 1.0}}, "logit_bias has True"),
        ({"logit_bias": [1]}, r"logit_bias = \[1\]; it takes a mapping"),
        ({"logit_bias": {3: 10**400}}, "logit_bias has 3: 1000.*; it maps token ids to numbers in"),
        ({"logit_bias": {3: math.inf}}, "logit_bias has 3: inf"),
        ({"logit_bias": {3: 1e39}}, "logit_bias has 3: 1e\\+39"),
        ({"stop": 5}, "stop = 5; it takes strings"),
        ({"stop": None}, "stop = None; it takes strings"),
        ({"stop_token_ids": 5}, "stop_token_ids = 5; it takes a list of token ids"),
        ({"stop_token_ids": (True,)}, "stop_token_ids = "),
        ({"ignore_eos": "no"}, "ignore_eos = 'no'; it takes True or False"),
        ({"skip_special_tokens": 1}, "skip_special_tokens = 1; it takes True or False"),
        ({"temperature": 10**400}, "temperature = 1000"),
        ({"max_tokens": 10**5000}, "max_tokens = a int that cannot be printed"),
    ],
)
def test_wrong_parameters_are_refused(values, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)
