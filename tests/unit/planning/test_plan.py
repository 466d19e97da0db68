"""`courtside.plan` and the command: what it prints, refuses and loads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.plan_recipes import PROMPTS, make_recipe
from support.plan_rows import distillation_work
from typer.testing import CliRunner

import courtside
from courtside.cli.app import app
from courtside.errors import PlanError, UserError
from courtside.planning.changes import propose_changes
from courtside.planning.estimate import estimate
from courtside.planning.gpus import GIB, GPUS
from courtside.planning.plan import plan
from courtside.planning.workload import Lengths
from courtside.recipe.load import parse_recipe


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    file = tmp_path / "distil.toml"
    file.write_text(
        '[student]\nmodel = "Qwen/Qwen3-0.6B"\n[tasks]\nkind = "arithmetic"\n'
        '[teacher]\nkind = "model"\nmodel = "Qwen/Qwen3-1.7B"\n[[losses]]\nkind = "divergence"\n'
    )
    return file


# ── the record ───────────────────────────────────────────────────────────────────────────────────


def test_totals_follow_from_the_phases() -> None:
    result = plan(make_recipe(), gpu="h200", num_gpus=8, price_per_hour=2.5, **PROMPTS)
    assert isinstance(result, courtside.CostPlan)
    seconds = 100 * sum(phase.seconds for phase in result.estimate.phases)
    seconds += result.estimate.evaluation.seconds
    assert result.hours == pytest.approx(seconds / 3600)
    assert result.gpu_hours == 8 * result.hours
    assert result.cost == pytest.approx(2.5 * result.gpu_hours)
    assert result.is_on_paper and any("on paper" in note for note in result.notes)
    # Before and after, and the teacher before.
    assert result.estimate.num_evaluations == 3
    assert plan(make_recipe(), **PROMPTS).cost is None


def test_evaluations_in_between_are_counted() -> None:
    recipe = make_recipe(evaluate={"every": 25, "num_tasks": 10, "teacher": False})
    result = plan(recipe, **PROMPTS)
    assert result.estimate.num_evaluations == 2 + 5
    assert result.estimate.evaluation.flops.output_tokens == 7 * 10 * 512


def test_the_teachers_evaluation_takes_its_own_time() -> None:
    """Qwen3-32B takes longer for the same answers than Qwen3-8B."""
    with_teacher = plan(make_recipe(), **PROMPTS).estimate
    without = plan(make_recipe(evaluate={"teacher": False}), **PROMPTS).estimate
    by_student = without.evaluation.seconds / without.num_evaluations
    by_teacher = with_teacher.evaluation.seconds - without.evaluation.seconds
    assert (without.num_evaluations, with_teacher.num_evaluations) == (2, 3)
    assert by_teacher > 1.5 * by_student


SYSTEM = {"kind": "system", "text": "Well."}
RULES = {"kind": "rules", "rules": [{"detect": "event", "event": "oops", "hint": "No."}]}
WORLD = {"kind": "environment", "path": "worlds:World"}
KINDS: dict[str, dict[str, Any]] = {
    "no teacher": {"teacher": None, "losses": [{"kind": "policy_gradient", "advantage": "reward"}]},
    "frozen self": {"teacher": {"kind": "self", "weights": "frozen", "context": SYSTEM}},
    "moving average, LoRA": {
        "student": {"model": "Qwen/Qwen3-8B", "lora": {"rank": 8}},
        "teacher": {"kind": "self", "weights": "ema", "context": SYSTEM},
    },
    "routes": {
        "teacher": {
            "kind": "routes", "default": "a",
            "routes": {
                "a": {"kind": "model", "model": "Qwen/Qwen3-14B"},
                "b": {"kind": "model", "model": "Qwen/Qwen3-32B", "dtype": "int8"},
            },
        }
    },
    "custom teacher": {"teacher": {"kind": "custom", "path": "mine:Teacher"}},
    "top k": {"losses": [{"kind": "divergence", "support": {"kind": "top_k"}}]},
    "ramp": {
        "rollout": {
            "student_fraction": {"start": 0.0, "end": 1.0, "steps": 50},
            "off_policy_source": "teacher",
        }
    },
    "hints": {
        "tasks": WORLD, "reader": RULES, "teacher": {"kind": "self", "weights": "live"},
        "losses": [{"kind": "divergence", "on": "hinted_turns"}],
    },
    "hints by the student": {
        "tasks": WORLD, "reader": {"kind": "model"}, "teacher": {"kind": "self", "weights": "live"},
        "losses": [{"kind": "divergence", "on": "hinted_turns"}],
    },
    "conversations": {
        "tasks": {"kind": "conversations", "path": "chats.jsonl"},
        "rollout": {"student_fraction": 0.0},
        "losses": [{"kind": "divergence"}],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("gpu", ["a100-40", "cpu"])
def test_every_kind_of_recipe_can_be_planned(name: str, gpu: str) -> None:
    sections = {**KINDS[name]}
    if sections.get("teacher", 0) is None:
        tree = json.loads(make_recipe().model_dump_json(exclude_unset=True))
        del tree["teacher"], sections["teacher"]
        recipe = parse_recipe({**tree, **sections})
    else:
        recipe = make_recipe(**sections)
    result = plan(recipe, gpu=gpu, new_tokens=64, turns=3, **PROMPTS)
    seconds = {phase.name: phase.seconds for phase in result.estimate.phases}
    assert all(value > 0 for value in seconds.values())
    assert ("rollout" in seconds) == (name != "conversations")
    assert ("reader" in seconds) == (name == "hints by the student")
    assert ("teacher" in seconds) == (name not in ("no teacher", "custom teacher"))
    assert seconds["update"] > 0 and result.estimate.peak.total > 8 * GIB


def test_more_gpus_take_less_time_and_memory() -> None:
    results = [plan(make_recipe(), num_gpus=n, **PROMPTS) for n in (1, 2, 4, 8)]
    peaks = [result.estimate.peak.total for result in results]
    updates = [result.estimate.phases[2].seconds for result in results]
    assert peaks == sorted(peaks, reverse=True)
    assert updates == sorted(updates, reverse=True)
    assert updates[0] / updates[-1] < 8  # weights are gathered over the links
    machine, machines = (plan(make_recipe(), num_gpus=n, **PROMPTS).estimate for n in (8, 16))
    rollout, other = (result.memory[0].parts for result in (machine, machines))
    # A second machine halves the states and the rows, not the sampler.
    assert other["student weights"] == rollout["student weights"] / 2
    assert other["KV cache"] == rollout["KV cache"] / 2
    assert other["sampler"] == rollout["sampler"]
    # The teacher has more than 20 GB: its layers are in shards, embedding and LM head are not.
    assert rollout["teacher weights"] / 2 < other["teacher weights"] < rollout["teacher weights"]
    assert machine.phases[2].seconds / machines.phases[2].seconds < 2


def test_a_shape_stands_for_a_model_without_files() -> None:
    recipe = make_recipe(student={"model": "nobody/nothing"})
    with pytest.raises(PlanError, match=r"nobody/nothing.*--shape, e\.g\. qwen3-8b"):
        plan(recipe, **PROMPTS)
    result = plan(recipe, shape="qwen3-14b", teacher_shape="llama-3.1-70b", **PROMPTS)
    assert result.models.num_student == 14_768_307_200
    assert result.models.teachers[0].shape.num_parameters == 70_553_706_496


def test_lengths_are_measured_on_the_tasks(tiny_folder: Path) -> None:
    from courtside.assemble.inputs import load_inputs

    recipe = make_recipe(
        student={"model": str(tiny_folder)}, teacher={"kind": "model", "model": str(tiny_folder)},
        rollout={"max_new_tokens": 8},
    )  # fmt: skip
    result = plan(recipe, gpu="cpu")
    inputs = load_inputs(recipe)
    lengths = [len(inputs.template.prompt_ids(t.messages)) for t in inputs.tasks.batch(0, 64)]
    assert result.lengths.prompt == pytest.approx(sum(lengths) / 64)
    assert result.assumptions[0].endswith("(mean of 64 tasks)")
    assert result.models.num_student == 32 * 258 + 2 * (2 * 32 * 32 + 2 * 32 * 16) + (
        2 * 3 * 32 * 64 + 5 * 32
    )


def test_the_teachers_context_is_measured(tiny_folder: Path) -> None:
    from courtside.assemble.inputs import load_inputs

    text = "Answer with a number."
    recipe = make_recipe(
        student={"model": str(tiny_folder)},
        teacher={"kind": "self", "context": {"kind": "system", "text": text}},
        rollout={"max_new_tokens": 8},
    )
    result = plan(recipe, gpu="cpu")
    # A system message: its text, a token a byte, and its frame.
    inputs = load_inputs(recipe)
    frame = len(inputs.template.tokenizer.encode("<|im_start|>system\n<|im_end|>\n"))
    assert result.lengths.context == len(text) + frame


def test_pruned_students_have_fewer_layers() -> None:
    pruned = plan(
        make_recipe(student={"model": "Qwen/Qwen3-8B", "keep_layers": [0, 17]}), **PROMPTS
    )
    assert pruned.models.student.num_layers == 2
    with pytest.raises(PlanError, match="keep_layers names layer 36; qwen3-8b has 36"):
        plan(make_recipe(student={"model": "Qwen/Qwen3-8B", "keep_layers": [36]}), **PROMPTS)


# ── what does not fit ────────────────────────────────────────────────────────────────────────────


def test_each_change_is_computed() -> None:
    lengths = Lengths(prompt=128, new=512)
    work = distillation_work(
        "qwen3-8b", "qwen3-32b", lengths, prompts=64, samples=4, device=GPUS["h200"]
    )
    assert not estimate(work).fits(work.device)
    changes = {change.setting: change for change in propose_changes(work)}
    checkpointed = replace(
        work,
        recipe=work.recipe.model_copy(
            update={"student": work.recipe.student.model_copy(
                update={"gradient_checkpointing": True}
            )}
        ),
    )  # fmt: skip
    change = changes["student.gradient_checkpointing=true"]
    assert change.peak_bytes == estimate(checkpointed).peak.total
    assert change.step_seconds == estimate(checkpointed).step_seconds
    assert set(changes) >= {
        "train.optimizer_offload=true", "teacher.dtype=int8", "teacher.dtype=nf4",
        "student.lora.rank=32", "--gpus 8",
    }  # fmt: skip
    # Shards become smaller, the teacher's too; the sampler and a pass's activations do not.
    assert changes["--gpus 8"].fits and "--gpus 2" not in changes
    together = [change for change in changes.values() if " " in change.setting and change.fits]
    assert any("lora" in c.setting or "checkpointing" in c.setting for c in together)


def test_a_change_that_is_proposed_fits_when_it_is_made() -> None:
    recipe = make_recipe(
        student={"model": "Qwen/Qwen3-4B"}, teacher={"kind": "model", "model": "Qwen/Qwen3-4B"}
    )
    result = plan(recipe, gpu="h100", **PROMPTS)
    assert not result.fits
    proposals = [change for change in result.changes if change.fits]
    assert proposals
    for change in proposals:
        tree = json.loads(recipe.model_dump_json(exclude_unset=True))
        num_gpus = 1
        if change.setting.startswith("--gpus"):
            num_gpus = int(change.setting.split()[1])
        else:
            for setting in change.setting.split():
                path, _, value = setting.partition("=")
                *sections, key = path.split(".")
                node = tree
                for section in sections:
                    node = node.setdefault(section, {})
                node[key] = value if value in ("int8", "nf4") else json.loads(value)
        changed = plan(parse_recipe(tree), gpu="h100", num_gpus=num_gpus, **PROMPTS)
        assert changed.fits, change.setting
        assert changed.estimate.peak.total == pytest.approx(change.peak_bytes), change.setting


def test_nothing_is_proposed_where_it_fits() -> None:
    recipe = make_recipe(
        student={"model": "Qwen/Qwen3-0.6B"}, teacher={"kind": "model", "model": "Qwen/Qwen3-1.7B"}
    )
    result = plan(recipe, gpu="h200", **PROMPTS)
    assert result.fits and result.changes == ()
    assert 30 * GIB < result.estimate.peak.total < 40 * GIB


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def run_command(*args: str) -> Any:
    return CliRunner().invoke(app, ["plan", *args], catch_exceptions=False)


def test_the_command_prints_tables(recipe_file: Path) -> None:
    done = run_command(str(recipe_file), "--gpu", "h200", "--prompt-tokens", "100",
                       "--price-per-hour", "3")  # fmt: skip
    assert done.exit_code == 0
    for text in ("whole step", "50 steps", "GiB of one GPU", "AdamW moments", "fits: ", "money: "):
        assert text in done.stdout
    assert "student qwen3-0.6b: 596M parameters; teacher qwen3-1.7b: 1.72G, bfloat16" in done.stdout
    assert "rollout.max_new_tokens" in done.stdout


def test_the_command_says_what_does_not_fit(recipe_file: Path) -> None:
    done = run_command(str(recipe_file), "student.model=Qwen/Qwen3-32B", "--prompt-tokens", "100")
    assert done.exit_code == 0
    assert "DOES NOT FIT" in done.stdout
    assert re.search(r"student\.lora\.rank=32 +\d", done.stdout)
    assert "--gpus " in done.stdout


def test_json_has_what_the_tables_have(recipe_file: Path) -> None:
    args = (str(recipe_file), "--prompt-tokens", "100", "--gpus", "2")
    tree = json.loads(run_command(*args, "--json").stdout)
    expected = plan(recipe_file, num_gpus=2, prompt_tokens=100)
    assert tree["hours"] == pytest.approx(expected.hours)
    assert tree["fits"] is True and tree["cost"] is None
    assert tree["estimate"]["peak_bytes"] == pytest.approx(expected.estimate.peak.total)
    assert tree["models"]["num_trained"] == 596_049_920
    assert [phase["name"] for phase in tree["estimate"]["phases"]] == [
        "rollout", "teacher", "update", "record",
    ]  # fmt: skip


def test_the_page_is_self_contained_and_escaped(recipe_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    done = run_command(
        str(recipe_file), "student.model=<b>x</b>", "--shape", "qwen3-32b", "--prompt-tokens",
        "100", "--html", str(page),
    )  # fmt: skip
    assert done.exit_code == 0 and str(page) in done.stdout
    text = page.read_text("utf-8")
    assert "&lt;b&gt;x&lt;/b&gt;" in text and "<b>x</b>" not in text
    assert "AdamW moments" in text and "DOES NOT FIT" in text and "--gpus" in text
    assert not re.search(r"(src|href)=\"http", text) and "<script" not in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--gpu", "h300"), r"--gpu 'h300' is not known\. Known: h200, h100, .*cpu"),
        (("--gpus", "0"), r"--gpus 0: give a number from 1 to 4,096"),
        (("--gpus", "99999"), "give a number from 1"),
        (("--gpu", "cpu", "--gpus", "2"), "a run uses one machine's CPU"),
        (("--prompt-tokens", "0"), "prompt tokens = 0: give a number from 1"),
        (("--prompt-tokens", "nan"), "prompt tokens = nan"),
        (("--new-tokens", "1e12"), "new tokens = 1e"),
        (("--turns", "-1"), "turns tokens = -1"),
        (("--context-tokens", "-1"), "context tokens = -1: give a number from 0"),
        (("student.lora.rank=4000",), r"student\.lora\.rank = 4,000: .*1,024 wide"),
        (("--price-per-hour", "-3"), "give the price of a GPU and hour"),
        (("--shape", "qwen9"), r"--shape 'qwen9' is not known\. Known: smollm2-135m"),
        (("student.device=cpu",), r"student\.device = 'cpu' and --gpu h200 contradict"),
        (("student.model=nobody/nothing",), r"nobody/nothing.*give --shape"),
        (("--from-run", "/nowhere"), "not a run folder"),
    ],
)
def test_bad_input_is_refused(recipe_file: Path, args: tuple[str, ...], message: str) -> None:
    lengths = () if "--prompt-tokens" in args else ("--prompt-tokens", "100")
    done = run_command(str(recipe_file), *args, *lengths)
    assert done.exit_code == 2
    assert re.search(message, done.stderr.replace("\n", " ")), done.stderr


def test_unknown_lengths_say_what_to_give(recipe_file: Path) -> None:
    done = run_command(str(recipe_file), "student.model=nobody/nothing", "--shape", "qwen3-8b")
    assert done.exit_code == 2 and "Give --prompt-tokens" in done.stderr
    world = make_recipe(
        tasks={"kind": "environment", "path": "worlds:World"},
        losses=[{"kind": "divergence"}],
    )
    with pytest.raises(UserError, match="Give --turns"):
        plan(world, **PROMPTS)
    with pytest.raises(UserError, match="no teacher here is another model"):
        plan(make_recipe(teacher={
            "kind": "self", "context": {"kind": "system", "text": "Well."},
        }), teacher_shape="qwen3-8b", **PROMPTS)  # fmt: skip


def test_a_plan_of_known_shapes_loads_no_torch(recipe_file: Path) -> None:
    code = (
        "import sys, courtside\n"
        f"courtside.plan({str(recipe_file)!r}, prompt_tokens=100)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'loaded'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ── corrections ──────────────────────────────────────────────────────────────────────────────────

SERVER = {"base_url": "http://localhost:1/v1", "model": "big", "max_concurrency": 4}
REWRITE = {"kind": "rewrite", "endpoint": SERVER, "max_new_tokens": 100}
IMITATE = [{"kind": "cross_entropy", "on": "teacher"}, {"kind": "divergence", "on": "student"}]
TAKEOVER = ("takeover.at=random", 'losses=[{kind="cross_entropy", on="teacher"}]')


def test_mixed_sampling_says_that_its_time_is_not_measured() -> None:
    rollout = {"samples_per_prompt": 4, "max_new_tokens": 512, "mixed_sampling": {"top_k": 20}}
    plain, mixed = (plan(make_recipe(**c), **PROMPTS) for c in ({}, {"rollout": rollout}))
    assert any("mixed sampling decodes eagerly" in note for note in mixed.notes)
    assert not any("mixed" in note for note in plain.notes)
    before, after = (result.estimate for result in (plain, mixed))
    assert after.phases[0].seconds > 2 * before.phases[0].seconds
    assert "teacher's KV cache" in after.memory[0].parts
    # Both caches are within the budget of one.
    assert after.phases[1] == before.phases[1] and after.phases[2] == before.phases[2]


def test_calls_to_an_endpoint_are_counted_as_calls() -> None:
    recipe = make_recipe(drafts=[REWRITE], losses=IMITATE)
    assume = {"failed_fraction": 0.5, "question_tokens": 900, "reply_tokens": 60}
    most = plan(recipe, **PROMPTS)
    result = plan(recipe, assume=assume | {"call_seconds": 2.0}, **PROMPTS)
    (drafts,) = (phase for phase in result.estimate.phases if phase.name == "drafts")
    assert drafts.flops.counted == drafts.flops.executed == 0
    assert drafts.flops.calls == 64 * 4 * 0.5
    assert (drafts.flops.input_tokens, drafts.flops.output_tokens) == (128 * 900, 128 * 60)
    assert drafts.seconds == 128 / 4 * 2.0
    (drafts,) = (phase for phase in most.estimate.phases if phase.name == "drafts")
    assert drafts.flops.calls == 256 and drafts.flops.output_tokens == 256 * 100
    assert any("calls take no time (assumed" in line for line in most.assumptions)
    assert any(line.startswith("50% of the drafts fail (given)") for line in result.assumptions)
    assert not any("drafts" in memory.phase for memory in result.estimate.memory)


def test_a_teacher_that_writes_takes_time_and_memory() -> None:
    recipe = make_recipe(drafts=[REWRITE | {"endpoint": None}], losses=IMITATE, takeover={})
    result = plan(recipe, **PROMPTS).estimate
    assert [memory.phase for memory in result.memory] == [
        "rollout", "drafts", "take-over", "teacher", "update",
    ]  # fmt: skip
    assert all(memory.parts["KV cache"] > 0 for memory in result.memory[:3])
    drafts = next(phase for phase in result.phases if phase.name == "drafts")
    assert drafts.seconds > 0 and drafts.flops.executed > 0 and drafts.flops.calls == 0
    half = plan(recipe, assume={"failed_fraction": 0.5}, **PROMPTS).estimate
    assert half.step_flops.counted < 0.65 * result.step_flops.counted


@pytest.mark.parametrize(
    ("changes", "assume", "message"),
    [
        ((), "failed_fraction=0.5", "nothing in this recipe depends on it. Remove it"),
        (TAKEOVER, "pair_fraction=1", "It depends on failed_fraction, "),
        (TAKEOVER, "failed_fraction=1.5", "give a number from 0 to 1 "),
        (TAKEOVER, "prefix_tokens=-1", "give a number from 0 to "),
        (TAKEOVER, "failed=1", "--assume failed: is not known. Known: failed_fraction, "),
        (TAKEOVER, "failed_fraction", "give NAME=VALUE with a number"),
    ],
)
def test_rates_that_cannot_be_are_refused(
    changes: tuple[str, ...], assume: str, message: str, recipe_file: Path
) -> None:
    args = (str(recipe_file), *changes, "--prompt-tokens", "100", "--assume", assume)
    done = run_command(*args)
    assert done.exit_code == 2 and message in done.stderr.replace("\n", " ")


def test_the_command_says_how_a_budget_ends_the_run(recipe_file: Path) -> None:
    args = (str(recipe_file), "--prompt-tokens", "100", "train.max_student_tokens=100000")
    text = run_command(*args).stdout
    # 64 samples of 228 tokens, sampled and trained: 29 thousand a step.
    assert "ends after 4 steps by its budget: train.max_student_tokens = 100k, of which a" in text
    assert "4 steps" in text and "50 steps" not in text


def test_a_served_teacher_has_the_flops_of_its_stated_size_and_no_time() -> None:
    server = {"kind": "server", "server": {"urls": ["http://localhost:1"], "model": "big"}}
    losses = [{"kind": "policy_gradient", "advantage": "teacher_gap"}]
    without_size, with_size = (
        plan(make_recipe(teacher=server | size, losses=losses), **PROMPTS).estimate
        for size in ({}, {"num_parameters": 10**9})
    )
    first, second = (
        next(phase for phase in result.phases if phase.name == "teacher")
        for result in (without_size, with_size)
    )
    num_tokens = 64 * 4 * (128 + 512)
    assert first.flops.input_tokens == second.flops.teacher_tokens == num_tokens
    assert (first.flops.counted, second.flops.counted) == (0, 2e9 * num_tokens)
    assert first.seconds == second.seconds == 0
