"""What people see while a run goes."""

import io

import pytest
from rich.console import Console

from courtside.report.console import (
    PlainConsole,
    Progress,
    RichConsole,
    headline_metrics,
    make_console,
)
from courtside.report.summary import format_duration, format_number, summarize_recipe

ROW = {
    "step": 10, "kl": 0.2134, "reward/mean": 0.625, "grad_norm": None, "tokens_per_second": 412.3,
    "seconds/rollout": 4.0, "seconds/update": 2.5,
}  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.9, "0.9"), (-3.14159, "-3.14"), (123.4, "123"), (9999, "9999"), (12345, "12.3k"),
     (999999, "1M"), (2.5e9, "2.5G"), (3.3e18, "3.3E"), (1e-5, "1e-5"), (1.234e25, "1.23e25"),
     (None, "–"), (float("nan"), "–")],
)  # fmt: skip
def test_compact_numbers(value, text):
    assert format_number(value) == text


def test_durations():
    assert [format_duration(s) for s in (0.04, 9.96, 59.6, 185, 7800)] == [
        "0.0s", "10s", "1m 00s", "3m 05s", "2h 10m",
    ]  # fmt: skip


def test_the_pace_does_not_count_what_precedes_the_first_step():
    clock = Clock()
    pace = Progress(13, 3, clock)
    clock.now = 100.0  # an evaluation
    pace.step(3)
    assert pace.remaining is None
    clock.now = 104.0
    pace.step(4)
    assert pace.remaining == 4.0 * 8
    clock.now = 105.0
    assert pace.remaining == 4.0 * 8 - 1
    clock.now = 1e6
    assert pace.remaining == 0.0


def test_plain_lines(recipe):
    stream, clock = io.StringIO(), Clock()
    console = PlainConsole(stream, clock)
    console.start(recipe(), 50, 10)
    console.phase("rollout")
    clock.now = 6.5
    console.step(ROW)
    clock.now = 8.5
    console.step({"step": 11, "loss": 1.0})
    console.finish()
    head, *lines = stream.getvalue().splitlines()
    assert head == f"{summarize_recipe(recipe())} · steps 11 to 50"
    assert lines == [
        "step 11/50  kl 0.213  reward 0.625  grad –  412 tok/s  elapsed 6.5s",
        "step 12/50  loss 1.00  elapsed 8.5s  ETA 1m 16s",
    ]


def test_a_stream_that_cannot_write_accents_does_not_end_the_run():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainConsole(stream).print_line("modèle · 漢")
    stream.seek(0)
    assert stream.read() == "mod?le ? ?\n"


def test_the_summary_names_all_parts(recipe):
    assert summarize_recipe(recipe()) == (
        "smollm2-135m (LoRA 8) · arithmetic · teacher: self, frozen, sees solution · "
        "reverse KL (top 64) + policy gradient (reward)"
    )


def test_the_live_console_shows_step_phase_and_rate(recipe):
    clock = Clock()
    terminal = Console(file=io.StringIO(), force_terminal=True, width=110)
    console = RichConsole(terminal, clock)
    console.start(recipe(), 50, 10)
    console.phase("rollout")
    clock.now = 4.0
    console.step(ROW)
    clock.now = 10.0
    console.step(ROW | {"step": 11})
    console.print_line("KL rose [bold]3x[/bold]")
    console.phase("update")
    clock.now = 11.0
    with terminal.capture() as captured:
        terminal.print(console._line())
    console.finish()
    printed = terminal.file.getvalue()
    assert "KL rose [bold]3x[/bold]" in printed  # text is text, not markup
    plain = Console(file=io.StringIO(), width=110)
    plain.print(console._line())
    line = plain.file.getvalue()
    assert "step 13/50  update 1.0s" in line
    assert "412 tok/s · 11s elapsed · ETA 3m 47s" in line
    assert captured.get()


def test_the_live_console_needs_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_console(Terminal()), RichConsole)
    assert isinstance(make_console(io.StringIO()), PlainConsole)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_console(Terminal()), PlainConsole)


def test_an_episode_s_step_says_what_went_wrong_and_how_many_hints_train() -> None:
    row = {
        "kl": 0.2134,
        "reward/mean": 0.625,
        "error_rate": 0.1875,
        "hints/trained": 12,
        "grad_norm": 1.5,
    }
    assert headline_metrics(row) == [
        ("kl", "0.213"),
        ("reward", "0.625"),
        ("error_rate", "18.8%"),
        ("hints", "12"),
        ("grad", "1.50"),
    ]


def test_where_a_student_starts_from_is_told(recipe):
    warm = recipe(student={"model": "smollm2-135m", "adapter": "targeted-hints/warm"})
    assert summarize_recipe(warm).startswith("smollm2-135m from targeted-hints/warm · ")
