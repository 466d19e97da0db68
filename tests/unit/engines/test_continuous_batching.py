"""Continuous batching samples what the eager loop samples. On a CPU its steps run eagerly."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.sampling_cases import REQUESTS, assert_equal_samples, make_engine
from support.tiny_model import tiny_model

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.generation.kv_cache import MAX_CACHED_GRAPHS, DecodeStep


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_continuous_batching_samples_what_the_eager_loop_samples(temperature: float) -> None:
    sampling = Sampling(max_new_tokens=40, temperature=temperature)
    eager = make_engine(continuous=False).sample(REQUESTS, sampling)
    batched = make_engine(continuous=True)
    assert_equal_samples(batched.sample(REQUESTS, sampling), eager)
    # A KV cache and a graph that were used before start clean.
    assert_equal_samples(batched.sample(REQUESTS[:4], sampling), eager[:4])


def test_truncation_and_stop_strings_match_the_eager_loop() -> None:
    plain = make_engine(continuous=False).sample(REQUESTS, Sampling(max_new_tokens=40))
    stop = next(s.text[3] for s in plain if len(s.text) > 5)
    for sampling in (
        Sampling(max_new_tokens=40, top_p=0.7, min_p=0.01, top_k=20),
        Sampling(max_new_tokens=40, stop=(stop,)),
    ):
        eager = make_engine(continuous=False).sample(REQUESTS, sampling)
        assert_equal_samples(make_engine(continuous=True).sample(REQUESTS, sampling), eager)
    assert any(s.stop == "stop_string" for s in eager)


def test_tokens_after_a_stop_string_are_not_cached() -> None:
    sampling = Sampling(max_new_tokens=40)
    engine = make_engine(continuous=True)
    stop = engine.sample(REQUESTS[:1], sampling)[0].text[2]
    stopping = Sampling(max_new_tokens=40, stop=(stop,))
    for case in (make_engine(continuous=False), engine):
        session = case.session(1)
        (first,) = session.sample([0], REQUESTS[:1], stopping)
        assert first.stop == "stop_string"
        follow_up = SampleRequest(prompt_ids=(*first.token_ids[-1:], 8, 9), seed=5)
        (second,) = session.sample([0], [follow_up], sampling)
        whole = REQUESTS[0].prompt_ids + first.token_ids + (8, 9)
        (alone,) = engine.sample([SampleRequest(prompt_ids=whole, seed=5)], sampling)
        assert_equal_samples([second], [alone])


def test_waiting_requests_take_the_rows_of_finished_ones() -> None:
    sampling = Sampling(max_new_tokens=30, temperature=1.5)
    requests = [
        SampleRequest(prompt_ids=(0, *[20 + i // 3] * (1 + i % 4)), seed=i) for i in range(40)
    ]
    plain, batched = (
        make_engine(continuous=False),
        make_engine(continuous=True, max_batch_tokens=8 * 35),
    )
    plain.eos_ids = batched.eos_ids = frozenset(range(1, 258, 15))
    eager = plain.sample(requests, sampling)
    steps: list[int] = []
    batched.model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: steps.append(out.shape[1]) if out.shape[1] == 1 else None
    )
    assert_equal_samples(batched.sample(requests, sampling), eager)
    lengths = [len(s.token_ids) for s in eager]
    assert len(set(lengths)) > 5, "rows must end at different times for this to test anything"
    in_lockstep = sum(max(lengths[i : i + 8]) for i in range(0, 40, 8))
    assert len(steps) < 0.9 * in_lockstep


def test_rows_with_the_same_prompt_share_the_prefix_of_the_first() -> None:
    engine = make_engine(continuous=True)
    session = engine.session(6)
    requests = [REQUESTS[0], REQUESTS[3], *REQUESTS[1:3], *REQUESTS[4:5]]
    session.sample([4, 0, 2, 1, 3], requests, Sampling(max_new_tokens=3))
    cache = session.cache  # type: ignore[attr-defined]
    assert cache.prefix_row_B.tolist() == [0, 4, 4, 0, 4, 5, 6, 7]
    assert cache.prefix_length_B.tolist() == [6, 3, 3, 6, 3, 0, 0, 0]


def test_a_restarted_row_no_longer_shares_its_old_prompt() -> None:
    sampling = Sampling(max_new_tokens=6)
    # The last prompt is that of the second, whose row the third request takes.
    requests = [REQUESTS[i] for i in (3, 0, 6, 1)]
    session = make_engine(continuous=True)._continuous_batching(2, 32)
    expected = make_engine(continuous=False).sample(requests, sampling)
    assert_equal_samples(session.sample_all(requests, sampling), expected)


def test_a_second_session_has_its_own_kv_cache() -> None:
    sampling = Sampling(max_new_tokens=12)
    engine = make_engine(continuous=True)
    first = engine.session(3)
    samples = first.sample([0, 1, 2], REQUESTS[:3], sampling)
    assert_equal_samples(
        engine.sample(REQUESTS[3:], sampling),
        make_engine(continuous=False).sample(REQUESTS[3:], sampling),
    )
    more = SampleRequest(prompt_ids=(*samples[1].token_ids[-1:], 8), seed=9)
    (second,) = first.sample([1], [more], sampling)
    whole = REQUESTS[1].prompt_ids + samples[1].token_ids + (8,)
    assert_equal_samples(
        [second],
        make_engine(continuous=False).sample([SampleRequest(prompt_ids=whole, seed=9)], sampling),
    )


def test_an_interrupted_batch_leaves_no_row_active(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(max_new_tokens=30)
    engine = make_engine(continuous=True)
    run = DecodeStep.run
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):

        def interrupted(self: DecodeStep, num_steps: int) -> list[bool]:
            run(self, num_steps)
            raise KeyboardInterrupt

        patched.setattr(DecodeStep, "run", interrupted)
        engine.sample(REQUESTS, sampling)
    active: list[int] = []

    def watched(self: DecodeStep, num_steps: int) -> list[bool]:
        active.append(int(self.active_B.sum()))
        return run(self, num_steps)

    monkeypatch.setattr(DecodeStep, "run", watched)
    assert_equal_samples(
        engine.session(len(REQUESTS)).sample([0, 1], REQUESTS[:2], sampling),
        make_engine(continuous=False).sample(REQUESTS[:2], sampling),
    )
    assert max(active) <= 2


def test_other_weight_addresses_get_another_graph_and_old_graphs_are_dropped() -> None:
    engine = make_engine(continuous=True)
    sampling = Sampling(max_new_tokens=4)
    before = engine.sample(REQUESTS, sampling)
    assert engine.sample(REQUESTS, sampling) == before, "by the prefill's graph"
    for parameter in engine.model.parameters():
        parameter.data = parameter.data * 0.5  # a new address, as when weights are swapped in
    after = engine.sample(REQUESTS, sampling)
    assert engine.sample(REQUESTS, sampling) == after
    (cache,) = engine._kv_pool._caches.values()
    assert len(cache.decode_steps) == 2, "a graph would go on with the old weights"
    assert len(cache.prefill_steps) == 2, "and so would a prefill graph"
    fresh = make_engine(continuous=False)
    for parameter in fresh.model.parameters():
        parameter.data.mul_(0.5)
    assert_equal_samples(after, fresh.sample(REQUESTS, sampling))
    assert [s.token_ids for s in after] != [s.token_ids for s in before]
    for length in range(2 * MAX_CACHED_GRAPHS):
        engine.sample(REQUESTS, Sampling(max_new_tokens=length + 2))
    (cache,) = engine._kv_pool._caches.values()
    assert len(cache.decode_steps) == MAX_CACHED_GRAPHS


def test_a_large_kv_cache_is_freed_when_no_session_uses_it() -> None:
    engine = make_engine(continuous=True)
    sampling = Sampling(max_new_tokens=3)
    expected = engine.sample(REQUESTS, sampling)
    assert engine._kv_pool._caches and engine._kv_pool._buffers, "a small one stays"
    engine._kv_pool.max_idle_bytes = 0
    session = engine.session(2, row_capacity=64)
    session.sample([0, 1], REQUESTS[:2], sampling)
    (cache,) = [c for c in engine._kv_pool._caches.values() if c.num_rows == 8]
    buffers = [weakref.ref(layer.keys) for layer in cache.hf_cache.layers]
    steps = [weakref.ref(step) for step in cache.decode_steps.values()]
    del cache
    assert steps and all(ref() is not None for ref in buffers)
    gc.disable()  # a graph must not be left to the collector, which may run during a capture
    try:
        del session
        assert not engine._kv_pool._caches and not engine._kv_pool._buffers
        assert all(ref() is None for ref in (*buffers, *steps))
    finally:
        gc.enable()
    assert_equal_samples(engine.sample(REQUESTS, sampling), expected)


def test_shadow_weights_are_freed_with_the_kv_cache() -> None:
    engine = make_engine(continuous=True, model=tiny_model(), autocast=torch.bfloat16)
    sampling = Sampling(max_new_tokens=3)
    expected = engine.sample(REQUESTS, sampling)
    tensors = [tensor for pair in engine._decode_weights._weights for tensor in pair]
    copies = [weakref.ref(tensor.tensor) for tensor in tensors if tensor.is_copy]
    assert copies, "they stay with a small KV cache"
    engine._kv_pool.max_idle_bytes = 0
    with engine._decode_weights.swap_in():  # another session uses them
        engine.sample(REQUESTS, sampling)
        assert all(tensor.tensor is not None for tensor in tensors if tensor.is_copy)
    engine.sample(REQUESTS, sampling)
    assert all(tensor.tensor is None for tensor in tensors) and all(c() is None for c in copies)
    assert_equal_samples(engine.sample(REQUESTS, sampling), expected)


def test_kv_caches_that_are_replaced_are_freed_without_the_garbage_collector() -> None:
    engine = make_engine(continuous=True)
    sampling = Sampling(max_new_tokens=3)
    engine.sample(REQUESTS[:1], sampling)
    (cache,) = engine._kv_pool._caches.values()
    refs = [weakref.ref(cache), *map(weakref.ref, cache.decode_steps.values())]
    del cache
    gc.disable()
    try:
        engine.sample(REQUESTS, Sampling(max_new_tokens=300))  # needs larger buffers
        assert all(ref() is None for ref in refs)
    finally:
        gc.enable()
