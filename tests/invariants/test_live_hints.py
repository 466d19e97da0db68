"""A live student scores its hints in the update's own pass: the same update, for fewer tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gradients import accumulate, make_float64
from support.small_runs import small_recipe
from torch import Tensor

from courtside.api import rescore, train
from courtside.assemble import assemble
from courtside.runtime import Runtime
from courtside.teacher.judging import judge_hints
from courtside.training.hint_branches import uses_dropout
from courtside.training.loss_terms import make_loss_terms
from courtside.types import Hint, Scored, Trajectory

EVERY = {"min_shift": -1e9, "harmful": "train"}
"""A threshold that keeps every hint, but asks for its shift before the update."""

LOSSES = {
    "divergence": [{"kind": "divergence", "on": "hinted_turns"}],
    "top_k": [
        {"kind": "divergence", "on": "hinted_turns", "normalize": "turn",
         "support": {"kind": "top_k", "k": 8, "of": "joint", "form": "tail"}},
        {"kind": "policy_gradient", "advantage": "reward", "turn_penalty": 0.5, "name": "rl"},
        {"kind": "divergence", "on": "unhinted_turns", "against": "reference", "name": "anchor"},
    ],
    "sampled": [{"kind": "policy_gradient", "advantage": "teacher_gap", "on": "hinted_turns"}],
    "capped": [{"kind": "divergence", "on": "hinted_turns", "clip": 0.3}],
}  # fmt: skip


HEAD = {"rank": 2, "target_modules": ["v_proj", "lm_head"]}


def tree(folder: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "tasks": {"kind": "toolbox", "turns": 3, "num_tools": 2},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6},
        "reader": {"kind": "rules"},
        "hints": {"harmful": "train"},  # test_harmful_hints.py has those that are dropped
        "teacher": {"kind": "self", "weights": "live"},
        "losses": LOSSES["divergence"],
        "train": {"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-3},
        "run": {"checkpoint_every": 1},
        "evaluate": {"num_tasks": 1},
    }
    return small_recipe(folder, **(settings | changes))


def in_update(parts: Runtime) -> bool:
    teacher: Any = parts.teacher.teacher
    return teacher.defers_hints


def prepared(recipe: Any) -> Runtime:
    """In float64, moved off the start so that adapters and references differ from it."""
    parts = assemble(recipe)
    return make_float64(parts)


def some_hints(trajectories: Sequence[Trajectory]) -> list[Hint]:
    """0, 1, 2 and 3 of them."""
    return [
        Hint(trajectory=t.id, turn=turn, text=f"Look again, {n} {turn}.", source="rules",
             bad_span=t.turns[turn].text[:2] or None)
        for n, t in enumerate(trajectories)
        for turn in [i for i, t_turn in enumerate(t.turns) if t_turn.role == "assistant"][:n]
    ]  # fmt: skip


def batch_of(parts: Runtime) -> list[Scored]:
    trajectories = parts.rollout(parts.tasks.batch(0, 2), 0)
    assert len(trajectories) == 4
    return parts.teacher(trajectories, some_hints(trajectories))


@contextmanager
def counted(parts: Runtime) -> Iterator[list[int]]:
    """Tokens of every pass through the embedding."""
    num_tokens: list[int] = []
    embedding = parts.engine.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _, args, __: num_tokens.append(args[0].numel()))
    yield num_tokens
    hook.remove()


def accumulated(parts: Runtime, scored: list[Scored]) -> tuple[dict[str, Tensor], dict[str, float]]:
    gradients, metrics = accumulate(parts, scored)
    return gradients, {**metrics.losses, **metrics.means()}


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("lora", [None, {"rank": 2}, HEAD], ids=["all weights", "lora", "head"])
def test_the_update_is_that_of_hints_scored_before(
    roomy_folder: Path, losses: Any, lora: dict[str, Any] | None
) -> None:
    changes = {
        "student": {"model": str(roomy_folder)} | ({"lora": lora} if lora else {}),
        "losses": losses,
    }
    before = prepared(tree(roomy_folder, hints=EVERY, **changes))
    live = prepared(tree(roomy_folder, **changes))
    assert in_update(live) and not in_update(before)
    expected, values = accumulated(before, batch_of(before))
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-5
    for budget in (1, 300, 10**6):
        live.student.micro_batch_tokens = budget
        gradients, metrics = accumulated(live, batch_of(live))
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-10)
        assert metrics == {
            name: pytest.approx(v, rel=1e-8, abs=1e-10) for name, v in values.items()
        }


def test_hints_branch_off_trajectories_that_share_their_prompt(roomy_folder: Path) -> None:
    """Hinted ones next to others of the same prompt: the same update, for fewer tokens."""
    live = prepared(tree(roomy_folder, losses=LOSSES["top_k"]))
    assert in_update(live)
    scored = batch_of(live)
    assert [len(s.hints) for s in scored] == [0, 1, 2, 3]
    shared = live.student.passes
    assert shared.padding_reason is None and shared.unshared_reason is None
    for budget in (None, 10**6):
        live.student.micro_batch_tokens = budget
        results, counts = [], []
        for unshared in (None, "asked for"):
            live.student.passes = replace(shared, unshared_reason=unshared)
            with counted(live) as num_tokens:
                results.append(accumulated(live, scored))
            counts.append(sum(num_tokens))
        prompts = {s.trajectory.task.id: len(s.trajectory.turns[0].token_ids) for s in scored}
        assert len(prompts) == 2
        if budget is not None:  # else passes are too small for both to share
            assert counts[1] - counts[0] >= sum(prompts.values())
        (gradients, values), (separate, expected) = results
        assert gradients.keys() == separate.keys()
        for name, gradient in separate.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-10)
        assert values == {n: pytest.approx(v, rel=1e-8, abs=1e-10) for n, v in expected.items()}


def test_what_hints_did_is_measured_by_the_update(roomy_folder: Path) -> None:
    before = prepared(tree(roomy_folder, hints=EVERY))
    live = prepared(tree(roomy_folder))
    scored, expected = batch_of(live), batch_of(before)
    hint_outcomes = [j for s in scored for j in s.hints]
    assert len(hint_outcomes) == 6 and all(
        j.shift is None and j.drop_reason is None for j in hint_outcomes
    )
    measured = judge_hints(scored, live.student.step(0, scored))
    spans: list[float | None] = []
    for actual, reference in zip(measured, expected, strict=True):
        assert [j.hint for j in actual.hints] == [j.hint for j in reference.hints]
        for outcome, expected_outcome in zip(actual.hints, reference.hints, strict=True):
            assert outcome.shift == pytest.approx(expected_outcome.shift, abs=1e-10)
            assert outcome.bad_span_shift == pytest.approx(
                expected_outcome.bad_span_shift, abs=1e-10
            )
            spans.append(expected_outcome.bad_span_shift)
        assert (actual.target is None) == (reference.target is None)
        if actual.target is not None and reference.target is not None:
            assert actual.target.token_indices == reference.target.token_indices
            assert actual.target.context == reference.target.context
            assert actual.target.num_context_tokens == reference.target.num_context_tokens
            torch.testing.assert_close(actual.target.logp_T, reference.target.logp_T.float())
    assert any(shift is not None for shift in spans)


def test_every_token_is_computed_once(roomy_folder: Path) -> None:
    parts = prepared(tree(roomy_folder))
    with counted(parts) as num_tokens:
        trajectories = parts.rollout(parts.tasks.batch(0, 2), 0)
        num_tokens.clear()
        scored = parts.teacher(trajectories, some_hints(trajectories))
        assert not num_tokens, "the teacher stage computes nothing"
        accumulated(parts, scored)
    hinted = [s for s in scored if s.hints]
    trunks = [
        max(i for i, turn in enumerate(_turn_of_ids(s.trajectory)) if turn == s.hints[-1].hint.turn)
        for s in hinted
    ]
    branches = [len(b.token_ids) for s in scored if s.deferred for b in s.deferred.branches]
    assert len(trunks) == 3 and len(branches) == 6
    tasks = [s.trajectory.task.id for s in hinted]
    assert tasks[0] != tasks[1] == tasks[2], "two of them share their prompt"
    prompt = len(hinted[2].trajectory.turns[0].token_ids)
    assert sum(num_tokens) == sum(trunks) - prompt + sum(branches)


def _turn_of_ids(trajectory: Trajectory) -> list[int]:
    return [i for i, turn in enumerate(trajectory.turns) for _ in turn.token_ids]


BEFORE: dict[str, dict[str, Any]] = {
    "threshold": {"hints": {"min_shift": 0.0}},
    "tried first": {"hints": {"resamples": 1}},
    "in one sequence": {"hints": {"cumulative": True}},
    "in the system prompt": {"hints": {"position": "system"}},
    "frozen": {"teacher": {"kind": "self", "weights": "frozen"}},
    "average": {"teacher": {"kind": "self", "weights": "ema"}},
    "routes": {"teacher": {"kind": "routes", "default": "a",
                           "routes": {"a": {"kind": "self", "weights": "live"}}}},
    "checkpointing": {"student": {"gradient_checkpointing": True}},
    "dropout": {"student": {"lora": {"rank": 2, "dropout": 0.1}}},
}  # fmt: skip


@pytest.mark.parametrize("changes", BEFORE.values(), ids=BEFORE)
def test_where_more_must_be_known_hints_are_scored_before(
    roomy_folder: Path, changes: dict[str, Any]
) -> None:
    changes = {**changes, "student": {"model": str(roomy_folder), **changes.get("student", {})}}
    parts = assemble(tree(roomy_folder, **changes))
    scored = batch_of(parts)
    targets = [s.target for s in scored if s.target is not None]
    assert targets and all(t.logp_T.isfinite().all() for t in targets)
    assert not any(s.deferred for s in scored)
    assert all(j.shift is not None for s in scored for j in s.hints)


def test_gradient_checkpointing_leaves_nothing_to_branch_from(roomy_folder: Path) -> None:
    losses = []
    for live in (True, False):
        student = {"model": str(roomy_folder), "gradient_checkpointing": not live}
        parts = assemble(tree(roomy_folder, student=student))
        assert in_update(parts) == live == (not parts.student.weights.uses_gradient_checkpointing)
        notes = [note for note in parts.notes if "hints are scored before the update" in note]
        assert len(notes) == (not live)
        assert all("(student.gradient_checkpointing keeps no keys" in note for note in notes)
        scored = batch_of(parts)
        hinted = [s for s in scored if s.has_target]
        assert hinted and all((s.deferred is not None) == live for s in hinted)
        losses.append(parts.student.step(0, scored).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    "where",
    [
        "courtside.engines.forward.forward.probe_packing",
        "courtside.training.hint_branches.probe_tree_scoring",
    ],
)
def test_models_that_cannot_are_scored_before(
    roomy_folder: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, lambda *args: "it is special")
    parts = assemble(tree(roomy_folder))
    scored = batch_of(parts)
    assert all(j.shift is not None for s in scored for j in s.hints)
    assert any("hints are scored before the update" in note for note in parts.notes)


def test_dropout_of_the_model_itself_is_detected(roomy_folder: Path, tmp_path: Path) -> None:
    parts = assemble(tree(roomy_folder))
    assert not uses_dropout(parts.engine.model)
    parts.engine.model.config.attention_dropout = 0.1
    assert uses_dropout(parts.engine.model)


def test_hints_that_cannot_be_spliced_are_counted(roomy_folder: Path) -> None:
    def make_hints(trajectories: Sequence[Trajectory]) -> list[Hint]:
        def hint(n: int, turn: int, text: str) -> Hint:
            return Hint(trajectory=trajectories[n].id, turn=turn, text=text, source="rules")

        return [hint(0, 1, "Look."), hint(0, 2, "Look."), hint(0, 3, "  "), hint(1, 1, "")]

    results = []
    for hints in ({"harmful": "train"}, EVERY):
        parts = prepared(tree(roomy_folder, hints=hints))
        trajectories = parts.rollout(parts.tasks.batch(0, 2), 0)
        scored = parts.teacher(trajectories, make_hints(trajectories))
        dropped = [[(j.hint.turn, j.drop_reason) for j in s.hints] for s in scored]
        (part,) = make_loss_terms(parts.recipe.losses, parts.recipe.loss_names(), scored)
        results.append((dropped, part.weight, part.denominator))
        after = judge_hints(scored, parts.student.step(0, scored))
        assert [[j.shift is None for j in s.hints] for s in after] == [
            [False, True, True], [True], [], []
        ]  # fmt: skip
    assert results[0] == results[1]
    assert results[0][0][:2] == [
        [(1, None), (2, "no_assistant_turn"), (3, "empty")], [(1, "empty")]
    ]  # fmt: skip


def test_a_run_records_what_a_run_that_scores_before_does(
    roomy_folder: Path, tmp_path: Path
) -> None:
    live = train(tree(roomy_folder), tmp_path / "live")
    before = train(tree(roomy_folder, hints=EVERY), tmp_path / "before")
    for live_row, row in zip(live.metrics(), before.metrics(), strict=True):
        assert live_row.keys() - row.keys() <= {"seconds/teacher"}
        shared = [k for k in row if k in live_row and "second" not in k and "cost/" not in k]
        assert live_row["cost/teacher_tokens"] < row["cost/teacher_tokens"], "no second pass"
        assert {k: live_row[k] for k in shared} == pytest.approx(
            {k: row[k] for k in shared}, rel=1e-3, abs=1e-4
        )
        assert live_row["hints/shift"] is not None
    for step in range(3):
        for a, b in zip(live.trajectories(step), before.trajectories(step), strict=True):
            assert (
                a.trajectory.token_ids == b.trajectory.token_ids
                and a.teacher_token_indices == b.teacher_token_indices
            )
            assert a.teacher_logp == pytest.approx(b.teacher_logp, abs=1e-4)
            assert [j.shift for j in a.hints] == pytest.approx([j.shift for j in b.hints], abs=1e-3)
    costs, more = (json.loads((r.path / "costs.json").read_text()) for r in (live, before))
    trunk = sum(
        len(s.trajectory.token_ids) for n in range(3) for s in live.trajectories(n) if s.teacher
    )
    assert more["teacher"]["input_tokens"] - costs["teacher"]["input_tokens"] == trunk
    assert costs["teacher"]["input_tokens"] > 0 and costs["teacher"]["flops"] > 0
    assert costs["update"]["input_tokens"] == more["update"]["input_tokens"]
    assert "mean shift" in (live.path / "report.html").read_text()


def test_stored_trajectories_can_be_scored_again(roomy_folder: Path, tmp_path: Path) -> None:
    train(tree(roomy_folder), tmp_path / "run")
    live = rescore(tmp_path / "run")
    before = rescore(tmp_path / "run", ["hints.min_shift=-1e9"])
    for actual, expected in zip(live, before, strict=True):
        assert actual == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all weights", "lora"])
def test_in_bfloat16_the_cut_changes_rounding_only(roomy_folder: Path, lora: Any) -> None:
    settings = {"model": str(roomy_folder), "dtype": "bfloat16"} | ({"lora": lora} if lora else {})
    parts = assemble(tree(roomy_folder, student=settings))
    assert in_update(parts)
    with torch.no_grad():
        for p in parts.student.weights.trained.values():
            p.add_(0.01 * torch.sin(torch.arange(p.numel())).view_as(p))
    scored = batch_of(parts)
    gradients = []
    for budget in (1, 10**6):
        parts.student.micro_batch_tokens = budget
        gradients.append(accumulated(parts, scored)[0])
    assert gradients[0].keys() == gradients[1].keys() == parts.student.weights.trained.keys()
    for name, gradient in gradients[1].items():
        assert float((gradients[0][name] - gradient).norm() / gradient.norm()) < 0.1, name


def test_a_weight_that_branches_use_first_still_trains(roomy_folder: Path) -> None:
    """Autocast keeps what it has rounded; rounded without a graph, it would stay without one."""
    parts = assemble(tree(roomy_folder, student={"model": str(roomy_folder), "dtype": "bfloat16"}))
    mlp = parts.engine.model.model.layers[0].mlp
    mlp.sometimes = torch.nn.Linear(32, 32)
    real, calls = mlp.forward, []

    def forward(x: Tensor) -> Tensor:
        calls.append(x.requires_grad)
        out: Tensor = real(x)
        return out if len(calls) == 1 else out + mlp.sometimes(x)  # as a router might decide

    mlp.forward = forward
    scored = batch_of(parts)
    calls.clear()
    parts.student.micro_batch_tokens = 1
    gradients, _ = accumulated(parts, scored)
    assert calls[:3] == [True, False, True], "a pass, its branches, the next pass"
    assert any(name.endswith("sometimes.weight") for name in gradients)
