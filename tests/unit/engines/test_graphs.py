"""Decoding in slots draws what the eager loop draws. On a CPU its step is called, not replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.lent import LentWeights
from courtside.engines.slots import KEPT, SlotSession
from courtside.engines.transformers import TransformersEngine, head_of
from courtside.types import Sample

REQUESTS = [
    SampleRequest(prompt_ids=prompt, seed=seed)
    for prompt in ((0, 5, 9), (0, 7, 7, 7, 30, 31), (0, 40))
    for seed in (1, 2, 3)
]


def engine(*, slots: bool, model: Any = None, **options: Any) -> TransformersEngine:
    made = TransformersEngine(
        model or tiny_model().double(), tiny_tokenizer(), name="tiny", **options
    )
    made.in_slots = slots
    return made


def same(one: list[Sample], other: list[Sample]) -> None:
    assert [s.token_ids for s in one] == [s.token_ids for s in other]
    assert [s.stop for s in one] == [s.stop for s in other]
    for ours, theirs in zip(one, other, strict=True):
        assert ours.logp == pytest.approx(theirs.logp, abs=1e-5)


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
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):

        def interrupt(self: SlotSession, *_: Any) -> None:
            raise KeyboardInterrupt

        patched.setattr(SlotSession, "_end", interrupt)
        made.sample(REQUESTS, sampling)
    same(
        made.sample(REQUESTS[:2], sampling),
        engine(slots=False).sample(REQUESTS[:2], sampling),
    )


def test_other_weights_get_another_graph_and_old_ones_go() -> None:
    made = engine(slots=True)
    sampling = Sampling(max_new_tokens=4)
    before = made.sample(REQUESTS, sampling)
    for parameter in made.model.parameters():
        parameter.data = parameter.data * 0.5  # a new address, as when weights are lent
    after = made.sample(REQUESTS, sampling)
    fresh = engine(slots=False)
    for parameter in fresh.model.parameters():
        parameter.data.mul_(0.5)
    same(after, fresh.sample(REQUESTS, sampling))
    assert [s.token_ids for s in after] != [s.token_ids for s in before]
    for length in range(2 * KEPT):
        made.sample(REQUESTS, Sampling(max_new_tokens=length + 2))
    (slots,) = made._pool._slots.values()
    assert len(slots.decoders) == KEPT


# ── copies of the weights ────────────────────────────────────────────────────────────────────────


def qwen() -> Qwen3ForCausalLM:
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def lora(model: Any) -> Any:
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config).base_model.model


@pytest.mark.parametrize("make", [tiny_model, qwen, lambda: lora(qwen())])
def test_copies_in_bfloat16_are_what_autocast_multiplies_by(make: Any) -> None:
    """The log-probs of samples are those of scoring them, up to bfloat16's rounding."""
    made = engine(slots=True, model=make(), autocast=torch.bfloat16)
    first = next(p for n, p in made.model.named_parameters() if "q_proj" in n)
    sampling = Sampling(max_new_tokens=20, temperature=1.3)
    for _ in range(2):
        samples = made.sample(REQUESTS, sampling)
        eager = engine(slots=False, model=made.model, autocast=torch.bfloat16)
        for request, sample in zip(REQUESTS, samples, strict=True):
            ids = request.prompt_ids + sample.token_ids
            scored = (False,) * len(request.prompt_ids) + (True,) * len(sample.token_ids)
            (found,) = eager.score([_scored(ids, scored)])
            torch.testing.assert_close(
                torch.tensor(sample.logp), found.logp_T.float(), atol=0.05, rtol=0
            )
        first.data.mul_(-3.0)  # a step of training: the copies must follow


def _scored(ids: tuple[int, ...], scored: tuple[bool, ...]) -> Any:
    from courtside.engines.base import ScoreRequest

    return ScoreRequest(token_ids=ids, scored=scored, temperature=1.3)


def test_layers_are_their_own_again_afterwards() -> None:
    model = qwen()
    lent = LentWeights(model, head_of(model), torch.bfloat16)
    lent.refresh()
    with pytest.raises(KeyError), lent.used():
        assert "forward" in model.model.norm.__dict__
        raise KeyError
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_a_norm_of_another_kind_is_left_alone() -> None:
    class OffsetRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.zeros(8)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    model = qwen()
    model.model.norm = OffsetRMSNorm()
    lent = LentWeights(model, head_of(qwen()), None)
    assert model.model.norm not in lent._norms
    assert model.model.layers[0].input_layernorm in lent._norms
