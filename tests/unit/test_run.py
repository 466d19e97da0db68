"""A run in its folder: what it keeps, counts and says. Kills and resumes are in the invariants."""

from __future__ import annotations

import gc
import math
import os
import signal
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe, write_jsonl

from courtside.api import train
from courtside.assemble import assemble
from courtside.errors import (
    CheckpointError,
    Interrupted,
    NotFiniteError,
    RunError,
    ServerError,
    TaskError,
)
from courtside.loop import train_loop
from courtside.progress import ProgressMeter
from courtside.report.console import RunConsole
from courtside.report.costs import CostMeter
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.parquet import read_trajectories
from courtside.run import Run
from courtside.run_state import _file_name
from courtside.training import checkpoints


class Recorder(RunConsole):
    """A console that records its calls and can act on a step."""

    def __init__(self, on_step: Any = None) -> None:
        self.texts: list[str] = []
        self.phases: list[str] = []
        self.steps = 0
        self.finished = 0
        self.on_step = on_step

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def print_line(self, text: str) -> None:
        self.texts.append(text)

    def step(self, row: Any) -> None:
        self.steps += 1
        if self.on_step:
            self.on_step(row)

    def finish(self) -> None:
        self.finished += 1


def go(recipe: Any, path: Path, console: Recorder, spoil: Any = None) -> Run:
    """`verbs.train`, with the parts in hand."""
    with RunFolder.open(path, recipe) as folder:
        parts = assemble(recipe)
        run = Run(parts, folder, console)
        if spoil:
            spoil(parts)
        train_loop(parts, run)
        return run


def test_the_console_shows_the_outer_phase_after_a_nested_one() -> None:
    names: list[str] = []
    run = object.__new__(Run)
    run.console, run.meter = RunConsole(), CostMeter()
    run.parts = SimpleNamespace(progress=ProgressMeter())
    run.console.phase = names.append
    with run.phase("evaluate"), run.phase("rollout"):
        pass
    with run.phase("rollout"):
        pass
    assert names == ["evaluate", "rollout", "evaluate", "rollout"]


def test_a_run_leaves_everything_that_it_promises(tiny_folder, tiny_teacher_folder, tmp_path):
    console = Recorder()
    recipe = small_recipe(tiny_folder, tiny_teacher_folder, evaluate={"num_tasks": 2, "every": 2})
    folder = train(recipe, tmp_path / "run", console=console)
    assert [row["step"] for row in folder.metrics()] == [0, 1, 2, 3, 4]
    measured = [(e.step, e.policy, e.split) for e in folder.evaluations()]
    assert sorted(measured) == [
        (0, "student", "test"), (0, "student", "validation"), (0, "teacher", "test"),
        (2, "student", "validation"), (4, "student", "validation"), (5, "student", "test"),
    ]  # fmt: skip
    assert [p.name for p in sorted(folder.checkpoints.iterdir())] == ["step-000004", "step-000005"]
    assert folder.trajectory_steps() == [0, 1, 2, 3, 4]
    assert sorted(folder.stored_evaluations()) == sorted(measured)
    for evaluation in folder.evaluations():
        answers = folder.evaluation_trajectories(evaluation)
        assert {t.task.id: t.grade.score for t in answers} == evaluation.scores
    assert (folder.path / "report.html").stat().st_size > 1000
    assert folder.recipe() == recipe
    assert console.steps == 5 and console.finished == 1
    step = ["rollout", "drafts", "reader", "teacher", "update"]
    saved = ["checkpoint", "evaluate"]
    between = ["loading models", *["evaluate"] * 3], [], saved, [], saved
    assert console.phases == [p for before in between for p in (*before, *step)] + saved
    assert not (folder.path / "failed").exists()


def test_what_a_step_made_is_gone_when_the_next_begins(tiny_folder, tiny_teacher_folder, tmp_path):
    refs: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(parts: Any) -> None:
        class Teacher:
            """The real one, whose hidden states are remembered."""

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def __call__(self, *args: Any) -> Any:
                gc.collect()
                alive.append(sum(ref() is not None for ref in refs))
                scored = real(*args)
                refs.extend(weakref.ref(s.target.hidden_TD) for s in scored)
                return scored

        real = parts.teacher
        object.__setattr__(parts, "teacher", Teacher())

    recipe = small_recipe(
        tiny_folder, tiny_teacher_folder, train={"steps": 2, "prompts_per_step": 2}
    )
    go(recipe, tmp_path / "run", Recorder(), watched)
    assert len(refs) > 2 and alive == [0, 0]


def test_trajectories_are_stored_as_often_as_configured(tiny_folder, tiny_teacher_folder, tmp_path):
    run = {"trajectories_every": 3, "checkpoint_every": 5}
    folder = train(small_recipe(tiny_folder, tiny_teacher_folder, run=run), tmp_path / "run")
    assert folder.trajectory_steps() == [0, 3, 4]  # and the last


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_moving_average_follows_every_step(lora, tiny_folder, tmp_path):
    """Its checkpoints against θ̄ ← d·θ̄ + (1 − d)·θ over those of the weights."""
    recipe = small_recipe(
        tiny_folder,
        student={"model": str(tiny_folder)} | ({"lora": lora} if lora else {}),
        teacher={"kind": "self", "weights": "ema", "ema_decay": 0.6,
                 "context": {"kind": "system", "text": "be brief"}},
        train={"steps": 4, "prompts_per_step": 2, "learning_rate": 1e-2},
        run={"checkpoint_every": 1, "keep_checkpoints": 9},
    )  # fmt: skip
    folder = train(recipe, tmp_path / "run")
    average = {n: p.detach() for n, p in assemble(recipe).student.weights.trained.items()}
    for step in (1, 2, 3, 4):
        saved = checkpoints.load(checkpoints.at(folder.checkpoints, step)).tensors
        for name, weight in saved["weights"].items():
            average[name] = 0.6 * average[name] + 0.4 * weight
        for name, tensor in saved["average-self%3Aema"].items():
            torch.testing.assert_close(tensor, average[name])


# ── not finite ───────────────────────────────────────────────────────────────────────────────────


def test_a_batch_that_is_not_finite_is_stored(tiny_folder, tiny_teacher_folder, tmp_path):
    """From step 3 on the teacher excludes every word but one."""
    recipe = small_recipe(tiny_folder, tiny_teacher_folder)
    before: list[torch.Tensor] = []

    def spoil(parts: Any) -> None:
        def act(row: Any) -> None:
            if row["step"] == 2:
                head = parts.teacher.teacher.engine.head
                module = torch.nn.Linear(32, head.vocab_size)
                module.bias.data[:] = -math.inf
                module.bias.data[0] = 0.0
                head.module = module
                trained = parts.student.weights.trained.values()
                before.extend(p.detach().clone() for p in trained)
                batches.append(parts)

        console.on_step = act

    batches: list[Any] = []
    console = Recorder()
    path = tmp_path / "run"
    with pytest.raises(NotFiniteError) as caught:
        go(recipe, path, console, spoil)
    file = path / "failed" / "step-000003.parquet"
    message = str(caught.value)
    assert "step 3: the loss 'divergence' is not finite; no weight was changed" in message
    assert str(file) in message and "The last checkpoint is from step 2" in message
    batch = read_trajectories(file, 3)
    assert len(batch) == 4 and all(record.teacher_logp for record in batch)
    assert any(math.isinf(logp) for record in batch for logp in record.teacher_logp)
    after = [p.detach() for p in batches[0].student.weights.trained.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert len(RunFolder.read(path).metrics()) == 3
    assert console.finished == 1
    # What was wrong is mended; the run goes on from its checkpoint.
    assert len(train(recipe, path).metrics()) == 5


def test_a_first_step_that_is_not_finite_can_be_corrected(
    tiny_folder, tiny_teacher_folder, tmp_path
):
    def spoil(parts: Any) -> None:
        next(iter(parts.student.weights.trained.values())).data.fill_(math.nan)

    recipe = small_recipe(tiny_folder, tiny_teacher_folder)
    with pytest.raises(NotFiniteError):
        go(recipe, tmp_path / "run", Recorder(), spoil)
    assert (tmp_path / "run" / "failed" / "step-000000.parquet").is_file()
    changed = small_recipe(
        tiny_folder, tiny_teacher_folder, train={"steps": 2, "prompts_per_step": 1}
    )
    folder = train(changed, tmp_path / "run")
    assert len(folder.metrics()) == 2 and folder.recipe() == changed


def test_a_component_without_tokens_is_null_in_the_metrics(
    tiny_folder, tiny_teacher_folder, tmp_path
):
    ramp = {"start": 0.0, "end": 1.0, "steps": 4}
    recipe = small_recipe(
        tiny_folder,
        tiny_teacher_folder,
        tasks={"kind": "arithmetic"},
        rollout={"samples_per_prompt": 2, "max_new_tokens": 4, "student_fraction": ramp},
        losses=[
            {"kind": "divergence", "on": "student"},
            {"kind": "cross_entropy", "on": "dataset"},
        ],
    )
    rows = train(recipe, tmp_path / "run").metrics()
    assert rows[0]["loss/divergence"] is None and rows[0]["tokens/divergence"] == 0
    assert rows[0]["loss"] == rows[0]["loss/cross_entropy"] > 0
    assert "kl" not in rows[0]  # never measured is not 0
    assert rows[4]["loss/cross_entropy"] is None and rows[4]["kl"] > 0


# ── ways to stop ─────────────────────────────────────────────────────────────────────────────────


def test_an_interrupt_ends_the_run_at_the_next_whole_step(
    tiny_folder, tiny_teacher_folder, tmp_path
):
    recipe = small_recipe(
        tiny_folder, tiny_teacher_folder, run={"checkpoint_every": 100}, evaluate={"num_tasks": 1}
    )
    ours = signal.getsignal(signal.SIGINT)

    def interrupt(row: Any) -> None:
        if row["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    console = Recorder(interrupt)
    with pytest.raises(Interrupted, match=r"stopped by Ctrl-C after 3 of 5 steps; everything"):
        train(recipe, tmp_path / "run", console=console)
    assert any("press Ctrl-C again" in text for text in console.texts)
    assert signal.getsignal(signal.SIGINT) is ours
    assert console.finished == 1
    assert checkpoints.latest(tmp_path / "run" / "checkpoints").name == "step-000003"

    def twice(row: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "run", console=Recorder(twice))
    assert signal.getsignal(signal.SIGINT) is ours
    assert len(train(recipe, tmp_path / "run").metrics()) == 5


@pytest.mark.parametrize(
    ("phase", "num_phases", "name", "num_steps"),
    [
        ("evaluate", 1, "SIGTERM", 0),
        ("evaluate", 1, "SIGINT", 0),
        ("rollout", 1, "SIGTERM", 0),
        ("rollout", 1, "SIGINT", 1),  # Ctrl-C lets the step be done
        ("update", 1, "SIGHUP", 1),  # weights are being changed
        ("teacher", 3, "SIGHUP", 2),
        ("checkpoint", 1, "SIGTERM", 3),  # and not after the evaluation that follows
        ("evaluate", 3, "SIGTERM", 3),
    ],
)
def test_signals_stop_a_run_where_no_weight_is_changed(
    tiny_folder, tmp_path, phase, num_phases, name, num_steps
):
    recipe = small_recipe(
        tiny_folder,
        teacher={"kind": "self", "weights": "frozen"},
        train={"steps": 4, "prompts_per_step": 1},
        evaluate={"num_tasks": 1, "every": 3, "teacher": False},
        run={"checkpoint_every": 3},
    )
    console = Recorder()
    number = getattr(signal, name)
    handlers = {signum: signal.getsignal(signum) for signum in (number, signal.SIGINT)}

    def act(current: str) -> None:
        Recorder.phase(console, current)
        if current == phase and console.phases.count(phase) == num_phases:
            os.kill(os.getpid(), number)

    console.phase = act  # type: ignore[method-assign]
    where = f"after {num_steps} of 4 steps" if num_steps else "before the first step"
    who = "Ctrl-C" if name == "SIGINT" else name
    with pytest.raises(Interrupted, match=f"stopped by {who} {where}") as stopped:
        train(recipe, tmp_path / "run", console=console)
    assert stopped.value.signal_number == number
    assert {signum: signal.getsignal(signum) for signum in handlers} == handlers
    latest = checkpoints.latest(tmp_path / "run" / "checkpoints")
    assert (checkpoints.num_steps_of(latest) if latest else 0) == num_steps
    folder = train(recipe, tmp_path / "run")
    assert [row["step"] for row in folder.metrics()] == [0, 1, 2, 3]
    assert [e.step for e in folder.evaluations()] == [0, 0, 3, 4]


def test_nohup_ignores_a_closed_terminal(tiny_folder, tmp_path):
    recipe = small_recipe(
        tiny_folder,
        teacher={"kind": "self", "weights": "frozen"},
        train={"steps": 2, "prompts_per_step": 1},
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        console = Recorder(lambda row: os.kill(os.getpid(), signal.SIGHUP))
        assert len(train(recipe, tmp_path / "run", console=console).metrics()) == 2
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_the_user_must_mend_does_not_cost_the_steps_done(tiny_folder, tmp_path):
    """A task without a completion turns up in the third step."""
    rows = [{"prompt": f"say {n}", "completion": "yes", "split": "train"} for n in range(6)]
    file = write_jsonl(tmp_path / "tasks.jsonl", rows)
    recipe = small_recipe(
        tiny_folder,
        tasks={"kind": "jsonl", "path": str(file)},
        rollout={"student_fraction": 0.0},
        losses=[{"kind": "cross_entropy"}],
        run={"checkpoint_every": 100},
    )
    third = assemble(recipe).tasks.batch(2, 2)[0].messages[0].content
    for row in rows:
        if row["prompt"] == third:
            del row["completion"]
    write_jsonl(file, rows)
    console = Recorder()
    with pytest.raises(TaskError, match="`completion` on every task"):
        train(recipe, tmp_path / "run", console=console)
    assert checkpoints.latest(tmp_path / "run" / "checkpoints").name == "step-000002"
    assert console.finished == 1
    write_jsonl(file, [row | {"completion": "yes"} for row in rows])
    assert len(train(recipe, tmp_path / "run").metrics()) == 5


@pytest.mark.parametrize(("phase", "num_saved"), [("teacher", 2), ("update", 0), ("weights", 3)])
def test_servers_that_fail_do_not_cost_the_steps_done(
    phase, num_saved, tiny_folder, tiny_teacher_folder, tmp_path
):
    """In an update the weights are no longer those of the steps recorded: saved under that number,
    the batch would train them twice. When they do not reach the servers, the step is done."""
    recipe = small_recipe(tiny_folder, tiny_teacher_folder, run={"checkpoint_every": 100})
    plain = go(recipe, tmp_path / "plain", Recorder())

    def spoil(parts: Any) -> None:
        what, name = {
            "teacher": (parts, "teacher"),
            "update": (parts.student, "accumulate"),
            "weights": (parts.engine, "load_weights"),
        }[phase]
        real, calls = getattr(what, name), []

        def fail_at_the_third(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 3:
                raise ServerError("no answer")
            return real(*args)

        object.__setattr__(what, name, fail_at_the_third)

    with pytest.raises(ServerError, match="no answer"):
        go(recipe, tmp_path / "run", Recorder(), spoil)
    saved = checkpoints.latest(tmp_path / "run" / "checkpoints")
    assert (saved and saved.name) == (f"step-{num_saved:06d}" if num_saved else None)
    num_rows = num_saved or 2  # those after the last checkpoint are trained again
    assert len(RunFolder.read(tmp_path / "run").metrics()) == num_rows
    resumed = go(recipe, tmp_path / "run", Recorder())
    for name, tensor in plain.parts.student.weights.trained.items():
        assert torch.equal(tensor, resumed.parts.student.weights.trained[name]), name


def test_a_step_that_cannot_be_saved_does_not_hide_what_servers_said(
    tiny_folder, tiny_teacher_folder, tmp_path, monkeypatch
):
    recipe = small_recipe(tiny_folder, tiny_teacher_folder, run={"checkpoint_every": 100})
    tries = []

    def save(parts: Any, folder: Path, num_steps: int) -> None:
        tries.append(num_steps)
        raise CheckpointError("the disk is full")

    def spoil(parts: Any) -> None:
        def fail(version: int) -> None:
            raise ServerError("no answer")

        object.__setattr__(parts.engine, "load_weights", fail)

    monkeypatch.setattr("courtside.run.save_checkpoint", save)
    with pytest.raises(ServerError) as caught:
        go(recipe, tmp_path / "run", Recorder(), spoil)
    assert str(caught.value) == "no answer. The step was not saved either: the disk is full"
    assert tries == [1]


def test_the_last_step_is_saved_before_it_is_measured(
    tiny_folder, tiny_teacher_folder, tmp_path, monkeypatch
):
    recipe = small_recipe(tiny_folder, tiny_teacher_folder)
    saved = []
    real = RunFolder.record_evaluation

    def record(self: RunFolder, evaluation: Any, trajectories: Any) -> None:
        latest = checkpoints.latest(self.checkpoints)
        saved.append((evaluation.step, latest and latest.name))
        real(self, evaluation, trajectories)

    monkeypatch.setattr(RunFolder, "record_evaluation", record)
    train(recipe, tmp_path / "run")
    assert saved == [(0, None), (0, None), (5, "step-000005")]


def test_a_run_that_trained_nothing_says_so(tiny_folder, tmp_path):
    """Hints of other episodes, where all episodes are one."""
    recipe = small_recipe(
        tiny_folder,
        tiny_folder,
        tasks={"kind": "toolbox", "turns": 1, "num_tools": 2},
        rollout={"samples_per_prompt": 2, "max_new_tokens": 4},
        reader={"kind": "rules", "rules": [{"detect": "no_call"}], "control": "random_hint"},
        teacher={"kind": "self", "weights": "live"},
        losses=[{"kind": "divergence", "on": "hinted_turns"}],
        train={"steps": 2, "prompts_per_step": 1},
    )
    console = Recorder()
    folder = train(recipe, tmp_path / "run", console=console)
    (alarm,) = folder.alarms()
    assert alarm["step"] == 1 and alarm["message"] in console.texts
    assert "none of the 2 steps trained a single token" in alarm["message"]
    assert "dropped/no_other_hint 4" in alarm["message"]


def test_a_split_without_tasks_is_told_once(tiny_folder, tiny_teacher_folder, tmp_path):
    """Though the student and its teacher would be measured on it."""
    rows = [{"prompt": f"{n}?", "split": "train"} for n in range(4)]
    tasks = {"kind": "jsonl", "path": str(write_jsonl(tmp_path / "tasks.jsonl", rows))}
    console = Recorder()
    recipe = small_recipe(
        tiny_folder, tiny_teacher_folder, tasks=tasks, train={"steps": 1, "prompts_per_step": 2}
    )
    train(recipe, tmp_path / "run", console=console)
    assert sum(note.startswith("not evaluated on test tasks") for note in console.texts) == 1


def test_a_finished_run_says_so(tiny_folder, tiny_teacher_folder, tmp_path):
    recipe = small_recipe(
        tiny_folder, tiny_teacher_folder, train={"steps": 1, "prompts_per_step": 1}
    )
    train(recipe, tmp_path / "run")
    console = Recorder()
    train(recipe, tmp_path / "run", console=console)
    assert console.texts == [f"{tmp_path / 'run'}: all 1 steps are done; nothing to train"]
    assert console.steps == 0


# ── costs ────────────────────────────────────────────────────────────────────────────────────────


def test_costs_are_counted_with_the_size_of_who_did_the_work(
    tiny_folder, tiny_teacher_folder, tmp_path
):
    recipe = small_recipe(
        tiny_folder,
        tiny_teacher_folder,
        losses=[{"kind": "divergence", "extrapolate": 1.2}],
        train={"steps": 2, "prompts_per_step": 2},
    )
    folder = train(recipe, tmp_path / "run")
    parts = assemble(recipe)
    size = sum(p.numel() for p in parts.engine.model.parameters())
    (teacher_size,) = parts.teacher_sizes.values()
    assert teacher_size > size
    stored = [s.trajectory for step in (0, 1) for s in folder.trajectories(step)]
    length = sum(len(t.token_ids) for t in stored)
    num_tokens = sum(t.num_completion_tokens for t in stored)
    costs = folder.read_costs()
    assert costs["rollout"].output_tokens == num_tokens
    assert costs["rollout"].input_tokens == length - num_tokens
    assert costs["rollout"].flops == 2 * size * length
    assert costs["teacher"].input_tokens == 2 * length  # the teacher and the reference
    assert costs["teacher"].flops == 2 * (teacher_size + size) * length
    # The last token of each is predicted, not read.
    assert costs["update"].input_tokens == length - len(stored)
    assert costs["update"].flops == 6 * size * (length - len(stored))
    assert all(cost.seconds > 0 for cost in costs.values())
    # The last evaluation is in them too.
    evaluations = [e for e in folder.evaluations()]
    answered = sum(round(e.metrics["length"] * len(e.scores)) for e in evaluations)
    assert costs["evaluate"].output_tokens == answered and len(evaluations) == 3


def test_costs_of_steps_that_are_done_again_stay(tiny_folder, tiny_teacher_folder, tmp_path):
    def stop(row: Any) -> None:
        if row["step"] == 2:
            raise RuntimeError("a power cut")

    recipe = small_recipe(tiny_folder, tiny_teacher_folder)
    with pytest.raises(RuntimeError):
        train(recipe, tmp_path / "run", console=Recorder(stop))
    paid = RunFolder.read(tmp_path / "run").read_costs()
    folder = train(recipe, tmp_path / "run")
    once = sum(t.trajectory.num_completion_tokens for s in range(5) for t in folder.trajectories(s))
    num_tokens_after = sum(t.trajectory.num_completion_tokens for t in folder.trajectories(2))
    assert folder.read_costs()["rollout"].output_tokens == once + num_tokens_after
    assert folder.read_costs()["rollout"].seconds > paid["rollout"].seconds


def test_names_of_averages_stay_apart():
    names = ["a:self:ema", "a-self-ema", "a self:ema", "a/self:ema", "ä:self:ema"]
    assert len({_file_name(name) for name in names}) == len(names)
    assert not any("/" in _file_name(name) for name in names)


@pytest.mark.parametrize("recomputes", [False, True])
def test_out_of_memory_says_what_to_lower(recomputes, tiny_folder, tiny_teacher_folder, tmp_path):
    def spoil(parts: Any) -> None:
        whole = parts.student.step

        def step(number: int, scored: Any) -> Any:
            if number == 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
            return whole(number, scored)

        parts.student.step = step

    student = {"model": str(tiny_folder), "gradient_checkpointing": recomputes}
    recipe = small_recipe(tiny_folder, tiny_teacher_folder, student=student)
    with pytest.raises(RunError, match=r"step 3.*from step 2.*micro_batch_tokens") as error:
        go(recipe, tmp_path / "run", Recorder(), spoil)
    assert "more" not in str(error.value)
    assert ("student.gradient_checkpointing = true" in str(error.value)) == (not recomputes)
    assert "train.optimizer_offload = true" in str(error.value)
    # And it goes on from there with what it was told to change.
    less = {"micro_batch_tokens": 64, "logits_chunk_tokens": 16, "optimizer_offload": True}
    lean = small_recipe(
        tiny_folder,
        tiny_teacher_folder,
        student=student | {"gradient_checkpointing": True},
        train=recipe.train.model_dump(exclude_unset=True) | less,
        rollout=recipe.rollout.model_dump(exclude_unset=True) | {"kv_cache_tokens": 600},
    )
    done = train(lean, tmp_path / "run")
    assert done.metrics()[-1]["step"] == 4 and done.recipe() == lean


def test_a_completion_too_long_for_the_context_is_told_at_the_start(tiny_folder, tmp_path):
    rows = [{"prompt": f"p{n}", "completion": "yes", "split": "train"} for n in range(4)]
    path = write_jsonl(
        tmp_path / "tasks.jsonl", [*rows, rows[0] | {"prompt": "long", "completion": "y" * 600}]
    )
    tasks = {"kind": "jsonl", "path": str(path)}
    imitate = {"rollout": {"student_fraction": 0.0}, "losses": [{"kind": "cross_entropy"}]}
    with pytest.raises(TaskError, match=r"'long'.*its completion"):
        assemble(small_recipe(tiny_folder, tasks=tasks, **imitate))
    reloaded = assemble(
        small_recipe(tiny_folder, tasks=tasks | {"overlong_prompts": "drop"}, **imitate)
    )
    assert reloaded.tasks.num_dropped == 1
