"""A student that several processes train is that of one process: real ranks on loopback (gloo)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.float64 import relative_error
from support.mixtures import save_mixture
from support.rank_runs import compare_runs, outcomes, rows, run_ranks
from support.small_runs import small_tree, write_jsonl

from courtside.api import export, train
from courtside.errors import GateFailedError, RunError
from courtside.recipe.load import parse_recipe
from courtside.recipe.pipeline import parse_pipeline
from courtside.report.folder import toml
from courtside.report.folder.folder import RunFolder
from courtside.training.checkpoints import latest, load, num_steps_of

pytestmark = pytest.mark.usefixtures("one_thread")
TEACHERS = ("shards", "whole")
"""How a moving average of all weights scores."""
TRAIN = {"steps": 2, "prompts_per_step": 5, "learning_rate": 1e-3}


class Cases:
    """Recipes by name; each trains in a fraction of a second."""

    def __init__(self, folder: Path, student: Path, teacher: Path):
        self.student, self.teacher = student, teacher
        self.mixture = save_mixture(folder / "mixture", "qwen3_moe")
        rows = [
            {"prompt": f"say {i}", "completion": f"{i * 7} yes", "rejected": "no" * (i % 5 + 1)}
            for i in range(40)
        ]
        self.pairs = write_jsonl(folder / "pairs.jsonl", rows)
        sevens = [{"prompt": f"say {n}", "completion": "7777777777"} for n in range(12)]
        self.sevens = write_jsonl(folder / "sevens.jsonl", sevens)
        questions = [
            {"prompt": f"ask {n}", "grader": "regex", "grader_args": {"pattern": "[^7 ]"},
             "split": "test"} for n in range(32)
        ]  # fmt: skip
        self.questions = write_jsonl(folder / "questions.jsonl", questions)

    def of_steps(self, steps: int) -> dict[str, Any]:
        student = {"model": str(self.student), "dtype": "float32"}
        settings = {
            "student": student,
            "train": TRAIN | {"steps": steps},
            "run": {"checkpoint_every": 1},
            "evaluate": {"num_tasks": 3},
        }
        return small_tree(self.student, self.teacher, **settings)

    def average_of_steps(self, steps: int, teachers: str) -> dict[str, Any]:
        """With a moving average of all weights, which scores in shards or as a whole copy."""
        average = {"kind": "self", "weights": "ema", "ema_decay": 0.5}
        context = {"kind": "system", "text": "be brief"}
        return self.of_steps(steps) | {
            "teacher": average | {"context": context},
            "evaluate": {"before": False, "teacher": False, "num_tasks": 1},
            "sharding": {"teachers": teachers},
        }

    def average_job(self, steps: int, teachers: str, folder: Path) -> dict[str, Any]:
        recipe = self.average_of_steps(steps, teachers)
        return {"recipe": recipe, "folder": str(folder / f"averaged-{teachers}")}

    def pipeline(self) -> dict[str, Any]:
        """The second stage forgets what a suite asks for."""
        gate = {"suite": "talk", "max_loss": 0.2}
        talk = {"kind": "jsonl", "path": str(self.questions)}
        return {
            "base": {
                "student": {"model": str(self.student), "dtype": "float32"},
                "rollout": {"student_fraction": 0, "max_new_tokens": 4},
                "tasks": {"kind": "jsonl", "path": str(self.pairs)},
                "losses": [{"kind": "cross_entropy", "on": "dataset"}],
                "train": {"steps": 1, "prompts_per_step": 3, "learning_rate": 1e-5},
                "evaluate": {"num_tasks": 32, "temperature": 0, "suites": {"talk": talk}},
            },
            "stages": [
                {"name": "first", "gate": gate},
                {"name": "sevens", "student": {"model": "stage:first"}, "gate": gate,
                 "tasks": {"kind": "jsonl", "path": str(self.sevens)},
                 "train": {"steps": 10, "prompts_per_step": 4, "learning_rate": 3e-2}},
            ],
        }  # fmt: skip

    def trees(self) -> dict[str, dict[str, Any]]:
        full = {"model": str(self.student), "dtype": "float32"}
        lora = full | {"lora": {"rank": 4}}
        live = {"kind": "self", "weights": "live"}
        by_teacher = {
            "full": {"student": full, "train": TRAIN | {"micro_batch_tokens": 60}},
            "lora": {"student": lora | {"gradient_checkpointing": True}},
        }
        in_16_bits = {"dtype": "bfloat16", "gradient_checkpointing": True}
        for name, student in (("full", full), ("lora", lora)):
            for stage in (1, 2):
                by_teacher[f"{name}-{stage}"] = by_teacher[name] | {
                    "sharding": {"zero_stage": stage}
                }
            by_teacher[f"{name}-autocast"] = {
                "student": student | in_16_bits,
                "train": TRAIN | {"steps": 1, "micro_batch_tokens": 60},
            }
        alone = {
            "ema": {"student": lora, "teacher": {"kind": "self", "weights": "ema"}},
            "hints": {
                "student": full,
                "teacher": live,
                "tasks": {"kind": "toolbox", "turns": 3, "num_tools": 2},
                "reader": {"kind": "rules"},
                "evaluate": {"num_tasks": 2},
                "losses": [
                    {"kind": "divergence", "on": "hinted_turns", "normalize": "turn"},
                    {"kind": "policy_gradient", "advantage": "reward", "turn_penalty": 0.5},
                ],
            },
            "rewards": {
                "student": full,
                "rollout": {"samples_per_prompt": 4, "max_new_tokens": 6},
                "losses": [{"kind": "policy_gradient", "advantage": "reward"}],
            },
            "experts": {
                "student": full
                | {
                    "model": str(self.mixture),
                    "router_replay": True,
                    "router_aux_loss_coef": 0.02,
                },
                "teacher": {
                    "kind": "self",
                    "weights": "frozen",
                    "context": {"kind": "system", "text": "be brief"},
                },
            },
            "pairs": {
                "student": full,
                "tasks": {"kind": "jsonl", "path": str(self.pairs)},
                "rollout": {"student_fraction": 0.0, "off_policy_source": "dataset"},
                "losses": [{"kind": "preference"}],
            },
        }
        shared = {
            "train": TRAIN,
            "run": {"checkpoint_every": 3},
            "evaluate": {"before": False, "num_tasks": 1},
        }
        models = {name: (self.student, self.teacher) for name in by_teacher}
        models |= {name: (self.student,) for name in alone}
        return {
            name: small_tree(*models[name], **shared | changes)
            for name, changes in (by_teacher | alone).items()
        }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def cases(folder: Path, roomy_folder: Path, tiny_teacher_folder: Path) -> Cases:
    return Cases(folder, roomy_folder, tiny_teacher_folder)


@pytest.fixture(scope="module")
def two_ranks(folder: Path, cases: Cases) -> Path:
    """The folder with everything that two ranks do in this module, in one launch."""
    trees = cases.trees()
    jobs = [{"recipe": tree, "folder": str(folder / f"two-{n}")} for n, tree in trees.items()]
    jobs.append({"recipe": cases.of_steps(1), "folder": str(folder / "resumed")})
    jobs += [cases.average_job(1, teachers, folder) for teachers in TEACHERS]
    jobs.append({"recipe": cases.pipeline(), "folder": str(folder / "two-pipeline")})
    recipe = folder / "recipe.toml"
    recipe.write_text(toml.dumps(cases.of_steps(1)))
    command = ["train", str(recipe), "--run", str(folder / "printed")]
    jobs.append({"command": command, "folder": str(folder / "printed")})
    refused = [*command, "train.optimizer_offload=true"]
    jobs.append({"command": refused, "folder": str(folder / "refused")})
    assert run_ranks(folder, jobs, 2) == 0
    return folder


@pytest.fixture(scope="module")
def three_ranks(two_ranks: Path, cases: Cases) -> Path:
    """After two ranks and one process: what three do, until one of them is killed."""
    train(parse_recipe(cases.of_steps(2)), two_ranks / "resumed", quiet=True)
    for teachers in TEACHERS:
        job = cases.average_job(2, teachers, two_ranks)
        train(parse_recipe(job["recipe"]), job["folder"], quiet=True)
    jobs = [
        {"recipe": cases.of_steps(3), "folder": str(two_ranks / "resumed")},
        *(cases.average_job(3, teachers, two_ranks) for teachers in TEACHERS),
        {"recipe": cases.of_steps(3), "folder": str(two_ranks / "raised"), "raise": [2, 1]},
        {"recipe": cases.of_steps(3), "folder": str(two_ranks / "stopped"), "signal": [1, 1]},
        {"recipe": cases.of_steps(3), "folder": str(two_ranks / "full"), "full": [1, 2]},
        {"recipe": cases.of_steps(3), "folder": str(two_ranks / "killed"), "kill": [2, 2]},
    ]
    with pytest.raises(RunError, match=r"rank 2 was ended by SIGKILL.*goes on from the last"):
        run_ranks(two_ranks, jobs, 3)
    return two_ranks


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, cases: Cases) -> Path:
    train(parse_recipe(cases.of_steps(3)), folder / "uninterrupted", quiet=True)
    return folder / "uninterrupted"


@pytest.mark.parametrize(
    "name",
    [
        "full", "full-1", "full-2", "lora", "lora-1", "lora-2",
        "ema", "hints", "rewards", "experts", "pairs",
    ],
)  # fmt: skip
def test_two_ranks_train_what_one_process_trains(two_ranks: Path, cases: Cases, name: str) -> None:
    alone = two_ranks / f"one-{name}"
    train(parse_recipe(cases.trees()[name]), alone, quiet=True)
    compare_runs(alone, two_ranks / f"two-{name}")
    first, second = (RunFolder.read(two_ranks / f"{n}-{name}") for n in ("one", "two"))
    assert [s.trajectory.token_ids for s in first.trajectories(1)] == [
        s.trajectory.token_ids for s in second.trajectories(1)
    ]


@pytest.mark.parametrize("name", ["full-autocast", "lora-autocast"])
def test_gradients_under_autocast_are_those_of_one_process(
    two_ranks: Path, cases: Cases, name: str
) -> None:
    """Over several passes: autocast must not cast a weight in one pass for all of them."""
    alone = two_ranks / f"one-{name}"
    train(parse_recipe(cases.trees()[name]), alone, quiet=True)
    folders = (alone, two_ranks / f"two-{name}")
    alone_state, shared_state = (
        load(latest(folder / "checkpoints")).tensors["optimizer"] for folder in folders
    )
    gradients = [key for key in alone_state if key.endswith("exp_avg")]
    assert gradients
    ours, expected = (
        torch.cat([state[key].flatten() for key in gradients])
        for state in (shared_state, alone_state)
    )
    assert relative_error(ours, expected) < 0.05


def test_a_run_resumes_with_any_number_of_ranks(three_ranks: Path, uninterrupted: Path) -> None:
    resumed = three_ranks / "resumed"
    compare_runs(uninterrupted, resumed)
    # Answers that three ranks gave together.
    evaluations = [RunFolder.read(folder).evaluations() for folder in (uninterrupted, resumed)]
    assert [e.scores for e in evaluations[0] if e.step in (0, 3)] == [
        e.scores for e in evaluations[1] if e.step in (0, 3)
    ]


@pytest.mark.parametrize("teachers", TEACHERS)
def test_a_moving_average_resumes_with_any_number_of_ranks(
    three_ranks: Path, cases: Cases, teachers: str
) -> None:
    alone, resumed = three_ranks / f"alone-{teachers}", three_ranks / f"averaged-{teachers}"
    train(parse_recipe(cases.average_of_steps(3, teachers)), alone, quiet=True)
    compare_runs(alone, resumed)
    checkpoint = latest(resumed / "checkpoints")
    assert checkpoint is not None
    shards = sorted(file.name for file in checkpoint.glob("average-*"))
    assert shards == [f"average-self%3Aema-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    tensors = load(checkpoint).tensors
    average, weights = tensors["average-self%3Aema"], tensors["weights"]
    assert any(not average[name].equal(weights[name]) for name in weights)


def test_ranks_run_the_stages_of_a_pipeline(two_ranks: Path, cases: Cases) -> None:
    leader, other = outcomes(two_ranks / "two-pipeline")
    assert (leader["reports"], other["reports"]) == (True, False)
    assert leader["error"].startswith("GateFailedError: stage 'sevens': gate failed: talk")
    assert other["error"].startswith("GateFailedError: rank 0: stage 'sevens'")
    with pytest.raises(GateFailedError):
        train(parse_pipeline(cases.pipeline()), two_ranks / "one-pipeline", quiet=True)
    for stage in ("01-first", "02-sevens"):
        alone, together = (two_ranks / f"{n}-pipeline" / "stages" / stage for n in ("one", "two"))
        assert [e.scores for e in RunFolder.read(alone).evaluations()] == [
            e.scores for e in RunFolder.read(together).evaluations()
        ]
        assert rows(alone)[0] == pytest.approx(rows(together)[0], rel=1e-4, abs=1e-5)
    promoted = (two_ranks / "two-pipeline" / "promoted").resolve()
    assert promoted == two_ranks.resolve() / "two-pipeline" / "stages" / "01-first" / "export"


def test_an_error_of_one_rank_ends_all_and_is_told_once(three_ranks: Path) -> None:
    errors = outcomes(three_ranks / "raised")
    assert [outcome["reports"] for outcome in errors] == [True, False, False]
    assert errors[0]["error"] == "TaskError: rank 2: nothing works in step 1"
    assert num_steps_of(latest(three_ranks / "raised" / "checkpoints")) == 1


def test_a_full_disk_of_one_rank_leaves_the_checkpoint_before(three_ranks: Path) -> None:
    errors = outcomes(three_ranks / "full")
    assert [outcome["reports"] for outcome in errors] == [True, False, False]
    assert errors[1]["error"] == "RunError: failed, as the leader says"
    assert errors[0]["error"].startswith("CheckpointError: rank 1: ")
    assert "could not be written: [Errno 28] No space left on device" in errors[0]["error"]
    assert "The run can go on from step-000001, which is intact" in errors[0]["error"]
    assert num_steps_of(latest(three_ranks / "full" / "checkpoints")) == 1


def test_the_command_line_prints_on_the_leader_alone(two_ranks: Path) -> None:
    leader, other = outcomes(two_ranks / "printed")
    assert (leader["code"], other["code"]) == (0, 0)
    assert "step 1/1" in leader["out"]
    assert "courtside export" in leader["out"]
    assert other["out"] == ""
    leader, other = outcomes(two_ranks / "refused")
    assert (leader["code"], other["code"]) == (2, 2)
    assert "train.optimizer_offload: the optimizer state is sharded" in leader["error"]
    assert "error" not in other["error"]


def test_an_export_has_whole_weights(two_ranks: Path) -> None:
    """Of shards that two ranks wrote: one safetensors folder."""
    run = two_ranks / "two-full"
    shards = [file.name for file in latest(run / "checkpoints").glob("weights-*")]
    assert sorted(shards) == [f"weights-0000{n}-of-00002.safetensors" for n in (1, 2)]
    exported = load_file(export(run, two_ranks / "exported") / "model.safetensors")
    trained = load(latest(run / "checkpoints")).tensors["weights"]
    assert exported.keys() == trained.keys()
    assert all(exported[name].equal(tensor) for name, tensor in trained.items())


def test_a_signal_to_one_rank_stops_all_and_saves_once(
    three_ranks: Path, uninterrupted: Path, cases: Cases
) -> None:
    stopped = three_ranks / "stopped"
    errors = outcomes(stopped)
    assert [outcome["reports"] for outcome in errors] == [True, False, False]
    assert "stopped by SIGTERM after 1 of 3 steps; everything is saved" in errors[0]["error"]
    train(parse_recipe(cases.of_steps(3)), stopped, quiet=True)
    compare_runs(uninterrupted, stopped)


def test_a_killed_rank_ends_the_others_and_the_run_resumes(
    three_ranks: Path, uninterrupted: Path, cases: Cases
) -> None:
    killed = three_ranks / "killed"
    survivors = outcomes(killed)
    assert len(survivors) == 2
    assert all("another rank is gone" in outcome["error"] for outcome in survivors)
    assert sum(outcome["reports"] for outcome in survivors) == 1
    assert num_steps_of(latest(killed / "checkpoints")) == 2
    train(parse_recipe(cases.of_steps(3)), killed, quiet=True)
    compare_runs(uninterrupted, killed)
