"""bfloat16 on a CPU: chosen where it is native, for matmuls only, within its rounding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.float64 import in_float64, relative_error
from support.gradients import accumulate, flatten_gradients
from support.small_runs import small_recipe
from support.textbook import logp_of, naive_loss
from support.tiny_model import tiny_model, tiny_tokenizer
from torch import Tensor

from courtside.assemble import assemble
from courtside.engines import precision as module
from courtside.engines.base import SampleRequest, Sampling, ScoreRequest
from courtside.engines.local import LocalEngine
from courtside.engines.patches import onednn_prepack
from courtside.engines.patches.patch import apply_patches
from courtside.engines.precision import has_bf16_flag, resolve_dtype
from courtside.runtime import Runtime
from courtside.types import Scored

CPU = torch.device("cpu")
BRIEF = {"kind": "self", "weights": "frozen", "context": {"kind": "system", "text": "be brief"}}


@pytest.fixture
def native_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with bf16 instructions, and prepacking for models of any size."""
    monkeypatch.setattr(module, "has_native_bf16", lambda: True)
    monkeypatch.setattr(onednn_prepack, "MIN_PARAMETERS", 0)


# ── the choice ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("native", [False, True])
def test_auto_is_bfloat16_where_it_is_native(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_native_bf16", lambda: native)
    assert resolve_dtype("auto", CPU) == (torch.bfloat16 if native else torch.float32)
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float32", CPU) == resolve_dtype("float32", torch.device("cuda"))
    assert resolve_dtype("float32", CPU) == torch.float32
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16


@pytest.mark.parametrize(
    ("line", "native"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 clzero", True),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", False),
        ("Features\t: fp asimd svebf16 i8mm bf16", True),
        ("Features\t: fp asimd svebf16", False),
        ("", False),
    ],
)
def test_instructions_are_those_of_cpuinfo(line: str, native: bool) -> None:
    assert has_bf16_flag(f"processor\t: 0\n{line}\npower management:\n") == native


@pytest.mark.parametrize("native", [False, True])
def test_student_and_teacher_follow_the_same_choice(
    native: bool, tiny_folder: Path, tiny_teacher_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_native_bf16", lambda: native)
    parts = assemble(small_recipe(tiny_folder, tiny_teacher_folder))
    weights, teacher = parts.student.weights, parts.teacher.teacher.engine  # type: ignore[union-attr]
    assert weights.autocast == (torch.bfloat16 if native else None)
    assert {p.dtype for p in weights.trained.values()} == {torch.float32}
    assert teacher.model.dtype == (torch.bfloat16 if native else torch.float32)  # type: ignore[attr-defined]


# ── what is in bfloat16, and what is not ─────────────────────────────────────────────────────────


def run_step(parts: Runtime) -> list[Scored]:
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0))
    parts.student.step(0, scored)
    return scored


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all weights", "LoRA"])
def test_attention_stays_float32(
    lora: Any, tiny_folder: Path, native_bf16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In sampling, scoring and the update, because in bfloat16 it is slower."""
    dtypes: set[Any] = set()
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def recording_sdpa(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        dtypes.add((query.dtype, key.dtype, value.dtype, torch.is_autocast_enabled("cpu")))
        return sdpa(query, key, value, **settings)

    student = {"model": str(tiny_folder)} | ({"lora": lora} if lora else {})
    parts = assemble(small_recipe(tiny_folder, student=student, teacher=BRIEF))
    # Probed now, against the model's attention, which may be in bfloat16.
    assert parts.engine.stateless_reason is None and parts.engine.passes.padding_reason is None
    teacher = parts.teacher.teacher
    assert teacher is not None and parts.student.passes.padding_reason is None
    assert teacher.engine.passes.padding_reason is None  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording_sdpa)
    run_step(parts)
    assert dtypes == {(torch.float32, torch.float32, torch.float32, False)}


def test_prepacked_weights_are_what_autocast_casts(native_bf16: None) -> None:
    """The current ones, also of a truncated LM head; the layers are restored afterwards."""
    engine = LocalEngine(
        tiny_model(), tiny_tokenizer(), name="tiny", vocab_size=200, autocast=torch.bfloat16
    )
    ids = torch.arange(2, 14).view(3, 4)

    @torch.no_grad()
    def logits() -> Tensor:
        return engine.head(engine.model.base_model(input_ids=ids).last_hidden_state)

    for _ in range(2):
        with engine.autocast_context():
            expected = logits()
            patches = onednn_prepack.make_prepacked_patches(engine.model, engine.head)
            with apply_patches(patches):
                assert "forward" in engine.model.model.layers[0].mlp.up_proj.__dict__
                prepacked = logits()
        assert prepacked.dtype == torch.float32
        torch.testing.assert_close(
            prepacked, expected, rtol=0.02, atol=0.02 * float(expected.abs().max())
        )
        with torch.no_grad():
            engine.model.model.layers[0].mlp.up_proj.weight.mul_(3)
            engine.model.lm_head.weight.mul_(2)
    assert not any("forward" in m.__dict__ for m in engine.model.modules())


def test_prepacking_pays_where_weights_would_be_cast(native_bf16: None) -> None:
    model, few = tiny_model(), onednn_prepack.MIN_DECODE_STEPS - 1
    assert onednn_prepack.is_worth_prepacking(model, torch.bfloat16, num_steps=0), (
        "casting them costs as much"
    )
    assert not onednn_prepack.is_worth_prepacking(model, torch.float32, num_steps=few)
    assert not onednn_prepack.is_worth_prepacking(model.bfloat16(), torch.bfloat16, num_steps=few)
    assert onednn_prepack.is_worth_prepacking(
        model, torch.bfloat16, num_steps=onednn_prepack.MIN_DECODE_STEPS
    )


# ── accuracy ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all weights", "LoRA"])
def test_log_probs_of_samples_are_those_of_scoring_them(
    lora: Any, tiny_folder: Path, native_bf16: None
) -> None:
    student = {"model": str(tiny_folder)} | ({"lora": lora} if lora else {})
    engine = assemble(small_recipe(tiny_folder, student=student, teacher=BRIEF)).engine
    prompts = [(0, 5, 9), (0, 7, 7, 7, 30, 31), (0, 40), tuple(2 + i % 250 for i in range(40))]
    sample_requests = [SampleRequest(prompt_ids=prompts[n % 4], seed=n) for n in range(8)]
    samples = engine.sample(sample_requests, Sampling(max_new_tokens=16, temperature=0.8))
    requests = [
        ScoreRequest(
            token_ids=r.prompt_ids + s.token_ids,
            scored=(False,) * len(r.prompt_ids) + (True,) * len(s.token_ids),
            temperature=0.8,
        )
        for r, s in zip(sample_requests, samples, strict=True)
    ]
    scores = torch.cat([scores.logp_T for scores in engine.score(requests)])
    error_T = torch.tensor([logp for s in samples for logp in s.logp]) - scores
    assert float(error_T.abs().mean()) < 0.03 and float(error_T.abs().max()) < 0.25
    assert abs(float(error_T.mean())) < 0.01


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl"])
def test_loss_and_gradient_of_a_step_are_those_of_float64_within_rounding(
    name: str, tiny_folder: Path, tiny_teacher_folder: Path, native_bf16: None
) -> None:
    losses = [{"kind": "divergence", "divergence": name}]
    parts = assemble(
        small_recipe(
            tiny_folder,
            tiny_teacher_folder,
            losses=losses,
            train={
                "steps": 5,
                "prompts_per_step": 2,
                "learning_rate": 1e-3,
                "micro_batch_tokens": 64,
            },
        )
    )
    teacher = parts.teacher.teacher
    assert teacher is not None
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0))
    actual, metrics = accumulate(parts, scored)
    model = in_float64(parts.student.weights.model)
    model.zero_grad()
    teachers = {teacher.name: in_float64(teacher.engine.model)}  # type: ignore[union-attr, attr-defined]
    total, _ = naive_loss(losses, scored, model, teachers, model)
    total.backward()  # type: ignore[no-untyped-call]
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert actual.keys() == expected.keys()
    assert all(gradient.dtype == torch.float32 for gradient in actual.values())
    error = relative_error(flatten_gradients(actual), flatten_gradients(expected))
    # 0.056 with avx512_bf16 and 0.064 with AMX, which sum in another order.
    assert 1e-4 < error < 0.08, "rounded, and no more than that"
    assert metrics.losses["divergence"] == pytest.approx(float(total.detach()), rel=0.02)


def test_the_update_scores_samples_as_the_sampler_did(tiny_folder: Path, native_bf16: None) -> None:
    """Importance ratios compare the two, so both must be near the float64 model."""
    parts = assemble(small_recipe(tiny_folder, teacher=BRIEF))
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0))
    exact = in_float64(parts.student.weights.model)
    update = parts.student.step(0, scored)
    errors = []
    for s in scored:
        exact_logp = logp_of(exact, s.trajectory)[1].tolist()
        sampler_logp = [x for turn in s.trajectory.turns for x in turn.sampler_logp or ()]
        update_logp = update.student_logp[s.trajectory.id]
        errors += [
            max(abs(w - r), abs(w - t))
            for w, r, t in zip(sampler_logp, update_logp, exact_logp, strict=True)
        ]
    assert max(errors) < 0.2 and math.fsum(errors) / len(errors) < 0.03
