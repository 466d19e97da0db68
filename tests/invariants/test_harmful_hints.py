"""Hints that make their turn more likely train nothing; all other hints train as without them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gradients import accumulate, assert_equal_gradients, make_float64, take_gradients
from support.small_runs import small_recipe, train_until_killed
from support.tiny_model import save_tiny

from courtside.api import rescore, train
from courtside.assemble import assemble
from courtside.errors import RecipeError
from courtside.report.console import PlainConsole
from courtside.runtime import Runtime
from courtside.teacher.judging import judge_hints
from courtside.training.loss_terms import make_loss_terms
from courtside.types import Hint, Scored, Trajectory

LOSSES: dict[str, list[dict[str, Any]]] = {
    "divergence": [{"kind": "divergence", "on": "hinted_turns"}],
    "mixed": [
        {"kind": "divergence", "on": "hinted_turns", "normalize": "turn"},
        {"kind": "policy_gradient", "advantage": "reward", "turn_penalty": 0.5, "name": "rl"},
        {"kind": "divergence", "on": "unhinted_turns", "against": "reference", "name": "anchor"},
    ],
    "top_k": [{"kind": "divergence", "on": "hinted_turns",
               "support": {"kind": "top_k", "k": 8, "of": "joint", "form": "tail"}}],
    "sampled": [{"kind": "policy_gradient", "advantage": "teacher_gap", "on": "hinted_turns"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with flat distributions: hints move its turns a little, up or down."""
    folder = save_tiny(tmp_path_factory.mktemp("flat"), spread=0.1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


def tree(folder: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "student": {"model": str(folder), "dtype": "float32"},
        "tasks": {"kind": "toolbox", "turns": 3, "num_tools": 2},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6},
        "reader": {"kind": "rules"},
        "teacher": {"kind": "self", "weights": "live"},
        "losses": LOSSES["divergence"],
        "train": {"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-3},
        "run": {"checkpoint_every": 1},
        "evaluate": {"num_tasks": 1},
    }
    return small_recipe(folder, **(settings | changes))


def some_hints(trajectories: Sequence[Trajectory]) -> list[Hint]:
    """For every assistant's turn; a random model likes about half of them."""
    return [
        Hint(trajectory=t.id, turn=turn, text=f"Look again, {n} {turn}.", source="rules")
        for n, t in enumerate(trajectories)
        for turn in t.hintable_turns
    ]


def batch_of(parts: Runtime, hints: Any = some_hints) -> list[Scored]:
    trajectories = parts.rollout(parts.tasks.batch(0, 2), 0)
    return parts.teacher(trajectories, hints(trajectories))


def scored_first(folder: Path, **changes: Any) -> Any:
    """The same update, whose hints are scored before it."""
    return tree(folder, student={"model": str(folder), "gradient_checkpointing": True}, **changes)


def harmful_turns(scored: Sequence[Scored]) -> set[tuple[str, int]]:
    return {(s.trajectory.id, turn) for s in scored for turn in s.harmful_turns}


def helpful_hints(parts: Runtime) -> Any:
    """Those of `some_hints` that do no harm to this student."""
    harmful = harmful_turns(batch_of(parts))

    def hints(trajectories: Sequence[Trajectory]) -> list[Hint]:
        return [h for h in some_hints(trajectories) if (h.trajectory, h.turn) not in harmful]

    return hints


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
def test_measured_inside_the_update_or_before_it_they_train_nothing(
    folder: Path, losses: Any
) -> None:
    before = make_float64(assemble(scored_first(folder, losses=losses)))
    live = make_float64(assemble(tree(folder, losses=losses)))
    reference = batch_of(before)
    num_hints = sum(len(s.hints) for s in reference)
    assert 2 < len(harmful_turns(reference)) < num_hints - 2
    expected, metrics = accumulate(before, reference)
    values = {**metrics.losses, **metrics.means()}
    for budget in (1, 300, 10**6):
        live.student.micro_batch_tokens = budget
        scored = batch_of(live)
        assert all(s.deferred is not None and s.target is None for s in scored if s.hints)
        gradients, metrics = accumulate(live, scored)
        assert_equal_gradients(gradients, expected)
        assert {**metrics.losses, **metrics.means()} == {
            name: pytest.approx(value, rel=1e-8, abs=1e-10) for name, value in values.items()
        }


def naive_gradient(parts: Runtime, scored: Sequence[Scored]) -> dict[str, torch.Tensor]:
    """One plain forward pass for each turn: KL(student ‖ student with the hint) summed over turns
    that the hint makes less likely, over the number of tokens of all hinted turns."""
    model, tokenizer = parts.student.weights.model, parts.renderer.tokenizer
    total, count = torch.zeros((), dtype=torch.float64), 0
    for s in scored:
        ids = s.trajectory.token_ids
        logp = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        for outcome in s.hints:
            turn = s.trajectory.turns[outcome.hint.turn]
            start = sum(len(t.token_ids) for t in s.trajectory.turns[: outcome.hint.turn])
            opening = s.trajectory.turns[outcome.hint.turn - 1].num_generation_prompt_tokens
            hint_ids = tokenizer(f"<|im_start|>user\n{outcome.hint.text}<|im_end|>\n")["input_ids"]
            context = (*ids[: start - opening], *hint_ids, *ids[start - opening : start])
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([context + turn.token_ids])).logits[0]
            q = logits.log_softmax(-1)[len(context) - 1 : -1]
            p = logp[start - 1 : start - 1 + len(turn.token_ids)]
            chosen = torch.tensor(turn.token_ids)[:, None]
            count += len(turn.token_ids)
            if float((p - q).detach().gather(1, chosen).sum()) >= 0:
                total = total + (p.exp() * (p - q)).sum()
    (total / count).backward()
    return take_gradients(parts.student.weights.trained)


def test_the_update_is_that_of_the_textbook(folder: Path) -> None:
    parts = make_float64(assemble(tree(folder)))
    scored = batch_of(parts)
    assert_equal_gradients(accumulate(parts, scored)[0], naive_gradient(parts, scored))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
def test_without_a_harmful_hint_the_update_has_the_same_bits(
    folder: Path, losses: Any, dtype: str
) -> None:
    student = {"model": str(folder), "dtype": dtype}
    measured = {**student, "gradient_checkpointing": True}
    hints = helpful_hints(assemble(tree(folder, losses=losses, student=measured)))
    gradients = []
    for harmful in ("drop", "train"):
        recipe = tree(folder, losses=losses, student=student, hints={"harmful": harmful})
        parts = assemble(recipe)
        scored = batch_of(parts, hints)
        assert sum(len(s.hints) for s in scored) > 2
        gradients.append(accumulate(parts, scored)[0])
        assert not parts.student.step(0, scored).harmful_turns
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def only_harmful(folder: Path) -> Any:
    harmful = harmful_turns(batch_of(assemble(scored_first(folder))))
    return lambda trajectories: [
        h for h in some_hints(trajectories) if (h.trajectory, h.turn) in harmful
    ]


@pytest.mark.parametrize("make", [tree, scored_first], ids=["inside the update", "before it"])
def test_a_batch_of_harmful_hints_alone_is_no_step(folder: Path, make: Any) -> None:
    """Not even the optimizer's momentum moves the weights."""
    parts = assemble(make(folder))
    weights = parts.student.weights.trained
    scored = batch_of(parts, only_harmful(folder))
    assert any(s.hints for s in scored)
    start = {name: p.detach().clone() for name, p in weights.items()}
    update = parts.student.step(0, scored)
    assert update.num_tokens == {"divergence": 0} and update.metrics["grad_norm"] == 0
    assert all(torch.equal(weights[name], p) for name, p in start.items())
    assert all(p.grad is None or not p.grad.any() for p in weights.values())
    outcomes = [o for s in judge_hints(scored, update) for o in s.hints]
    assert outcomes and all(o.drop_reason == "harmful" and o.is_harmful for o in outcomes)


def test_denominators_count_them(folder: Path) -> None:
    """Else the few hints that remain would weigh more, the more others do harm."""
    for losses in (LOSSES["divergence"], LOSSES["mixed"]):
        terms = []
        for make in (tree, scored_first):
            parts = make_float64(assemble(make(folder, losses=losses)))
            recipe, scored = parts.recipe, batch_of(parts)
            terms.append(make_loss_terms(recipe.losses, recipe.loss_names(), scored))
        assert [t.denominator for t in terms[0]] == [t.denominator for t in terms[1]]
        assert terms[0][0].num_tokens > terms[1][0].num_tokens > 0
        assert [t.num_tokens for t in terms[0][1:]] == [t.num_tokens for t in terms[1][1:]]


def test_runs_record_the_same_whichever_way_hints_were_scored(folder: Path, tmp_path: Path) -> None:
    live = train(tree(folder), tmp_path / "live")
    before = train(scored_first(folder), tmp_path / "before")
    num_dropped = 0
    for a, b in zip(live.metrics(), before.metrics(), strict=True):
        shared = [k for k in b if k in a and "second" not in k and "cost/" not in k]
        assert {"hints/shift", "hints/harmful", "tokens/divergence"} <= {*shared}
        assert {k: a[k] for k in shared} == pytest.approx(
            {k: b[k] for k in shared}, rel=1e-3, abs=1e-4
        )
        num_dropped += a.get("hints/dropped/harmful", 0)
    assert num_dropped > 0
    for step in range(3):
        for a, b in zip(live.trajectories(step), before.trajectories(step), strict=True):
            assert a.teacher_token_indices == b.teacher_token_indices
            assert [o.drop_reason for o in a.hints] == [o.drop_reason for o in b.hints]
    rescored = rescore(tmp_path / "live")
    assert all(row["kl"] is not None for row in rescored)


def test_a_threshold_below_zero_contradicts_them(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"min_shift = -1 admits .* set harmful = 'train'"):
        tree(folder, hints={"min_shift": -1.0})


def test_a_run_says_so_on_the_step_line_and_in_an_alarm(folder: Path, tmp_path: Path) -> None:
    """Hints of a person, chosen so that all of them do harm: nothing trains, and it is told."""
    run = train(tree(folder, reader={"kind": "rules"}, train={"steps": 1, "prompts_per_step": 2},
                     run={"checkpoint_every": 1}), tmp_path / "run")  # fmt: skip
    harmful = [
        {"trajectory": s.trajectory.id, "turn": o.hint.turn, "text": o.hint.text}
        for s in run.trajectories(0)
        for o in s.hints
        if o.shift is not None and o.shift < -0.01
    ]
    assert len(harmful) >= 2
    file = tmp_path / "hints.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in harmful))
    screen = io.StringIO()
    rerun = train(
        tree(
            folder,
            tasks={"kind": "trajectories", "path": str(run.path), "select": "hinted"},
            rollout={"student_fraction": 0.0},
            reader={"kind": "human", "path": str(file)},
            train={"steps": 2, "prompts_per_step": 8, "learning_rate": 1e-3},
        ),
        tmp_path / "again",
        console=PlainConsole(screen),
    )
    lines = screen.getvalue().splitlines()
    num = len(harmful)
    (alarm,) = [line for line in lines if "make their turn more likely" in line]
    assert alarm.startswith(f"step 1: {num} of {num} hints make their turn more likely")
    assert all("  hints 0  shift -" in line for line in lines if line.startswith("step 1/2"))
    assert any(line.startswith("none of the 2 steps trained a single token") for line in lines)
    assert [row.get("kind") for row in rerun.alarms()] == ["harmful_hints", "nothing_trained"]
    assert all(row["hints/dropped/harmful"] == num for row in rerun.metrics())
    page = (rerun.path / "report.html").read_text()
    assert "Hints that make their turn more likely" in page and "Largest shifts" not in page


def test_a_stopped_run_goes_on_as_if_it_had_not(folder: Path, tmp_path: Path) -> None:
    whole = train(tree(folder), tmp_path / "whole")
    assert all(row["hints/dropped/harmful"] for row in whole.metrics())
    train_until_killed(tree(folder), tmp_path / "cut", 2)
    cut = train(tree(folder), tmp_path / "cut")

    def plain(rows: Any) -> Any:
        return [{k: v for k, v in row.items() if "second" not in k} for row in rows]

    assert plain(cut.metrics()) == plain(whole.metrics())
    assert cut.alarms() == whole.alarms()
