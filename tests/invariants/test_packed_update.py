"""An update does not depend on how trajectories are laid into passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.float64 import double
from support.gradients import (
    Gradients,
    assert_equal_gradients,
    make_float64,
    score_batch,
    take_gradients,
)
from support.small_runs import small_recipe, write_jsonl
from support.textbook import naive_loss
from support.tiny_model import tiny_model, tiny_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from courtside.assemble import assemble
from courtside.engines.forward.batching import pack_sequences
from courtside.engines.forward.forward import ForwardPasses
from courtside.engines.forward.varlen import VARLEN_ATTENTION
from courtside.runtime import Runtime
from courtside.training.loss_terms import find_trained_tokens, make_loss_terms
from courtside.training.metrics import MetricAccumulator
from courtside.types import Scored


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(4)
    config = tiny_model().config.to_dict()
    fields = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
        "tie_word_embeddings", "initializer_range", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    shape = {name: config[name] for name in fields}
    Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def prepared(
    model: Path,
    teacher: Path,
    tmp_path: Path,
    /,
    *,
    prompts: Sequence[str] = tuple("Why? " * n for n in (1, 30, 2, 9, 4)),
    **sections: Any,
) -> Runtime:
    """Prompts of 1 to 30 words; everything in float64, the student moved off its start."""
    lines = [{"prompt": prompt, "split": "train"} for prompt in prompts]
    tasks = {"kind": "jsonl", "path": str(write_jsonl(tmp_path / "tasks.jsonl", lines))}
    parts = assemble(small_recipe(model, teacher, tasks=tasks, **sections))
    return make_float64(parts)


def accumulated(
    parts: Runtime, scored: list[Scored], budget: int | None
) -> tuple[Gradients, dict[str, tuple[float, ...]], list[int]]:
    """Gradients, the student's log-probs, and how many tokens each pass computed."""
    student = parts.student
    student.micro_batch_tokens = budget
    computed: list[int] = []
    assert isinstance(
        student.passes, ForwardPasses
    )  # tried on a small example, which is not counted
    hook = student.weights.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    chosen = make_loss_terms(parts.recipe.losses, parts.recipe.loss_names(), scored)
    logps = student.accumulate(0, scored, chosen, MetricAccumulator()).student
    hook.remove()
    return take_gradients(parts.student.weights.trained), logps, computed


def read_lengths(parts: Runtime, scored: list[Scored]) -> list[int]:
    """What the losses look at and what that depends on: everything but the last token."""
    trained = find_trained_tokens(
        make_loss_terms(parts.recipe.losses, parts.recipe.loss_names(), scored)
    )
    assert trained.keys() == {s.trajectory.id for s in scored}
    return [len(s.trajectory.token_ids) - 1 for s in scored]


KINDS = [
    pytest.param((family, checkpointing, lora), id=f"{family}-{how}-{what}")
    for family in ("llama", "qwen3")
    for how, checkpointing in (("stored", False), ("recomputed", True))
    for what, lora in (("all weights", None), ("lora", {"rank": 2}))
]


@pytest.fixture(params=KINDS)
def student(request: pytest.FixtureRequest, tiny_folder: Path, qwen_folder: Path) -> dict[str, Any]:
    """Of each family, with activations stored or recomputed, all weights or an adapter trained."""
    family, checkpointing, lora = request.param
    folder = tiny_folder if family == "llama" else qwen_folder
    settings = {"model": str(folder), "gradient_checkpointing": checkpointing}
    return settings | ({"lora": lora} if lora else {})


def test_packed_passes_are_one_sequence_at_a_time(
    student: dict[str, Any], tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    parts = prepared(tiny_folder, tiny_teacher_folder, tmp_path, student=student)
    scored = score_batch(parts, 5)
    lengths = read_lengths(parts, scored)
    assert parts.student.passes.padding_reason is None

    model = parts.student.weights.model
    teacher = parts.teacher.teacher
    total, _ = naive_loss(
        [{"kind": "divergence"}], scored, model, {teacher.name: teacher.engine.model}, model
    )
    total.backward()
    textbook = take_gradients(parts.student.weights.trained)
    alone, logps, computed = accumulated(parts, scored, 1)
    assert sorted(computed) == sorted(lengths)
    assert_equal_gradients(alone, textbook)
    parts.student.passes = replace(parts.student.passes, unshared_reason="asked for")
    for budget in (60, 250, 10**6):
        packed, packed_logps, computed = accumulated(parts, scored, budget)
        assert_equal_gradients(packed, alone)
        assert sum(computed) == sum(lengths), "no padding is computed"
        assert len(computed) < len(lengths) and max(computed) <= max(budget, *lengths)
        assert packed_logps.keys() == logps.keys()
        for id, values in logps.items():
            assert packed_logps[id] == pytest.approx(values, abs=1e-6)
            assert not any(map(math.isnan, values))


def test_padded_passes_give_the_same_update(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    parts = prepared(tiny_folder, tiny_teacher_folder, tmp_path)
    scored = score_batch(parts, 5)
    packed, logps, computed = accumulated(parts, scored, 300)
    real = parts.student.passes
    parts.student.passes = ForwardPasses(
        model=real.model, pad_id=real.pad_id, padding_reason="asked for"
    )
    padded, padded_logps, more = accumulated(parts, scored, 300)
    assert_equal_gradients(padded, packed)
    assert padded_logps == {id: pytest.approx(values, abs=1e-6) for id, values in logps.items()}
    assert sum(more) > sum(computed)


def test_pairs_share_a_pass_whose_tokens_are_counted_together(
    tiny_folder: Path, tmp_path: Path
) -> None:
    lines = [
        {"prompt": "Why? " * n, "split": "train", "completion": "a" * n, "rejected": "no " * 2 * n}
        for n in (1, 12, 5)
    ]
    tasks = {"kind": "jsonl", "path": str(write_jsonl(tmp_path / "pairs.jsonl", lines))}
    recipe = small_recipe(
        tiny_folder,
        losses=[{"kind": "preference", "beta": 0.4}],
        tasks=tasks,
        rollout={"student_fraction": 0.0},
    )
    parts = assemble(recipe)
    double(parts.engine.model)
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 3), 0))
    read = {s.trajectory.id: s.trajectory.token_ids[:-1] for s in scored}
    assert len(read) == 6
    chosen = make_loss_terms(recipe.losses, recipe.loss_names(), scored)
    trained = find_trained_tokens(chosen)
    pair = max(
        pack_sequences(
            [read[s.trajectory.id] for s in scored if s.trajectory.task.id == id],
            share_prefixes=True,
        ).num_tokens
        for id in {s.trajectory.task.id for s in scored}
    )
    parts.student.micro_batch_tokens = pair
    for micro in parts.student._micro_batches(scored, trained):
        tasks_of = [s.trajectory.task.id for s in micro]
        assert all(tasks_of.count(id) == 2 for id in tasks_of)
        batch = pack_sequences([read[s.trajectory.id] for s in micro], share_prefixes=True)
        assert batch.num_tokens <= pair


def test_a_pass_that_fails_leaves_the_model_as_it_was(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    parts = prepared(tiny_folder, tiny_teacher_folder, tmp_path)
    scored = score_batch(parts, 5)
    model = parts.student.weights.model
    assert parts.student.passes.padding_reason is None

    def fail(*args: Any) -> None:
        assert model.config._attn_implementation == VARLEN_ATTENTION and model.training
        raise RuntimeError("out of luck")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        accumulated(parts, scored, 300)
    assert model.config._attn_implementation == "sdpa" and not model.training
    hook.remove()
    gradients, _, _ = accumulated(parts, scored, 300)
    assert gradients


# ── samples that share their prompt ──────────────────────────────────────────────────────────────


QUESTIONS = ("Is it far to the sea? " * 3, "Who said so, and when? " * 2, "Why?")
SAMPLES = {"rollout": {"samples_per_prompt": 4, "max_new_tokens": 8}}


def once_a_prompt(scored: list[Scored]) -> int:
    """Tokens of the batch without its last ones, every prompt counted once."""
    answers = sum(len(s.trajectory.turns[1].token_ids) - 1 for s in scored)
    prompts = {s.trajectory.task.id: len(s.trajectory.turns[0].token_ids) for s in scored}
    return answers + sum(prompts.values())


def test_samples_that_share_their_prompt_give_the_same_update(
    student: dict[str, Any], tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    parts = prepared(
        tiny_folder, tiny_teacher_folder, tmp_path, prompts=QUESTIONS, student=student, **SAMPLES
    )
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 3), 0))
    lengths = read_lengths(parts, scored)
    assert len(lengths) == 12
    shared = parts.student.passes
    assert shared.padding_reason is None and shared.unshared_reason is None
    parts.student.passes = replace(shared, unshared_reason="asked for")
    separate, logps, computed = accumulated(parts, scored, 10**6)
    assert sum(computed) == sum(lengths)
    parts.student.passes = shared
    counts = {}
    # One sequence a pass, groups cut over passes, all in one.
    for budget in (1, max(lengths) + 10, 10**6):
        gradients, shared_logps, computed = accumulated(parts, scored, budget)
        assert_equal_gradients(gradients, separate)
        assert max(computed) <= max(budget, *lengths)
        assert shared_logps == {id: pytest.approx(values, abs=1e-6) for id, values in logps.items()}
        counts[budget] = sum(computed)
    assert counts[1] == sum(lengths)
    assert once_a_prompt(scored) < counts[max(lengths) + 10] < sum(lengths)
    assert counts[10**6] == once_a_prompt(scored)


def test_in_float32_every_gradient_is_the_same(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    """In passes of the device's size, which grow for a prompt: one that splits the batch."""
    parts = prepared(tiny_folder, tiny_teacher_folder, tmp_path, prompts=QUESTIONS, **SAMPLES)
    parts.student.default_pass_tokens = 256
    for model in (parts.engine.model, parts.teacher.teacher.engine.model):
        model.float()
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 3), 0))
    shared_gradients, _, computed = accumulated(parts, scored, None)
    assert len(computed) > 1 and sum(computed) == once_a_prompt(scored)
    parts.student.passes = replace(parts.student.passes, unshared_reason="asked for")
    separate, _, _ = accumulated(parts, scored, None)
    for name, gradient in separate.items():
        assert float((shared_gradients[name] - gradient).norm() / gradient.norm()) < 1e-5, name


def test_a_teacher_computes_its_own_prompts_once(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    """Its context makes them others than the student's."""
    context = {"kind": "system", "text": "Answer in one word."}
    teacher = {"kind": "model", "model": str(tiny_teacher_folder), "context": context}
    parts = prepared(
        tiny_folder, tiny_teacher_folder, tmp_path, prompts=QUESTIONS, teacher=teacher, **SAMPLES
    )
    trajectories = parts.rollout(parts.tasks.batch(0, 3), 0)
    engine = parts.teacher.teacher.engine
    engine.score_batch_tokens = 10**6
    shared = engine.passes
    scored_by_setting, counts = [], []
    for unshared in (None, "asked for"):
        engine.passes = replace(shared, unshared_reason=unshared)
        computed: list[int] = []
        hook = engine.model.base_model.register_forward_pre_hook(
            lambda module, args, kwargs, counts=computed: counts.append(
                kwargs["input_ids"].numel()
            ),
            with_kwargs=True,
        )
        scored_by_setting.append(parts.teacher(trajectories))
        hook.remove()
        counts.append(sum(computed))
    saved = 0
    for shared_s, separate_s in zip(*scored_by_setting, strict=True):
        assert shared_s.target is not None and separate_s.target is not None
        assert shared_s.target.num_context_tokens > 0
        torch.testing.assert_close(
            shared_s.target.logp_T, separate_s.target.logp_T, rtol=1e-9, atol=1e-11
        )
        torch.testing.assert_close(
            shared_s.target.hidden_TD, separate_s.target.hidden_TD, rtol=1e-9, atol=1e-10
        )
        saved += len(shared_s.trajectory.turns[0].token_ids) + shared_s.target.num_context_tokens
    # All have the template and the context in common: that is not more than a prompt of one.
    assert counts[1] - counts[0] == saved * 3 // 4


def test_pairs_share_their_prompt(tiny_folder: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": prompt, "split": "train", "completion": "yes, " * n, "rejected": "no " * n}
        for n, prompt in enumerate(QUESTIONS, 1)
    ]
    tasks = {"kind": "jsonl", "path": str(write_jsonl(tmp_path / "pairs.jsonl", lines))}
    losses = [{"kind": "preference", "beta": 0.4}]
    parts = assemble(
        small_recipe(tiny_folder, losses=losses, tasks=tasks, rollout={"student_fraction": 0.0})
    )
    double(parts.engine.model)
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 3), 0))
    gradients, logps, computed = accumulated(parts, scored, 10**6)
    assert sum(computed) == once_a_prompt(scored)
    parts.student.passes = replace(parts.student.passes, unshared_reason="asked for")
    separate, separate_logps, _ = accumulated(parts, scored, 10**6)
    assert_equal_gradients(gradients, separate)
    assert separate_logps == {id: pytest.approx(values, abs=1e-6) for id, values in logps.items()}


def test_under_dropout_every_sample_has_its_own_mask(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    student = {"model": str(tiny_folder), "lora": {"rank": 2, "dropout": 0.3}}
    parts = prepared(
        tiny_folder, tiny_teacher_folder, tmp_path, prompts=QUESTIONS, student=student, **SAMPLES
    )
    assert parts.student.passes.padding_reason is None
    assert parts.student.passes.unshared_reason == "dropout acts on each sample"
    assert parts.engine.passes.unshared_reason is None, "nothing is dropped where nothing trains"
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 3), 0))
    _, _, computed = accumulated(parts, scored, 10**6)
    assert sum(computed) == sum(read_lengths(parts, scored))
