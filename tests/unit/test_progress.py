"""Numbers inside a long phase: who counts, what is displayed, and how often."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from courtside.run import Run


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(clock: Clock) -> tuple[ProgressMeter, list[PhaseProgress]]:
    meter, reports = ProgressMeter(clock), []
    meter.watch(reports.append)
    return meter, reports


def test_answers_under_way_count_by_their_tokens() -> None:
    clock = Clock()
    meter, reports = watched(clock)
    meter.begin(4, "answers", max_tokens=10)
    assert reports[-1].fraction == 0 and reports[-1].remaining is None
    clock.now = 2.0
    meter.add_samples(4, 0, 0)
    meter.add_samples(4, 2, 16)  # two end after two tokens each
    last = reports[-1]
    assert (last.finished, last.total, last.num_tokens) == (2, 4, 8)
    assert last.fraction == 24 / 40 and last.tokens_per_second == 4.0
    assert last.remaining == pytest.approx(2.0 * 16 / 24)
    assert format_progress(last) == "2/4 answers · 4 tok/s · ETA 1.3s"


def test_samples_inside_episodes_are_tokens_only() -> None:
    meter, reports = watched(Clock())
    meter.begin(3, "episodes")
    meter.add_samples(12, 3, 5)
    assert (reports[-1].finished, reports[-1].num_tokens, reports[-1].fraction) == (0, 12, 0.0)
    meter.set_finished(1, 0.5)
    assert (reports[-1].finished, reports[-1].fraction) == (1, 0.5)


def test_counts_without_a_beginning_go_nowhere() -> None:
    meter, reports = watched(Clock())
    meter.add_samples(5, 1, 0)
    meter.begin(2, "answers", max_tokens=4)
    meter.clear()
    meter.add_samples(5, 1, 0)
    assert len(reports) == 1 and reports[0].num_tokens == 0


def test_a_phase_does_not_go_on_with_the_counts_of_the_one_before() -> None:
    meter, reports = watched(Clock())
    run = object.__new__(Run)
    run.console, run.meter, run.parts = RunConsole(), CostMeter(), SimpleNamespace(progress=meter)
    with run.phase("rollout"):
        meter.begin(2, "answers", max_tokens=4)
    with run.phase("reader"):  # which may sample too
        meter.add_samples(5, 1, 0)
    assert len(reports) == 1


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_row_is_finished_at_its_end_or_its_limit(stop: tuple[str, ...]) -> None:
    class Tokenizer:
        def decode(self, ids: Any, **_: Any) -> str:
            return ""

    counts: list[tuple[int, int, int]] = []
    sampling = Sampling(max_new_tokens=3, stop=stop)
    buffer = SampleBuffer(
        2, sampling, eos=frozenset({0}), tokenizer=Tokenizer(), count=lambda *n: counts.append(n)
    )
    assert buffer.append([0, 1], [5, 0], [0.0, 0.0]) == [0]
    assert counts == [(2, 1, 2)]
    buffer.extend(0, [6, 7], [0.0, 0.0])
    assert tuple(map(sum, zip(*counts, strict=True))) == (4, 2, 2)


# ── consoles ─────────────────────────────────────────────────────────────────────────────────────


def progress(finished: int = 23) -> PhaseProgress:
    return PhaseProgress(
        finished=finished,
        total=48,
        unit="episodes",
        num_tokens=6200,
        fraction=finished / 48,
        seconds=20.0,
    )


def test_a_log_gets_a_line_after_ten_seconds_and_then_every_thirty() -> None:
    stream, clock = io.StringIO(), Clock()
    console = PlainConsole(stream, clock)
    console.phase("evaluate")
    for tenth in range(0, 1000):
        clock.now = tenth / 10
        console.progress(progress())
    lines = stream.getvalue().splitlines()
    assert lines == ["evaluate: 23/48 episodes · 310 tok/s · ETA 22s"] * 3  # at 10, 40 and 70
    console.phase("rollout")  # a short phase has none
    clock.now += 9
    console.progress(progress())
    assert len(stream.getvalue().splitlines()) == 3


def test_the_live_line_has_the_phase_s_numbers(recipe: Any) -> None:
    clock = Clock()
    console = RichConsole(Console(file=io.StringIO(), force_terminal=True, width=150), clock)
    console.start(recipe, 50, 0)
    console.phase("evaluate")
    console.progress(progress())
    assert "step 1/50  evaluate 0.0s  23/48 episodes · 310 tok/s · ETA 22s" in render_line(console)
    console.phase("update")
    assert "episodes" not in render_line(console)
    console.finish()


@pytest.mark.parametrize("width", [80, 100, 139, 140, 200])
def test_no_number_is_cut_off_on_a_terminal(recipe: Any, width: int) -> None:
    clock = Clock()
    console = RichConsole(Console(file=io.StringIO(), force_terminal=True, width=width), clock)
    console.start(recipe, 1000, 0)
    for step in (997, 998):
        clock.now += 500
        console.step({"step": step, "tokens_per_second": 1234.5})
    console.phase("evaluate")
    console.progress(progress())
    line = render_line(console, width)
    assert "step 1000/1000  evaluate 0.0s  23/48 episodes · 310 tok/s · ETA 22s" in line
    assert "…" not in line and ("16m 40s elapsed · run's ETA 8m 20s" in line) == (width >= 140)
    console.phase("update")
    assert "…" not in render_line(console, width)
    console.finish()


def test_an_evaluation_by_itself_has_a_live_line_without_steps() -> None:
    console = RichConsole(Console(file=io.StringIO(), force_terminal=True, width=150), Clock())
    console.phase("evaluate")
    console.progress(progress())
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


class Recorder(RunConsole):
    """Counts of each phase, in order."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, list[PhaseProgress]]] = []

    def phase(self, name: str) -> None:
        self.phases.append((name, []))

    def progress(self, progress: PhaseProgress) -> None:
        self.phases[-1][1].append(progress)


def phases(console: Recorder, name: str, unit: str) -> list[list[PhaseProgress]]:
    """Counts of that unit; an evaluation also counts the passes that score its answers."""
    counts = [[p for p in reports if p.unit == unit] for n, reports in console.phases if n == name]
    return [reports for reports in counts if reports]


def check(reports: list[PhaseProgress], total: int, unit: str) -> None:
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


@pytest.mark.parametrize("limits", [{}, {"turns": 2}])
def test_episodes_report_episodes(
    roomy_folder: Path, tmp_path: Path, limits: dict[str, int]
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
    (rollout,) = phases(console, "rollout", "episodes")
    assert (rollout[-1].finished, rollout[-1].total) == (4, 4)
    # With a limit the share is known from the first turn on; without, from the first that ends.
    assert any(0 < p.fraction < 1 for p in rollout) == bool(limits)
