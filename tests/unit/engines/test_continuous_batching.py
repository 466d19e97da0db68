"""Decoding in slots draws what the eager loop draws. On a CPU its step is called, not replayed."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from model_kinds import lora, lora_head, lora_qwen, made_of, olmo2, phi3, qwen, qwen2
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
)
from transformers.models.qwen3 import modeling_qwen3

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.generation import continuous_batching as slots_engine
from courtside.engines.generation import kv_cache
from courtside.engines.generation.cuda_graphs import STEPS_PER_SYNC, DecodeStep, sample_from_hidden
from courtside.engines.generation.decode_weights import DecodeWeights, FusedLinear
from courtside.engines.generation.kv_cache import MAX_CACHED_GRAPHS
from courtside.engines.generation.sampler import sample_tokens
from courtside.engines.kernels import layers
from courtside.engines.lm_head import LMHead, find_lm_head
from courtside.engines.local import LocalEngine
from courtside.engines.patches import layer_ops
from courtside.types import Sample

REQUESTS = [
    SampleRequest(prompt_ids=prompt, seed=seed)
    for prompt in ((0, 5, 9), (0, 7, 7, 7, 30, 31), (0, 40))
    for seed in (1, 2, 3)
]


def engine(*, slots: bool, model: Any = None, **options: Any) -> LocalEngine:
    made = LocalEngine(model or tiny_model().double(), tiny_tokenizer(), name="tiny", **options)
    made.uses_continuous_batching = slots
    return made


def same(one: list[Sample], other: list[Sample], *, within: float = 1e-5) -> None:
    assert [s.token_ids for s in one] == [s.token_ids for s in other]
    assert [s.stop for s in one] == [s.stop for s in other]
    for ours, theirs in zip(one, other, strict=True):
        assert ours.logp == pytest.approx(theirs.logp, abs=within)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_same_samples_as_the_eager_loop(temperature: float) -> None:
    sampling = Sampling(max_new_tokens=40, temperature=temperature)
    eager = engine(slots=False).sample(REQUESTS, sampling)
    in_slots = engine(slots=True)
    same(in_slots.sample(REQUESTS, sampling), eager)
    # Room and graph that were used before start clean.
    same(in_slots.sample(REQUESTS[:4], sampling), eager[:4])


def test_truncation_and_stop_strings() -> None:
    plain = engine(slots=False).sample(REQUESTS, Sampling(max_new_tokens=40))
    stop = next(s.text[3] for s in plain if len(s.text) > 5)
    for sampling in (
        Sampling(max_new_tokens=40, top_p=0.7, min_p=0.01, top_k=20),
        Sampling(max_new_tokens=40, stop=(stop,)),
    ):
        eager = engine(slots=False).sample(REQUESTS, sampling)
        same(engine(slots=True).sample(REQUESTS, sampling), eager)
    assert any(s.stop == "stop_string" for s in eager)


def test_what_follows_a_stop_string_is_not_remembered() -> None:
    sampling = Sampling(max_new_tokens=40)
    made = engine(slots=True)
    stop = made.sample(REQUESTS[:1], sampling)[0].text[2]
    stopping = Sampling(max_new_tokens=40, stop=(stop,))
    for one in (engine(slots=False), made):
        session = one.session(1)
        (first,) = session.sample([0], REQUESTS[:1], stopping)
        assert first.stop == "stop_string"
        again = SampleRequest(prompt_ids=(*first.token_ids[-1:], 8, 9), seed=5)
        (second,) = session.sample([0], [again], sampling)
        whole = REQUESTS[0].prompt_ids + first.token_ids + (8, 9)
        (alone,) = made.sample([SampleRequest(prompt_ids=whole, seed=5)], sampling)
        same([second], [alone])


def test_waiting_requests_take_the_rows_of_finished_ones() -> None:
    sampling = Sampling(max_new_tokens=30, temperature=1.5)
    requests = [
        SampleRequest(prompt_ids=(0, *[20 + i // 3] * (1 + i % 4)), seed=i) for i in range(40)
    ]
    plain, made = engine(slots=False), engine(slots=True, max_batch_tokens=8 * 35)
    plain.eos_ids = made.eos_ids = frozenset(range(1, 258, 15))
    eager = plain.sample(requests, sampling)
    steps: list[int] = []
    made.model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: steps.append(out.shape[1]) if out.shape[1] == 1 else None
    )
    same(made.sample(requests, sampling), eager)
    lengths = [len(s.token_ids) for s in eager]
    assert len(set(lengths)) > 5, "rows must end at different times for this to test anything"
    in_lockstep = sum(max(lengths[i : i + 8]) for i in range(0, 40, 8))
    assert len(steps) < 0.9 * in_lockstep


def test_samples_of_a_prompt_read_it_in_the_row_of_the_first() -> None:
    made = engine(slots=True)
    session = made.session(6)
    requests = [REQUESTS[0], REQUESTS[3], *REQUESTS[1:3], *REQUESTS[4:5]]
    session.sample([4, 0, 2, 1, 3], requests, Sampling(max_new_tokens=3))
    slots = session.slots  # type: ignore[attr-defined]
    leaders, alike = slots.prefix_row_B.tolist(), slots.prefix_length_B.tolist()
    assert leaders == [0, 4, 4, 0, 4, 5, 6, 7]
    assert alike == [6, 3, 3, 6, 3, 0, 0, 0]


def test_a_row_that_begins_anew_leads_nobody_with_what_it_had() -> None:
    sampling = Sampling(max_new_tokens=6)
    asked = [REQUESTS[i] for i in (3, 0, 6, 1)]  # the last as the second, whose row the third gets
    session = engine(slots=True)._slots(2, 32)
    same(session.sample_all(asked, sampling), engine(slots=False).sample(asked, sampling))


def test_a_second_session_leaves_the_first_alone() -> None:
    sampling = Sampling(max_new_tokens=12)
    made = engine(slots=True)
    first = made.session(3)
    said = first.sample([0, 1, 2], REQUESTS[:3], sampling)
    same(made.sample(REQUESTS[3:], sampling), engine(slots=False).sample(REQUESTS[3:], sampling))
    more = SampleRequest(prompt_ids=(*said[1].token_ids[-1:], 8), seed=9)
    (second,) = first.sample([1], [more], sampling)
    whole = REQUESTS[1].prompt_ids + said[1].token_ids + (8,)
    same([second], engine(slots=False).sample([SampleRequest(prompt_ids=whole, seed=9)], sampling))


def test_an_interrupted_batch_leaves_no_row_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(max_new_tokens=30)
    made = engine(slots=True)
    go = DecodeStep.go
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):

        def interrupted(self: DecodeStep) -> list[bool]:
            go(self)
            raise KeyboardInterrupt

        patched.setattr(DecodeStep, "go", interrupted)
        made.sample(REQUESTS, sampling)
    active: list[int] = []

    def watched(self: DecodeStep) -> list[bool]:
        active.append(int(self.active_B.sum()))
        return go(self)

    monkeypatch.setattr(DecodeStep, "go", watched)
    same(
        made.session(len(REQUESTS)).sample([0, 1], REQUESTS[:2], sampling),
        engine(slots=False).sample(REQUESTS[:2], sampling),
    )
    assert max(active) <= 2


def test_other_weights_get_another_graph_and_old_ones_go() -> None:
    made = engine(slots=True)
    sampling = Sampling(max_new_tokens=4)
    before = made.sample(REQUESTS, sampling)
    for parameter in made.model.parameters():
        parameter.data = parameter.data * 0.5  # a new address, as when weights are lent
    after = made.sample(REQUESTS, sampling)
    (slots,) = made._pool._slots.values()
    assert len(slots.decoders) == 2, "a graph would go on with the old weights"
    assert len(slots.readers) == 2, "and so would one that reads"
    fresh = engine(slots=False)
    for parameter in fresh.model.parameters():
        parameter.data.mul_(0.5)
    same(after, fresh.sample(REQUESTS, sampling))
    assert [s.token_ids for s in after] != [s.token_ids for s in before]
    for length in range(2 * MAX_CACHED_GRAPHS):
        made.sample(REQUESTS, Sampling(max_new_tokens=length + 2))
    (slots,) = made._pool._slots.values()
    assert len(slots.decoders) == MAX_CACHED_GRAPHS


def test_much_room_is_given_back_when_nobody_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(slots=True)
    sampling = Sampling(max_new_tokens=3)
    expected = made.sample(REQUESTS, sampling)
    assert made._pool._slots and made._pool._stores, "a little stays"
    monkeypatch.setattr(kv_cache, "MAX_IDLE_CACHE_BYTES", 0)
    session = made.session(2, row_capacity=64)
    session.sample([0, 1], REQUESTS[:2], sampling)
    (slots,) = [s for s in made._pool._slots.values() if s.num_rows == 8]
    room = [weakref.ref(layer.keys) for layer in slots.cache.layers]
    del slots
    assert all(one() is not None for one in room)
    gc.disable()  # nothing may wait for it
    try:
        del session
        assert not made._pool._slots and not made._pool._stores
        assert all(one() is None for one in room)
    finally:
        gc.enable()
    same(made.sample(REQUESTS, sampling), expected)


def test_copies_of_weights_go_with_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(slots=True, model=tiny_model(), autocast=torch.bfloat16)
    sampling = Sampling(max_new_tokens=3)
    expected = made.sample(REQUESTS, sampling)
    copies = [weakref.ref(weight) for weight, _ in made._lent._copies]
    assert copies, "they stay with a little room"
    monkeypatch.setattr(kv_cache, "MAX_IDLE_CACHE_BYTES", 0)
    with made._lent.used():  # another session is at work
        made.sample(REQUESTS, sampling)
        assert made._lent._copies
    made.sample(REQUESTS, sampling)
    assert not made._lent._copies and all(copy() is None for copy in copies)
    same(made.sample(REQUESTS, sampling), expected)


# ── copies of the weights ────────────────────────────────────────────────────────────────────────


KINDS = [tiny_model, qwen, qwen2, phi3, olmo2, lora_qwen, lora_head]


@pytest.mark.parametrize("make", KINDS)
def test_copies_in_bfloat16_are_what_autocast_multiplies_by(make: Any) -> None:
    """The log-probs of samples are those of scoring them, up to bfloat16's rounding."""
    made = engine(slots=True, model=make(), autocast=torch.bfloat16)
    first = next(p for n, p in made.model.named_parameters() if "q_proj" in n or "qkv_proj" in n)
    sampling = Sampling(max_new_tokens=12, temperature=1.3)
    for _ in range(2):
        samples = made.sample(REQUESTS, sampling)
        eager = engine(slots=False, model=made.model, autocast=torch.bfloat16)
        gaps = []
        for request, sample in zip(REQUESTS, samples, strict=True):
            ids = request.prompt_ids + sample.token_ids
            scored = (False,) * len(request.prompt_ids) + (True,) * len(sample.token_ids)
            (found,) = eager.score([_scored(ids, scored)])
            gaps.append(torch.tensor(sample.logp) - found.logp_T.float())
        # Keys and values of slots are bfloat16; scoring on a CPU has them in float32.
        gap_T = torch.cat(gaps).abs()
        assert float(gap_T.max()) < 0.25 and float(gap_T.mean()) < 0.03
        first.data.mul_(-3.0)  # a step of training: the copies must follow
        if made.head.adapter is not None:
            made.head.adapter.up_VR.data.mul_(-1.0)


@pytest.mark.parametrize("make", KINDS)
def test_layers_that_are_computed_together_draw_the_same(make: Any) -> None:
    """In float64, where rounding cannot hide a mistake; eagerly, the model's own layers."""
    model = make().double()
    made = engine(slots=True, model=model)
    made._lent = DecodeWeights(model, made.head, torch.float64)
    sampling = Sampling(max_new_tokens=12, temperature=1.3)
    for _ in range(2):
        eager = engine(slots=False, model=model).sample(REQUESTS, sampling)
        same(made.sample(REQUESTS, sampling), eager)
        for name, parameter in model.named_parameters():
            if "k_proj" in name or "up_proj" in name:
                parameter.data.mul_(-2.0)


def _scored(ids: tuple[int, ...], scored: tuple[bool, ...]) -> Any:
    from courtside.engines.base import ScoreRequest

    return ScoreRequest(token_ids=ids, scored=scored, temperature=1.3)


@pytest.mark.parametrize(
    ("make", "norms", "rounded", "joined", "mlps", "rotary"),
    [
        (tiny_model, 5, 4, 4, 2, 1),
        (qwen, 9, 4, 4, 2, 1),
        (qwen2, 5, 4, 4, 2, 1),
        (phi3, 5, 4, 0, 2, 1),
        (olmo2, 9, 0, 4, 2, 1),
        (lora_qwen, 9, 4, 0, 2, 1),
        (lora_head, 9, 4, 2, 2, 1),
        # Norms that add one, a gate that is no SiLU.
        (lambda: made_of(Gemma2Config, Gemma2ForCausalLM), 0, 0, 4, 0, 1),
        # Neighbours are turned against each other, not halves; norms that take the mean away.
        (lambda: made_of(CohereConfig, CohereForCausalLM), 0, 0, 4, 2, 0),
    ],
)  # fmt: skip
def test_what_is_found_in_a_model(
    make: Any, norms: int, rounded: int, joined: int, mlps: int, rotary: int
) -> None:
    model = make()
    lent = DecodeWeights(model, find_lm_head(model), torch.bfloat16)
    assert len(lent.parts.norms) == norms
    assert len(lent.parts.autocast_norms) == rounded
    assert sum(len(group) > 1 for group in lent.groups) == joined
    assert len(lent.parts.mlps) == mlps
    assert len(lent.parts.rotary) == rotary
    every = [m for group in lent.groups for m in group]
    own = set(lent.head.module.modules())
    linear = [m for m in model.modules() if type(m) is nn.Linear and m not in own]
    assert len(every) == len(linear) and set(every) == set(linear)
    assert model.get_output_embeddings() not in every


def test_kernels_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole step, and how many kernels a layer has: in Triton's interpreter, or on a GPU."""
    on_gpu = torch.cuda.is_available()
    model = qwen2().to("cuda" if on_gpu else "cpu")
    sampling = Sampling(max_new_tokens=4)
    eager = engine(slots=False, model=model).sample(REQUESTS[:2], sampling)
    monkeypatch.setattr(layer_ops, "can_run_kernels", lambda x: True)
    monkeypatch.setattr(slots_engine, "MAX_GRAPH_TOKENS", 0)  # slow to interpret
    calls: Counter[str] = Counter()
    for name in ("rms_norm", "apply_rotary", "append_kv", "swiglu"):
        monkeypatch.setattr(layers, name, counted(calls, getattr(layers, name)))
    made = engine(slots=True, model=model)
    made._lent = DecodeWeights(model, made.head, torch.float32)
    calls.clear()
    same(made.sample(REQUESTS[:2], sampling), eager, within=1e-4)
    steps = 3 if on_gpu else STEPS_PER_SYNC  # two trials and what is captured, or each by itself
    both = steps + 1  # prompts are read by the same layers, in one pass
    assert calls == {"rms_norm": 5 * both, "apply_rotary": 2 * both, "append_kv": 2 * steps,
                     "swiglu": 2 * both}  # fmt: skip


@pytest.mark.parametrize(("softcap", "scale"), [(None, 0.25), (2.0, 1.0), (1.5, 0.5)])
def test_a_kernel_draws_from_the_logits_that_count(
    softcap: float | None, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from bare products, where a head scales or caps them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layer = nn.Linear(8, 50, bias=False, device=device)
    head = LMHead(layer, vocab_size=50, softcap=softcap, scale=scale)
    hidden_BD = 6 * torch.randn(16, 8, device=device)
    uniform_B = torch.rand(16, dtype=torch.float64, device=device)
    sampling = Sampling(max_new_tokens=1, temperature=0.8)
    with torch.no_grad():
        expected_ids, expected_logps = sample_tokens(head(hidden_BD), uniform_B, sampling)
        monkeypatch.setattr(layer_ops, "can_run_kernels", lambda x: True)
        ids_B, logp_B = sample_from_hidden(head, hidden_BD, uniform_B, sampling)
    assert torch.equal(ids_B, expected_ids)
    torch.testing.assert_close(logp_B, expected_logps.float(), rtol=1e-4, atol=1e-4)


def counted(calls: Counter[str], function: Any) -> Any:
    def call(*args: Any, **named: Any) -> Any:
        calls[function.__name__] += 1
        return function(*args, **named)

    return call


def test_a_part_of_a_joined_product_is_for_the_input_it_was_made_of() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(12, 4), torch.randn(12), torch.randn(2, 4)
    joined = FusedLinear(weight, bias, [6, 4, 2])
    own = [lambda x, w=w, b=b: x @ w.T + b for w, b in
           zip(weight.split([6, 4, 2]), bias.split([6, 4, 2]), strict=True)]  # fmt: skip
    torch.testing.assert_close(joined.part(0, x), own[0](x))
    torch.testing.assert_close(joined.part(1, 2 * x), own[1](2 * x))
    torch.testing.assert_close(joined.part(2, x), own[2](x))
    torch.testing.assert_close(joined.part(1, x), own[1](x))
    x.mul_(3)  # all parts are taken: nothing old is left
    for i in (2, 1, 0):
        torch.testing.assert_close(joined.part(i, x), own[i](x))


def test_adapters_get_their_input_as_it_is() -> None:
    """Their copies are bfloat16, as a norm's result: to float32 and back would be for nothing."""
    model = lora(qwen())
    lent = DecodeWeights(model, find_lm_head(model), torch.bfloat16)
    lent.refresh()
    layer = model.model.layers[0].self_attn.q_proj
    given: list[torch.dtype] = []
    for part in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]):
        part.register_forward_pre_hook(lambda module, args: given.append(args[0].dtype))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), lent.used():
        model.base_model(input_ids=torch.tensor([[0, 5, 9]]))
    assert given == [torch.bfloat16] * 3
    assert layer.cast_input_dtype_enabled


@pytest.mark.parametrize("rows", [2, 1])
def test_rows_with_several_tokens_are_rotated_as_the_model_does(rows: int) -> None:
    model = qwen()
    lent = DecodeWeights(model, find_lm_head(model), None)
    (module,) = lent.parts.rotary
    own = module.apply_rotary_pos_emb
    q, k = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 3, 16)
    cos, sin = torch.randn(2, rows, 3, 16)
    expected = own(q, k, cos, sin), own(q[:, 0], k[:, 0], cos, sin, unsqueeze_dim=0)
    with lent.used():
        assert module.apply_rotary_pos_emb is not own
        found = module.apply_rotary_pos_emb(q, k, cos, sin)
        other = module.apply_rotary_pos_emb(q[:, 0], k[:, 0], cos, sin, unsqueeze_dim=0)
    for ours, theirs in zip((*found, *other), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(ours, theirs)


def test_a_heads_adapter_that_is_off_is_off_in_the_copies() -> None:
    """And its copies stay where they are: graphs of both are kept."""
    model = lora_head()
    head = find_lm_head(model)
    lent = DecodeWeights(model, head, torch.bfloat16)
    hidden_ND, keys, found = torch.randn(3, 32), [], []
    for on in (True, False, True):
        model.lm_head.enable_adapters(on)
        lent.refresh()
        keys.append(lent.key)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            own = head(hidden_ND)
            with lent.used():
                found.append(head(hidden_ND))
        assert torch.equal(found[-1], own) and "low_rank" not in vars(head)
    assert len(set(keys)) == 1 and torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1])


def test_layers_are_their_own_again_afterwards() -> None:
    model = qwen()
    lent = DecodeWeights(model, find_lm_head(model), torch.bfloat16)
    lent.refresh()
    rotary, linear = modeling_qwen3.apply_rotary_pos_emb, lent.head.linear
    model.model.layers[1].mlp.forward = hooked = partial(type(model.model.layers[1].mlp).forward)
    with pytest.raises(KeyError), lent.used():
        assert "forward" in model.model.norm.__dict__
        assert "forward" in model.model.layers[0].mlp.__dict__
        assert modeling_qwen3.apply_rotary_pos_emb is not rotary
        raise KeyError
    assert model.model.layers[1].mlp.__dict__.pop("forward") is hooked
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert modeling_qwen3.apply_rotary_pos_emb is rotary and lent.head.linear is linear


def test_a_norm_of_another_kind_is_left_alone() -> None:
    class OffsetRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.zeros(32)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    model = qwen()
    model.model.norm = OffsetRMSNorm()
    lent = DecodeWeights(model, find_lm_head(qwen()), None)
    assert model.model.norm not in lent.parts.norms
    assert model.model.layers[0].input_layernorm in lent.parts.norms
