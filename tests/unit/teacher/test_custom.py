"""A teacher from the user's own file."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe

import courtside
from courtside.assemble import assemble
from courtside.errors import RecipeError, RunError
from courtside.recipe import Recipe

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "extending.md").read_text(encoding="utf-8")

USER_MODULE = """
import torch
from courtside.types import Target

def target(t, **changes):
    fields = dict(teacher="x", context=None, logp_T=torch.full((t.num_completion_tokens,), -2.0))
    return Target(**{**fields, **changes})

class Teacher:
    num_parameters = 7
    def __init__(self, skip=0): self.skip = skip
    def score(self, trajectories): return {t.id: target(t) for t in trajectories[self.skip:]}
def make(): return Teacher(skip=1)
class Short(Teacher):
    def score(self, trajectories):
        return {t.id: target(t, logp_T=torch.zeros(1)) for t in trajectories}
class Some(Teacher):
    def score(self, trajectories):
        return {t.id: target(t, logp_T=torch.zeros(1), token_indices=(0,)) for t in trajectories}
class List(Teacher):
    def score(self, trajectories): return [target(t) for t in trajectories]
class Numbers(Teacher):
    def score(self, trajectories): return {t.id: 3.0 for t in trajectories}
class Unknown(Teacher):
    def score(self, trajectories): return {"nobody": target(trajectories[0])}
class Silent: ...
"""

GAP = [{"kind": "policy_gradient", "advantage": "teacher_gap"}]


@pytest.fixture(autouse=True)
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for name in ("mine", "my_teachers"):
        sys.modules.pop(name, None)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(USER_MODULE)
    for block, name in re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```$", PAGE, re.M | re.S):
        (tmp_path / name).write_text(block)
    return tmp_path


def recipe(folder: Path, path: str, *, losses: Any = None, **changes: Any) -> Recipe:
    teacher = {"kind": "custom", "path": path, "settings": changes.pop("settings", {})}
    return small_recipe(folder, teacher=teacher, losses=losses or GAP, **changes)


def test_the_teacher_of_the_page_makes_answers_shorter(tiny_folder: Path) -> None:
    short = recipe(
        tiny_folder, "my_teachers:ShortAnswers", settings={"vocab_size": 258, "end_id": 1},
        rollout={"samples_per_prompt": 8, "max_new_tokens": 12},
        train={"steps": 30, "prompts_per_step": 4, "learning_rate": 1e-2},
        evaluate={"num_tasks": 1},
    )  # fmt: skip
    rows = courtside.train(short, Path("run")).metrics()
    lengths = [row["length/mean"] for row in rows]
    assert sum(lengths[-5:]) < 0.85 * sum(lengths[:5]) and rows[0]["without_teacher"] == 0


def test_targets_become_records_and_costs(tiny_folder: Path, user_folder: Path) -> None:
    run = courtside.train(recipe(tiny_folder, "mine:make", train={"steps": 1}), Path("run"))
    (row,) = run.metrics()
    assert row["without_teacher"] == 1, "the one that it left out"
    scored = run.trajectories(0)
    assert [s.teacher for s in scored] == [None, *["mine:make"] * (len(scored) - 1)]
    assert "teacher: mine:make" in (run.path / "report.html").read_text()


def test_some_tokens_can_be_scored(tiny_folder: Path) -> None:
    parts = assemble(recipe(tiny_folder, "mine:Some"))
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0))
    assert all(sum(s.target_mask) == 1 for s in scored)
    update = parts.student.step(0, scored)
    assert update.num_tokens == {"policy_gradient": len(scored)}


WRONG = {
    "mine:Short": r"teacher 'mine:Short' has 1 log-probs for .*, which has \d+ tokens to score",
    "mine:List": r"returned list; return a dict from id to Target",
    "mine:Numbers": r"returned float for .*; return a courtside\.types\.Target",
    "mine:Unknown": r"returned Target for 'nobody'.*ids of the given trajectories",
}


@pytest.mark.parametrize(("path", "message"), WRONG.items(), ids=WRONG)
def test_wrong_results_are_refused(path: str, message: str, tiny_folder: Path) -> None:
    parts = assemble(recipe(tiny_folder, path))
    with pytest.raises(RunError, match=message):
        parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"kind": "divergence"}, r"gives too little for losses\[0\]\.support\.kind = 'full'"),
        (
            {"kind": "divergence", "support": {"kind": "top_k", "k": 4}},
            r"gives too little for losses\[0\]\.support\.k = 4: .*top_ids_TK",
        ),
    ],
)
def test_too_little_for_a_loss_is_refused(loss: Any, message: str, tiny_folder: Path) -> None:
    parts = assemble(recipe(tiny_folder, "mine:Teacher", losses=[loss]))
    with pytest.raises(RunError, match=message):
        parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0))


def test_teachers_that_cannot_be_made_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"Silent has no method score\(trajectories\)"):
        assemble(recipe(tiny_folder, "mine:Silent"))
    with pytest.raises(RecipeError, match=r"teacher.path = 'mine:Nobody': module 'mine' has no"):
        assemble(recipe(tiny_folder, "mine:Nobody"))
    with pytest.raises(RecipeError, match=r"teacher.settings = .* do not fit.*Teacher takes skip"):
        assemble(recipe(tiny_folder, "mine:Teacher", settings={"ship": 1}))
    with pytest.raises(RecipeError, match=r"'mine' must be 'module:Class'"):
        recipe(tiny_folder, "mine")


def test_it_neither_samples_nor_takes_hints(tiny_folder: Path) -> None:
    with pytest.raises(RecipeError, match="scores and does not sample"):
        recipe(
            tiny_folder, "mine:Teacher", losses=[{"kind": "divergence", "on": "teacher"}],
            rollout={"student_fraction": 0.5, "off_policy_source": "teacher"},
        )  # fmt: skip
    with pytest.raises(RecipeError, match="hints go into the context of a model"):
        recipe(
            tiny_folder, "mine:Teacher", reader={"kind": "rules"},
            losses=[{"kind": "divergence", "on": "hinted_turns"}], tasks={"kind": "toolbox"},
        )  # fmt: skip


def test_its_gap_is_the_advantage(tiny_folder: Path) -> None:
    parts = assemble(recipe(tiny_folder, "mine:Teacher"))
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0))
    assert all(torch.equal(s.target.logp_T, torch.full_like(s.target.logp_T, -2)) for s in scored)
    sampler = torch.tensor([x for s in scored for x in s.trajectory.sampler_logp or ()])
    update = parts.student.step(0, scored)
    assert update.metrics["kl_estimate"] == pytest.approx(float((sampler + 2).mean()), rel=1e-4)
