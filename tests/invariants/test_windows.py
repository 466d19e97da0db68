"""Sliding windows, sinks and soft caps on the fast paths, against separate plain passes.

Windows have 5 positions, so that every sequence, prefix, turn and branch here crosses them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.architectures import WINDOWED, windowed
from support.gradients import take_gradients
from support.tiny_model import tiny_tokenizer
from support.varlen import make_branch
from torch import Tensor

from courtside.engines.base import BranchRequest, SampleRequest, Sampling, ScoreRequest
from courtside.engines.forward.forward import ForwardPasses
from courtside.engines.generation.continuous_batching import ContinuousBatchingSession
from courtside.engines.generation.decode_probe import probe_decoding
from courtside.engines.generation.session import CachedSession
from courtside.engines.local import LocalEngine

KINDS = sorted(WINDOWED)
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
ATOL = 1e-4


def random_ids(*lengths: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(2, 258) for _ in range(length)) for length in lengths]


@cache
def make_engine(kind: str, *, continuous: bool = False) -> LocalEngine:
    """`continuous`: decode steps as on a GPU, run eagerly."""
    engine = LocalEngine(windowed(kind), tiny_tokenizer(), name=kind)
    engine.eos_ids = frozenset([0])
    engine.uses_continuous_batching = continuous
    return engine


@torch.no_grad()
def plain_logps(model: Any, ids: Sequence[int], start: int) -> Tensor:
    """Log-probs of the tokens from `start` on, of one pass over this sequence alone."""
    ids_1L = torch.tensor([ids])
    logp_LV = model(input_ids=ids_1L, use_cache=False).logits[0].float().log_softmax(-1)
    return logp_LV[start - 1 : -1].gather(-1, ids_1L[0, start:, None])[:, 0]


def assert_near(ours: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(ours).float(), expected, rtol=0, atol=ATOL)


def test_the_page_of_supported_models_lists_these() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "supported-models.md").read_text()
    (row,) = re.findall(r"^\| all fast paths, with sliding windows.*?\| (.+?) \|", page, re.M)
    assert set(re.findall(r"`(\w+)`", row)) == WINDOWED.keys()


@EACH_KIND
def test_every_fast_path_is_taken(kind: str) -> None:
    engine = make_engine(kind)
    assert engine.stateless_reason is None and engine.separate_branches_reason is None
    assert engine.passes.padding_reason is None and engine.passes.unshared_reason is None
    assert probe_decoding(engine.model) is None


@pytest.mark.parametrize(
    ("kind", "continuous"),
    [(kind, False) for kind in KINDS]
    + [
        (kind, True)
        for kind in ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "mistral", "phimoe")
    ],
)
def test_samples_and_turns_have_the_log_probs_of_plain_passes(kind: str, continuous: bool) -> None:
    """Equal prompts, prompts of several lengths, three turns, and a row that starts again."""
    engine = make_engine(kind, continuous=continuous)
    session = engine.session(4)
    assert isinstance(session, ContinuousBatchingSession if continuous else CachedSession)
    long, short, other, last = random_ids(19, 3, 12, 8)
    sampling = Sampling(max_new_tokens=7)
    contexts: dict[int, tuple[int, ...]] = dict.fromkeys(range(4), ())
    pending: dict[int, tuple[int, ...]] = dict.fromkeys(range(4), ())
    script = (
        ({0: long, 1: long, 2: short, 3: other}, ()),
        ({0: (5, 6), 2: other, 3: (9,)}, ()),
        ({1: short, 3: last, 0: (7, 8) * 60}, (3,)),  # beyond the capacity at the start
    )
    for number, (turn, restarted) in enumerate(script):
        for row in restarted:
            session.restart(row)
            contexts[row] = pending[row] = ()
        requests = [
            SampleRequest(prompt_ids=pending[row] + ids, seed=10 * number + row)
            for row, ids in turn.items()
        ]
        samples = session.sample(list(turn), requests, sampling)
        for row, sample in zip(turn, samples, strict=True):
            whole = contexts[row] + turn[row] + sample.token_ids
            start = len(whole) - len(sample.token_ids)
            assert_near(sample.logp, plain_logps(engine.model, whole, start))
            contexts[row], pending[row] = whole, sample.token_ids[-1:]


@EACH_KIND
def test_scores_and_branches_are_those_of_plain_passes(kind: str) -> None:
    """Mixed lengths, a prefix that several sequences share, and turns off a trunk."""
    engine = make_engine(kind)
    prefix, *suffixes = random_ids(23, 1, 9, 30)
    sequences = [*(prefix + suffix for suffix in suffixes), *random_ids(2, 40, 6, seed=1)]
    requests = [
        ScoreRequest(token_ids=x, scored=(False, *(True,) * (len(x) - 1))) for x in sequences
    ]
    for ids, scores in zip(sequences, engine.score(requests), strict=True):
        assert_near(scores.logp_T, plain_logps(engine.model, ids, 1))
    (trunk,) = random_ids(30, seed=2)
    branches = tuple(
        make_branch(splice, ids)
        for splice, ids in zip((30, 17, 17, 3, 0), random_ids(7, 9, 3, 12, 8, seed=3), strict=True)
    )
    (tree,) = engine.score_branches([BranchRequest(token_ids=trunk, branches=branches)])
    assert tree.note is None
    for branch, scores in zip(branches, tree.branches, strict=True):
        ids = trunk[: branch.splice] + branch.token_ids
        assert_near(scores.logp_T, plain_logps(engine.model, ids, branch.splice + 1))


def shared_passes(model: Any) -> ForwardPasses:
    return ForwardPasses(model=model, pad_id=1, padding_reason=None)


@pytest.mark.parametrize(
    ("kind", "recomputed"),
    [(kind, False) for kind in KINDS] + [(kind, True) for kind in ("gemma4_text", "gpt_oss")],
)
def test_gradients_of_packed_batches_with_adapters_are_those_of_separate_passes(
    kind: str, recomputed: bool
) -> None:
    tolerance = 2e-5  # in float64, but norms, routers and sinks compute in float32
    model = windowed(kind)
    get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj"] if kind != "phi3" else ["qkv_proj"],
                          init_lora_weights=False)
    )  # fmt: skip
    model.requires_grad_(True).double().eval()
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the grouped matmul takes no float64
    prefix, *suffixes = random_ids(21, 1, 9, 30)
    sequences = [*(prefix + suffix for suffix in suffixes), *random_ids(11, 3, seed=1)]
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    passes = shared_passes(model)
    torch.manual_seed(0)
    with passes.patch_model():
        hidden_ND, spans = passes.forward(sequences)
        packed_hidden = [
            hidden_ND[span.indices(range(len(ids)))]
            for span, ids in zip(spans, sequences, strict=True)
        ]
        weights = [torch.randn_like(hidden_LD) for hidden_LD in packed_hidden]
        torch.autograd.backward(packed_hidden, weights)
    packed = take_gradients(dict(model.named_parameters()))
    model.eval()
    for ids, weight_LD, packed_LD in zip(sequences, weights, packed_hidden, strict=True):
        alone_LD = model.base_model(input_ids=torch.tensor([ids]), use_cache=False)
        alone_LD = alone_LD.last_hidden_state[0]
        limit = tolerance * float(alone_LD.detach().abs().max())
        torch.testing.assert_close(packed_LD, alone_LD, rtol=0, atol=limit)
        alone_LD.backward(weight_LD)
    separate = take_gradients(dict(model.named_parameters()))
    assert packed.keys() == separate.keys()
    for name, gradient in separate.items():
        limit = tolerance * float(gradient.abs().max())
        torch.testing.assert_close(packed[name], gradient, rtol=0, atol=limit, msg=name)
