"""Rounding to 16 bits is told from a model that sees what follows."""

from __future__ import annotations

import pytest
import torch
from support.model_kinds import ModelKind, build_model

from courtside.engines import probes
from courtside.engines.probes import probe_causality


@pytest.mark.parametrize(("error", "is_refused"), [(0.04, False), (0.1, False), (0.4, True)])
def test_a_causal_model_may_round_with_the_length(
    error: float, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of trained models in bfloat16 some differ by 0.07 between passes of two lengths."""
    monkeypatch.setattr(probes, "_causality_error", lambda model: error)
    model = build_model(ModelKind(model_type="qwen3"))
    assert (probe_causality(model.to(torch.bfloat16)) is not None) == is_refused
    assert probe_causality(model.float()) is not None, "float32 does not round so"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bidirectional_model_is_refused_where_it_differs_little(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ModelKind(model_type="bert-generation", settings={"is_decoder": False})
    model = build_model(kind).to(dtype)
    assert probe_causality(model) is not None
    monkeypatch.setattr(probes, "_causality_error", lambda model: 0.06)
    assert probe_causality(model) is not None
