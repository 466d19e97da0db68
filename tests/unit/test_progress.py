"""Numbers inside a long phase: who counts, what is displayed, and how often."""

from __future__ import annotations

import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from rich.console import Console
from support.small_runs import small_recipe

from courtside.api import train
from courtside.engines.base import Sampling
from courtside.engines.generation.sampler import SampleBuffer
from courtside.errors import ModelError
from courtside.progress import PhaseProgress, ProgressMeter
from courtside.report.console import PlainConsole, RichConsole, RunConsole, format_progress
from courtside.report.costs import CostMeter
from courtside.report.folder.folder import RunFolder
from courtside.run import Run


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_answers_under_way_count_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("courtside.progress.time.monotonic", clock)
    progress = PhaseProgress(total=4, unit="answers", max_tokens=10, start=0.0)
    assert progress.fraction == 0 and progress.remaining is None
    clock.now = 2.0
    progress.num_tokens, progress.finished, progress.num_unused = 8, 2, 16
    assert progress.fraction == 24 / 40 and progress.tokens_per_second == 4.0
    assert progress.remaining == pytest.approx(2.0 * 16 / 24)
    assert format_progress(progress) == "2/4 answers · 4 tok/s · ETA 1.3s"


class Tokenizer:
    def decode(self, ids: Any, **_: Any) -> str:
        return ""


def make_buffer(meter: ProgressMeter, **settings: Any) -> SampleBuffer:
    sampling = Sampling(max_new_tokens=3, **settings)
    return SampleBuffer(2, sampling, eos=frozenset({0}), tokenizer=Tokenizer(), progress=meter)


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_row_is_finished_at_its_end_or_its_limit(stop: tuple[str, ...]) -> None:
    progress = PhaseProgress(total=2, unit="answers", max_tokens=3)
    buffer = make_buffer(ProgressMeter(progress), stop=stop)
    assert buffer.append([0, 1], [5, 0], [0.0, 0.0]) == [0]
    assert (progress.num_tokens, progress.finished, progress.num_unused) == (2, 1, 2)
    buffer.extend(0, [6, 7], [0.0, 0.0])
    assert (progress.num_tokens, progress.finished, progress.num_unused) == (4, 2, 2)
    assert progress.fraction == 1.0


def test_samples_inside_episodes_are_tokens_only() -> None:
    progress = PhaseProgress(total=3, unit="episodes")
    make_buffer(ProgressMeter(progress)).append([0, 1], [5, 0], [0.0, 0.0])
    assert (progress.finished, progress.num_tokens, progress.fraction) == (0, 2, 0.0)
    progress.finished, progress.partial = 1, 0.5
    assert progress.fraction == 0.5


def test_a_phase_does_not_go_on_with_the_counts_of_the_one_before() -> None:
    meter = ProgressMeter()
    run = object.__new__(Run)
    run.console, run.meter, run.parts = RunConsole(), CostMeter(), SimpleNamespace(progress=meter)
    with run.phase("rollout"):
        answers = meter.phase = PhaseProgress(total=2, unit="answers", max_tokens=4)
    with run.phase("reader"):  # which may sample too
        make_buffer(meter).append([0, 1], [5, 0], [0.0, 0.0])
    assert meter.phase is None and answers.num_tokens == 0


# ── consoles ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> ProgressMeter:
    """Of episodes that have run for 20 seconds."""
    monkeypatch.setattr(PhaseProgress, "seconds", 20.0)
    return ProgressMeter(PhaseProgress(finished=23, total=48, unit="episodes", num_tokens=6200))


def test_a_log_gets_a_line_after_ten_seconds_and_then_every_thirty(meter: ProgressMeter) -> None:
    stream, clock = io.StringIO(), Clock()
    console = PlainConsole(stream, clock)
    console._watched = meter
    console.phase("evaluate")
    for tenth in range(0, 1000):
        clock.now = tenth / 10
        console.print_progress()
    lines = stream.getvalue().splitlines()
    assert lines == ["evaluate: 23/48 episodes · 310 tok/s · ETA 22s"] * 3  # at 10, 40 and 70
    console.phase("rollout")  # a short phase has none
    clock.now += 9
    console.print_progress()
    assert len(stream.getvalue().splitlines()) == 3


def test_a_log_s_line_needs_no_call_until_the_run_is_finished(
    meter: ProgressMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOOK_EVERY", "FIRST_PROGRESS", "PROGRESS_EVERY"):
        monkeypatch.setattr(f"courtside.report.console.{name}", 0.01)
    stream = io.StringIO()
    console = PlainConsole(stream)
    console.watch(meter)
    console.phase("rollout")
    deadline = time.monotonic() + 10
    while stream.getvalue().count("rollout: 23/48 episodes") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    console.finish()
    time.sleep(0.05)
    lines = stream.getvalue().splitlines()
    time.sleep(0.05)
    assert 2 <= len(lines) == len(stream.getvalue().splitlines())


def test_the_live_line_has_the_phase_s_numbers(recipe: Any, meter: ProgressMeter) -> None:
    clock = Clock()
    console = RichConsole(Console(file=io.StringIO(), force_terminal=True, width=150), clock)
    console.start(recipe, 50, 0)
    console.phase("evaluate")
    console.watch(meter)
    assert "step 1/50  evaluate 0.0s  23/48 episodes · 310 tok/s · ETA 22s" in render_line(console)
    meter.phase = None
    console.phase("update")
    assert "episodes" not in render_line(console)
    console.finish()


@pytest.mark.parametrize("width", [80, 100, 139, 140, 200])
def test_no_number_is_cut_off_on_a_terminal(recipe: Any, width: int, meter: ProgressMeter) -> None:
    clock = Clock()
    console = RichConsole(Console(file=io.StringIO(), force_terminal=True, width=width), clock)
    console.start(recipe, 1000, 0)
    for step in (997, 998):
        clock.now += 500
        console.step({"step": step, "tokens_per_second": 1234.5})
    console.phase("evaluate")
    console.watch(meter)
    line = render_line(console, width)
    assert "step 1000/1000  evaluate 0.0s  23/48 episodes · 310 tok/s · ETA 22s" in line
    assert "…" not in line and ("16m 40s elapsed · run's ETA 8m 20s" in line) == (width >= 140)
    meter.phase = None
    console.phase("update")
    assert "…" not in render_line(console, width)
    console.finish()


def test_an_evaluation_by_itself_has_a_live_line_without_steps(meter: ProgressMeter) -> None:
    console = RichConsole(Console(file=io.StringIO(), force_terminal=True, width=150), Clock())
    console.phase("evaluate")
    console.watch(meter)
    line = render_line(console)
    assert "evaluate 0.0s  23/48 episodes" in line and "step" not in line
    console.finish()


def render_line(console: RichConsole, width: int = 150) -> str:
    plain = Console(file=io.StringIO(), width=width)
    plain.print(console._line())
    return plain.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def recipe(tiny_folder: Path) -> Any:
    return small_recipe(tiny_folder, tiny_folder)


def test_the_line_of_a_start_that_fails_does_not_stay(tmp_path: Path, tiny_folder: Path) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    console = RichConsole(terminal)
    recipe = small_recipe(tiny_folder, tmp_path / "no-such-teacher")
    with pytest.raises(ModelError):
        train(recipe, tmp_path / "run", console=console)
    assert not console._live.is_started
    assert "loading models" in terminal.file.getvalue()  # type: ignore[attr-defined]


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────


class Report(NamedTuple):
    finished: int
    total: int
    unit: str
    num_tokens: int
    fraction: float


class RecordedProgress(PhaseProgress):
    """Reports what a console would see after each count."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.report()

    def report(self) -> None:
        report = Report(self.finished, self.total, self.unit, self.num_tokens, self.fraction)
        self.reports.append(report)


class Recorder(RunConsole):
    """Counts of each phase, in order."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, list[Report]]] = []

    def phase(self, name: str) -> None:
        self.phases.append((name, []))

    def watch(self, progress: ProgressMeter) -> None:
        recorder = self

        class RecordedMeter(ProgressMeter):
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value)
                if value is not None:
                    value.__dict__["reports"] = recorder.phases[-1][1]
                    value.__class__ = RecordedProgress
                    value.report()

        progress.__class__ = RecordedMeter


def phases(console: Recorder, name: str, unit: str) -> list[list[Report]]:
    """Counts of that unit; an evaluation also counts the passes that score its answers."""
    counts = [[p for p in reports if p.unit == unit] for n, reports in console.phases if n == name]
    return [reports for reports in counts if reports]


def check(reports: list[Report], total: int, unit: str) -> None:
    last = reports[-1]
    assert (last.finished, last.total, last.unit, last.fraction) == (total, total, unit, 1.0)
    assert last.num_tokens > 0
    fractions = [p.fraction for p in reports]
    assert fractions == sorted(fractions) and len(set(fractions)) > 2


def test_single_turns_report_answers(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    console = Recorder()
    recipe = small_recipe(
        tiny_folder, tiny_teacher_folder, train={"steps": 1, "prompts_per_step": 2}
    )
    train(recipe, tmp_path / "run", console=console)
    evaluations = phases(console, "evaluate", "answers")
    assert len(evaluations) == 3  # the student before and after, and the teacher
    for reports in evaluations:
        check(reports, 2, "answers")
    (rollout,) = phases(console, "rollout", "answers")
    check(rollout, 4, "answers")


def test_scoring_and_updates_report_their_passes(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    console = Recorder()
    train_config = {"steps": 1, "prompts_per_step": 2, "micro_batch_tokens": 40}
    recipe = small_recipe(tiny_folder, tiny_teacher_folder, train=train_config)
    train(recipe, tmp_path / "run", console=console)
    (teacher,) = phases(console, "teacher", "passes")
    (update,) = phases(console, "update", "micro-batches")
    for reports in (teacher, update):
        assert [p.finished for p in reports] == list(range(reports[0].total + 1))
        assert reports[-1].fraction == 1.0 and reports[-1].num_tokens == 0
    assert update[0].total > 1


@pytest.mark.parametrize(
    "limits", [{}, {"turns": 2}, {"turns": {"start": 2, "end": 3, "steps": 4}}]
)
def test_episodes_report_episodes(
    roomy_folder: Path, tmp_path: Path, limits: dict[str, Any]
) -> None:
    console = Recorder()
    recipe = small_recipe(
        roomy_folder,
        tasks={"kind": "toolbox", "turns": 2, "num_tools": 2},
        teacher={"kind": "self"},
        rollout={"samples_per_prompt": 2, "max_new_tokens": 8, "limits": limits},
        evaluate={"num_tasks": 3},
        train={"steps": 1, "prompts_per_step": 2, "learning_rate": 1e-3},
    )
    train(recipe, tmp_path / "run", console=console)
    for reports in phases(console, "evaluate", "episodes"):
        assert (reports[-1].finished, reports[-1].total, reports[-1].unit) == (3, 3, "episodes")
        assert reports[-1].fraction == 1.0 and reports[-1].num_tokens > 0
        assert any(0 < report.fraction < 1 for report in reports)
    (row,) = RunFolder.read(tmp_path / "run").metrics()
    assert row.get("turn_limit") == (2 if limits else None)
    (rollout,) = phases(console, "rollout", "episodes")
    assert (rollout[-1].finished, rollout[-1].total) == (4, 4)
    # From the first turn on: the recipe limits them, or the environment's settings tell how many.
    assert any(0 < p.fraction < 1 for p in rollout)
