"""The kernels between the products, in Triton's interpreter or on the GPU where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from courtside.engines.kernels import layers
from courtside.engines.patches import layer_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUMBERS = [torch.float32, torch.bfloat16]


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_ops, "can_run_kernels", lambda x: False)


def joined(*sizes: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Parts of one product, as layers that are computed together have them."""
    torch.manual_seed(sum(sizes))
    return (2 * torch.randn(rows, 1, sum(sizes), device=DEVICE)).to(dtype).split(sizes, -1)


def close(ours: Tensor, theirs: Tensor, *, exact: bool) -> None:
    """Up to float32's rounding, or, where there are bfloat16, up to neighbours of those."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    # The interpreter cuts off where a GPU rounds, twice on the way.
    rtol = 1e-6 if exact else 2**-7 if ours.is_cuda else 2**-6
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol * float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("out", NUMBERS)
@pytest.mark.parametrize("rounds", [True, False])
def test_norms_of_heads_inside_a_joined_product(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, out: torch.dtype, rounds: bool
) -> None:
    by_torch(monkeypatch)
    query, key = joined(4 * 24, 2 * 24, rows=3, dtype=dtype)
    weight = torch.rand(24, device=DEVICE) + 0.5
    for x in (query.view(3, 1, 4, 24), key.view(3, 1, 2, 24), query.reshape(-1, 24)[:5]):
        ours = layers.rms_norm(x, weight, eps=0.1, dtype=out, rounds=rounds)
        theirs = layer_ops.rms_norm(x, weight, eps=0.1, dtype=out, rounds=rounds)
        close(ours, theirs, exact=dtype == out == torch.float32)
        plain = x.double() * (x.double().square().mean(-1, keepdim=True) + 0.1).rsqrt() * weight
        torch.testing.assert_close(ours.double(), plain, rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("angles", NUMBERS)
@pytest.mark.parametrize("D", [16, 24])
def test_rotation_of_query_and_key(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, angles: torch.dtype, D: int
) -> None:
    by_torch(monkeypatch)
    query, key, _ = joined(4 * D, 2 * D, 2 * D, rows=3, dtype=dtype)
    q, k = query.view(3, 1, 4, D).transpose(1, 2), key.view(3, 1, 2, D).transpose(1, 2)
    cos, sin = torch.randn(2, 3, 1, D, device=DEVICE).to(angles)
    both = torch.promote_types(dtype, angles)
    for ours, theirs in zip(
        layers.apply_rotary(q, k, cos, sin, dtypes=(both, both)),
        layer_ops.apply_rotary(q, k, cos, sin),
        strict=True,
    ):
        close(ours, theirs, exact=torch.float32 in (dtype, angles))
        assert ours[:, :, 0].is_contiguous()


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("B", "N", "H", "K", "D"), [(1, 1, 4, 2, 64), (2, 3, 5, 1, 96)])
def test_heads_are_rotated_alike_one_by_one_and_together(
    dtype: torch.dtype, back: bool, B: int, N: int, H: int, K: int, D: int
) -> None:
    """Heads that fill a tile, that do not, and those of the key that are fewer than a tile."""
    torch.manual_seed(B)
    q, k = (
        torch.randn(B, N, heads, D, device=DEVICE).to(dtype).transpose(1, 2) for heads in (H, K)
    )
    cos, sin = torch.randn(2, 1, N, D, device=DEVICE).to(dtype)
    found = {
        tile: layers.apply_rotary(q, k, cos, sin, dtypes=(dtype, dtype), back=back, tile=tile)
        for tile in (None, 1, 2, 4, 8)
    }
    for both in found.values():
        assert all(torch.equal(x, y) for x, y in zip(both, found[1], strict=True))
    pairs = zip(found[1], (q, k), strict=True)
    for ours, x in pairs:
        low, high = x.double().chunk(2, -1)
        c, s = (angles.double()[:, None] for angles in (cos, sin))
        turned = torch.cat((-high, low), -1) * s
        if back:
            low, high = (x.double() * s).chunk(2, -1)
            turned = torch.cat((high, -low), -1)
        close(ours, (x.double() * c + turned).to(dtype), exact=dtype == torch.float32)


def test_many_heads_share_a_program_and_few_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where places are many, programs are fewer; a short rotation wants all that it can have."""
    grids = []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, HEADS, num_warps, **__: grids.append((*grid, HEADS, num_warps))

    monkeypatch.setattr(layers, "_rotate", Counted())
    for N in (2, 400):
        q, k = torch.zeros(1, 16, N, 128), torch.zeros(1, 8, N, 128)
        angles = torch.zeros(1, N, 128)
        layers.apply_rotary(q, k, angles, angles, dtypes=(q.dtype, q.dtype))
    assert grids == [(2 * 24, 1, 1), (400 * 3, 8, 4)]


@pytest.mark.parametrize("room", NUMBERS)
def test_new_keys_and_values_go_behind_the_rows_own(room: torch.dtype) -> None:
    _, key, value = joined(4 * 24, 2 * 24, 2 * 24, rows=3, dtype=torch.float32)
    # Numbers that bfloat16 has: the interpreter cuts off where a GPU rounds.
    k, v = (x.bfloat16().float().view(3, 1, 2, 24).transpose(1, 2) for x in (key, value))
    lengths = torch.tensor([0, 6, 3], device=DEVICE)
    ours = [torch.full((3, 2, 7, 24), -1.0, dtype=room, device=DEVICE) for _ in range(2)]
    expected = [x.clone() for x in ours]
    layers.append_kv(*ours, k.to(torch.bfloat16), v, lengths)
    for row, length in enumerate(lengths.tolist()):
        expected[0][row, :, length] = k[row, :, 0].to(room)
        expected[1][row, :, length] = v[row, :, 0].to(room)
    for x, y in zip(ours, expected, strict=True):
        assert torch.equal(x, y)
    before = [x.clone() for x in ours]
    layers.append_kv(*ours, k, v, torch.full((3,), 7, device=DEVICE))
    assert all(torch.equal(x, y) for x, y in zip(ours, before, strict=True)), "there is no room"


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("size", [40, 1500])
def test_gate(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int) -> None:
    by_torch(monkeypatch)
    gate, up = joined(size, size, rows=3, dtype=dtype)
    for g in (gate, 10 * gate):
        ours, theirs = layers.swiglu(g, up), layer_ops.swiglu(g, up)
        close(ours, theirs, exact=dtype == torch.float32)
