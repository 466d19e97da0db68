"""Teachers, references and moving averages in shards score as whole ones do: real ranks (gloo)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.rank_runs import compare_runs, outcomes, run_ranks
from support.small_runs import small_tree

from courtside.api import train
from courtside.recipe.load import parse_recipe
from courtside.report.folder.folder import RunFolder

SHARDS = {"teachers": "shards"}
TRAIN = {"steps": 2, "prompts_per_step": 3, "learning_rate": 1e-3}
EMA = {"kind": "self", "weights": "ema", "ema_decay": 0.5}


class Cases:
    def __init__(self, student: Path, teacher: Path, other: Path):
        self.student, self.teacher, self.other = str(student), str(teacher), str(other)

    def tree(self, **changes: Any) -> dict[str, Any]:
        shared = {
            "student": {"model": self.student, "dtype": "float32"},
            "train": TRAIN,
            "run": {"checkpoint_every": 3},
            "evaluate": {"before": False, "teacher": False, "num_tasks": 1},
            "sharding": SHARDS,
        }
        return small_tree(Path(self.student), **shared | changes)

    def bfloat16(self) -> dict[str, Any]:
        student = {"model": self.student, "dtype": "bfloat16"}
        frozen = {"kind": "self", "weights": "frozen"}
        return self.tree(student=student, teacher=frozen, train=TRAIN | {"steps": 1})

    def stored(self, folder: Path) -> dict[str, Any]:
        store = {"folder": str(folder / "scores")}
        return self.tree(
            teacher={"kind": "model", "model": self.teacher, "store": store},
            losses=[{"kind": "divergence", "support": {"kind": "top_k", "k": 5}}],
            evaluate={"before": False, "teacher": False, "num_tasks": 1, "temperature": 0},
            train=TRAIN | {"steps": 1},
        )

    def trees(self) -> dict[str, dict[str, Any]]:
        model = {"kind": "model", "model": self.teacher}
        lora = {"model": self.student, "dtype": "float32", "lora": {"rank": 4}}
        system = {"kind": "system", "text": "be brief"}
        return {
            # Three prompts for two ranks, a sequence a pass: one makes more passes, and it samples.
            "model": self.tree(
                teacher=model,
                student=lora,
                rollout={"samples_per_prompt": 2, "max_new_tokens": 6, "kv_cache_tokens": 40,
                         "student_fraction": 0.5, "off_policy_source": "teacher"},
                evaluate={"before": False, "num_tasks": 3},
            ),
            # Ranks ask other teachers, two of which are one model, and both ask the reference.
            "routes": self.tree(
                tasks={"kind": "instructions", "checks": ["lower_case", "json", "bullets"]},
                teacher={"kind": "routes", "routes": {
                    "json": model,
                    "lower_case": model | {"model": self.other},
                    "bullets": model | {"context": system},
                }},
                losses=[{"kind": "divergence", "extrapolate": 1.5}],
            ),
            "hints": self.tree(
                teacher={"kind": "self", "weights": "frozen"},
                tasks={"kind": "toolbox", "turns": 3, "num_tools": 2},
                reader={"kind": "rules", "control": "random_hint"},
                losses=[{"kind": "divergence", "on": "hinted_turns"}],
                evaluate={"teacher": False, "num_tasks": 1},
            ),
            "average": self.tree(teacher=EMA | {"context": system}),
            "whole average": self.tree(
                teacher=EMA | {"context": system}, sharding={"teachers": "whole"}
            ),
            "choice": self.tree(
                teacher=model,
                losses=[
                    {"kind": "divergence", "support": {"kind": "top_k", "k": 5}},
                    {"kind": "preference", "weight": 0.1},
                ],
                drafts=[{"kind": "choose", "by": "teacher_logp"}],
            ),
        }  # fmt: skip


@pytest.fixture(scope="module")
def cases(
    roomy_folder: Path, roomy_teacher_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Cases:
    from support.tiny_model import save_tiny

    other = save_tiny(tmp_path_factory.mktemp("other-teacher"), seed=2)
    return Cases(roomy_folder, roomy_teacher_folder, other)


@pytest.fixture(scope="module")
def two_ranks(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    jobs = [{"recipe": tree, "folder": str(folder / f"two-{name}")}
            for name, tree in cases.trees().items()]  # fmt: skip
    failing = {"recipe": cases.trees()["model"], "folder": str(folder / "failing")}
    jobs.append(failing | {"raise_in_teacher": 1})
    stopped = {"recipe": cases.trees()["average"], "folder": str(folder / "stopped")}
    jobs.append(stopped | {"signal_in_pass": 1})
    jobs.append({"recipe": cases.stored(folder), "folder": str(folder / "stored")})
    jobs.append({"recipe": cases.bfloat16(), "folder": str(folder / "two-bfloat16")})
    assert run_ranks(folder, jobs, 2) == 0
    return folder


def counts(folder: Path) -> list[dict[str, float]]:
    """By rank: see `rank_script.count_turns`."""
    files = sorted(folder.parent.glob(f"{folder.name}.turns*.json"))
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("name", ["model", "routes", "hints", "average", "whole average", "choice"])
def test_two_ranks_score_what_one_process_scores(two_ranks: Path, cases: Cases, name: str) -> None:
    alone = two_ranks / f"one-{name}"
    train(parse_recipe(cases.trees()[name]), alone, quiet=True)
    compare_runs(alone, two_ranks / f"two-{name}")
    runs = (RunFolder.read(two_ranks / f"{n}-{name}") for n in ("one", "two"))
    for a, b in zip(*(run.trajectories(0) for run in runs), strict=True):
        if a.teacher_logp is not None:  # in the first step weights are the same bits
            assert a.teacher_logp == pytest.approx(b.teacher_logp, abs=1e-6)


def test_ranks_hold_shards_and_fill_up_the_passes_of_others(two_ranks: Path) -> None:
    for name in ("model", "routes", "hints", "average", "choice"):
        first, second = counts(two_ranks / f"two-{name}")
        assert first["passes"] == second["passes"] > 0
        assert max(first["part"], second["part"]) < 0.55, "layers are freed after their pass"
        assert name in ("average", "choice") or first["idle"] + second["idle"], (
            "else nobody had to wait"
        )
    assert [c["passes"] for c in counts(two_ranks / "two-whole average")] == [0, 0]


def test_an_error_while_the_other_rank_takes_turns_ends_both(two_ranks: Path) -> None:
    leader, other = outcomes(two_ranks / "failing")
    assert (leader["reports"], other["reports"]) == (True, False)
    assert leader["error"] == "TaskError: rank 1: nothing can be scored"


def test_a_signal_within_a_pass_waits_for_the_step(two_ranks: Path) -> None:
    leader, other = outcomes(two_ranks / "stopped")
    assert (leader["reports"], other["reports"]) == (True, False)
    assert "stopped by SIGTERM after 1 of 2 steps; everything is saved" in leader["error"]


def test_scores_that_shards_stored_serve_one_process(two_ranks: Path, cases: Cases) -> None:
    files = sorted((two_ranks / "scores").rglob("*"))
    assert len(files) > 6
    train(parse_recipe(cases.stored(two_ranks)), two_ranks / "stored-again", quiet=True)
    assert sorted((two_ranks / "scores").rglob("*")) == files
    compare_runs(two_ranks / "stored", two_ranks / "stored-again")


def test_shards_of_two_dtypes(two_ranks: Path, cases: Cases) -> None:
    """A frozen copy of the student has linear weights in bfloat16, and norms in float32."""
    train(parse_recipe(cases.bfloat16()), two_ranks / "one-bfloat16", quiet=True)
    runs = (RunFolder.read(two_ranks / f"{n}-bfloat16") for n in ("one", "two"))
    for a, b in zip(*(run.trajectories(0) for run in runs), strict=True):
        assert a.trajectory.token_ids == b.trajectory.token_ids
        assert a.teacher_logp == pytest.approx(b.teacher_logp, abs=2e-2)
    assert all(c["passes"] > 0 for c in counts(two_ranks / "two-bfloat16"))
