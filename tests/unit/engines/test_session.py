"""A conversation whose keys and values are kept is the conversation read again each turn."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model, tiny_tokenizer
from transformers import MistralConfig, MistralForCausalLM

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.generation import continuous_batching
from courtside.engines.generation.continuous_batching import ContinuousBatchingSession
from courtside.engines.generation.session import CachedSession
from courtside.engines.local import LocalEngine
from courtside.engines.stateless import StatelessSession
from courtside.types import Sample


def engine_of(model: Any, **options: Any) -> LocalEngine:
    return LocalEngine(model, tiny_tokenizer(), name="tiny", **options)


ENGINE = engine_of(tiny_model())
SLOTS = engine_of(tiny_model())
SLOTS.uses_continuous_batching = True  # as on a GPU; here its step is called, not replayed
EAGER = engine_of(tiny_model())
EAGER.uses_continuous_batching = EAGER._pool.reads_eagerly = True  # eager prefill
EACH = pytest.mark.parametrize("engine", [ENGINE, SLOTS, EAGER], ids=["kept", "slots", "eager"])


def rounded(num_rows: int, num_tokens: int) -> int:
    step = continuous_batching.PREFILL_STEP
    return num_rows * -(-num_tokens // step) * step


def rereading(engine: LocalEngine, num_rows: int) -> StatelessSession:
    return StatelessSession(engine.sample, num_rows=num_rows, note="for comparison")


def play(session: Any, script: list[dict[int, tuple[int, ...]]], sampling: Sampling) -> list[Any]:
    """Each turn: row → ids it is told. What it wrote last comes first, as the session asks."""
    last: dict[int, tuple[int, ...]] = {}
    said: list[dict[int, Sample]] = []
    for number, told in enumerate(script):
        rows = list(told)
        requests = [
            SampleRequest(prompt_ids=last.get(row, ()) + told[row], seed=1000 * number + row)
            for row in rows
        ]
        samples = session.sample(rows, requests, sampling)
        last |= {row: s.token_ids[-1:] for row, s in zip(rows, samples, strict=True)}
        said.append(dict(zip(rows, samples, strict=True)))
    return said


def same(one: list[Any], other: list[Any]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert ours.keys() == theirs.keys()
        for row, sample in ours.items():
            assert sample.token_ids == theirs[row].token_ids
            assert sample.stop == theirs[row].stop and sample.text == theirs[row].text
            assert sample.logp == pytest.approx(theirs[row].logp, abs=3e-5)


ids = st.lists(st.integers(2, 257), min_size=1, max_size=12).map(tuple)


@EACH
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_keeping_equals_reading_again(engine: LocalEngine, data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 5))
    shared = data.draw(ids)  # rows often begin alike
    script = []
    for _ in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.permutations(range(num_rows)))
        rows = rows[: data.draw(st.integers(1, num_rows))]
        script.append({row: data.draw(st.one_of(st.just(shared), ids)) for row in rows})
    sampling = Sampling(max_new_tokens=data.draw(st.integers(1, 9)), temperature=0.7)
    kept = engine.session(num_rows)
    assert isinstance(kept, CachedSession if engine is ENGINE else ContinuousBatchingSession)
    same(play(kept, script, sampling), play(rereading(ENGINE, num_rows), script, sampling))


@EACH
def test_a_row_that_starts_again_knows_nothing_of_what_it_had(engine: LocalEngine) -> None:
    """Its first and others begin alike, one of them after it has gone on to something else."""
    sampling = Sampling(max_new_tokens=5, temperature=0.7)
    alike, other = (7,) * 20, (9, 8, 7)
    script = [
        ({}, {0: alike, 1: alike, 2: other}),
        ({}, {1: (3, 4), 2: (5,)}),
        ({0}, {0: other, 1: (6, 6)}),  # the row whose beginning the next one shares
        ({2}, {0: (4,), 1: (2, 2), 2: alike}),
        ({1, 2}, {0: (5, 5), 1: alike, 2: alike}),
        ({1}, {0: (3,), 2: (8, 8)}),  # it sits out, where another has the beginning that it led
    ]
    sessions = [engine.session(3), rereading(ENGINE, 3)]
    last: dict[int, tuple[int, ...]] = {}
    for number, (anew, told) in enumerate(script):
        for row in anew:
            last.pop(row)
            for session in sessions:
                session.restart(row)
        requests = [
            SampleRequest(prompt_ids=last.get(row, ()) + ids, seed=100 * number + row)
            for row, ids in told.items()
        ]
        ours, right = (dict(zip(told, s.sample(list(told), requests, sampling), strict=True))
                       for s in sessions)  # fmt: skip
        same([ours], [right])
        last |= {row: sample.token_ids[-1:] for row, sample in ours.items()}


@EACH
def test_a_turn_costs_its_own_tokens(engine: LocalEngine) -> None:
    seen: list[int] = []
    hook = engine.model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: seen.append(out.shape[0] * out.shape[1])
    )
    try:
        session = engine.session(4)
        play(session, [{row: (5,) * 40 for row in range(4)}], Sampling(max_new_tokens=1))
        # Four rows begin alike: read once.
        assert seen[0] == (rounded(8, 40) if engine is SLOTS else 40)
        seen.clear()
        play(session, [{2: (6, 7, 8)}], Sampling(max_new_tokens=1))
        assert seen[0] == (rounded(8, 3) if engine is SLOTS else 3)
    finally:
        hook.remove()


def test_rows_that_are_done_leave_the_pass() -> None:
    sizes: list[int] = []
    hook = ENGINE.model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: sizes.append(out.shape[0])
    )
    try:
        told = {row: (10 + row, 20 + 3 * row) for row in range(16)}
        (said,) = play(ENGINE.session(16), [told], Sampling(max_new_tokens=60, temperature=2.0))
    finally:
        hook.remove()
    lengths = sorted(len(s.token_ids) for s in said.values())
    assert lengths[0] < 60, "some row must end early for this to test anything"
    assert sum(sizes[1:]) == sum(length - 1 for length in lengths)


@EACH
def test_room_grows_and_nothing_is_lost(engine: LocalEngine) -> None:
    script = [{0: (7,) * 30, 1: (9,) * 3}, {0: (8,) * 150, 1: (3, 4)}, {1: (6,) * 140, 0: (5,)}]
    sampling = Sampling(max_new_tokens=40)
    same(play(engine.session(2), script, sampling), play(rereading(ENGINE, 2), script, sampling))


@EACH
def test_a_row_that_sits_out_while_room_grows_keeps_its_own(engine: LocalEngine) -> None:
    script = [{0: (7,) * 30, 1: (9,) * 3}, {1: (8,) * 300}, {0: (5, 6)}]
    sampling = Sampling(max_new_tokens=8)
    same(play(engine.session(2), script, sampling), play(rereading(ENGINE, 2), script, sampling))


def test_a_reading_that_no_graph_can_hold_is_eager_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    script = [{0: (5, 6), 1: (7,)}, {1: (8, 9), 0: (4,)}]
    sampling = Sampling(max_new_tokens=4)
    expected = play(rereading(ENGINE, 2), script, sampling)
    engine = engine_of(tiny_model())
    engine.uses_continuous_batching = True
    monkeypatch.setattr(continuous_batching.PrefillStep, "read", refuse)
    with pytest.warns(
        UserWarning, match="not replayed as a graph: operation not permitted"
    ) as told:
        same(play(engine.session(2), script, sampling), expected)
    assert len(told) == 1


def test_models_with_windows_read_again() -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        sliding_window=8, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    engine = engine_of(MistralForCausalLM(config).eval())
    session = engine.session(2)
    assert isinstance(session, StatelessSession) and "window" in session.note
    script = [{0: (5, 6, 7), 1: (8,)}, {0: (9,) * 12}]
    said = play(session, script, Sampling(max_new_tokens=5))
    whole = (5, 6, 7, *said[0][0].token_ids, *(9,) * 12)
    (alone,) = engine.sample(
        [SampleRequest(prompt_ids=whole, seed=1000)], Sampling(max_new_tokens=5)
    )
    assert said[1][0].token_ids == alone.token_ids


def test_room_for_keys_goes_with_the_session() -> None:
    session: Any = ENGINE.session(2)
    assert isinstance(session, CachedSession)
    requests = [SampleRequest(prompt_ids=(5, 6, 7), seed=seed) for seed in (1, 2)]
    session.sample([0, 1], requests, Sampling(max_new_tokens=3))
    room = [weakref.ref(layer.keys) for layer in session.cache.layers]
    assert all(one() is not None for one in room)
    gc.disable()  # nothing may wait for it
    try:
        del session
        assert all(one() is None for one in room)
    finally:
        gc.enable()
