"""A session with a persistent KV cache samples what prefilling every turn anew samples."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_model import tiny_model, tiny_tokenizer
from transformers import BloomConfig, BloomForCausalLM

from courtside.engines.base import SampleRequest, Sampling, StatelessSession
from courtside.engines.generation import continuous_batching
from courtside.engines.generation.continuous_batching import ContinuousBatchingSession
from courtside.engines.generation.session import CachedSession
from courtside.engines.local import LocalEngine
from courtside.types import Sample


def engine_of(model: Any, **options: Any) -> LocalEngine:
    return LocalEngine(model, tiny_tokenizer(), name="tiny", **options)


class PrefillEngine(LocalEngine):
    """Prefills of a shape run eagerly `num_eager_prefills` times, then by a step over all rows."""

    num_eager_prefills = 0

    def _continuous_batching(self, num_rows: int, row_capacity: int) -> ContinuousBatchingSession:
        session = super()._continuous_batching(num_rows, row_capacity)
        session.num_eager_prefills = self.num_eager_prefills
        return session


class EagerPrefillEngine(PrefillEngine):
    num_eager_prefills = 10**9


# In float64: after rounding in float32 a token may be sampled on the other side of a threshold.
CACHED = engine_of(tiny_model().double())
BATCHED = PrefillEngine(tiny_model().double(), tiny_tokenizer(), name="tiny")
EAGER_PREFILL = EagerPrefillEngine(tiny_model().double(), tiny_tokenizer(), name="tiny")
BATCHED.uses_continuous_batching = True  # as on a GPU; steps run eagerly here
EAGER_PREFILL.uses_continuous_batching = True
EACH = pytest.mark.parametrize(
    "engine", [CACHED, BATCHED, EAGER_PREFILL], ids=["cached", "batched", "eager prefill"]
)


def graph_tokens(num_rows: int, num_tokens: int) -> int:
    step = continuous_batching.PREFILL_STEP
    return num_rows * -(-num_tokens // step) * step


def stateless(engine: LocalEngine, num_rows: int) -> StatelessSession:
    return StatelessSession(engine.sample, num_rows=num_rows, note="for comparison")


def play(session: Any, script: list[dict[int, tuple[int, ...]]], sampling: Sampling) -> list[Any]:
    """`script`: new tokens of each row, turn by turn. The last sampled token goes before them."""
    last: dict[int, tuple[int, ...]] = {}
    turns: list[dict[int, Sample]] = []
    for number, new_ids in enumerate(script):
        rows = list(new_ids)
        requests = [
            SampleRequest(prompt_ids=last.get(row, ()) + new_ids[row], seed=1000 * number + row)
            for row in rows
        ]
        samples = session.sample(rows, requests, sampling)
        last |= {row: s.token_ids[-1:] for row, s in zip(rows, samples, strict=True)}
        turns.append(dict(zip(rows, samples, strict=True)))
    return turns


def assert_equal_turns(turns: list[Any], expected: list[Any]) -> None:
    for turn, reference in zip(turns, expected, strict=True):
        assert turn.keys() == reference.keys()
        for row, sample in turn.items():
            assert sample.token_ids == reference[row].token_ids
            assert sample.stop == reference[row].stop and sample.text == reference[row].text
            assert sample.logp == pytest.approx(reference[row].logp, abs=3e-5)


ids = st.lists(st.integers(2, 257), min_size=1, max_size=12).map(tuple)


@EACH
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_persistent_kv_cache_equals_prefilling_anew(
    engine: LocalEngine, data: st.DataObject
) -> None:
    num_rows = data.draw(st.integers(1, 5))
    shared = data.draw(ids)  # rows often share a prompt
    script = []
    for _ in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.permutations(range(num_rows)))
        rows = rows[: data.draw(st.integers(1, num_rows))]
        script.append({row: data.draw(st.one_of(st.just(shared), ids)) for row in rows})
    sampling = Sampling(max_new_tokens=data.draw(st.integers(1, 9)), temperature=0.7)
    session = engine.session(num_rows)
    assert isinstance(session, CachedSession if engine is CACHED else ContinuousBatchingSession)
    assert_equal_turns(
        play(session, script, sampling), play(stateless(CACHED, num_rows), script, sampling)
    )


@EACH
def test_a_restarted_row_has_nothing_cached(engine: LocalEngine) -> None:
    """Rows share a prompt with it, one of them after it has gone on to something else."""
    sampling = Sampling(max_new_tokens=5, temperature=0.7)
    shared, other = (7,) * 20, (9, 8, 7)
    script = [
        ({}, {0: shared, 1: shared, 2: other}),
        ({}, {1: (3, 4), 2: (5,)}),
        ({0}, {0: other, 1: (6, 6)}),  # the row whose prompt the next one shares
        ({2}, {0: (4,), 1: (2, 2), 2: shared}),
        ({1, 2}, {0: (5, 5), 1: shared, 2: shared}),
        ({1}, {0: (3,), 2: (8, 8)}),  # it is idle, while another row shares its prompt
    ]
    sessions = [engine.session(3), stateless(CACHED, 3)]
    last: dict[int, tuple[int, ...]] = {}
    for number, (restarted, new_ids) in enumerate(script):
        for row in restarted:
            last.pop(row)
            for session in sessions:
                session.restart(row)
        requests = [
            SampleRequest(prompt_ids=last.get(row, ()) + ids, seed=100 * number + row)
            for row, ids in new_ids.items()
        ]
        turn, expected = (
            dict(zip(new_ids, session.sample(list(new_ids), requests, sampling), strict=True))
            for session in sessions
        )
        assert_equal_turns([turn], [expected])
        last |= {row: sample.token_ids[-1:] for row, sample in turn.items()}


@EACH
def test_a_turn_costs_its_own_tokens(engine: LocalEngine) -> None:
    sizes: list[int] = []
    hook = engine.model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: sizes.append(out.shape[0] * out.shape[1])
    )
    try:
        session = engine.session(4)
        play(session, [{row: (5,) * 40 for row in range(4)}], Sampling(max_new_tokens=1))
        # Four rows share a prompt: one prefill.
        assert sizes[0] == (graph_tokens(8, 40) if engine is BATCHED else 40)
        sizes.clear()
        play(session, [{2: (6, 7, 8)}], Sampling(max_new_tokens=1))
        assert sizes[0] == (graph_tokens(8, 3) if engine is BATCHED else 3)
    finally:
        hook.remove()


def test_prompts_prefill_what_they_all_begin_with_once() -> None:
    """Also beside a row that has a KV cache, and a prompt that is a prefix of the others."""
    sizes: list[int] = []
    hook = CACHED.model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: sizes.append(out.shape[0] * out.shape[1])
    )
    start, sampling = tuple(range(30, 70)), Sampling(max_new_tokens=4)
    script = [{3: (8,) * 5}, {0: start, 1: (*start, 5, 6), 2: (*start, 9, 8), 3: (7, 7)}]
    try:
        turns = play(CACHED.session(4), script, sampling)
    finally:
        hook.remove()
    assert len(start) - 1 in sizes, "one row's tokens"
    assert max(sizes) == len(start) - 1, "nothing is computed four times"
    assert_equal_turns(turns, play(stateless(CACHED, 4), script, sampling))


def test_rows_of_similar_lengths_share_a_prefill() -> None:
    """Whatever their order in the buffers: padding costs as much as tokens."""
    sizes: list[int] = []
    hook = CACHED.model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: sizes.append(out.shape[0] * out.shape[1])
    )
    long, short, sampling = (4,) * 21, (6, 7), Sampling(max_new_tokens=1)
    script = [{row: (10 + row,) * 3 for row in range(4)}, {0: long, 1: short, 2: long, 3: short}]
    try:
        turns = play(CACHED.session(4), script, sampling)
    finally:
        hook.remove()
    # The last sampled token comes before each prompt.
    assert sizes[1:] == [2 * 22, 2 * 3]
    assert_equal_turns(turns, play(stateless(CACHED, 4), script, sampling))


def test_finished_rows_leave_the_batch() -> None:
    sizes: list[int] = []
    hook = CACHED.model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: sizes.append(out.shape[0])
    )
    try:
        new_ids = {row: (10 + row, 20 + 3 * row) for row in range(16)}
        (turn,) = play(CACHED.session(16), [new_ids], Sampling(max_new_tokens=60, temperature=2.0))
    finally:
        hook.remove()
    lengths = sorted(len(s.token_ids) for s in turn.values())
    assert lengths[0] < 60, "some row must end early for this to test anything"
    assert sum(sizes[1:]) == sum(length - 1 for length in lengths)


@EACH
def test_the_kv_cache_grows_and_nothing_is_lost(engine: LocalEngine) -> None:
    script = [{0: (7,) * 30, 1: (9,) * 3}, {0: (8,) * 150, 1: (3, 4)}, {1: (6,) * 140, 0: (5,)}]
    sampling = Sampling(max_new_tokens=40)
    assert_equal_turns(
        play(engine.session(2), script, sampling), play(stateless(CACHED, 2), script, sampling)
    )


@EACH
def test_an_idle_row_stays_cached_while_the_kv_cache_grows(engine: LocalEngine) -> None:
    script = [{0: (7,) * 30, 1: (9,) * 3}, {1: (8,) * 300}, {0: (5, 6)}]
    sampling = Sampling(max_new_tokens=8)
    assert_equal_turns(
        play(engine.session(2), script, sampling), play(stateless(CACHED, 2), script, sampling)
    )


def test_models_without_position_ids_have_stateless_sessions() -> None:
    torch.manual_seed(0)
    config = BloomConfig(
        vocab_size=258, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    engine = engine_of(BloomForCausalLM(config).eval())
    session = engine.session(2)
    assert isinstance(session, StatelessSession) and "position ids" in session.note
    script = [{0: (5, 6, 7), 1: (8,)}, {0: (9,) * 12}]
    turns = play(session, script, Sampling(max_new_tokens=5))
    whole = (5, 6, 7, *turns[0][0].token_ids, *(9,) * 12)
    (alone,) = engine.sample(
        [SampleRequest(prompt_ids=whole, seed=1000)], Sampling(max_new_tokens=5)
    )
    assert turns[1][0].token_ids == alone.token_ids


def test_the_kv_cache_is_freed_with_its_session() -> None:
    session: Any = CACHED.session(2)
    assert isinstance(session, CachedSession)
    requests = [SampleRequest(prompt_ids=(5, 6, 7), seed=seed) for seed in (1, 2)]
    session.sample([0, 1], requests, Sampling(max_new_tokens=3))
    buffers = [weakref.ref(layer.keys) for layer in session.cache.layers]
    assert all(ref() is not None for ref in buffers)
    gc.disable()  # by reference counting alone
    try:
        del session
        assert all(ref() is None for ref in buffers)
    finally:
        gc.enable()
