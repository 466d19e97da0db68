"""Decode kernels against references, in Triton's interpreter or on a GPU where there is one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from courtside.engines.base import Sampling
from courtside.engines.generation.sampler import sample_tokens
from courtside.engines.kernels import decode
from courtside.engines.kernels.decode import (
    BLOCK_VOCAB,
    decode_attention,
    sample_from_logits,
    token_logps,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _index_loops_by_loaded_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter converts an array of one element to an int, which numpy 2.4 refuses."""
    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.mark.parametrize("programs", [decode.TARGET_PROGRAMS, 1])
@pytest.mark.parametrize(
    ("B", "H", "K", "D", "value_size"),
    [
        (3, 9, 3, 64, 64),
        (2, 4, 4, 24, 24),
        (1, 8, 4, 128, 128),
        (2, 4, 4, 24, 16),
        (3, 6, 3, 8, 40),
    ],
)
def test_attention_covers_each_row_up_to_its_length(
    programs: int, B: int, H: int, K: int, D: int, value_size: int
) -> None:
    """In parts that are merged, and unsplit as with many rows. Values of another size, too."""
    torch.manual_seed(B)
    L = 200
    q = torch.randn(B, H, D, device=DEVICE)
    keys, values = (torch.randn(B, K, L, size, device=DEVICE) for size in (D, value_size))
    lengths = torch.randint(1, L + 1, (B,), device=DEVICE)
    lengths[0], lengths[-1] = 1, L
    for row, length in enumerate(lengths.tolist()):  # never to be loaded
        keys[row, :, length:] = float("nan")
        values[row, :, length:] = float("nan")
    context = decode_attention(q, keys, values, lengths, 0.3, target_programs=programs)
    for row, length in enumerate(lengths.tolist()):
        k = keys[row, :, :length].double().repeat_interleave(H // K, 0)
        v = values[row, :, :length].double().repeat_interleave(H // K, 0)
        weight = (0.3 * (k @ q[row].double()[:, :, None])).softmax(1)
        expected = (weight * v).sum(1)
        torch.testing.assert_close(context[row].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("programs", [decode.TARGET_PROGRAMS, 1])
def test_rows_with_the_same_prompt_load_it_from_one_of_them(programs: int) -> None:
    """Whole blocks of it; each row loads the remainder and later positions from its own buffers."""
    torch.manual_seed(0)
    B, H, K, L, D = 3, 2, 1, 150, 32
    q = torch.randn(B, H, D, device=DEVICE)
    keys, values = torch.randn(2, B, K, L, D, device=DEVICE)
    prefix_rows = torch.tensor([0, 0, 2], device=DEVICE)
    prefix_lengths = torch.tensor([100, 100, 0], device=DEVICE)
    values = values[..., :24].contiguous()
    keys[1, :, :100], values[1, :, :100] = keys[0, :, :100], values[0, :, :100]
    lengths = torch.tensor([101, 150, 90], device=DEVICE)
    attend = partial(decode_attention, target_programs=programs)
    expected = attend(q, keys, values, lengths, 0.3)
    whole = 100 // decode.BLOCK_POSITIONS * decode.BLOCK_POSITIONS
    for buffer in (keys, values):
        buffer[1, :, :whole] = float("nan")  # this copy is not loaded
    context = attend(q, keys, values, lengths, 0.3, (prefix_rows, prefix_lengths))
    assert torch.equal(context, expected)


def test_values_that_lie_between_the_keys() -> None:
    """As multi-head latent attention expands them: views of one tensor, positions before heads."""
    torch.manual_seed(0)
    B, H, L, D, value_size = 2, 4, 130, 24, 16
    q = torch.randn(B, H, D, device=DEVICE)
    both = torch.randn(B, L, H, D + value_size, device=DEVICE).transpose(1, 2)
    keys, values = both.split([D, value_size], dim=-1)
    lengths = torch.tensor([L, 7], device=DEVICE)
    context = decode_attention(q, keys, values, lengths, 0.3)
    expected = decode_attention(q, keys.contiguous(), values.contiguous(), lengths, 0.3)
    assert torch.equal(context, expected)


def attend_naively(
    q: Tensor, keys: Tensor, values: Tensor, scale: float,
    *, window: int, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """One row, [H, D] and [K, L, D], in float64."""
    H, K, L = len(q), *keys.shape[:2]
    first = max(0, L - window)
    k, v = (x[:, first:].double().repeat_interleave(H // K, 0) for x in (keys, values))
    score = scale * (k @ q.double()[:, :, None])[:, :, 0]
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if sinks is not None:
        score = torch.cat([score, sinks.double()[:, None]], 1)
    return (score.softmax(1)[:, : L - first, None] * v).sum(1)


VARIANTS = [
    (1, None, False), (5, 1.5, True), (64, None, True), (100, None, False), (137, 0.7, False),
    (10**6, 1.5, True),
]  # fmt: skip


@pytest.mark.parametrize("programs", [decode.TARGET_PROGRAMS, 1])
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), VARIANTS)
def test_windows_soft_caps_and_sinks(
    programs: int, window: int, softcap: float | None, has_sinks: bool
) -> None:
    """Against float64; positions before a row's window are never loaded."""
    torch.manual_seed(window)
    B, H, K, L, D = 4, 6, 2, 140, 24
    q = torch.randn(B, H, D, device=DEVICE)
    keys, values = torch.randn(2, B, K, L, D, device=DEVICE)
    sinks = 2 * torch.randn(H, device=DEVICE) if has_sinks else None
    lengths = torch.tensor([L, 1, 130, 64], device=DEVICE)
    for row, length in enumerate(lengths.tolist()):
        for buffer in (keys, values):
            buffer[row, :, length:] = float("nan")
            buffer[row, :, : max(0, length - window)] = float("nan")
    context = decode_attention(
        q, keys, values, lengths, 0.5, window=window, softcap=softcap, sinks_H=sinks,
        target_programs=programs,
    )  # fmt: skip
    for row, length in enumerate(lengths.tolist()):
        expected = attend_naively(
            q[row], keys[row, :, :length], values[row, :, :length], 0.5,
            window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        torch.testing.assert_close(context[row].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("programs", [decode.TARGET_PROGRAMS, 1])
@pytest.mark.parametrize("window", [30, 90, 140])
def test_a_window_that_begins_inside_a_shared_prefix(programs: int, window: int) -> None:
    torch.manual_seed(0)
    B, H, K, L, D = 2, 2, 1, 220, 32
    q = torch.randn(B, H, D, device=DEVICE)
    keys, values = torch.randn(2, B, K, L, D, device=DEVICE)
    prefix = 150
    keys[1, :, :prefix], values[1, :, :prefix] = keys[0, :, :prefix], values[0, :, :prefix]
    lengths = torch.tensor([200, 175], device=DEVICE)
    attend = partial(decode_attention, window=window, target_programs=programs)
    expected = attend(q, keys, values, lengths, 0.3)
    whole = prefix // decode.BLOCK_POSITIONS * decode.BLOCK_POSITIONS
    for buffer in (keys, values):
        buffer[1, :, :whole] = float("nan")
    prefixes = (torch.zeros(2, dtype=torch.long, device=DEVICE), torch.full_like(lengths, prefix))
    context = attend(q, keys, values, lengths, 0.3, prefixes)
    assert torch.equal(context, expected) and context.isfinite().all()


def test_large_heads_take_fewer_positions_at_a_time() -> None:
    """Full layers of Gemma 4 have heads of 512."""
    torch.manual_seed(0)
    q = torch.randn(1, 2, 512, device=DEVICE)
    keys, values = torch.randn(2, 1, 1, 90, 512, device=DEVICE)
    lengths = torch.tensor([90], device=DEVICE)
    context = decode_attention(q, keys, values, lengths, 0.04)
    expected = attend_naively(q[0], keys[0], values[0], 0.04, window=90, softcap=None, sinks=None)
    torch.testing.assert_close(context[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_the_query_is_rounded_to_the_dtype_of_the_keys() -> None:
    attend = partial(decode_attention, target_programs=1)
    q = torch.randn(2, 4, 16, device=DEVICE).bfloat16()
    keys, values = torch.randn(2, 2, 2, 20, 16, device=DEVICE).bfloat16()
    lengths = torch.tensor([20, 3], device=DEVICE)
    context = attend(q.float(), keys, values, lengths, 0.3)
    assert context.dtype == torch.bfloat16
    assert torch.equal(context, attend(q, keys, values, lengths, 0.3))


@pytest.mark.parametrize("V", [7, BLOCK_VOCAB, 3 * BLOCK_VOCAB + 5])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_the_kernel_samples_the_token_that_torch_samples(V: int, temperature: float) -> None:
    torch.manual_seed(V)
    logits = 3 * torch.randn(24, V, device=DEVICE)
    logits[1, V // 2] = 60.0  # one token has all the mass
    logits[2] = 0.0
    uniform = torch.rand(24, dtype=torch.float64, device=DEVICE)
    uniform[3], uniform[4] = 0.0, 1.0 - 1e-16
    column = torch.stack([uniform, torch.zeros_like(uniform)], 1)[:, 0]
    ids, logp = sample_from_logits(logits, column, temperature)
    expected_ids, expected_logp = sample_tokens(
        logits, uniform, Sampling(max_new_tokens=1, temperature=temperature)
    )
    same = ids == expected_ids
    assert same.float().mean() > 0.95  # a random number may fall within rounding of an edge
    torch.testing.assert_close(logp[same], expected_logp[same], rtol=1e-4, atol=1e-4)
    exact = (logits.double() / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logp.double(), exact, rtol=1e-4, atol=1e-4)


def test_excluded_tokens_are_neither_sampled_nor_counted() -> None:
    """A bias of −inf: on some tokens, and on all of a block, as padding of a vocabulary may be."""
    torch.manual_seed(0)
    V = BLOCK_VOCAB + 40
    logits = torch.randn(40, V, device=DEVICE)
    logits[:, 3], logits[:, BLOCK_VOCAB:] = -torch.inf, -torch.inf
    uniform = torch.rand(40, dtype=torch.float64, device=DEVICE)
    uniform[0] = 1.0 - 1e-16
    ids, logp = sample_from_logits(logits, uniform, 0.7)
    exact = (logits.double() / 0.7).log_softmax(-1)
    assert bool(((ids < BLOCK_VOCAB) & (ids != 3)).all())
    torch.testing.assert_close(logp.double(), exact.gather(1, ids[:, None])[:, 0])
    scale = torch.full((40,), 1 / 0.7, device=DEVICE)
    logps = token_logps(logits, torch.where(torch.arange(40, device=DEVICE) < 5, 3, ids), scale)
    assert bool((logps[:5] == -torch.inf).all())
    torch.testing.assert_close(logps[5:], logp[5:])


def test_tokens_are_sampled_as_often_as_they_are_likely() -> None:
    """Evenly spaced random numbers: each token in proportion to its probability, up to one."""
    N = 100
    logits = torch.randn(1, 12, device=DEVICE).expand(N, 12).contiguous()
    uniform = torch.linspace(0, 1, N + 1, dtype=torch.float64, device=DEVICE)[:-1]
    ids, _ = sample_from_logits(logits, uniform, 1.0)
    frequency = torch.bincount(ids, minlength=12) / N
    torch.testing.assert_close(frequency, logits[0].softmax(-1), atol=1.01 / N, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [37, BLOCK_VOCAB, 2 * BLOCK_VOCAB + 5])
def test_log_probs_at_each_rows_temperature(dtype: torch.dtype, V: int) -> None:
    torch.manual_seed(V)
    padded = (20 * torch.randn(4, V + 3, device=DEVICE)).to(dtype)
    logits = padded[:, :V]  # the vocabulary, without the padding of the head
    ids = torch.tensor([0, V - 1, V // 2, 5], device=DEVICE)
    scale = torch.tensor([1.0, 0.25, 3.0, 1.5], device=DEVICE)
    expected = (logits.double() * scale[:, None]).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    logp = token_logps(logits, ids, scale)
    torch.testing.assert_close(logp.double(), expected, rtol=1e-6, atol=2e-5)
