"""The layer kernels against torch, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from courtside.engines.kernels import layers
from courtside.engines.patches import fused_layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]


def on_cpu(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> Any:
    """Its result in torch operations, which run where kernels do not."""
    out = function(*(x.cpu() for x in inputs), **options)
    return tuple(x.to(DEVICE) for x in out) if isinstance(out, tuple) else out.to(DEVICE)


def fused_slices(*sizes: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Slices of one fused matmul's output."""
    torch.manual_seed(sum(sizes))
    return (2 * torch.randn(rows, 1, sum(sizes), device=DEVICE)).to(dtype).split(sizes, -1)


def assert_near(actual: Tensor, expected: Tensor, *, exact: bool) -> None:
    """Up to float32's rounding, or to the neighboring bfloat16."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    # The interpreter truncates where a GPU rounds, twice on the way.
    rtol = 1e-6 if exact else 2**-7 if actual.is_cuda else 2**-6
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("rounds", [True, False])
def test_rms_norm_of_heads_in_a_fused_matmul(
    dtype: torch.dtype, out: torch.dtype, rounds: bool
) -> None:
    query, key = fused_slices(4 * 24, 2 * 24, rows=3, dtype=dtype)
    weight = torch.rand(24, device=DEVICE) + 0.5
    for x, shift in (
        (query.view(3, 1, 4, 24), 0.0),
        (key.view(3, 1, 2, 24), 1.0),
        (query.reshape(-1, 24)[:5], 0.0),
    ):
        options = {"eps": 0.1, "dtype": out, "rounds": rounds, "shift": shift}
        actual = layers.rms_norm(x, weight, **options)
        expected = on_cpu(fused_layers.rms_norm, x, weight, **options)
        assert_near(actual, expected, exact=dtype == out == torch.float32)
        norm = (x.double().square().mean(-1, keepdim=True) + 0.1).rsqrt()
        plain = x.double() * norm * (weight + shift)
        torch.testing.assert_close(actual.double(), plain, rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("angles", DTYPES)
@pytest.mark.parametrize("D", [16, 24])
def test_rotary_of_query_and_key(dtype: torch.dtype, angles: torch.dtype, D: int) -> None:
    query, key, _ = fused_slices(4 * D, 2 * D, 2 * D, rows=3, dtype=dtype)
    q, k = query.view(3, 1, 4, D).transpose(1, 2), key.view(3, 1, 2, D).transpose(1, 2)
    cos, sin = torch.randn(2, 3, 1, D, device=DEVICE).to(angles)
    both = torch.promote_types(dtype, angles)
    for actual, expected in zip(
        layers.apply_rotary(q, k, cos, sin, dtypes=(both, both)),
        on_cpu(fused_layers.apply_rotary, q, k, cos, sin),
        strict=True,
    ):
        assert_near(actual, expected, exact=torch.float32 in (dtype, angles))
        assert actual[:, :, 0].is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("B", "N", "H", "K", "D"), [(1, 1, 4, 2, 64), (2, 3, 5, 1, 96)])
def test_tiling_over_heads_changes_no_value(
    dtype: torch.dtype, backward: bool, B: int, N: int, H: int, K: int, D: int
) -> None:
    """Heads that fill a tile, that do not, and those of the key that are fewer than a tile."""
    torch.manual_seed(B)
    q, k = (
        torch.randn(B, N, heads, D, device=DEVICE).to(dtype).transpose(1, 2) for heads in (H, K)
    )
    cos, sin = torch.randn(2, 1, N, D, device=DEVICE).to(dtype)
    rotations = {
        heads: layers.apply_rotary(
            q, k, cos, sin, dtypes=(dtype, dtype), backward=backward, heads_per_program=heads
        )
        for heads in (None, 1, 2, 4, 8)
    }
    for both in rotations.values():
        assert all(torch.equal(x, y) for x, y in zip(both, rotations[1], strict=True))
    pairs = zip(rotations[1], (q, k), strict=True)
    for actual, x in pairs:
        low, high = x.double().chunk(2, -1)
        c, s = (angles.double()[:, None] for angles in (cos, sin))
        rotated = torch.cat((-high, low), -1) * s
        if backward:
            low, high = (x.double() * s).chunk(2, -1)
            rotated = torch.cat((high, -low), -1)
        assert_near(actual, (x.double() * c + rotated).to(dtype), exact=dtype == torch.float32)


def test_many_heads_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many positions; with few, each head has its own program."""
    grids = []

    class GridRecorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, HEADS, num_warps, **__: grids.append((*grid, HEADS, num_warps))

    monkeypatch.setattr(layers, "_apply_rotary", GridRecorder())
    for N in (2, 400):
        q, k = torch.zeros(1, 16, N, 128), torch.zeros(1, 8, N, 128)
        angles = torch.zeros(1, N, 128)
        layers.apply_rotary(q, k, angles, angles, dtypes=(q.dtype, q.dtype))
    assert grids == [(2 * 24, 1, 1), (400 * 3, 8, 4)]


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("value_size", [24, 16, 40])
def test_keys_and_values_are_appended_at_each_rows_length(
    cache_dtype: torch.dtype, value_size: int
) -> None:
    sizes = (24, value_size)
    _, *states = fused_slices(4 * 24, *(2 * n for n in sizes), rows=3, dtype=torch.float32)
    # Exact in bfloat16, because the interpreter truncates where a GPU rounds.
    k, v = (
        x.bfloat16().float().view(3, 1, 2, n).transpose(1, 2)
        for x, n in zip(states, sizes, strict=True)
    )
    lengths = torch.tensor([0, 6, 3], device=DEVICE)
    caches = [torch.full((3, 2, 7, n), -1.0, dtype=cache_dtype, device=DEVICE) for n in sizes]
    expected = [x.clone() for x in caches]
    layers.append_kv(*caches, k.to(torch.bfloat16), v, lengths)
    for row, length in enumerate(lengths.tolist()):
        expected[0][row, :, length] = k[row, :, 0].to(cache_dtype)
        expected[1][row, :, length] = v[row, :, 0].to(cache_dtype)
    for x, y in zip(caches, expected, strict=True):
        assert torch.equal(x, y)
    before = [x.clone() for x in caches]
    layers.append_kv(*caches, k, v, torch.full((3,), 7, device=DEVICE))
    assert all(torch.equal(x, y) for x, y in zip(caches, before, strict=True)), (
        "a full row stays as it is"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [40, 1500])
def test_swiglu(dtype: torch.dtype, size: int) -> None:
    gate, up = fused_slices(size, size, rows=3, dtype=dtype)
    for g in (gate, 10 * gate):
        actual, expected = layers.swiglu(g, up), on_cpu(fused_layers.swiglu, g, up)
        assert_near(actual, expected, exact=dtype == torch.float32)
