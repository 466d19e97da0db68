"""Hybrid models decode from states at fixed addresses, as CUDA graphs replay it; here eagerly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.hybrids import KINDS, PROMPTS, assert_plain, hybrid_engine, play_turns, prompt
from support.tiny_model import tiny_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.forward.state_passes import StatePasses
from courtside.engines.generation.kv_cache import KVCachePool, RowDecoder
from courtside.engines.generation.recurrent_session import RecurrentSession
from courtside.engines.generation.state_batching import StateBatchingSession
from courtside.engines.local import LocalEngine

NOT_STATIC = {
    "minimax": "its rows cannot have different lengths in one pass",
    "rwkv": "its list is a cache of its own",
}
STATIC = [kind for kind in KINDS if kind not in NOT_STATIC]
MIXTURES = (
    "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid", "lfm2_moe", "jamba", "kimi_linear",
)  # fmt: skip
"""Without weights, grouped matmuls run in bfloat16 only."""


def static_engine(kind: str, *, adapter: bool = False) -> LocalEngine:
    model = copy.deepcopy(hybrid_engine(kind, adapter=adapter).model)  # those are shared by tests
    engine = LocalEngine(model, tiny_tokenizer(), name=kind)
    assert isinstance(engine.static_states, StatePasses), engine.static_states
    engine.uses_continuous_batching = True  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize(
    ("kind", "adapter"), [*((kind, False) for kind in STATIC), ("qwen3_5_text", True)]
)
def test_conversations_have_the_log_probs_of_separate_passes(kind: str, adapter: bool) -> None:
    """Turns of different rows, a restart, and a capacity that grows."""
    engine = static_engine(kind, adapter=adapter)
    session = engine.session(5)
    assert isinstance(session, StateBatchingSession)
    capacity = session.cache.row_capacity
    play_turns(engine, session, (6, 7, 130, 9))
    assert session.cache.row_capacity > capacity


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "falcon_h1", "mamba2", "jamba"])
def test_samples_are_those_of_joined_states(kind: str) -> None:
    """More requests than rows: rows that end take the next prompt."""
    requests = [SampleRequest(prompt_ids=PROMPTS[n % 7], seed=n) for n in range(14)]
    sampling = Sampling(max_new_tokens=12)
    expected = hybrid_engine(kind).sample(requests, sampling)
    engine = static_engine(kind)
    engine.max_batch_tokens = 4 * (82 + engine.row_state_tokens)
    samples = engine.sample(requests, sampling)
    assert len({len(s.token_ids) for s in samples}) > 2, "rows end at different times"
    assert [s.token_ids for s in samples] == [s.token_ids for s in expected]
    for request, sample in zip(requests, samples, strict=True):
        assert_plain(engine, request.prompt_ids + sample.token_ids, sample.logp)


def test_rows_that_begin_alike_share_keys_and_values_of_their_prompt() -> None:
    engine = static_engine("qwen3_5_text")
    session = engine.session(4)
    assert isinstance(session, StateBatchingSession)
    requests = [SampleRequest(prompt_ids=PROMPTS[n], seed=n) for n in (0, 3, 1, 2)]
    session.sample(range(4), requests, Sampling(max_new_tokens=2))
    assert session.cache.prefix_row_B[:4].tolist() == [0, 1, 0, 0]
    assert session.cache.prefix_length_B[:4].tolist() == [3, 9, 3, 3]
    session.restart(2)
    session.sample([2], requests[:1], Sampling(max_new_tokens=2))
    assert session.cache.prefix_row_B[:4].tolist() == [0, 1, 2, 0], "another prefill rounds apart"


@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba2"])
def test_a_state_has_nothing_that_came_after_a_stop_string(kind: str) -> None:
    engine = static_engine(kind)
    session = engine.session(2)
    requests = [SampleRequest(prompt_ids=prompt(5, n), seed=n) for n in range(2)]
    free = session.sample([0, 1], requests, Sampling(max_new_tokens=30))
    texts = [engine.tokenizer.decode(list(sample.token_ids)) for sample in free]
    stop = tuple({text[len(text) // 2] for text in texts if len(text) > 1})
    session = engine.session(2)
    samples = session.sample([0, 1], requests, Sampling(max_new_tokens=30, stop=stop))
    assert any(len(s.token_ids) < len(f.token_ids) for s, f in zip(samples, free, strict=True))
    following = [
        SampleRequest(prompt_ids=sample.token_ids[-1:] + prompt(4, n), seed=9)
        for n, sample in enumerate(samples)
    ]
    for n, sample in enumerate(session.sample([0, 1], following, Sampling(max_new_tokens=6))):
        ids = requests[n].prompt_ids + samples[n].token_ids[:-1] + following[n].prompt_ids
        assert_plain(engine, ids + sample.token_ids, sample.logp)


class ReadsNoValue(TorchDispatchMode):
    """A CUDA graph cannot capture what waits for the value of a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func) and "nonzero" not in str(func), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", STATIC)
def test_a_decode_step_waits_for_no_value(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = RowDecoder.forward

    def forward(self: RowDecoder, ids_B1: torch.Tensor, active_B: torch.Tensor) -> torch.Tensor:
        with ReadsNoValue():
            return plain(self, ids_B1, active_B)

    monkeypatch.setattr(RowDecoder, "forward", forward)
    engine = static_engine(kind)
    requests = [SampleRequest(prompt_ids=prompt(4), seed=0)]
    assert engine.sample(requests, Sampling(max_new_tokens=3))


class StaysOnDevice(TorchDispatchMode):
    """A capture permits no copy from the host either."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        assert all(tensor.is_meta for tensor in tensors), func
        return output


@pytest.mark.parametrize("kind", [kind for kind in STATIC if kind not in MIXTURES])
def test_a_decode_step_makes_nothing_on_the_host(kind: str) -> None:
    passes = static_engine(kind).static_states
    assert isinstance(passes, StatePasses)
    model = passes.model.to("meta")
    cache = KVCachePool(model, None, graphs=None, passes=passes).acquire(2, 16)
    decoder = RowDecoder(model, cache)
    ids_B1 = torch.zeros(cache.num_rows, 1, dtype=torch.long, device="meta")
    with StaysOnDevice(), torch.no_grad():
        hidden_BD = decoder.forward(ids_B1, ids_B1[:, 0] == 0)
    assert hidden_BD.shape == (cache.num_rows, model.config.hidden_size)


@pytest.mark.parametrize("kind", NOT_STATIC)
def test_states_without_fixed_shapes_are_joined_for_each_batch(kind: str) -> None:
    engine = hybrid_engine(kind)
    assert engine.static_states == NOT_STATIC[kind]
    assert isinstance(engine.session(2), RecurrentSession)


def test_a_step_that_moves_rows_that_have_ended_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = RowDecoder.forward
    monkeypatch.setattr(
        RowDecoder, "forward", lambda self, ids, active_B: plain(self, ids, active_B | True)
    )
    model = copy.deepcopy(hybrid_engine("qwen3_5_text").model)
    reason = LocalEngine(model, tiny_tokenizer(), name="changed").static_states
    assert isinstance(reason, str) and "not those of separate passes" in reason
