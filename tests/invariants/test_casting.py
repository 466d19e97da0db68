"""Under autocast a weight is rounded once a step, and never stays rounded into the next."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gradients import compute_gradients, score_batch
from support.small_runs import small_recipe
from torch.utils._python_dispatch import TorchDispatchMode

from courtside.assemble import assemble
from courtside.runtime import Runtime
from courtside.training import cpu_patches, head

CAPPED = [{"kind": "divergence", "clip": 0.5}]
"""A loss without a closed form, differentiated by autograd a block at a time."""


class Casts(TorchDispatchMode):
    """How often each trained weight is rounded."""

    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__()
        self.names = {p.data_ptr(): name for name, p in weights.items()}
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rounded = None
        if str(func.overloadpacket) == "aten._to_copy" and kwargs["dtype"] == torch.bfloat16:
            rounded = args[0]
        elif str(func.overloadpacket) == "aten.copy_" and args[0].dtype == torch.bfloat16:
            rounded = args[1]
        if rounded is not None and rounded.data_ptr() in self.names:
            self.count[self.names[rounded.data_ptr()]] += 1
        return func(*args, **kwargs)


def rounded(student: Path, teacher: Path, losses: Any = None, **settings: Any) -> Runtime:
    """Several micro-batches a step, and arithmetic in bfloat16 over float32 weights."""
    recipe = small_recipe(
        student,
        teacher,
        student={"model": str(student), "dtype": "bfloat16", **settings},
        losses=losses or [{"kind": "divergence"}],
        train={
            "prompts_per_step": 3,
            "learning_rate": 0.1,
            "micro_batch_tokens": 32,
            "logits_chunk_tokens": 4,
        },
    )
    return assemble(recipe)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"gradient_checkpointing": True},
    {"lora": {"rank": 2}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["all", "checkpointed", "lora"])
def test_each_weight_is_rounded_once_a_step(
    settings: dict[str, Any],
    tiny_folder: Path,
    tiny_teacher_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = rounded(tiny_folder, tiny_teacher_folder, **settings)
    scored, student = score_batch(parts), parts.student
    num_passes = 0
    real = student._micro_batch

    def micro_batch(*args: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        if anew:
            torch.clear_autocast_cache()
        return real(*args)

    monkeypatch.setattr(student, "_micro_batch", micro_batch)
    linear = {n: p for n, p in student.weights.trained.items() if "proj" in n}
    anew = False
    compute_gradients(parts, scored)  # layers are tried out now, which rounds too
    num_passes = 0
    with Casts(linear) as casts:
        ours = compute_gradients(parts, scored)
    assert num_passes >= 3 and len(linear) >= 14
    assert casts.count == dict.fromkeys(linear, 1)
    monkeypatch.setattr(cpu_patches, "_linear_patches", lambda *_: [])
    autocast_gradients, counts = [], []
    for anew in (False, True):  # noqa: B007  (`micro_batch` looks at it)
        num_passes = 0
        with Casts(linear) as casts:
            autocast_gradients.append(compute_gradients(parts, scored))
        counts.append(set(casts.count.values()))
    assert counts == [{1}, {num_passes}], "autocast's casts, with its cache and without"
    for gradients in autocast_gradients:
        assert ours.keys() == gradients.keys() == student.weights.trained.keys()
        assert all(torch.equal(ours[name], gradients[name]) for name in ours)


def test_both_heads_are_rounded_once_a_step(
    tiny_folder: Path, tiny_teacher_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = rounded(tiny_folder, tiny_teacher_folder)
    scored, rounding = score_batch(parts), []
    real = head._cast

    def cast(*parameters: Any) -> Any:
        rounding.append(parameters)
        return real(*parameters)

    monkeypatch.setattr(head, "_cast", cast)
    for number in range(2):
        parts.student.step(number, scored)
        assert len(rounding) == 2 * (number + 1), "the student's and the teacher's"
        assert parts.student._cast_weights is None


@pytest.mark.parametrize("outer", [False, True], ids=["alone", "inside another autocast"])
@pytest.mark.parametrize("losses", [[{"kind": "divergence"}], CAPPED], ids=["closed", "autograd"])
def test_a_step_uses_the_weights_of_the_step_before(
    losses: Any, outer: bool, tiny_folder: Path, tiny_teacher_folder: Path
) -> None:
    parts = rounded(tiny_folder, tiny_teacher_folder, losses)
    scored = score_batch(parts)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outer):
        before = parts.student.step(0, scored).student_logp
        second = parts.student.step(1, scored)
    fresh = rounded(tiny_folder, tiny_teacher_folder, losses)
    start = assemble(parts.recipe).student.weights.trained
    fresh.student.step(0, scored)
    for name, parameter in fresh.student.weights.trained.items():
        assert not torch.equal(parameter, start[name]), "the first step moved everything"
    expected = fresh.student.step(1, scored)
    assert second.student_logp == expected.student_logp != before
    assert dict(second.metrics) == dict(expected.metrics)
    after = fresh.student.weights.trained
    for name, parameter in parts.student.weights.trained.items():
        assert torch.equal(parameter, after[name])


def test_a_pass_that_fails_leaves_nothing_rounded(
    tiny_folder: Path, tiny_teacher_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = rounded(tiny_folder, tiny_teacher_folder)
    scored = score_batch(parts)
    weight = parts.student.weights.model.model.layers[0].mlp.up_proj.weight
    hidden_1D = torch.ones(1, weight.shape[1])

    def fail(*args: Any) -> Any:
        torch.nn.functional.linear(hidden_1D, weight)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(parts.student, "_micro_batch", fail)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match="luck"):
            parts.student.step(0, scored)
        weight.data.zero_()
        assert not torch.nn.functional.linear(hidden_1D, weight).any()
    assert not torch.is_autocast_enabled("cpu")
