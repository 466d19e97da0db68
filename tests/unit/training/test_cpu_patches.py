"""Layers that are recomputed on a CPU are those that `cpu_patches` can compute itself."""

from __future__ import annotations

from support.model_kinds import ModelKind, build_model

from courtside.training.cpu_patches import RecomputedLayers


def test_gated_norms_are_left_alone() -> None:
    """They take a second argument: of Qwen3-Next, Mamba 2 and others."""
    model = build_model(ModelKind(model_type="bamba", settings={"attn_layer_indices": [1]}))
    norms = [m for m in model.modules() if "RMSNorm" in type(m).__name__]
    gated = [m for m in norms if "Gated" in type(m).__name__]
    assert len(gated) == 1
    assert {*RecomputedLayers(model).norms} == {*norms} - {*gated}
