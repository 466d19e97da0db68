"""Targeted hints, whole: the loop's update is that of the textbook, on the hinted turn alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gradients import compute_gradients, take_gradients
from support.small_runs import small_recipe, train_until_killed

from courtside.api import rescore, train
from courtside.assemble import assemble
from courtside.assemble.rollouts import find_max_turns
from courtside.errors import RecipeError, RunError
from courtside.recipe.load import parse_recipe
from courtside.training.loss_terms import make_loss_terms
from courtside.types import Hint, Scored


def tree(folder: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "tasks": {"kind": "toolbox", "turns": 2, "num_tools": 2},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6},
        "reader": {"kind": "rules"},
        "teacher": {"kind": "self", "weights": "live"},
        "losses": [{"kind": "divergence", "on": "hinted_turns"}],
        "train": {"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-3},
        "run": {"checkpoint_every": 1},
    }
    return small_recipe(folder, **(settings | changes))


def scored_batch(parts: Any, hints: Any = None) -> list[Scored]:
    trajectories = parts.rollout(parts.tasks.batch(0, 2), 0)
    proposed = parts.reader(trajectories).hints
    return parts.teacher(trajectories, proposed if hints is None else hints(trajectories, proposed))


def naive_gradient(parts: Any, scored: list[Scored]) -> dict[str, torch.Tensor]:
    """Sequence by sequence: KL(student ‖ student that sees the hint, detached) over the turn."""
    model = parts.student.weights.model
    total, count = torch.zeros(()), 0
    for s in scored:
        ids = torch.tensor([s.trajectory.token_ids])
        logp = model(input_ids=ids).logits[0].log_softmax(-1)
        for hint_outcomes in s.hints:
            start = sum(len(t.token_ids) for t in s.trajectory.turns[: hint_outcomes.hint.turn])
            turn = s.trajectory.turns[hint_outcomes.hint.turn]
            opening = s.trajectory.turns[hint_outcomes.hint.turn - 1].num_generation_prompt_tokens
            tokenizer = parts.renderer.tokenizer
            hint_ids = tokenizer(f"<|im_start|>user\n{hint_outcomes.hint.text}<|im_end|>\n")[
                "input_ids"
            ]
            above = s.trajectory.token_ids[: start - opening] + tuple(hint_ids)
            above += s.trajectory.token_ids[start - opening : start]
            with torch.no_grad():
                hinted = model(input_ids=torch.tensor([above + turn.token_ids])).logits[0]
            q = hinted.log_softmax(-1)[len(above) - 1 : -1]
            p = logp[start - 1 : start - 1 + len(turn.token_ids)]
            total = total + (p.exp() * (p - q)).sum()
            count += len(turn.token_ids)
    (total / count).backward()
    return take_gradients(parts.student.weights.trained)


CONTRASTS: dict[str, list[dict[str, Any]]] = {
    "sampled": [{"kind": "policy_gradient", "advantage": "hint_contrast", "on": "hinted_turns"}],
    "whole": [{"kind": "divergence", "contrast": 0.7, "on": "hinted_turns"}],
}


def naive_contrast(
    parts: Any, scored: list[Scored], loss: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Each turn alone, in two sequences: under its hint, and under the wrong one."""
    model, tokenizer = parts.student.weights.model, parts.renderer.tokenizer
    total, count = torch.zeros(()), 0
    for s in scored:
        ids = s.trajectory.token_ids
        logp = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        for outcome in s.hints:
            index = outcome.hint.turn
            turn = s.trajectory.turns[index]
            start = sum(len(t.token_ids) for t in s.trajectory.turns[:index])
            opening = start - s.trajectory.turns[index - 1].num_generation_prompt_tokens
            size = len(turn.token_ids)
            q = []
            for text in (outcome.hint.text, outcome.hint.wrong_text):
                hint_ids = tokenizer(f"<|im_start|>user\n{text}<|im_end|>\n")["input_ids"]
                above = (*ids[:opening], *hint_ids, *ids[opening:start])
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([above + turn.token_ids])).logits[0]
                q.append(logits.log_softmax(-1)[len(above) - 1 : -1])
            p = logp[start - 1 : start - 1 + size]
            if loss["kind"] == "divergence":
                target = (q[0] + loss["contrast"] * (q[0] - q[1])).log_softmax(-1)
                total = total + (p.exp() * (p - target)).sum()
            else:
                tokens = (range(size), list(turn.token_ids))
                mu = torch.tensor(turn.sampler_logp)
                ratio = (p[tokens] - mu).exp()
                total = total - (ratio * (q[0][tokens] - q[1][tokens])).sum()
            count += size
    (total / count).backward()
    return take_gradients(parts.student.weights.trained)


@pytest.mark.parametrize("name", CONTRASTS)
@pytest.mark.parametrize("micro", [100_000, 1])
def test_a_wrong_hint_is_contrasted_with_the_right_one(
    roomy_folder: Path, name: str, micro: int
) -> None:
    losses = CONTRASTS[name]
    settings = {"contrast": "random_hint", "harmful": "train"}
    train_ = {"steps": 3, "prompts_per_step": 2, "micro_batch_tokens": micro}
    parts = assemble(tree(roomy_folder, losses=losses, hints=settings, train=train_))
    assert any("hints.contrast scores each turn twice" in note for note in parts.notes)
    scored = scored_batch(parts, two_texts)
    hints = [outcome.hint for s in scored for outcome in s.hints]
    assert len(hints) >= 4 and {h.text for h in hints} == {h.wrong_text for h in hints}
    assert all(h.text != h.wrong_text for h in hints)
    gradients = compute_gradients(parts, scored)
    close(gradients, naive_contrast(parts, scored, losses[0]))
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-5


def two_texts(trajectories: Any, proposed: Any) -> list[Hint]:
    """A random model makes one kind of mistake; so texts by turn, and each other's as the wrong."""
    texts = ("Call a tool.", "Answer in one word.")
    return [
        replace(h, text=texts[i % 2], wrong_text=texts[1 - i % 2]) for i, h in enumerate(proposed)
    ]


def test_a_run_contrasts_hints(roomy_folder: Path, tmp_path: Path) -> None:
    rules = [{"detect": "unparsable_call", "hint": "Write the call as described."},
             {"detect": "no_call", "hint": "Turn {turn}: call a tool."}]  # fmt: skip
    recipe = tree(
        roomy_folder,
        losses=[*CONTRASTS["sampled"], *CONTRASTS["whole"]],
        reader={"kind": "rules", "rules": rules},
        hints={"contrast": "random_hint", "harmful": "train"},
        teacher={"kind": "self", "weights": "frozen"},
    )
    run = train(recipe, tmp_path / "run")
    rows = run.metrics()
    assert all(row["hints/trained"] > 0 and row["grad_norm"] > 0 for row in rows)
    (stored, *_) = [o.hint for s in run.trajectories(0) for o in s.hints]
    assert stored.wrong_text and stored.wrong_text != stored.text


def close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in actual.items():
        assert torch.allclose(value, expected[name], rtol=1e-3, atol=1e-6), name


def test_the_update_is_that_of_the_textbook(roomy_folder: Path) -> None:
    parts = assemble(tree(roomy_folder))
    scored = scored_batch(parts)
    assert sum(len(s.hints) for s in scored) >= 4 and all(
        j.drop_reason is None for s in scored for j in s.hints
    )
    close(compute_gradients(parts, scored), naive_gradient(parts, scored))


def test_only_the_hinted_turn_moves(roomy_folder: Path) -> None:
    """Another hint elsewhere changes nothing of what this turn contributes."""
    parts = assemble(tree(roomy_folder))

    def first(trajectories: Any, proposed: Any) -> list[Hint]:
        return [next(h for h in proposed if h.trajectory == trajectories[0].id)]

    def all_but_first(trajectories: Any, proposed: Any) -> list[Hint]:
        return [h for h in proposed if h not in first(trajectories, proposed)]

    def everyone(trajectories: Any, proposed: Any) -> list[Hint]:
        return list(proposed)

    sizes = {}
    sums = {}
    for name, which in (("one", first), ("rest", all_but_first), ("all", everyone)):
        scored = scored_batch(parts, which)
        (part,) = make_loss_terms(parts.recipe.losses, parts.recipe.loss_names(), scored)
        sizes[name] = part.denominator
        sums[name] = {n: g * part.denominator for n, g in compute_gradients(parts, scored).items()}
    assert sizes["one"] + sizes["rest"] == sizes["all"]
    for name, whole in sums["all"].items():
        both = sums["one"][name] + sums["rest"][name]
        assert torch.allclose(both, whole, rtol=1e-3, atol=1e-5), name


def test_micro_batches_change_nothing(roomy_folder: Path) -> None:
    losses = [
        {"kind": "divergence", "on": "hinted_turns", "normalize": "turn"},
        {"kind": "policy_gradient", "advantage": "reward", "turn_penalty": 0.5, "name": "rl"},
        {"kind": "divergence", "on": "unhinted_turns", "against": "reference", "name": "anchor"},
    ]
    gradients = []
    for micro in (100_000, 1):
        train_ = {"steps": 3, "prompts_per_step": 2, "micro_batch_tokens": micro}
        parts = assemble(tree(roomy_folder, losses=losses, train=train_))

        def half(trajectories: Any, proposed: Any) -> list[Hint]:
            return list(proposed)[::2]  # so that there are other turns, too

        with torch.no_grad():  # away from the reference, or the anchor has no gradient
            for p in parts.student.weights.trained.values():
                p.add_(0.01 * torch.sin(torch.arange(p.numel())).view_as(p))
        gradients.append(compute_gradients(parts, scored_batch(parts, half)))
    close(*gradients)


@pytest.mark.parametrize("weights", ["live", "frozen", "ema"])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_every_kind_of_self_teacher_scores_hints(
    roomy_folder: Path, tmp_path: Path, weights: str, lora: Any
) -> None:
    recipe = tree(
        roomy_folder,
        student={"model": str(roomy_folder)} | ({"lora": lora} if lora else {}),
        teacher={"kind": "self", "weights": weights},
        train={"steps": 2, "prompts_per_step": 2},
    )
    rows = train(recipe, tmp_path / "run").metrics()
    assert all(row["hints/trained"] > 0 and row["grad_norm"] > 0 for row in rows)
    # Every turn of a random model is wrong, and has its hint.
    assert rows[0]["tokens/divergence"] == rows[0]["length/mean"] * 4


def test_a_batch_without_a_mistake_is_no_step(roomy_folder: Path, tmp_path: Path) -> None:
    quiet = {"kind": "rules", "rules": [{"detect": "event", "event": "extra_calls", "hint": "x"}]}
    run = train(tree(roomy_folder, reader=quiet), tmp_path / "run")
    rows = run.metrics()
    assert len(rows) == 3 and all(row["grad_norm"] == 0 for row in rows)
    before, after = (e for e in run.evaluations() if e.policy == "student")
    assert before.scores == after.scores and after.metrics[
        "logp_drop/error_turns"
    ] == pytest.approx(0, abs=1e-5)


def test_hints_that_are_all_dropped_are_an_error(roomy_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nothing|no trajectory has anything to train on"):
        train(tree(roomy_folder, hints={"min_shift": 1e9}), tmp_path / "run")


def test_later_on_a_batch_may_have_only_hints_that_do_too_little(
    roomy_folder: Path, tmp_path: Path
) -> None:
    parts = assemble(tree(roomy_folder, hints={"min_shift": 1e9}))
    trajectories = parts.rollout(parts.tasks.batch(1, 2), 1)
    scored = parts.teacher(trajectories, parts.reader(trajectories).hints)
    assert any(s.hints for s in scored) and all(h.drop_reason for s in scored for h in s.hints)
    before = {name: p.detach().clone() for name, p in parts.student.weights.trained.items()}
    update = parts.student.step(1, scored)
    assert update.metrics["grad_norm"] == 0
    after = parts.student.weights.trained
    assert all(torch.equal(after[name], p) for name, p in before.items())


def test_a_stopped_run_goes_on_as_if_it_had_not(roomy_folder: Path, tmp_path: Path) -> None:
    # A process of its own does not know that tests compute in float32 on every machine.
    recipe = tree(roomy_folder, student={"model": str(roomy_folder), "dtype": "float32"})
    whole = train(recipe, tmp_path / "whole")
    train_until_killed(recipe, tmp_path / "cut", 2)
    cut = train(recipe, tmp_path / "cut")

    def plain(rows: Any) -> Any:
        return [{k: v for k, v in row.items() if "second" not in k} for row in rows]

    assert plain(cut.metrics()) == plain(whole.metrics())
    assert [e.scores for e in cut.evaluations()] == [e.scores for e in whole.evaluations()]
    assert [e.metrics for e in cut.evaluations()] == [e.metrics for e in whole.evaluations()]


def test_stored_episodes_can_be_hinted_again(roomy_folder: Path, tmp_path: Path) -> None:
    train(tree(roomy_folder), tmp_path / "run")
    rows = rescore(tmp_path / "run", ["hints.role=system"])
    plain = rescore(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["loss/divergence"] != plain[0]["loss/divergence"]
    assert rows[0]["without_teacher"] == 0


def test_suites_are_measured_before_and_after(roomy_folder: Path, tmp_path: Path) -> None:
    settings = {"num_tasks": 2, "suites": {"held_out": {"names": "held_out"}}}
    run = train(tree(roomy_folder, evaluate=settings), tmp_path / "run")
    assert [(e.policy, e.step) for e in run.evaluations()] == [
        ("student", 0), ("student:held_out", 0), ("student", 3), ("student:held_out", 3),
    ]  # fmt: skip
    assert run.evaluations()[0].metrics["error_rate"] == 1
    assert run.evaluations()[2].metrics["logp_drop/error_turns"] != 0


def test_suites_that_are_played_together_have_the_results_of_single_ones(
    roomy_folder: Path,
) -> None:
    settings = {"num_tasks": 3, "suites": {"held_out": {"names": "held_out"}}}
    evaluator = assemble(tree(roomy_folder, evaluate=settings)).evaluator
    policies = ["student", "student:held_out"]
    together = evaluator.evaluate_suites("test", policies, step=0)
    for policy in policies:
        single = evaluator.evaluate("test", step=0, policy=policy)
        assert [t.token_ids for t in together[policy].trajectories] == [
            t.token_ids for t in single.trajectories
        ]
        assert together[policy].evaluation.scores == single.evaluation.scores
    ids = [t.id for policy in policies for t in together[policy].trajectories]
    assert len(set(ids)) == 6 and ids[3].startswith("student:held_out-")


def test_the_longest_suite_decides_how_many_turns_a_row_has_capacity_for(
    roomy_folder: Path,
) -> None:
    suites = {"long": {"turns": [2, 9], "retries": 1}, "short": {"turns": 1}}
    recipe = tree(roomy_folder, evaluate={"num_tasks": 2, "suites": suites})
    assert find_max_turns(recipe) == 18
    limited = tree(roomy_folder, evaluate={"num_tasks": 2})
    assert find_max_turns(limited) == recipe.tasks.max_turns < 18


def test_demonstrations_can_be_imitated(roomy_folder: Path, tmp_path: Path) -> None:
    recipe = parse_recipe(
        {
            "student": {"model": str(roomy_folder)},
            "tasks": {"kind": "toolbox", "turns": 2, "habit_fraction": 0.5},
            "rollout": {"student_fraction": 0, "max_new_tokens": 6},
            "losses": [{"kind": "cross_entropy"}],
            "train": {"steps": 4, "prompts_per_step": 4, "learning_rate": 1e-2},
            "evaluate": {"num_tasks": 2},
        }
    )
    run = train(recipe, tmp_path / "run")
    losses = [row["loss"] for row in run.metrics()]
    assert losses[-1] < losses[0]
    first = run.trajectories(step=0)[0].trajectory
    assert first.source == "dataset"
    replies = [turn for turn in first.turns if turn.role == "assistant"]
    assert len(replies) == 2 and all("<tool_call>" in turn.text for turn in replies)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reader": None}, r"on = 'hinted_turns' needs hints"),
        ({"losses": [{"kind": "policy_gradient", "advantage": "reward"}]},
         r"reader: no loss has on = 'hinted_turns'"),
        ({"losses": [{"kind": "divergence"}, {"kind": "divergence", "on": "hinted_turns",
                                              "name": "h"}]},
         r"losses\[0\].*the teacher scores hinted turns only"),
        ({"tasks": {"kind": "arithmetic"}},
         r"reader.kind = 'rules' needs an environment that reports errors"),
        ({"teacher": {"kind": "self", "context": {"kind": "system", "text": "x"}}},
         r"teacher.context: with a \[reader\] the hint is the teacher's additional context"),
        ({"evaluate": {"suites": {"other": {"names": "nobody"}}}},
         r"evaluate.suites.other.names: must be"),
        ({"losses": CONTRASTS["sampled"]},
         r"losses\[0\]: advantage = 'hint_contrast' needs a wrong hint.*hints.contrast"),
        ({"losses": CONTRASTS["whole"]},
         r"losses\[0\]: contrast needs a wrong hint.*hints.contrast"),
        ({"losses": [{"kind": "divergence", "contrast": 1.0}],
          "hints": {"contrast": "random_hint"}},
         r"losses\[0\]: contrast is defined on hinted turns"),
        ({"hints": {"contrast": "random_hint"}}, r"hints.contrast: no loss contrasts two hints"),
        ({"hints": {"contrast": "random_hint", "cumulative": True}},
         r"contrast scores each turn under one hint alone"),
        ({"losses": CONTRASTS["sampled"], "hints": {"contrast": "other_kind"},
          "reader": {"kind": "rules", "rules": [{"detect": "no_call"}]}},
         r"hints.contrast = 'other_kind' exchanges hints of different rules"),
        ({"losses": [{"kind": "divergence", "contrast": 1.0, "extrapolate": 2.0,
                      "on": "hinted_turns"}]},
         r"contrast needs the teacher's whole distributions under two hints"),
    ],
)  # fmt: skip
def test_impossible_recipes_are_refused(roomy_folder: Path, changes: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        tree(roomy_folder, **changes)


def test_limits_and_penalties_need_episodes(roomy_folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"rollout.limits are those of episodes"):
        small_recipe(roomy_folder, rollout={"limits": {"turns": 3}})
    loss = {"kind": "policy_gradient", "advantage": "reward", "turn_penalty": 1.0}
    with pytest.raises(RecipeError, match=r"turn_penalty needs an environment"):
        small_recipe(roomy_folder, losses=[loss])


def test_costs_count_the_tokens_of_the_forward_passes(roomy_folder: Path, tmp_path: Path) -> None:
    """One hint in the first turn of one trajectory: the update ends there, and skips the others."""
    rule = {"detect": "pattern", "pattern": "^", "hint": "Look."}
    changes: dict[str, Any] = {
        "reader": {"kind": "rules", "rules": [rule], "max_hints": 1},
        "train": {"steps": 1, "prompts_per_step": 2},
    }
    run = train(tree(roomy_folder, **changes), tmp_path / "run")
    stored = run.trajectories(step=0)
    assert all([j.hint.turn for j in s.hints] == [1] for s in stored)
    first = sum(
        len(t.trajectory.turns[0].token_ids) + len(t.trajectory.turns[1].token_ids) - 1
        for t in stored
    )
    costs = json.loads((run.path / "costs.json").read_text())
    assert costs["update"]["input_tokens"] == first
    # The teacher is the student, whose pass over the trajectory serves both.
    branches = costs["teacher"]["input_tokens"]
    frozen = tree(roomy_folder, **changes, teacher={"kind": "self", "weights": "frozen"})
    costs = json.loads((train(frozen, tmp_path / "frozen").path / "costs.json").read_text())
    whole = sum(len(t.trajectory.token_ids) for t in stored)
    assert costs["teacher"]["input_tokens"] == whole + branches > whole > first
    quiet = {"kind": "rules", "rules": [{"detect": "event", "event": "extra_calls", "hint": "x"}]}
    nothing = train(
        tree(roomy_folder, reader=quiet, train={"steps": 1, "prompts_per_step": 2}), tmp_path / "no"
    )
    costs = json.loads((nothing.path / "costs.json").read_text())
    assert costs["update"]["input_tokens"] == 0 and costs["teacher"]["input_tokens"] == 0


def test_a_student_that_is_its_own_reader_pays_for_it(roomy_folder: Path, tmp_path: Path) -> None:
    reader = {
        "kind": "model",
        "max_new_tokens": 8,
        "window_chars": 1000,
        "overlap_chars": 0,
        "max_message_chars": 100,
    }
    run = train(
        tree(roomy_folder, reader=reader, train={"steps": 1, "prompts_per_step": 1}),
        tmp_path / "run",
    )
    reading = json.loads((run.path / "costs.json").read_text())["reader"]
    assert reading["input_tokens"] > 0 and reading["output_tokens"] > 0 and reading["flops"] > 0
