"""The kernels in Triton's interpreter, or on the GPU where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
def _loaded_numbers_bound_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter makes an int of an array of one element, which numpy 2.4 refuses."""
    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.mark.parametrize("programs", [decode.TARGET_PROGRAMS, 1])
@pytest.mark.parametrize(("B", "H", "K", "D"), [(3, 9, 3, 64), (2, 4, 4, 24), (1, 8, 4, 128)])
def test_attention_reads_each_row_up_to_its_own_length(
    monkeypatch: pytest.MonkeyPatch, programs: int, B: int, H: int, K: int, D: int
) -> None:
    """In parts that are joined, and in one go as with many rows."""
    monkeypatch.setattr(decode, "TARGET_PROGRAMS", programs)
    torch.manual_seed(B)
    L = 200
    q = torch.randn(B, H, D, device=DEVICE)
    keys, values = torch.randn(2, B, K, L, D, device=DEVICE)
    lengths = torch.randint(1, L + 1, (B,), device=DEVICE)
    lengths[0], lengths[-1] = 1, L
    for row, length in enumerate(lengths.tolist()):  # beyond it stands what must never be read
        keys[row, :, length:] = float("nan")
        values[row, :, length:] = float("nan")
    found = decode_attention(q, keys, values, lengths, 0.3)
    for row, length in enumerate(lengths.tolist()):
        k = keys[row, :, :length].double().repeat_interleave(H // K, 0)
        v = values[row, :, :length].double().repeat_interleave(H // K, 0)
        share = (0.3 * (k @ q[row].double()[:, :, None])).softmax(1)
        expected = (share * v).sum(1)
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("programs", [decode.TARGET_PROGRAMS, 1])
def test_rows_that_began_alike_read_their_beginning_in_one_of_them(
    monkeypatch: pytest.MonkeyPatch, programs: int
) -> None:
    """Whole blocks of it; the rest, and what came later, is each row's own."""
    monkeypatch.setattr(decode, "TARGET_PROGRAMS", programs)
    torch.manual_seed(0)
    B, H, K, L, D = 3, 2, 1, 150, 32
    q = torch.randn(B, H, D, device=DEVICE)
    keys, values = torch.randn(2, B, K, L, D, device=DEVICE)
    leader = torch.tensor([0, 0, 2], device=DEVICE)
    alike = torch.tensor([100, 100, 0], device=DEVICE)
    keys[1, :, :100], values[1, :, :100] = keys[0, :, :100], values[0, :, :100]
    lengths = torch.tensor([101, 150, 90], device=DEVICE)
    expected = decode_attention(q, keys, values, lengths, 0.3)
    whole = 100 // decode.BLOCK_POSITIONS * decode.BLOCK_POSITIONS
    for room in (keys, values):
        room[1, :, :whole] = float("nan")  # nobody looks at this copy
    found = decode_attention(q, keys, values, lengths, 0.3, (leader, alike))
    assert torch.equal(found, expected)


def test_a_query_is_rounded_as_the_keys_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "TARGET_PROGRAMS", 1)
    q = torch.randn(2, 4, 16, device=DEVICE).bfloat16()
    keys, values = torch.randn(2, 2, 2, 20, 16, device=DEVICE).bfloat16()
    lengths = torch.tensor([20, 3], device=DEVICE)
    found = decode_attention(q.float(), keys, values, lengths, 0.3)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, decode_attention(q, keys, values, lengths, 0.3))


@pytest.mark.parametrize("V", [7, BLOCK_VOCAB, 3 * BLOCK_VOCAB + 5])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_the_word_that_is_picked_is_the_one_the_plain_form_draws(
    V: int, temperature: float
) -> None:
    torch.manual_seed(V)
    logits = 3 * torch.randn(24, V, device=DEVICE)
    logits[1, V // 2] = 60.0  # one word has all the mass
    logits[2] = 0.0
    uniform = torch.rand(24, dtype=torch.float64, device=DEVICE)
    uniform[3], uniform[4] = 0.0, 1.0 - 1e-16
    of_a_table = torch.stack([uniform, torch.zeros_like(uniform)], 1)[:, 0]
    ids, logp = sample_from_logits(logits, of_a_table, temperature)
    plain_ids, plain_logp = sample_tokens(
        logits, uniform, Sampling(max_new_tokens=1, temperature=temperature)
    )
    same = ids == plain_ids
    assert same.float().mean() > 0.95  # a random number may fall within rounding of an edge
    torch.testing.assert_close(logp[same], plain_logp[same], rtol=1e-4, atol=1e-4)
    own = (logits.double() / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logp.double(), own, rtol=1e-4, atol=1e-4)


def test_words_are_picked_as_often_as_they_are_likely() -> None:
    """Evenly spread random numbers: each word as often as its share says, up to one."""
    N = 100
    logits = torch.randn(1, 12, device=DEVICE).expand(N, 12).contiguous()
    uniform = torch.linspace(0, 1, N + 1, dtype=torch.float64, device=DEVICE)[:-1]
    ids, _ = sample_from_logits(logits, uniform, 1.0)
    share = torch.bincount(ids, minlength=12) / N
    torch.testing.assert_close(share, logits[0].softmax(-1), atol=1.01 / N, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [37, BLOCK_VOCAB, 2 * BLOCK_VOCAB + 5])
def test_log_probs_of_words_at_each_rows_temperature(dtype: torch.dtype, V: int) -> None:
    torch.manual_seed(V)
    room = (20 * torch.randn(4, V + 3, device=DEVICE)).to(dtype)
    logits = room[:, :V]  # the words that count, of a wider product
    ids = torch.tensor([0, V - 1, V // 2, 5], device=DEVICE)
    scale = torch.tensor([1.0, 0.25, 3.0, 1.5], device=DEVICE)
    expected = (logits.double() * scale[:, None]).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    found = token_logps(logits, ids, scale)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-5)
