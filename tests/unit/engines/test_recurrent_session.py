"""Recurrent and hybrid models sample, over several turns, what plain passes say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.hybrids import (
    KINDS,
    PROMPTS,
    assert_plain,
    hybrid_engine,
    make_hybrid,
    plain_logp,
    play_turns,
    prompt,
)
from support.tiny_model import tiny_model, tiny_tokenizer
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.forward.state_passes import StateBatch, StatePasses
from courtside.engines.forward.state_probe import probe_state_passes
from courtside.engines.generation.recurrent_session import RecurrentSession
from courtside.engines.lm_head import find_lm_head
from courtside.engines.local import LocalEngine
from courtside.engines.mixed_sampling import MixedRequest, MixedSampler
from courtside.engines.patches.fused_layers import FusedLayers
from courtside.engines.patches.onednn_prepack import prepack_linear_layers
from courtside.engines.patches.patch import apply_patches
from courtside.engines.row_states import StateLayout

SINGLE_TOKENS = {"jamba", "mamba", "falcon_mamba", "minimax"}
"""Kinds whose passes over several tokens do not start from the state."""
BATCHING = {"minimax": "equal lengths", "rwkv": "one row"}
ADAPTED = ("qwen3_5_text", "nemotron_h")
EACH = pytest.mark.parametrize(
    ("kind", "adapter"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in ADAPTED)]
)


@EACH
def test_samples_have_the_log_probs_of_separate_passes(kind: str, adapter: bool) -> None:
    engine = hybrid_engine(kind, adapter=adapter)
    requests = [SampleRequest(prompt_ids=ids, seed=seed) for seed, ids in enumerate(PROMPTS)]
    samples = engine.sample(requests, Sampling(max_new_tokens=12))
    assert len({len(s.token_ids) for s in samples}) > 2, "rows leave the batch at different times"
    assert len({s.token_ids for s in samples[:3]}) == 3, "samples of one prompt differ"
    for ids, sample in zip(PROMPTS, samples, strict=True):
        assert_plain(engine, ids + sample.token_ids, sample.logp)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid", "lfm2", "falcon_h1", "jamba"])
def test_greedy_samples_are_those_of_generate(kind: str) -> None:
    engine = hybrid_engine(kind)
    prompts = PROMPTS[2:]
    requests = [SampleRequest(prompt_ids=ids, seed=0) for ids in prompts]
    samples = engine.sample(requests, Sampling(max_new_tokens=8, temperature=0))
    for ids, sample in zip(prompts, samples, strict=True):
        (expected,) = engine.model.generate(
            torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0,
            eos_token_id=sorted(engine.eos_ids),
        )  # fmt: skip
        assert sample.token_ids == tuple(expected[len(ids) :].tolist())


@EACH
def test_conversations_continue_from_their_states(
    kind: str, adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = hybrid_engine(kind, adapter=adapter)
    session = engine.session(5)
    assert isinstance(session, RecurrentSession)
    passes = session.passes
    assert passes.continues_by_chunks == (kind not in SINGLE_TOKENS)
    assert passes.batching == BATCHING.get(kind, "any lengths")
    num_read = 0
    forward = StatePasses.forward

    def count(self: StatePasses, ids_BN: torch.Tensor, *arguments: Any) -> Any:
        nonlocal num_read
        num_read += ids_BN.numel()
        return forward(self, ids_BN, *arguments)

    monkeypatch.setattr(StatePasses, "forward", count)
    num_tokens = play_turns(engine, session, range(4, 8))
    assert num_read < num_tokens, "each turn costs its own tokens"


def test_states_of_rows_count_against_the_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = hybrid_engine("qwen3_5_text")
    requests = [SampleRequest(prompt_ids=prompt(8, n), seed=n) for n in range(6)]
    expected = engine.sample(requests, Sampling(max_new_tokens=4))
    num_rows: list[int] = []
    init = StateBatch.__init__

    def count(self: StateBatch, passes: StatePasses, states: Any, **options: Any) -> None:
        num_rows.append(len(states))
        init(self, passes, states, **options)

    monkeypatch.setattr(StateBatch, "__init__", count)
    monkeypatch.setattr(engine, "max_batch_tokens", 2 * (12 + engine.row_state_tokens))
    samples = engine.sample(requests, Sampling(max_new_tokens=4))
    assert num_rows == [2, 2, 2]
    assert [s.token_ids for s in samples] == [s.token_ids for s in expected]


def test_both_models_of_mixed_sampling_may_be_recurrent() -> None:
    """Where the teacher's top-k is the whole vocabulary, the samples are the student's own."""
    student, teacher = hybrid_engine("qwen3_5_text"), hybrid_engine("mamba")
    sampler = MixedSampler(student=student, teacher=teacher, top_k=258)
    requests = [
        MixedRequest(prompt_ids=ids, teacher_prompt_ids=ids[:2] + ids, seed=seed)
        for seed, ids in enumerate(PROMPTS)
    ]
    mixed = sampler.sample(requests, Sampling(max_new_tokens=6))
    for ids, (sample, num_replaced) in zip(PROMPTS, mixed, strict=True):
        assert num_replaced == 0
        assert_plain(student, ids + sample.token_ids, sample.logp)


def test_time_steps_of_a_token_are_within_the_limits_of_a_pass() -> None:
    """transformers clamps them in passes over several tokens alone."""
    passes = probe_state_passes(make_hybrid("nemotron_h", time_step_min=0.3, time_step_max=0.4))
    assert isinstance(passes, StatePasses) and passes.batching == "any lengths"
    assert passes.patches, "or its decoded tokens would be off"
    assert probe_state_passes(tiny_model()) is None, "a KV cache alone is no recurrent state"


@torch.no_grad()
def test_rows_are_joined_and_split_without_loss() -> None:
    model = make_hybrid("qwen3_next")
    passes = probe_state_passes(model)
    assert isinstance(passes, StatePasses)
    rows = [(None, prompt(length, length)) for length in (4, 11, 7)]
    states = [state for state, _ in passes.extend(rows, max_tokens=100)]
    cache = passes.layout.join(states)
    for index, state in enumerate(states):
        copied = passes.layout.copy_row(cache, index, state.num_tokens)
        assert copied.num_tokens == state.num_tokens
        assert all(map(torch.equal, copied.tensors, state.tensors))
    passes.layout.select(cache, torch.tensor([0, 2]), [4, 7])
    assert cache.get_seq_length() == 7
    for index, state in enumerate([states[0], states[2]]):
        copied = passes.layout.copy_row(cache, index, state.num_tokens)
        assert all(map(torch.equal, copied.tensors, state.tensors))


def test_a_model_with_states_outside_of_its_cache_samples_without_one() -> None:
    config = RecurrentGemmaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=1, head_dim=8, lru_width=32,
        attention_window_size=16, block_types=["recurrent", "recurrent", "attention"],
        pad_token_id=0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    engine = LocalEngine(RecurrentGemmaForCausalLM(config).eval(), tiny_tokenizer(), name="x")
    requests = [SampleRequest(prompt_ids=prompt(n), seed=n) for n in (2, 30)]
    samples = engine.sample(requests, Sampling(max_new_tokens=4))
    assert engine.decode_path[0] == "uncached"
    assert config.attention_window_size == 16, "probes make it smaller only meanwhile"
    for request, sample in zip(requests, samples, strict=True):
        assert_plain(engine, request.prompt_ids + sample.token_ids, sample.logp)


def test_rows_with_unknown_states_are_not_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(make_hybrid("lfm2"), tiny_tokenizer(), name="model-x")
    init = StateLayout.__init__

    def add_state(self: StateLayout, cache: Any) -> None:
        cache.layers[0].router_states = torch.zeros(1, 3)
        init(self, cache)

    monkeypatch.setattr(StateLayout, "__init__", add_state)
    requests = [SampleRequest(prompt_ids=(3, 4) * n, seed=n) for n in (1, 4)]
    samples = engine.sample(requests, Sampling(max_new_tokens=5))
    assert engine.decode_path[0] == "separate_rows"
    for request, sample in zip(requests, samples, strict=True):
        ids = request.prompt_ids + sample.token_ids
        expected_T = plain_logp(engine.model, ids)[len(request.prompt_ids) - 1 :]
        torch.testing.assert_close(torch.tensor(sample.logp), expected_T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_mamba", "zamba2", "kimi_linear"])
def test_fused_and_prepacked_layers_leave_recurrent_ones_as_they_are(kind: str) -> None:
    """Their norms take a gate, or have a weight that nothing multiplies."""
    model = make_hybrid(kind, adapter=True)
    head, ids = find_lm_head(model), torch.tensor([prompt(40)])
    with torch.no_grad():
        expected = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        layers = FusedLayers(model, head, None)
        for patches in (layers.patches, prepack_linear_layers(model, head, torch.float32)):
            with apply_patches(patches):
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
