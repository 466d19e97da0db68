"""Sliding windows, sinks and soft caps on the device, against float64 and separate plain passes.

Windows have 48 positions and heads the sizes of real ones, so that the compiled kernels run.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.architectures import windowed
from support.float64 import relative_error
from support.gradients import take_gradients
from support.tiny_model import tiny_tokenizer
from support.varlen import make_branch
from torch import Tensor

from courtside.engines.base import (
    BranchRequest,
    SampleRequest,
    Sampling,
    ScoreRequest,
    score_branches_separately,
)
from courtside.engines.forward.forward import ForwardPasses, probe_packing
from courtside.engines.local import LocalEngine

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "head_dim": 64,
    "sliding_window": 48, "max_position_embeddings": 1024, "initializer_range": 0.1,
    "eos_token_id": 1,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "cohere2": {},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 64},
    # Larger weights in its gates make rounding errors of 16 bits grow a hundredfold.
    "gemma4_text": {"global_head_dim": 512, "initializer_range": 0.02},
    # All experts: a token that rounding sends to another one would hide the attention.
    "gpt_oss": {"num_experts_per_tok": 4},
    "mistral": {},
    "olmo3": {},
    "qwen3": {"head_dim": 128},
}
PRECISIONS = {
    "float32": (torch.float32, None),
    "autocast": (torch.float32, torch.bfloat16),
    "bfloat16": (torch.bfloat16, None),
}
LENGTHS = (130, 1, 64, 7, 300, 33)
EACH = pytest.mark.parametrize("kind", KINDS)
EACH_PRECISION = pytest.mark.parametrize("precision", PRECISIONS)


def make_model(kind: str) -> Any:
    model = windowed(kind, **{**SIZES, **KINDS[kind]})
    if kind == "gemma4_text":  # its scores have no scale: as sharp as these, they are all rounding
        for name, parameter in model.named_parameters():
            if "q_norm" in name:
                parameter.data.mul_(0.1)
    return model


def exact_copy(model: Any) -> Any:
    """Plain transformers on the CPU in float64; grouped matmuls of experts take no float64."""
    exact = copy.deepcopy(model).cpu().double()
    if hasattr(exact.config, "num_experts_per_tok"):
        exact.set_experts_implementation("eager")
    return exact


@contextmanager
def casting(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        yield


def random_ids(*lengths: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(2, 258) for _ in range(length)) for length in lengths]


# ── decode attention ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [64, 128, 256, 512])
@pytest.mark.parametrize("window", [None, 1, 100, 512, 10**6])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "soft cap and sinks"])
@pytest.mark.parametrize("rows", [3, 300])
def test_decode_attention(
    dtype: torch.dtype, D: int, window: int | None, extras: bool, rows: int, device: torch.device
) -> None:
    """Split rows (few) and whole ones (many)."""
    if device.type != "cuda":
        pytest.skip("a kernel; the interpreter runs it in tests/unit/engines")
    from courtside.engines.kernels.decode import decode_attention

    H, K, L = 8, 2, 900
    query = torch.randn(rows, H, D, device=device, dtype=dtype)
    keys, values = torch.randn(2, rows, K, L, D, device=device, dtype=dtype)
    length_B = torch.randint(1, L + 1, (rows,), device=device)
    length_B[0], length_B[-1] = 1, L
    softcap = 3.0 if extras else None
    sinks_H = 2 * torch.randn(H, device=device) if extras else None
    context = decode_attention(
        query, keys, values, length_B, D**-0.5, window=window, softcap=softcap, sinks_H=sinks_H
    )
    for row in (0, 1, rows - 1):
        end = int(length_B[row])
        first = 0 if window is None else max(0, end - window)
        k, v = (x[row, :, first:end].double().repeat_interleave(H // K, 0) for x in (keys, values))
        score = D**-0.5 * (k @ query[row].double()[:, :, None])[:, :, 0]
        if softcap is not None and sinks_H is not None:
            score = softcap * torch.tanh(score / softcap)
            score = torch.cat([score, sinks_H.double()[:, None]], 1)
        expected = (score.softmax(1)[:, : end - first, None] * v).sum(1)
        assert relative_error(context[row], expected) < (1e-4 if dtype == torch.float32 else 0.01)


# ── passes ───────────────────────────────────────────────────────────────────────────────────────


@EACH_PRECISION
@EACH
def test_packed_sequences_with_shared_prefixes_equal_separate_passes(
    kind: str, precision: str, device: torch.device
) -> None:
    dtype, cast = PRECISIONS[precision]
    model = make_model(kind).to(device, dtype)
    exact = exact_copy(model)
    with casting(device, cast):
        assert probe_packing(model) is None
    prefix, *plain = random_ids(70, *LENGTHS)
    sequences = [*plain, prefix + plain[3], prefix + plain[2], prefix]
    weights = [torch.randn(len(ids), 64, dtype=torch.float64) for ids in sequences]
    results: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    for name, reason in (("packed", None), ("padded", "asked for")):
        passes = ForwardPasses(model=model, pad_id=1, padding_reason=reason)
        with passes.patch_model(), casting(device, cast):
            hidden_ND, spans = passes.forward(sequences)
            pieces = [
                hidden_ND[span.indices(range(len(ids)))]
                for span, ids in zip(spans, sequences, strict=True)
            ]
            torch.autograd.backward(pieces, [w.to(hidden_ND) for w in weights])
        results[name] = torch.cat(pieces), take_gradients(dict(model.named_parameters()))
    expected_pieces = []
    for ids, weight in zip(sequences, weights, strict=True):
        hidden_LD = exact.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        hidden_LD.backward(weight)
        expected_pieces.append(hidden_LD.detach())
    expected_ND, expected = (
        torch.cat(expected_pieces),
        take_gradients(dict(exact.named_parameters())),
    )
    (packed_ND, packed), (padded_ND, padded) = results["packed"], results["padded"]
    limit = 1e-5 + 1.5 * relative_error(padded_ND, expected_ND)
    assert relative_error(packed_ND, expected_ND) < limit
    assert relative_error(packed_ND, expected_ND) < (1e-4 if precision == "float32" else 0.1)
    assert packed.keys() == padded.keys() == expected.keys()
    slack = 1e-4 if precision == "float32" else 0.02
    for name, gradient in expected.items():
        limit = slack + 2 * relative_error(padded[name], gradient)
        assert relative_error(packed[name], gradient) < limit, name


# ── the engine ───────────────────────────────────────────────────────────────────────────────────


def make_engine(kind: str, precision: str, device: torch.device) -> LocalEngine:
    dtype, autocast = PRECISIONS[precision]
    model = make_model(kind).to(device, dtype)
    engine = LocalEngine(model, tiny_tokenizer(), name=kind, autocast=autocast)
    assert engine.stateless_reason is None and engine.separate_branches_reason is None
    assert engine.passes.padding_reason is None and engine.passes.unshared_reason is None
    assert engine.uses_continuous_batching == (device.type == "cuda")
    return engine


@torch.no_grad()
def exact_logps(exact: Any, ids: Sequence[int], start: int) -> Tensor:
    ids_1L = torch.tensor([ids])
    logp_LV = exact(input_ids=ids_1L, use_cache=False).logits[0].log_softmax(-1)
    return logp_LV[start - 1 : -1].gather(-1, ids_1L[0, start:, None])[:, 0]


def assert_near(logps: list[tuple[Any, Tensor]], precision: str) -> None:
    gap_T = torch.cat([torch.as_tensor(ours).cpu().double() - x for ours, x in logps]).abs()
    is_float32 = precision == "float32"
    assert float(gap_T.max()) < (1e-3 if is_float32 else 0.5)
    assert float(gap_T.mean()) < (1e-4 if is_float32 else 0.04)


@EACH_PRECISION
@EACH
def test_turns_have_the_log_probs_of_plain_passes(
    kind: str, precision: str, device: torch.device
) -> None:
    """Equal and different prompts, three turns with growing caches, a restart; graphs replay."""
    engine = make_engine(kind, precision, device)
    exact = exact_copy(engine.model)
    session = engine.session(4)
    long, short, other, new = random_ids(150, 3, 60, 40, seed=4)
    sampling = Sampling(max_new_tokens=40)
    contexts: dict[int, tuple[int, ...]] = dict.fromkeys(range(4), ())
    pending = dict(contexts)
    logps: list[tuple[Any, Tensor]] = []
    script = (
        ({0: long, 1: long, 2: short, 3: other}, ()),
        ({0: (5, 6), 2: other, 3: (9,)}, ()),
        ({1: short, 3: new, 0: other}, (3,)),
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
            logps.append((sample.logp, exact_logps(exact, whole, start)))
            contexts[row], pending[row] = whole, sample.token_ids[-1:]
    assert_near(logps, precision)


@EACH_PRECISION
@EACH
def test_scores_and_branches(kind: str, precision: str, device: torch.device) -> None:
    engine = make_engine(kind, precision, device)
    exact = exact_copy(engine.model)
    prefix, *suffixes = random_ids(80, 1, 9, 130)
    sequences = [*(prefix + suffix for suffix in suffixes), *random_ids(2, 300, 60, seed=1)]
    requests = [
        ScoreRequest(token_ids=ids, scored=(False, *(True,) * (len(ids) - 1))) for ids in sequences
    ]
    scores = engine.score(requests)
    assert_near(
        [(s.logp_T, exact_logps(exact, x, 1)) for x, s in zip(sequences, scores, strict=True)],
        precision,
    )
    (trunk,) = random_ids(220, seed=2)
    endings = random_ids(70, 90, 3, 120, 8, seed=3)
    branches = tuple(
        make_branch(splice, ids)
        for splice, ids in zip((220, 117, 117, 30, 0), endings, strict=True)
    )
    request = BranchRequest(token_ids=trunk, branches=branches)
    (tree,), (apart,) = (
        engine.score_branches([request]),
        score_branches_separately(engine, [request]),
    )
    assert tree.note is None
    pairs = zip(tree.branches, apart.branches, strict=True)
    assert_near([(a.logp_T, b.logp_T.cpu().double()) for a, b in pairs], precision)
