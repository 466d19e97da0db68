"""Which weights a teacher scores with once the student has moved, in parts made from a recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_model import save_tiny, tiny_model, tiny_tokenizer
from torch import Tensor

from courtside.assemble import assemble
from courtside.engines.loading import load_model
from courtside.engines.precision import resolve_dtype
from courtside.errors import ModelError, RecipeError, TaskError
from courtside.recipe.load import parse_recipe
from courtside.runtime import Runtime
from courtside.teacher.teacher import Teacher
from courtside.types import Target, Trajectory

CONTEXT = {"kind": "field", "field": "rule"}
LORA = {"rank": 2}
HEAD = {"rank": 2, "target_modules": ["v_proj", "lm_head"]}
"""An adapter on the output head too, which is the embedding."""


@pytest.fixture
def prepare(tiny_folder: Path, tmp_path: Path) -> Any:
    def make(
        teacher: dict[str, Any],
        *,
        student: dict[str, Any] | None = None,
        rollout: dict[str, Any] | None = None,
        losses: Sequence[dict[str, Any]] = ({"kind": "divergence"},),
        rule: str | None = "lower case",
    ) -> Runtime:
        lines = [
            {
                "prompt": f"Question {n}?",
                "split": "train",
                **({"privileged": {"rule": rule}} if rule else {}),
            }
            for n in range(4)
        ]
        (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
        return assemble(
            parse_recipe(
                {
                    "student": {"model": str(tiny_folder), "device": "cpu", **(student or {})},
                    "tasks": {"kind": "jsonl", "path": str(tmp_path / "tasks.jsonl")},
                    "rollout": {
                        "samples_per_prompt": 2, "max_new_tokens": 5, "temperature": 1.3,
                        **(rollout or {})
                    },
                    "train": {"prompts_per_step": 3},
                    "teacher": teacher,
                    "losses": list(losses),
                }
            )
        )  # fmt: skip

    return make


def sample_trajectories(parts: Runtime) -> list[Trajectory]:
    return parts.rollout(parts.tasks.batch(0, 3), 0)


def targets(parts: Runtime, trajectories: Sequence[Trajectory]) -> dict[str, Target]:
    scored = parts.teacher(trajectories)
    return {s.trajectory.id: s.target for s in scored if s.target is not None}


@torch.no_grad()
def naive(model: Any, parts: Runtime, trajectory: Trajectory) -> Tensor:
    """[T, V] log-probs of a plain model that reads the rule and then the student's tokens."""
    rule = trajectory.task.privileged["rule"]
    (ask,) = trajectory.task.messages
    prompt = parts.renderer.tokenizer(
        f"<|im_start|>system\n{rule}<|im_end|>\n<|im_start|>user\n{ask.content}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )["input_ids"]
    ids = [*prompt, *trajectory.completion_ids]
    logits_LV = model(input_ids=torch.tensor([ids])).logits[0].float()
    return torch.log_softmax(logits_LV[len(prompt) - 1 : -1] / trajectory.temperature, -1)


def agree(
    target_by_id: dict[str, Target],
    model: Any,
    parts: Runtime,
    trajectories: Sequence[Trajectory],
    vocab_size: int = 258,
    atol: float = 5e-5,
) -> None:
    """Log-probs of the tokens and, through the head, of all words."""
    assert target_by_id.keys() == {t.id for t in trajectories}
    for t in trajectories:
        target, logp_TV = target_by_id[t.id], naive(model, parts, t)[:, :vocab_size].log_softmax(-1)
        ids_T = torch.tensor(t.completion_ids)
        expected_T = logp_TV.gather(-1, ids_T[:, None]).squeeze(-1)
        torch.testing.assert_close(target.logp_T, expected_T, rtol=0, atol=atol)
        assert target.hidden_TD is not None
        whole_TV = (target.head(target.hidden_TD) / t.temperature).log_softmax(-1)
        torch.testing.assert_close(whole_TV, logp_TV, rtol=0, atol=atol)


@torch.no_grad()
def move(parts: Runtime, seed: int, size: float = 0.2) -> None:
    """As an optimizer step would, only farther."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parts.student.weights.trained.values():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


def snapshot(parts: Runtime) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parts.student.weights.trained.items()}


# ── self: live, frozen, moving average ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("lora", [LORA, HEAD, None])
def test_a_frozen_teacher_stays_the_model_before_training(
    prepare: Any, lora: dict[str, Any] | None
) -> None:
    student = {"lora": lora} if lora else {}
    parts = prepare({"kind": "self", "weights": "frozen", "context": CONTEXT}, student=student)
    trajectories = sample_trajectories(parts)
    before = targets(parts, trajectories)
    agree(before, tiny_model(), parts, trajectories)
    move(parts, 1)
    weights = snapshot(parts)
    after = targets(parts, trajectories)
    agree(after, tiny_model(), parts, trajectories)
    for id, target in after.items():
        assert torch.equal(target.logp_T, before[id].logp_T), "to the last bit"
        assert torch.equal(target.hidden_TD, before[id].hidden_TD)
    trained = parts.student.weights.trained
    assert all(torch.equal(p, weights[name]) and p.requires_grad for name, p in trained.items())
    assert not torch.equal(
        parts.engine.score(_requests(trajectories))[0].logp_T,
        assemble(parts.recipe).engine.score(_requests(trajectories))[0].logp_T,
    ), "while the student itself did move"


@pytest.mark.parametrize("lora", [LORA, HEAD, None])
def test_a_live_teacher_is_the_student_of_this_moment(
    prepare: Any, lora: dict[str, Any] | None
) -> None:
    student = {"lora": lora} if lora else {}
    parts = prepare({"kind": "self", "weights": "live", "context": CONTEXT}, student=student)
    trajectories = sample_trajectories(parts)
    first = targets(parts, trajectories)
    agree(first, tiny_model(), parts, trajectories)
    move(parts, 1)
    for average in parts.averages.values():
        average.update()
    second = targets(parts, trajectories)
    agree(second, parts.student.weights.model, parts, trajectories)
    assert all((second[id].logp_T - first[id].logp_T).abs().max() > 1e-3 for id in first)


@pytest.mark.parametrize("lora", [LORA, HEAD, None])
def test_a_moving_average_moves_as_computed_by_hand(
    prepare: Any, lora: dict[str, Any] | None
) -> None:
    student = {"lora": lora} if lora else {}
    teacher = {"kind": "self", "weights": "ema", "ema_decay": 0.8, "context": CONTEXT}
    parts = prepare(teacher, student=student)
    trajectories = sample_trajectories(parts)
    expected_average = snapshot(parts)
    agree(targets(parts, trajectories), tiny_model(), parts, trajectories)
    for seed in range(3):
        move(parts, seed)
        for average in parts.averages.values():
            average.update()
        now = snapshot(parts)
        expected_average = {
            name: 0.8 * value + 0.2 * now[name] for name, value in expected_average.items()
        }

    before = snapshot(parts)
    places = {name: p.data_ptr() for name, p in parts.student.weights.trained.items()}
    target_by_id = targets(parts, trajectories)
    for name, parameter in parts.student.weights.trained.items():
        assert torch.equal(parameter, before[name]), f"{name} came back changed"
        assert parameter.data_ptr() == places[name]
    (moving_average,) = parts.averages.values()
    for name, tensor in moving_average.shadow.items():
        torch.testing.assert_close(tensor, expected_average[name], rtol=1e-6, atol=1e-6)

    # The same averages put into the student by hand.
    for name, parameter in parts.student.weights.trained.items():
        parameter.data.copy_(expected_average[name])
    agree(target_by_id, parts.student.weights.model, parts, trajectories)


def test_swapped_weights_come_back_even_after_an_error(
    prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = {"kind": "self", "weights": "ema", "context": CONTEXT}
    parts = prepare(teacher, student={"lora": LORA})
    trajectories = sample_trajectories(parts)
    move(parts, 0)
    before = snapshot(parts)
    assert isinstance(parts.teacher.teacher, Teacher)

    def fail(*args: Any, **options: Any) -> Any:
        raise ModelError("no scores")

    monkeypatch.setattr(parts.engine, "score", fail)
    with pytest.raises(ModelError, match="no scores"):
        parts.teacher(trajectories)
    for name, parameter in parts.student.weights.trained.items():
        assert torch.equal(parameter, before[name])


def test_two_averages_of_one_student_do_not_mix(prepare: Any) -> None:
    fast = {"kind": "self", "weights": "ema", "ema_decay": 0.1, "context": CONTEXT}
    slow = {**fast, "ema_decay": 0.9}
    parts = prepare(
        {"kind": "routes", "routes": {"fast": fast, "slow": slow}, "default": "slow"},
        student={"lora": LORA},
    )
    start = snapshot(parts)
    move(parts, 0)
    for average in parts.averages.values():
        average.update()
    end = snapshot(parts)
    for label, decay in (("fast:self:ema", 0.1), ("slow:self:ema", 0.9)):
        for name, tensor in parts.averages[label].shadow.items():
            expected = decay * start[name] + (1 - decay) * end[name]
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)


# ── other models ─────────────────────────────────────────────────────────────────────────────────


def save(folder: Path, *, seed: int = 1, vocab_size: int = 258, **options: Any) -> str:
    tiny_model(seed=seed, vocab_size=vocab_size, layers=3).save_pretrained(folder)
    tiny_tokenizer(**options).save_pretrained(folder)
    return str(folder)


def test_another_model_reads_the_same_tokens(prepare: Any, tiny_teacher_folder: Path) -> None:
    parts = prepare({"kind": "model", "model": str(tiny_teacher_folder), "context": CONTEXT})
    trajectories = sample_trajectories(parts)
    move(parts, 0)
    agree(targets(parts, trajectories), tiny_model(seed=1, layers=3), parts, trajectories)


def test_another_vocabulary_is_refused_with_an_example(prepare: Any, tmp_path: Path) -> None:
    other = save(tmp_path / "other", vocab_size=259, extra=("zebra",))
    with pytest.raises(ModelError, match=r"259 and 258 tokens; 1 entries differ, such as 'zebra'"):
        prepare({"kind": "model", "model": other})


def test_the_same_words_in_another_order_are_another_vocabulary(
    prepare: Any, tmp_path: Path
) -> None:
    other = save(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tree = json.loads(file.read_text())
    vocabulary = tree["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tree))
    with pytest.raises(ModelError, match="has another vocabulary"):
        prepare({"kind": "model", "model": other})


@pytest.mark.parametrize(("of_student", "of_teacher"), [(258, 264), (270, 258), (260, 270)])
def test_padded_heads_are_cut_to_the_words_they_share(
    prepare: Any, tmp_path: Path, of_student: int, of_teacher: int
) -> None:
    shared = min(of_student, of_teacher)
    other = save(tmp_path / "other", vocab_size=of_teacher)
    mine = save(tmp_path / "mine", seed=0, vocab_size=of_student)
    parts = prepare({"kind": "model", "model": other, "context": CONTEXT}, student={"model": mine})
    assert parts.engine.head.vocab_size == shared
    trajectories = sample_trajectories(parts)
    assert max(i for t in trajectories for i in t.completion_ids) < shared
    target_by_id = targets(parts, trajectories)
    teacher_model = tiny_model(seed=1, vocab_size=of_teacher, layers=3)
    agree(target_by_id, teacher_model, parts, trajectories, vocab_size=shared)

    # KL(student ‖ teacher) over the shared words, against both naive softmaxes.
    update = parts.student.step(0, parts.teacher(trajectories))
    kls = []
    for t in trajectories:
        student_logp_TV = _plain(tiny_model(seed=0, vocab_size=of_student, layers=3), t)[:, :shared]
        teacher_logp_TV = naive(teacher_model, parts, t)[:, :shared]
        student_logp_TV, teacher_logp_TV = (
            student_logp_TV.log_softmax(-1),
            teacher_logp_TV.log_softmax(-1),
        )
        kls += (student_logp_TV.exp() * (student_logp_TV - teacher_logp_TV)).sum(-1).tolist()
    assert update.components["divergence"] == pytest.approx(sum(kls) / len(kls), rel=1e-4)


def test_a_tokenizer_with_more_words_than_a_head_is_refused(prepare: Any, tmp_path: Path) -> None:
    other = save(tmp_path / "other", vocab_size=200)
    with pytest.raises(ModelError, match="ids up to 257, but a head has only 200 rows"):
        prepare({"kind": "model", "model": other})


def test_eight_bits_stay_close_to_the_model(prepare: Any, tiny_teacher_folder: Path) -> None:
    teacher = {"kind": "model", "model": str(tiny_teacher_folder), "context": CONTEXT}
    exact, quantized = prepare(teacher), prepare({**teacher, "dtype": "int8"})
    trajectories = sample_trajectories(exact)
    exact_targets, quantized_targets = (targets(t, trajectories) for t in (exact, quantized))
    gaps = torch.cat(
        [(exact_targets[id].logp_T - quantized_targets[id].logp_T).abs() for id in exact_targets]
    )
    assert 0 < float(gaps.mean()) < 0.1


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bitsandbytes packs whole blocks of 64 weights on CPUs with avx512_bf16."""
    return save_tiny(tmp_path_factory.mktemp("wide"), seed=1, layers=3, size=64)


def test_a_4_bit_teacher_scores_as_its_quantized_model_does(
    prepare: Any, wide_folder: Path
) -> None:
    parts = prepare(
        {"kind": "model", "model": str(wide_folder), "context": CONTEXT, "dtype": "nf4"}
    )
    trajectories = sample_trajectories(parts)
    # On CPUs with avx512_bf16 bitsandbytes multiplies in bfloat16, whatever was asked for.
    model = load_4_bits(wide_folder)
    agree(targets(parts, trajectories), model, parts, trajectories, atol=0.1)


def test_a_4_bit_teacher_is_smaller_and_keeps_its_lm_head(wide_folder: Path) -> None:
    model = load_4_bits(wide_folder)
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    linear = model.model.layers[0].mlp.up_proj
    assert linear.weight.nbytes == linear.in_features * linear.out_features / 2


def load_4_bits(folder: Path) -> Any:
    dtype, device = resolve_dtype("auto", torch.device("cpu")), torch.device("cpu")
    return load_model(str(folder), dtype=dtype, device=device, in_4_bits=True)


def test_an_adapter_on_a_4_bit_teacher_is_refused(prepare: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="courtside export"):
        prepare({"kind": "model", "model": "m", "dtype": "nf4", "adapter": str(tmp_path)})


def test_one_model_with_and_without_an_adapter_is_two_teachers(
    prepare: Any, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        tiny_model(seed=1, layers=3), LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    adapted.save_pretrained(tmp_path / "adapter")
    plain = {"kind": "model", "model": str(tiny_teacher_folder), "context": CONTEXT}
    models = {"plain": tiny_model(seed=1, layers=3), "adapted": adapted.eval()}
    routes = {"plain": plain, "adapted": {**plain, "adapter": str(tmp_path / "adapter")}}
    for tag, model in models.items():
        parts = prepare({"kind": "routes", "routes": routes, "default": tag})
        trajectories = sample_trajectories(parts)
        agree(targets(parts, trajectories), model, parts, trajectories)


def test_an_adapter_that_is_not_there_is_named(
    prepare: Any, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    teacher = {"kind": "model", "model": str(tiny_teacher_folder), "adapter": str(tmp_path / "no")}
    with pytest.raises(ModelError, match=r"adapter .*no adapter_config\.json there"):
        prepare(teacher)


# ── told before the first step ───────────────────────────────────────────────────────────────────


def test_a_field_that_the_tasks_lack_is_told_at_once(prepare: Any) -> None:
    with pytest.raises(TaskError, match=r"teacher\.context\.field = 'rule'"):
        prepare({"kind": "self", "weights": "frozen", "context": CONTEXT}, rule=None)


def test_the_reference_is_the_student_before_training_without_context(prepare: Any) -> None:
    parts = prepare(
        {"kind": "self", "weights": "live", "context": CONTEXT},
        student={"lora": LORA},
        losses=[{"kind": "divergence", "extrapolate": 1.5}],
    )
    trajectories = sample_trajectories(parts)
    move(parts, 0)
    for s in parts.teacher(trajectories):
        logp_TV = _plain(tiny_model(), s.trajectory)
        ids_T = torch.tensor(s.trajectory.completion_ids)
        expected_T = logp_TV.gather(-1, ids_T[:, None]).squeeze(-1)
        assert s.reference is not None and s.reference.context is None
        torch.testing.assert_close(s.reference.logp_T, expected_T, rtol=0, atol=5e-5)


@torch.no_grad()
def _plain(model: Any, t: Trajectory) -> Tensor:
    """[T, V] log-probs of a model that reads what the student read."""
    logits_LV = model(input_ids=torch.tensor([t.token_ids])).logits[0] / t.temperature
    where = [i - 1 for i, chosen in enumerate(t.completion_mask) if chosen]
    return logits_LV[where].float().log_softmax(-1)


def _requests(trajectories: Sequence[Trajectory]) -> Any:
    from courtside.engines.base import ScoreRequest

    return [ScoreRequest(token_ids=t.token_ids, scored=t.completion_mask) for t in trajectories]
