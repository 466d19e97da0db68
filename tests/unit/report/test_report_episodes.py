"""The page of a run with episodes and hints: what it says, where, and that it stays readable."""

import re
from dataclasses import replace
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.report.made_up import make_batch, make_evaluation, make_update
from unit.report.pages import read
from unit.report.played import (
    decode,
    hinted,
    make_episode,
    make_episode_evaluation,
    make_hinted_batch,
    make_hinted_update,
)

from courtside.report.folder.folder import RunFolder
from courtside.report.folder.parquet import read_trajectories, write_trajectories
from courtside.report.page.curves import error_figure, evaluation_figure
from courtside.report.page.hints import (
    StepHint,
    harmful_hints,
    largest_shifts,
    smallest_shifts,
)
from courtside.report.page.page import write_report
from courtside.report.page.shifted_tokens import find_shifted_tokens
from courtside.report.page.token_gaps import (
    MAX_CHARS,
    MAX_TOKENS,
    TokenGap,
    render_text,
    render_turn_text,
)
from courtside.report.page.transcript import MAX_TURNS, Conversation, render_transcript
from courtside.report.summary import summarize_recipe


@pytest.fixture
def build(tmp_path, recipe):
    def build(batches, evaluations=(), counts=None):
        path = tmp_path / "run"
        with RunFolder.open(path, recipe(train={"steps": max(len(batches), 1)})) as folder:
            for evaluation in evaluations:
                folder.record_evaluation(evaluation)
            for step, batch in enumerate(batches):
                folder.record(
                    step,
                    batch,
                    make_hinted_update(step, batch),
                    seconds={"rollout": 1.0},
                    store_trajectories=True,
                    reader_counts=counts,
                )
        return RunFolder.read(path)

    return build


def store(tmp_path, batch):
    path = tmp_path / "step-000000.parquet"
    write_trajectories(path, batch, make_hinted_update(0, batch).student_logp)
    return read_trajectories(path, 0)


def part(page, title, until):
    return page.text.split(f" {title} ", 1)[1].split(f" {until} ", 1)[0]


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


def test_error_rates_before_and_after_by_suite_and_kind(build):
    evaluations = [
        make_episode_evaluation(0, 0.4),
        make_episode_evaluation(0, 0.5, policy="student:held_out"),
        make_episode_evaluation(
            2, 0.1, **{"logp_drop/clean_turns": 0.0125, "logp_drop/error_turns": 1.5}
        ),
        make_episode_evaluation(2, 0.2, policy="student:held_out"),
    ]
    batches = [make_hinted_batch(step) for step in range(2)]
    _, page = read(write_report(build(batches, evaluations)))
    errors = part(page, "Errors", "Same tasks before and after")
    assert "turns with an error, before 40.0% 34.0% to 47.0%" in errors
    assert "turns with an error, after 2 steps 10.0% 4.0% to 17.0%" in errors
    student = "student 8 test 40.0% 34.0% to 47.0% 10.0% 4.0% to 17.0% – 4.8 → 4.2"
    assert f"{student} 0.0125 nats 1.5 nats" in errors
    assert (
        "student:held_out 8 test 50.0% 44.0% to 57.0% 20.0% 14.0% to 27.0% – 5 → 4.4 – –" in errors
    )
    # A kind that the later evaluation does not name did not occur.
    assert "tool not found 30.0% → 7.5% 37.5% → 15.0%" in errors
    assert "repeated call 4.0% → 0.0% 5.0% → 0.0%" in errors
    assert errors.index("tool not found") < errors.index("repeated call")
    result = part(page, "Result", "Errors")
    assert "student:held_out 8 test 50.0% 40.0% to 60.0% 80.0% 70.0% to 90.0%" in result


def test_errors_by_decision_with_what_training_changed_there(build):
    before = {"decisions/date/habit_wrong": 0.9, "decisions/filler": 0.0}
    after = {
        "decisions/date/habit_wrong": 0.25,
        "decisions/filler": 0.125,
        "collateral/date/habit_wrong": 0.5,
        "collateral/turns": 0.0625,
    }
    evaluations = [
        make_episode_evaluation(0, 0.4, **before),
        make_episode_evaluation(0, 0.5, policy="student:held_out"),
        make_episode_evaluation(2, 0.1, **after),
        make_episode_evaluation(2, 0.2, policy="student:held_out"),
    ]
    batches = [make_hinted_batch(step) for step in range(2)]
    _, page = read(write_report(build(batches, evaluations)))
    errors = part(page, "Errors", "Same tasks before and after")
    heads = "decision student, turns with an error student:held_out, turns with an error"
    assert f"{heads} KL(before‖after) a token" in errors
    assert "date/habit_wrong 90.0% → 25.0% – 0.5 nats" in errors
    assert re.search(r"filler \w* ?0\.0% → 12\.5% – –", errors), "marked as worse"
    assert "turns – – 0.0625 nats" in errors
    plain = [make_episode_evaluation(0, 0.4, **before), make_episode_evaluation(2, 0.1)]
    _, page = read(write_report(build(batches, plain)))
    assert "KL(before‖after)" not in page.text and "date/habit_wrong 90.0% → –" in page.text


def test_an_error_rate_that_was_measured_once(build):
    _, page = read(write_report(build([], [make_episode_evaluation(0, 0.4)])))
    errors = part(page, "Errors", "Metrics")
    assert "student 8 test 40.0% 34.0% to 47.0% – – 4.8 → –" in errors
    assert "tool not found 30.0% → –" in errors and "after" not in errors.split("Fraction of")[0]


def test_suites_are_lines_of_their_own_and_teachers_are_dashed():
    suites = [make_episode_evaluation(s, 0.5, policy="student:held_out") for s in (0, 2)]
    student = [make_episode_evaluation(s, 0.4) for s in (0, 2)]
    teacher = make_episode_evaluation(0, 0.1, policy="teacher")
    for figure in (error_figure, evaluation_figure):
        svg = figure([*student, *suites, teacher])
        names = re.findall(r'class="key c\d( flat)?">([^<]*) <', svg)
        assert names == [
            ("", "student, test"),
            ("", "student:held_out, test"),
            (" flat", "teacher, test"),
        ]
    assert error_figure([make_evaluation(0)]) is None and error_figure([teacher]) is None


# ── hints ────────────────────────────────────────────────────────────────────────────────────────


def test_hints_are_counted_by_source_and_by_why_they_were_dropped(build):
    batches = [make_hinted_batch(step) for step in range(3)]
    counts = {"rules/tool_not_found": 7, "dropped/budget": 2}
    _, page = read(write_report(build(batches, counts=counts), decode=decode))
    section = part(page, "Hints Shift:", "Tokens with the largest shift")
    assert "Counted in 3 stored steps" in section
    hint_outcomes = [j for batch in batches for s in batch for j in s.hints]
    shifts = {
        source: [j.shift for j in hint_outcomes if j.hint.source == source and j.shift is not None]
        for source in ("rules:tool_not_found", "model")
    }
    rules, model = (sum(values) / len(values) for values in shifts.values())
    assert "source hints trained on dropped: shift dropped: merge mean shift" in section
    assert f"rules:tool_not_found 15 12 0 3 +{rules:.2f}" in section
    assert f"model 3 0 3 0 {model:+.2f}".replace("-", "−") in section
    assert "total 18 12 3 3" in section
    assert "dropped/budget 6" in section and "rules/tool_not_found 21" in section


def test_the_best_hints_are_those_with_the_largest_shift_and_of_each_text_one(build):
    [a, b] = hinted(make_episode("0-0", wrong=(0, 1))).hints
    outcomes = [
        StepHint(step=0, outcome=replace(a, shift=1.0)),
        StepHint(step=1, outcome=replace(a, shift=5.0)),
        StepHint(step=2, outcome=replace(b, shift=3.0)),
        StepHint(step=3, outcome=replace(b, shift=9.0, drop_reason="too_long")),
        StepHint(step=4, outcome=replace(a, shift=None)),
        StepHint(step=5, outcome=replace(a, shift=float("nan"))),
        StepHint(step=6, outcome=replace(a, shift=0.1, drop_reason="shift")),
        StepHint(step=7, outcome=replace(b, shift=-2.0, drop_reason="shift")),
        StepHint(step=8, outcome=replace(b, shift=None, drop_reason="merge")),
    ]
    assert [outcome.step for outcome in largest_shifts(outcomes)] == [1, 2]
    assert [outcome.step for outcome in smallest_shifts(outcomes)] == [6]
    assert [outcome.step for outcome in harmful_hints(outcomes)] == [7]


def test_harmful_hints_have_a_list_of_their_own(build):
    """Trained or dropped, they are not among those that moved the student most."""
    [a, b] = hinted(make_episode("0-0", wrong=(0, 1))).hints
    outcomes = [
        StepHint(step=0, outcome=replace(a, shift=-0.7)),
        StepHint(step=1, outcome=replace(b, shift=-4.5, drop_reason="harmful")),
    ]
    assert [outcome.step for outcome in harmful_hints(outcomes)] == [1, 0]
    assert largest_shifts(outcomes) == smallest_shifts(outcomes) == []
    episode = hinted(make_episode("0-0", wrong=(1,)))
    [outcome] = episode.hints
    harmful = replace(outcome, shift=-4.5)
    _, page = read(write_report(build([[replace(episode, hints=(harmful,))]]), decode=decode))
    assert "Hints that make their turn more likely" in page.text and "4.50 nats" in page.text
    assert "Largest shifts" not in page.text and "with the largest shift" not in page.text


def test_a_hint_is_rendered_between_prompt_and_reply(build):
    episode = hinted(make_episode("0-0", wrong=(1,)))
    [hint_outcomes] = episode.hints
    outcome = replace(hint_outcomes, shift=4.5, bad_span_shift=4.0)
    outcome = replace(
        outcome, hint=replace(outcome.hint, text="Use <script>x</script>.", confidence=0.75)
    )
    text, page = read(write_report(build([[replace(episode, hints=(outcome,))]]), decode=decode))
    section = part(page, "Largest shifts", "Tokens with the largest shift")
    order = [
        "step 0 · turn 3 · the turn calls calculator",
        "tool 4 °C, light rain",
        "user Add 17, 4 and 21 for me, please.",
        "hint rules:tool_not_found · shift +4.50 nats · shift of the underlined span +4.00 nats · "
        "confidence 0.75 Use <script>x</script>.",
        "student tool not found",
    ]
    places = [section.index(phrase) for phrase in order]
    assert places == sorted(places)
    assert "<script" not in text
    [bad, *_] = re.findall(r'<span class="less5 bad" title="[^"]*">([^<]*)</span>', text)
    assert bad == "calculator"


def test_hints_without_effect_are_rendered_as_dropped(build):
    _, page = read(write_report(build([make_hinted_batch(0)]), decode=decode))
    section = part(page, "Smallest shifts, dropped", "Tokens with the largest shift")
    assert "dropped: shift Read the request again before you answer." in section
    assert "dropped: merge" not in section  # never measured, so nobody knows what it does


def test_a_reader_without_hints(build):
    clean = [s for s in make_hinted_batch(0) if not s.hints]
    _, page = read(write_report(build([clean], counts={"rules/tool_not_found": 0}), decode=decode))
    assert "Tokens with the largest shift" not in page.text and "Hints Shift" not in page.text
    assert "Episodes" in page.text


# ── shifted tokens ──────────────────────────────────────────────────────────────────────────────


def test_shifted_tokens_are_the_largest_gaps_of_turns_that_train(tmp_path):
    trained, dropped = hinted(make_episode("0-0", wrong=(1,))), make_episode("0-1", wrong=(0,))
    stored = store(tmp_path, [trained, hinted(dropped, dropped="shift")])
    shifted = find_shifted_tokens(stored, decode)
    assert shifted[0].token == "calculator"
    assert shifted[0].before == '<tool_call>{"name": "' and shifted[0].after.startswith('", "arg')
    student, teacher = shifted[0].gap.student, shifted[0].gap.teacher
    place = trained.trajectory.completion_ids.index(_id(trained, "calculator"))
    assert student == trained.trajectory.sampler_logp[place]
    assert teacher == pytest.approx(
        trained.target.logp_T.tolist()[trained.target.token_indices.index(place)]
    )
    assert not any(token.token == "weather" for token in shifted)
    sizes = [abs(token.gap.nats) for token in shifted]
    assert sizes == sorted(sizes, reverse=True) and min(sizes) > 0.375


def _id(scored, piece):
    return next(i for i in scored.trajectory.completion_ids if decode([i]) == [piece])


def test_the_same_tokens_are_rendered_once(tmp_path):
    many = [hinted(make_episode(f"{i}-0", wrong=(1,))) for i in range(6)]
    shifted = find_shifted_tokens(store(tmp_path, many), decode)
    assert [s.token for s in shifted].count("calculator") == 1
    largest = min(min(s.target.logp_T.tolist()) for s in many)
    assert shifted[0].gap.teacher <= largest + 0.5


def test_tokens_of_the_first_and_the_last_step_are_told_apart(build):
    _, page = read(write_report(build([make_hinted_batch(s) for s in range(3)]), decode=decode))
    section = part(page, "Tokens with the largest shift", "Episodes")
    assert section.index("Step 0") < section.index("Step 2") and "Step 1" not in section
    assert re.search(r'calculator ", "arguments.*? \d\d\.\d% 0\.0\d% −\d\.\d\d', section)


def test_without_decode_there_are_no_tokens_but_all_the_rest(build):
    text, page = read(write_report(build([make_hinted_batch(0)])))
    assert "Tokens with the largest shift" not in page.text and 'class="legend"' not in text
    assert "Largest shifts" in page.text
    assert '<span class="bad">calculator</span>' in text


# ── transcripts ──────────────────────────────────────────────────────────────────────────────────


def test_a_transcript_has_roles_events_and_hints_in_place(build):
    episode = hinted(make_episode("0-0", wrong=(0,), num=2))
    text, page = read(write_report(build([[episode]]), decode=decode))
    section = page.text.split(" Episodes ")[1].split(" Environment ")[0]
    assert "failed What is the weather in Oslo? step 0 · 3 turns · 1 with errors · " in section
    assert "1 hint, 1 trained on" in section
    card = text.split("<h2>Episodes</h2>")[1]
    roles = re.findall(r'<div class="entry [^"]*"><b>(\w+)</b>', card)
    assert roles == [
        "system",
        "user",
        "hint",
        "student",
        "tool",
        "student",
        "tool",
        "user",
        "student",
    ]
    # Colours stand on the tokens that the teacher spoke of, and on no others.
    titles = re.findall(r'title="(teacher [^"]*)"', card)
    assert len(titles) == len(episode.target.token_indices)
    assert card.count('<span class="badge failed" title="Tool not found: weather">') == 1


def test_only_the_first_transcript_is_unfolded(build):
    text, _ = read(write_report(build([make_hinted_batch(s) for s in range(2)]), decode=decode))
    folds = re.findall(r'<details class="sample episode"( open)?>', text)
    assert len(folds) == 8 and folds == [" open"] + [""] * 7


def test_transcripts_with_hints_come_first(build):
    text, _ = read(write_report(build([list(reversed(make_hinted_batch(0)))]), decode=decode))
    trained = re.findall(r"(\d) trained on</span></summary>", text)
    assert trained == ["1", "1", "2", "0"]


def test_a_context_of_the_whole_episode_is_rendered(build):
    episode = hinted(make_episode("0-0"))
    with_context = replace(episode, target=replace(episode.target, context="the <i>solution</i>"))
    text, page = read(write_report(build([[replace(with_context, hints=())]]), decode=decode))
    assert "teacher-only context the <i>solution</i>" in page.text and "<i>" not in text


def test_a_context_of_hints_is_not_rendered_twice(build):
    episode = hinted(make_episode("0-0"))
    with_context = replace(
        episode, target=replace(episode.target, context=episode.hints[0].hint.text)
    )
    _, page = read(write_report(build([[with_context]]), decode=decode))
    assert "teacher-only context" not in page.text


def test_a_single_answer_with_a_hint_is_told_like_an_episode(build):
    episode = hinted(make_episode("0-0", wrong=(0,), num=1))
    # Only the wrong turn is left, and the teacher spoke of just that one.
    alone = replace(episode.trajectory, turns=episode.trajectory.turns[:2])
    text, _ = read(write_report(build([[replace(episode, trajectory=alone)]]), decode=decode))
    roles = re.findall(r'"><b>(\w+)</b>', text.split("<h2>Episodes</h2>")[1])
    assert roles == ["system", "user", "hint", "student"]
    assert "What the teacher made" not in text


def test_episodes_before_and_after(build):
    evaluations = [make_episode_evaluation(0, 0.4), make_episode_evaluation(1, 0.1)]
    text, page = read(write_report(build([make_hinted_batch(0)], evaluations)))
    section = part(page, "Same tasks before and after", "Metrics")
    # Task 5 and 6 are fixed, and no sample of them is stored; none is broken; the others stay.
    assert "student 3 0 5" in section
    assert section.count("before · 6 turns · 2 with errors · 180 tokens") == 1
    assert section.count("after 1 steps · 4 turns · 118 tokens") == 1
    outlines = re.findall(r'<ol class="outline">.*?</ol>', text)
    assert [outline.count("<li>") for outline in outlines] == [6, 4]
    assert outlines[0].count("tool not found") == 2 and outlines[1].count("tool not found") == 0
    assert "system: Answer every request with one tool call" in section


def test_very_long_episodes_show_the_telling_turns():
    quiet = make_episode("0-0", wrong=(), num=60)
    episode = make_episode("0-0", wrong=(30,), num=60)
    wrong = next(i for i, turn in enumerate(episode.turns) if turn.events)
    text = render_transcript(Conversation(trajectory=episode))
    assert "Tool not found: calculator" in text or "Tool not found: notes" in text
    omitted = [int(n) for n in re.findall(r"(\d+) turns? omitted", text)]
    num_rendered = len(episode.turns) - sum(omitted)
    assert num_rendered == 5 + 3 and omitted[0] == wrong - 1 - 3
    assert sum(map(int, re.findall(r"(\d+) turns omitted", render_transcript(
        Conversation(trajectory=quiet)
    )))) == len(quiet.turns) - 5  # fmt: skip
    everywhere = make_episode("0-0", wrong=range(60), num=60)
    omitted = re.findall(
        r"(\d+) turns? omitted", render_transcript(Conversation(trajectory=everywhere))
    )
    assert len(everywhere.turns) - sum(map(int, omitted)) == MAX_TURNS


def test_a_run_of_single_answers_has_no_sections_for_episodes(tmp_path, recipe):
    with RunFolder.open(tmp_path / "run", recipe()) as folder:
        folder.record_evaluation(make_evaluation(0))
        batch = make_batch(0)
        folder.record(0, batch, make_update(0, batch), seconds={}, store_trajectories=True)
        text, _ = read(write_report(folder, decode=lambda ids: [f"[{i}]" for i in ids]))
    for title in ("Errors", "Hints", "Tokens with the largest shift", "Episodes"):
        assert f"<h2>{title}</h2>" not in text


def test_nothing_is_fetched(build):
    batches = [make_hinted_batch(0)]
    evaluations = [make_episode_evaluation(0, 0.4), make_episode_evaluation(1, 0.1)]
    text, page = read(write_report(build(batches, evaluations), decode=decode))
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not any("src" in attrs for _, attrs in page.tags)
    assert all(attrs.get("href", "#").startswith("#") for _, attrs in page.tags)
    assert "milk & bread" in page.text and "<b>milk" not in text


def test_the_reader_is_named_at_the_top(recipe):
    hinting = recipe(
        tasks={"kind": "toolbox"},
        reader={"kind": "rules", "control": "random_turn"},
        teacher={"kind": "self"},
        losses=[{"kind": "divergence", "on": "hinted_turns"}],
    )
    assert " · hints: rules, control random turn · " in summarize_recipe(hinting)


# ── words ────────────────────────────────────────────────────────────────────────────────────────


@given(st.text("ab<& \n", max_size=30), st.lists(st.text("ab<", max_size=4), max_size=3))
def test_underlining_changes_no_word(text, spans):
    marked = render_text(text, spans)
    assert unescape(re.sub(r'<span class="bad">|</span>', "", marked)) == text
    underlined = "".join(map(unescape, re.findall(r'<span class="bad">(.*?)</span>', marked)))
    indices = {i for s in spans if s in text for i in range(text.find(s), text.find(s) + len(s))}
    assert underlined == "".join(text[i] for i in sorted(indices))


def test_very_long_texts_are_cut_and_say_so():
    assert render_text("x" * (MAX_CHARS + 1234)).endswith("… 1,234 more characters</span>")
    turn = make_episode("0-0", wrong=(), num=1).turns[1]
    size = MAX_TOKENS + 7
    long = replace(
        turn, token_ids=turn.token_ids[:1] * size, completion_mask=(True,) * size, sampler_logp=None
    )
    gaps = [TokenGap(teacher=-1.0, student=-2.0)] * size
    text = render_turn_text(long, gaps, decode)
    assert text.count("title=") == MAX_TOKENS and "… 7 more tokens" in text
