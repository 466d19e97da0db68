"""Sampling with KV cache, padding and shrinking batches, against a loop without them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.tiny_model import tiny_model

from courtside.engines.base import SampleRequest, Sampling, ScoreRequest
from courtside.engines.generation.sampler import uniforms_for
from courtside.engines.local import LocalEngine
from courtside.errors import ModelError
from courtside.types import Sample, StopReason

Make = Callable[..., LocalEngine]

PROMPTS = (tuple(range(10, 14)), tuple(range(60, 69)), (5,), tuple(range(30, 37)))
MANY_EOS = tuple(range(1, 258, 12))
"""A random model seldom samples one given token: with 22 end tokens rows end at all lengths."""


def requests_of(prompts: Sequence[tuple[int, ...]], samples: int) -> list[SampleRequest]:
    """Samples of all prompts in turn, so that those of one prompt are not neighbors."""
    return [
        SampleRequest(prompt_ids=prompt, seed=1000 * s + p)
        for s in range(samples)
        for p, prompt in enumerate(prompts)
    ]


@torch.no_grad()
def naive(engine: LocalEngine, request: SampleRequest, sampling: Sampling) -> Sample:
    """One sequence, one token at a time, with a full forward pass for each."""
    ids, logp = list(request.prompt_ids), []
    for uniform in uniforms_for(request.seed, sampling.max_new_tokens).tolist():
        logits_V = engine.model(input_ids=torch.tensor([ids])).logits[0, -1]
        logp_V = torch.log_softmax(logits_V[: engine.head.vocab_size] / sampling.temperature, -1)
        token = int((logp_V.exp().cumsum(0) <= uniform).sum())
        ids.append(token)
        logp.append(float(logp_V[token]))
        if token in engine.eos_ids:
            break
    new_ids = tuple(ids[len(request.prompt_ids) :])
    stop: StopReason = "eos" if new_ids[-1] in engine.eos_ids else "length"
    text = engine.tokenizer.decode(new_ids, skip_special_tokens=True)
    return Sample(token_ids=new_ids, logp=tuple(logp), stop=stop, text=text)


def assert_equal_samples(samples: Sequence[Sample], expected: Sequence[Sample]) -> None:
    assert [s.token_ids for s in samples] == [s.token_ids for s in expected]
    assert [s.stop for s in samples] == [s.stop for s in expected]
    assert [s.text for s in samples] == [s.text for s in expected]
    for sample, reference in zip(samples, expected, strict=True):
        assert sample.logp == pytest.approx(reference.logp, abs=5e-6)


def gemma() -> Any:
    """Sliding window, soft caps, scaled embeddings: decoded in left-padded batches."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
        sliding_window=4, final_logit_softcapping=2.0, initializer_range=0.3,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize("model", [tiny_model, gemma])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_batch_samples_what_the_naive_loop_samples(
    make_engine: Make, model: Callable[[], Any], temperature: float
) -> None:
    engine = make_engine(model(), eos=MANY_EOS)
    sampling = Sampling(max_new_tokens=12, temperature=temperature)
    requests = requests_of(PROMPTS, 3)
    samples = engine.sample(requests, sampling)
    assert_equal_samples(samples, [naive(engine, request, sampling) for request in requests])
    lengths = {len(s.token_ids) for s in samples}
    assert len(lengths) > 3 and {s.stop for s in samples} == {"eos", "length"}, "else too easy"


def test_a_sample_does_not_depend_on_its_batch(make_engine: Make) -> None:
    engine = make_engine(eos=MANY_EOS)
    sampling = Sampling(max_new_tokens=10, temperature=0.8, top_k=50, top_p=0.95)
    requests = requests_of(PROMPTS, 3)
    alone = [engine.sample([request], sampling)[0] for request in requests]
    assert_equal_samples(engine.sample(requests, sampling), alone)
    assert_equal_samples(engine.sample(requests[::-1], sampling), alone[::-1])


@pytest.mark.parametrize("budget", [1, 23, 60, 100])
def test_samples_are_equal_under_any_token_budget(make_engine: Make, budget: int) -> None:
    sampling = Sampling(max_new_tokens=8)
    requests = requests_of(PROMPTS, 3)
    expected = make_engine().sample(requests, sampling)
    engine = make_engine(max_batch_tokens=budget)
    calls = spy(engine)
    assert_equal_samples(engine.sample(requests, sampling), expected)
    longest = 0
    for rows, new, past in calls:
        longest = new if past == 0 else longest  # each batch starts with a prefill
        assert rows * (longest + sampling.max_new_tokens) <= budget or rows == 1


def test_a_prompt_is_prefilled_once_and_finished_rows_leave(make_engine: Make) -> None:
    engine = make_engine(eos=MANY_EOS)
    assert engine.stateless_reason is None  # probed on first use
    calls = spy(engine)
    samples = engine.sample(requests_of(PROMPTS, 4), Sampling(max_new_tokens=9))
    lengths = [len(s.token_ids) for s in samples]
    # The n-th token of a row is an input only if the row goes on after it.
    batch_sizes = [sum(length > n for length in lengths) for n in range(1, max(lengths))]
    prefill, decoding = calls[: -len(batch_sizes)], calls[-len(batch_sizes) :]
    assert [(rows, new) for rows, new, _ in decoding] == [(rows, 1) for rows in batch_sizes]
    assert batch_sizes[0] > batch_sizes[-1]
    assert sum(rows for rows, _, _ in prefill) == len(PROMPTS)


def test_prompts_of_different_lengths_need_little_padding(make_engine: Make) -> None:
    """64 prompts of 4 to 256 ids: padded to one batch, four fifths of the work would be padding."""
    engine = make_engine()
    assert engine.stateless_reason is None
    lengths = [round(4 * 64 ** (n / 63)) for n in range(64)]
    random.Random(0).shuffle(lengths)
    requests = [
        SampleRequest(prompt_ids=tuple(2 + (n + i) % 250 for i in range(length)), seed=n)
        for n, length in enumerate(lengths)
    ]
    assert sum(lengths) < 0.25 * 64 * max(lengths)
    calls = spy(engine)
    engine.sample(requests, Sampling(max_new_tokens=1))
    assert sum(lengths) > 0.75 * sum(rows * new for rows, new, _ in calls)
    calls.clear()
    score_requests = [
        ScoreRequest(token_ids=r.prompt_ids, scored=(False, *(True,) * (len(r.prompt_ids) - 1)))
        for r in requests
    ]
    engine.score(score_requests)
    assert sum(lengths) > 0.75 * sum(rows * new for rows, new, _ in calls)


def test_the_end_token_is_part_of_the_sample_but_not_of_its_text(make_engine: Make) -> None:
    engine = make_engine(eos=(1, 40))
    request = SampleRequest(prompt_ids=PROMPTS[0], seed=0)
    for first in (1, 40):
        engine.head = Certain(first, engine.head.vocab_size)  # type: ignore[assignment]
        (sample,) = engine.sample([request], Sampling(max_new_tokens=5))
        assert sample.token_ids == (first,)
        assert sample.stop == "eos"
        assert sample.logp == pytest.approx((0.0,), abs=1e-6)
    engine.head = Certain(1, engine.head.vocab_size)  # type: ignore[assignment]
    assert engine.sample([request], Sampling(max_new_tokens=5))[0].text == ""


def test_max_new_tokens_is_the_longest_sample(make_engine: Make) -> None:
    engine = make_engine()
    engine.head = Certain(70, engine.head.vocab_size)  # type: ignore[assignment]
    for limit in (1, 2, 7):
        (sample,) = engine.sample(
            [SampleRequest(prompt_ids=PROMPTS[1], seed=0)], Sampling(max_new_tokens=limit)
        )
        assert (len(sample.token_ids), sample.stop) == (limit, "length")


def test_a_stop_string_of_several_tokens_ends_a_sample(make_engine: Make) -> None:
    # The first 96 ids are the two special tokens and the printable characters.
    engine = make_engine(vocab_size=96, eos=(1,))
    requests = [SampleRequest(prompt_ids=prompt, seed=7) for prompt in PROMPTS]
    free = engine.sample(requests, Sampling(max_new_tokens=20))
    stops = (free[0].text[5:7], free[1].text[11:14])
    stopped = engine.sample(requests, Sampling(max_new_tokens=20, stop=stops))
    for before, after in zip(free, stopped, strict=True):
        ends = [before.text.find(s) + len(s) for s in stops if s in before.text]
        if not ends:
            assert after == before
            continue
        assert after.stop == "stop_string"
        assert after.token_ids == before.token_ids[: min(ends)]
        assert after.logp == pytest.approx(before.logp[: min(ends)], abs=1e-6)
        assert after.text == min((before.text.split(s)[0] for s in stops), key=len)
    assert stopped[0].stop == stopped[1].stop == "stop_string"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.9])
def test_sampler_and_scorer_agree_at_any_temperature(make_engine: Make, temperature: float) -> None:
    engine = make_engine(eos=MANY_EOS)
    requests = requests_of(PROMPTS, 2)
    samples = engine.sample(requests, Sampling(max_new_tokens=10, temperature=temperature))
    scores = engine.score(
        [
            ScoreRequest(
                token_ids=r.prompt_ids + s.token_ids,
                scored=(False,) * len(r.prompt_ids) + (True,) * len(s.token_ids),
                temperature=temperature,
            )
            for r, s in zip(requests, samples, strict=True)
        ]
    )
    for sample, score in zip(samples, scores, strict=True):
        assert score.logp_T.tolist() == pytest.approx(sample.logp, abs=5e-6)


def test_greedy_is_the_same_for_every_seed_and_the_argmax_of_the_model(make_engine: Make) -> None:
    engine = make_engine()
    requests = requests_of(PROMPTS[:2], 3)
    samples = engine.sample(requests, Sampling(max_new_tokens=6, temperature=0.0))
    for request, sample in zip(requests, samples, strict=True):
        ids = torch.tensor([request.prompt_ids + sample.token_ids])
        with torch.no_grad():
            best = engine.model(input_ids=ids).logits[0].argmax(-1).tolist()
        assert tuple(best[len(request.prompt_ids) - 1 : -1]) == sample.token_ids


def test_requests_beyond_the_context_length_are_refused_before_sampling(
    make_engine: Make,
) -> None:
    engine = make_engine(tiny_model(layers=1))
    calls = spy(engine)
    short = SampleRequest(prompt_ids=(5, 6), seed=0)
    long = SampleRequest(prompt_ids=(5,) * 509, seed=0)
    with pytest.raises(ModelError, match=r"513 tokens do not fit the context of tiny \(512\)"):
        engine.sample([short, long], Sampling(max_new_tokens=4))
    assert not calls
    assert len(engine.sample([long], Sampling(max_new_tokens=3))[0].token_ids) <= 3


def test_no_requests_no_samples(make_engine: Make) -> None:
    assert make_engine().sample([], Sampling(max_new_tokens=3)) == []


def test_end_tokens_come_from_generation_config_and_tokenizer(make_engine: Make) -> None:
    engine = make_engine(eos=(7, 9))
    assert engine.eos_ids == {1, 7, 9}, "the generation settings' and the tokenizer's"
    model = tiny_model(layers=1)
    model.generation_config.eos_token_id = None
    engine.tokenizer.eos_token = None
    with pytest.raises(ModelError, match="no sample would ever end"):
        LocalEngine(model, engine.tokenizer, name="tiny")


class Certain:
    """A head that gives one token all the probability."""

    def __init__(self, token: int, vocab_size: int):
        self.token, self.vocab_size = token, vocab_size

    def __call__(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        logits_NV = torch.full((len(hidden_ND), self.vocab_size), -100.0)
        logits_NV[:, self.token] = 100.0
        return logits_NV


def spy(engine: LocalEngine) -> list[tuple[int, int, int]]:
    """(rows, new positions, cached positions) of every forward pass from now on."""
    calls: list[tuple[int, int, int]] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        cache = kwargs.get("past_key_values")
        past = int(cache.get_seq_length()) if cache is not None else 0
        calls.append((*kwargs["input_ids"].shape, past))

    engine.model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    return calls
