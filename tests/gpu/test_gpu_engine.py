"""The engine on a GPU: samples, scores and tree scoring."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.float64 import in_float64
from support.gpu_models import qwen3
from support.tiny_model import tiny_tokenizer

from courtside.engines.base import (
    BranchRequest,
    SampleRequest,
    Sampling,
    ScoreRequest,
    score_branches_separately,
)
from courtside.engines.local import LocalEngine
from courtside.types import Branch, Sample

PROMPTS = [(0, 5, 9), (0, 7, 7, 7, 30, 31), (0, 40), tuple(2 + i % 250 for i in range(70))]
REQUESTS = [SampleRequest(prompt_ids=PROMPTS[n % 4], seed=n) for n in range(12)]
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "autocast": {"autocast": torch.bfloat16},
    "bfloat16": {"dtype": torch.bfloat16},
}


def make_engine(
    device: torch.device, *, dtype: torch.dtype = torch.float32, **options: Any
) -> LocalEngine:
    model = qwen3().to(device, dtype)
    return LocalEngine(model, tiny_tokenizer(), name="small", **options)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_samples_of_a_head_with_an_adapter_match_their_scores(
    precision: str, on: bool, device: torch.device
) -> None:
    """Also after the adapter has changed, and while it is off."""
    engine = make_engine(device, **PRECISIONS[precision])
    targets = ["q_proj", "lm_head"]
    settings = LoraConfig(r=8, target_modules=targets, init_lora_weights=False)
    adapted = get_peft_model(engine.model, settings)
    engine = LocalEngine(engine.model, engine.tokenizer, name="small", autocast=engine.autocast)
    adapter = engine.head.adapter
    assert adapter is not None
    limit = 1e-3 if precision == "float32" else 0.25
    token_ids = []
    for _ in range(2):
        with nullcontext() if on else adapted.disable_adapter():
            samples = engine.sample(REQUESTS, Sampling(max_new_tokens=24))
            scores = score_samples(engine, samples, 1.0)
        for sample, logp_T in zip(samples, scores, strict=True):
            torch.testing.assert_close(torch.tensor(sample.logp), logp_T, atol=limit, rtol=0)
        token_ids.append([s.token_ids for s in samples])
        adapter.up_VR.data.mul_(-3.0)
    assert (token_ids[0] != token_ids[1]) == on


def score_samples(
    engine: LocalEngine, samples: Sequence[Sample], temperature: float
) -> list[torch.Tensor]:
    requests = [
        ScoreRequest(
            token_ids=r.prompt_ids + s.token_ids,
            scored=(False,) * len(r.prompt_ids) + (True,) * len(s.token_ids),
            temperature=temperature,
        )
        for r, s in zip(REQUESTS, samples, strict=True)
    ]
    return [scores.logp_T.float().cpu() for scores in engine.score(requests)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_samples_are_those_of_scoring_them(
    precision: str, temperature: float, device: torch.device
) -> None:
    engine = make_engine(device, **PRECISIONS[precision])
    samples = engine.sample(REQUESTS, Sampling(max_new_tokens=24, temperature=temperature))
    limit = 1e-3 if precision == "float32" else 0.25
    scores = score_samples(engine, samples, temperature)
    for sample, logp_T in zip(samples, scores, strict=True):
        torch.testing.assert_close(torch.tensor(sample.logp), logp_T, atol=limit, rtol=0)
    gap_T = torch.cat([torch.tensor(s.logp) - x for s, x in zip(samples, scores, strict=True)])
    assert float(gap_T.abs().mean()) < (1e-4 if precision == "float32" else 0.03)
    assert len({s.token_ids for s in samples}) == len(samples), "seeds differ"


def test_scores_are_those_of_float64(device: torch.device) -> None:
    engine = make_engine(device)
    samples = engine.sample(REQUESTS, Sampling(max_new_tokens=24))
    exact = in_float64(engine.model)
    for request, sample, logp_T in zip(
        REQUESTS, samples, score_samples(engine, samples, 1.0), strict=True
    ):
        ids_L = torch.tensor(request.prompt_ids + sample.token_ids)
        with torch.no_grad():
            logp_LV = exact(input_ids=ids_L[None]).logits[0].log_softmax(-1)
        start = len(request.prompt_ids)
        right_T = logp_LV[start - 1 : -1].gather(-1, ids_L[start:, None]).squeeze(-1)
        torch.testing.assert_close(logp_T.double(), right_T, atol=1e-3, rtol=0)


def test_a_freed_kv_cache_is_allocated_again(device: torch.device) -> None:
    engine = make_engine(device, autocast=torch.bfloat16)
    sampling = Sampling(max_new_tokens=12)
    expected = [s.token_ids for s in engine.sample(REQUESTS, sampling)]
    engine._kv_pool.max_idle_bytes = 0
    for _ in range(3):
        assert [s.token_ids for s in engine.sample(REQUESTS, sampling)] == expected
    if engine.uses_continuous_batching:
        assert not engine._kv_pool._buffers


def test_greedy_samples_are_those_of_generate(device: torch.device) -> None:
    engine = make_engine(device)
    samples = engine.sample(REQUESTS[:4], Sampling(max_new_tokens=20, temperature=0.0))
    for request, sample in zip(REQUESTS, samples, strict=False):
        ids_1L = torch.tensor([request.prompt_ids], device=device)
        out = engine.model.generate(
            ids_1L, attention_mask=torch.ones_like(ids_1L), do_sample=False, max_new_tokens=20,
            eos_token_id=sorted(engine.eos_ids), pad_token_id=engine.pad_id,
        )  # fmt: skip
        assert sample.token_ids == tuple(out[0, ids_1L.shape[1] :].tolist())


def test_a_sample_does_not_depend_on_its_batch(device: torch.device) -> None:
    engine = make_engine(device)
    sampling = Sampling(max_new_tokens=16)
    together = engine.sample(REQUESTS, sampling)
    for number in (0, 3, 7):
        (alone,) = engine.sample([REQUESTS[number]], sampling)
        assert alone.token_ids == together[number].token_ids


def test_a_session_continues_from_its_kv_cache(device: torch.device) -> None:
    engine = make_engine(device)
    sampling = Sampling(max_new_tokens=8, temperature=0.0)
    session = engine.session(3)
    first = session.sample([0, 1, 2], REQUESTS[:3], sampling)
    prompts = [(*sample.token_ids[-1:], 50, 51, 52) for sample in first]
    follow_ups = [SampleRequest(prompt_ids=ids, seed=9) for ids in prompts]
    second = session.sample([0, 1, 2], follow_ups, sampling)
    for number in range(3):
        ids = (*PROMPTS[number], *first[number].token_ids, 50, 51, 52)
        (whole,) = engine.sample([SampleRequest(prompt_ids=ids, seed=9)], sampling)
        assert second[number].token_ids == whole.token_ids


# ── tree scoring ─────────────────────────────────────────────────────────────────────────────────


def branch(splice: int, ids: Sequence[int]) -> Branch:
    scored = (False,) + (True,) * (len(ids) - 1)
    return Branch(trajectory="t", turn=1, splice=splice, token_ids=tuple(ids), scored=scored)


def branch_requests() -> list[BranchRequest]:
    requests = []
    for length, splices in ((200, (190, 120, 120, 37)), (90, (45, 0)), (150, ())):
        ids = tuple(3 + (7 * i * i) % 250 for i in range(length))
        scored = tuple(i % 3 == 1 for i in range(length))
        branches = tuple(
            branch(splice, [3 + (11 * i + n) % 250 for i in range(9 + 5 * n)])
            for n, splice in enumerate(splices)
        )
        requests.append(
            BranchRequest(token_ids=ids, branches=branches, scored=scored, temperature=0.9)
        )
    return requests


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tree_scoring_matches_separate_passes(precision: str, device: torch.device) -> None:
    engine = make_engine(device, **PRECISIONS[precision])
    together = engine.score_branches(branch_requests(), want="hidden")
    apart = score_branches_separately(engine, branch_requests(), want="hidden")
    limit = 1e-3 if precision == "float32" else 0.25
    gaps = []
    for tree, separate in zip(together, apart, strict=True):
        assert tree.note is None, "tree scoring was not used"
        assert tree.trunk is not None and separate.trunk is not None
        branches = zip(tree.branches, separate.branches, strict=True)
        for scores, expected in [(tree.trunk, separate.trunk), *branches]:
            torch.testing.assert_close(scores.logp_T, expected.logp_T, atol=limit, rtol=0)
            gaps.append((scores.logp_T - expected.logp_T).abs())
            assert scores.hidden_TD is not None and expected.hidden_TD is not None
            assert scores.hidden_TD.shape == expected.hidden_TD.shape
    assert float(torch.cat(gaps).mean()) < (1e-4 if precision == "float32" else 0.03)
