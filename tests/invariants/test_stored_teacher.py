"""A teacher whose scores are on disk trains as one that is asked, and is asked once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe
from support.tiny_model import save_tiny

from courtside.api import rescore, train
from courtside.assemble import assemble
from courtside.engines.local import LocalEngine
from courtside.errors import RecipeError
from courtside.report.folder.folder import RunFolder

TOP_K: dict[str, Any] = {
    "kind": "divergence",
    "support": {"kind": "top_k", "k": 8, "of": "teacher"},
}
GAP: dict[str, Any] = {"kind": "policy_gradient", "advantage": "teacher_gap"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return save_tiny(folder / "student"), save_tiny(folder / "teacher", seed=1)


ScoredRequests = list[tuple[str, Any]]


@pytest.fixture
def scored_requests(monkeypatch: pytest.MonkeyPatch) -> ScoredRequests:
    """Name of the engine and request, of everything that was scored."""
    requests_by_name: ScoredRequests = []
    score, branches = LocalEngine.score, LocalEngine.score_branches

    def count(self: Any, requests: Any, **options: Any) -> Any:
        requests_by_name.extend((self.name, request) for request in requests)
        return score(self, requests, **options)

    def count_branches(self: Any, requests: Any, **options: Any) -> Any:
        requests_by_name.extend((self.name, request) for request in requests)
        return branches(self, requests, **options)

    monkeypatch.setattr(LocalEngine, "score", count)
    monkeypatch.setattr(LocalEngine, "score_branches", count_branches)
    return requests_by_name


def select_requests(scored_requests: ScoredRequests, name: Path) -> list[Any]:
    return [request for engine, request in scored_requests if engine == str(name)]


def teacher(models: tuple[Path, Path], folder: Path | None, **more: Any) -> dict[str, Any]:
    store = {} if folder is None else {"store": {"folder": str(folder)}}
    return {"kind": "model", "model": str(models[1]), **store, **more}


def gradient(recipe: Any) -> torch.Tensor:
    parts = assemble(recipe)
    tasks = parts.tasks.batch(0, recipe.train.prompts_per_step)
    trajectories = parts.rollout(tasks, 0)
    scored = parts.teacher(trajectories, parts.reader(trajectories).hints)
    assert any(s.target is not None for s in scored)
    parts.student.step(0, scored)
    state = parts.student.optimizer.state
    trained = sorted(parts.student.weights.trained.items())
    return torch.cat([state[p]["exp_avg"].flatten() for _, p in trained])


HINTS: dict[str, Any] = {
    "tasks": {"kind": "toolbox", "turns": 2, "num_tools": 2},
    "reader": {"kind": "rules"},
    "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6},
    "evaluate": {"num_tasks": 1},
}


@pytest.mark.parametrize("hinted", [False, True], ids=["whole", "hints"])
def test_the_gradient_is_that_of_a_teacher_that_is_asked(
    hinted: bool, models: tuple[Path, Path], tmp_path: Path, scored_requests: ScoredRequests
) -> None:
    loss = TOP_K | ({"on": "hinted_turns"} if hinted else {})
    changes = {"losses": [loss]} | (HINTS if hinted else {})
    plain = gradient(small_recipe(models[0], teacher=teacher(models, None), **changes))
    recipe = small_recipe(models[0], teacher=teacher(models, tmp_path / "store"), **changes)
    first = gradient(recipe)
    scored_requests.clear()
    second = gradient(recipe)
    assert not select_requests(scored_requests, models[1]), "everything was on disk"
    assert plain.norm() > 0
    for stored in (first, second):
        assert (stored - plain).norm() < 1e-4 * plain.norm()


def test_other_losses_need_no_teacher(
    models: tuple[Path, Path], tmp_path: Path, scored_requests: ScoredRequests
) -> None:
    """Given texts, epoch after epoch; then a run with another loss; then `rescore`."""
    changes: dict[str, Any] = {
        "tasks": {"kind": "arithmetic", "limit": 2},
        "rollout": {"student_fraction": 0.0, "samples_per_prompt": 1, "max_new_tokens": 6},
        "teacher": teacher(models, tmp_path / "store"),
        "evaluate": {"num_tasks": 1, "teacher": False},
    }
    train(small_recipe(models[0], losses=[TOP_K], **changes), tmp_path / "first", quiet=True)
    texts = {s.trajectory.token_ids for s in RunFolder.read(tmp_path / "first").trajectories(0)}
    first = select_requests(scored_requests, models[1])
    assert len(texts) == 2 and texts <= {request.token_ids for request in first}
    smaller = TOP_K | {"support": TOP_K["support"] | {"k": 4}}
    train(small_recipe(models[0], losses=[smaller], **changes), tmp_path / "second", quiet=True)
    assert len(rescore(tmp_path / "first", quiet=True)) == 5
    both = select_requests(scored_requests, models[1])
    assert len(set(both)) == len(both), "answers of evaluations are new, and nothing is asked twice"
    scored_requests.clear()
    more = TOP_K | {"support": TOP_K["support"] | {"k": 16}}
    train(small_recipe(models[0], losses=[more], **changes), tmp_path / "third", quiet=True)
    third = select_requests(scored_requests, models[1])
    assert len(set(third)) == len(third), "more than is stored is asked once"
    assert texts <= {request.token_ids for request in third}


def test_another_teacher_in_the_same_folder_has_scores_of_its_own(
    models: tuple[Path, Path], tmp_path: Path, scored_requests: ScoredRequests
) -> None:
    """Weights that were trained further under the same path, too."""
    folder = save_tiny(tmp_path / "teacher", seed=3)
    changes: dict[str, Any] = {
        "losses": [TOP_K],
        "teacher": teacher((models[0], folder), tmp_path / "store"),
    }
    before = gradient(small_recipe(models[0], **changes))
    save_tiny(tmp_path / "teacher", seed=4)
    scored_requests.clear()
    after = gradient(small_recipe(models[0], **changes))
    assert select_requests(scored_requests, folder) and not torch.allclose(before, after)


def test_a_frozen_self_teacher_may_be_stored_whatever_the_student_became(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """With an adapter that trains, and with all weights trained."""
    context = {"kind": "system", "text": "Be brief."}
    store = {"folder": str(tmp_path / "store")}
    for student in ({"model": str(models[0])}, {"model": str(models[0]), "lora": {"rank": 2}}):
        self_teacher = {"kind": "self", "weights": "frozen", "context": context}
        changes: dict[str, Any] = {"student": student, "losses": [TOP_K]}
        plain = gradient(small_recipe(models[0], **changes, teacher=self_teacher))
        recipe = small_recipe(models[0], **changes, teacher=self_teacher | {"store": store})
        for _ in range(2):
            assert (gradient(recipe) - plain).norm() < 1e-4 * plain.norm()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "live": ({"teacher": {"kind": "self", "weights": "live", "store": {"folder": "s"},
                          "context": {"kind": "system", "text": "x"}}, "losses": [TOP_K]},
             r"teacher.store: the weights of a live teacher change.*'frozen'"),
    "average": ({"teacher": {"kind": "self", "weights": "ema", "store": {"folder": "s"}},
                 "losses": [TOP_K]}, r"teacher.store: the weights of a ema teacher"),
    "whole distributions": ({"losses": [{"kind": "divergence"}]},
                            r"losses\[0\].support.kind = 'full' needs.*teacher.store keeps"),
    "of a route": ({"teacher": {"kind": "routes", "default": "a", "routes": {
        "a": {"kind": "model", "model": "m", "store": {"folder": "s"}}}},
        "losses": [{"kind": "policy_gradient", "baseline": True}]},
        r"baseline = true needs.*teacher.routes.a.store keeps"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stored_is_refused(
    changes: dict[str, Any], message: str, models: tuple[Path, Path]
) -> None:
    with pytest.raises(RecipeError, match=message):
        small_recipe(models[0], **{"teacher": teacher(models, Path("s")), **changes})
