"""The engine on the device: what it draws, what it scores, and branches off one trunk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from gpu_models import in_float64, qwen3
from peft import LoraConfig, get_peft_model
from tiny import tiny_tokenizer

from courtside.engines.base import BranchRequest, SampleRequest, Sampling, ScoreRequest
from courtside.engines.generation import kv_cache
from courtside.engines.local import LocalEngine
from courtside.engines.stateless import score_branches_separately
from courtside.types import Branch, Sample

PROMPTS = [(0, 5, 9), (0, 7, 7, 7, 30, 31), (0, 40), tuple(2 + i % 250 for i in range(70))]
REQUESTS = [SampleRequest(prompt_ids=PROMPTS[n % 4], seed=n) for n in range(12)]
AUTOCAST: dict[str, dict[str, Any]] = {
    "float32": {},
    "autocast": {"autocast": torch.bfloat16},
    "bfloat16": {"dtype": torch.bfloat16},
}


def engine(
    device: torch.device, *, dtype: torch.dtype = torch.float32, **options: Any
) -> LocalEngine:
    model = qwen3().to(device, dtype)
    return LocalEngine(model, tiny_tokenizer(), name="small", **options)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("arithmetic", AUTOCAST)
def test_a_head_with_an_adapter_writes_as_it_scores(
    arithmetic: str, on: bool, device: torch.device
) -> None:
    """Also once the adapter has moved, and while it is off."""
    made = engine(device, **AUTOCAST[arithmetic])
    targets = ["q_proj", "lm_head"]
    settings = LoraConfig(r=8, target_modules=targets, init_lora_weights=False)
    adapted = get_peft_model(made.model, settings)
    made = LocalEngine(made.model, made.tokenizer, name="small", autocast=made.autocast)
    adapter = made.head.adapter
    assert adapter is not None
    limit = 1e-3 if arithmetic == "float32" else 0.25
    written = []
    for _ in range(2):
        with nullcontext() if on else adapted.disable_adapter():
            samples = made.sample(REQUESTS, Sampling(max_new_tokens=24))
            found = scored_again(made, samples, 1.0)
        for sample, logp_T in zip(samples, found, strict=True):
            torch.testing.assert_close(torch.tensor(sample.logp), logp_T, atol=limit, rtol=0)
        written.append([s.token_ids for s in samples])
        adapter.up_VR.data.mul_(-3.0)
    assert (written[0] != written[1]) == on


def scored_again(
    made: LocalEngine, samples: Sequence[Sample], temperature: float
) -> list[torch.Tensor]:
    requests = [
        ScoreRequest(
            token_ids=r.prompt_ids + s.token_ids,
            scored=(False,) * len(r.prompt_ids) + (True,) * len(s.token_ids),
            temperature=temperature,
        )
        for r, s in zip(REQUESTS, samples, strict=True)
    ]
    return [scores.logp_T.float().cpu() for scores in made.score(requests)]


@pytest.mark.parametrize("arithmetic", AUTOCAST)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_samples_are_those_of_scoring_them(
    arithmetic: str, temperature: float, device: torch.device
) -> None:
    made = engine(device, **AUTOCAST[arithmetic])
    samples = made.sample(REQUESTS, Sampling(max_new_tokens=24, temperature=temperature))
    limit = 1e-3 if arithmetic == "float32" else 0.25
    found = scored_again(made, samples, temperature)
    for sample, logp_T in zip(samples, found, strict=True):
        torch.testing.assert_close(torch.tensor(sample.logp), logp_T, atol=limit, rtol=0)
    gap_T = torch.cat([torch.tensor(s.logp) - x for s, x in zip(samples, found, strict=True)])
    assert float(gap_T.abs().mean()) < (1e-4 if arithmetic == "float32" else 0.03)
    assert len({s.token_ids for s in samples}) == len(samples), "every seed has its own numbers"


def test_scores_are_those_of_float64(device: torch.device) -> None:
    made = engine(device)
    samples = made.sample(REQUESTS, Sampling(max_new_tokens=24))
    exact = in_float64(made.model)
    for request, sample, logp_T in zip(
        REQUESTS, samples, scored_again(made, samples, 1.0), strict=True
    ):
        ids_L = torch.tensor(request.prompt_ids + sample.token_ids)
        with torch.no_grad():
            logp_LV = exact(input_ids=ids_L[None]).logits[0].log_softmax(-1)
        start = len(request.prompt_ids)
        right_T = logp_LV[start - 1 : -1].gather(-1, ids_L[start:, None]).squeeze(-1)
        torch.testing.assert_close(logp_T.double(), right_T, atol=1e-3, rtol=0)


def test_room_that_was_given_back_is_made_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(device, autocast=torch.bfloat16)
    sampling = Sampling(max_new_tokens=12)
    expected = [s.token_ids for s in made.sample(REQUESTS, sampling)]
    monkeypatch.setattr(kv_cache, "MAX_IDLE_CACHE_BYTES", 0)
    for _ in range(3):
        assert [s.token_ids for s in made.sample(REQUESTS, sampling)] == expected
    if made.uses_continuous_batching:
        assert not made._kv_pool._buffers


def test_greedy_is_what_generate_gives(device: torch.device) -> None:
    made = engine(device)
    samples = made.sample(REQUESTS[:4], Sampling(max_new_tokens=20, temperature=0.0))
    for request, sample in zip(REQUESTS, samples, strict=False):
        ids_1L = torch.tensor([request.prompt_ids], device=device)
        out = made.model.generate(
            ids_1L, attention_mask=torch.ones_like(ids_1L), do_sample=False, max_new_tokens=20,
            eos_token_id=sorted(made.eos_ids), pad_token_id=made.pad_id,
        )  # fmt: skip
        assert sample.token_ids == tuple(out[0, ids_1L.shape[1] :].tolist())


def test_a_sample_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    made = engine(device)
    sampling = Sampling(max_new_tokens=16)
    together = made.sample(REQUESTS, sampling)
    for number in (0, 3, 7):
        (alone,) = made.sample([REQUESTS[number]], sampling)
        assert alone.token_ids == together[number].token_ids


def test_a_session_goes_on_where_it_was(device: torch.device) -> None:
    made = engine(device)
    sampling = Sampling(max_new_tokens=8, temperature=0.0)
    session = made.session(3)
    first = session.sample([0, 1, 2], REQUESTS[:3], sampling)
    after = [(*sample.token_ids[-1:], 50, 51, 52) for sample in first]
    again = [SampleRequest(prompt_ids=ids, seed=9) for ids in after]
    second = session.sample([0, 1, 2], again, sampling)
    for number in range(3):
        ids = (*PROMPTS[number], *first[number].token_ids, 50, 51, 52)
        (whole,) = made.sample([SampleRequest(prompt_ids=ids, seed=9)], sampling)
        assert second[number].token_ids == whole.token_ids


# ── branches ─────────────────────────────────────────────────────────────────────────────────────


def branch(splice: int, ids: Sequence[int]) -> Branch:
    scored = (False,) + (True,) * (len(ids) - 1)
    return Branch(trajectory="t", turn=1, splice=splice, token_ids=tuple(ids), scored=scored)


def requests() -> list[BranchRequest]:
    made = []
    for length, places in ((200, (190, 120, 120, 37)), (90, (45, 0)), (150, ())):
        ids = tuple(3 + (7 * i * i) % 250 for i in range(length))
        scored = tuple(i % 3 == 1 for i in range(length))
        branches = tuple(
            branch(splice, [3 + (11 * i + n) % 250 for i in range(9 + 5 * n)])
            for n, splice in enumerate(places)
        )
        made.append(BranchRequest(token_ids=ids, branches=branches, scored=scored, temperature=0.9))
    return made


@pytest.mark.parametrize("arithmetic", AUTOCAST)
def test_branches_in_one_pass_are_those_of_separate_passes(
    arithmetic: str, device: torch.device
) -> None:
    made = engine(device, **AUTOCAST[arithmetic])
    together = made.score_branches(requests(), want="hidden")
    apart = score_branches_separately(made, requests(), want="hidden")
    limit = 1e-3 if arithmetic == "float32" else 0.25
    gaps = []
    for one, other in zip(together, apart, strict=True):
        assert one.note is None, "they were to share a pass"
        assert one.trunk is not None and other.trunk is not None
        pairs = [(one.trunk, other.trunk), *zip(one.branches, other.branches, strict=True)]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours.logp_T, theirs.logp_T, atol=limit, rtol=0)
            gaps.append((ours.logp_T - theirs.logp_T).abs())
            assert ours.hidden_TD is not None and theirs.hidden_TD is not None
            assert ours.hidden_TD.shape == theirs.hidden_TD.shape
    assert float(torch.cat(gaps).mean()) < (1e-4 if arithmetic == "float32" else 0.03)
