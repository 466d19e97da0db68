"""Rows are extended in few passes: shared prefixes once, lengths split into powers of two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.hybrids import make_hybrid

from courtside.engines.forward.state_passes import StatePasses, plan_steps
from courtside.engines.forward.state_probe import probe_state_passes


@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=40),
    max_tokens=st.sampled_from([1, 30, 10**6]),
    may_split=st.booleans(),
)
def test_steps_process_every_token_in_order(
    rows: list[tuple[int, bool]], max_tokens: int, may_split: bool
) -> None:
    lengths, is_new = [n for n, _ in rows], [new for _, new in rows]
    steps = plan_steps(lengths, is_new, max_tokens=max_tokens, may_split=may_split)
    processed = [0] * len(rows)
    for step in steps:
        assert len(step.rows) == 1 or len(step.rows) * step.num_tokens <= max_tokens
        # New sequences have no state to join with those of others.
        assert len({is_new[row] and not processed[row] for row in step.rows}) == 1
        for row in step.rows:
            processed[row] += step.num_tokens
    assert processed == lengths
    assert len(steps) <= len(plan_steps(lengths, is_new, max_tokens=max_tokens, may_split=False))
    if max_tokens > 10**5 and may_split:
        assert len(steps) <= 2 * 2 * 6, "powers of two, of new rows and others"


@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h", "falcon_h1"])
@torch.no_grad()
def test_rows_extended_together_are_those_extended_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_hybrid(kind)
    passes = probe_state_passes(model)
    assert isinstance(passes, StatePasses)
    system = tuple(2 + (3 * i * i) % 250 for i in range(40))
    few_shot = (*system, *range(100, 140))
    prompts = [
        (*(few_shot if n % 2 else system), *(2 + (11 * i + n) % 250 for i in range(n + 1)))
        for n in range(20)
    ]
    expected = [passes.extend([(None, ids)], max_tokens=512)[0] for ids in prompts]
    more = [tuple(2 + (5 * i + n) % 250 for i in range(1 + 2 * n)) for n in range(20)]
    states = [state for state, _ in expected]
    expected_more = [
        passes.extend([row], max_tokens=512)[0] for row in zip(states, more, strict=True)
    ]
    shapes: list[torch.Size] = []
    forward = StatePasses.forward

    def count(self: StatePasses, ids_BN: torch.Tensor, *arguments: Any) -> Any:
        shapes.append(ids_BN.shape)
        return forward(self, ids_BN, *arguments)

    monkeypatch.setattr(StatePasses, "forward", count)
    new = passes.extend([(None, ids) for ids in prompts], max_tokens=10**6)
    assert len(shapes) <= 9 and sum(n.numel() for n in shapes) == 40 + 40 + sum(range(1, 21))
    continued = passes.extend(list(zip(states, more, strict=True)), max_tokens=512, last_only=True)
    for (state, hidden_ND), (plain, plain_ND) in zip(
        [*new, *continued], [*expected, *expected_more], strict=True
    ):
        assert state.num_tokens == plain.num_tokens
        for x, y in zip(state.tensors, plain.tensors, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(hidden_ND, plain_ND[-len(hidden_ND) :], rtol=1e-3, atol=1e-4)
    assert all(len(hidden_ND) == 1 for _, hidden_ND in continued)
    assert [len(hidden_ND) for _, hidden_ND in new] == [len(ids) for ids in prompts]
