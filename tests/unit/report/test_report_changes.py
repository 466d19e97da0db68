"""What changed between two evaluations, and what is not right with a run or its folder."""

import re
from dataclasses import replace

import pytest
from unit.report.made_up import (
    make_batch,
    make_evaluation,
    make_recipe,
    make_trajectory,
    make_update,
)
from unit.report.pages import read
from unit.report.played import make_episode, make_episode_evaluation

from courtside.errors import UserError
from courtside.evaluate.comparisons import compare_evaluations
from courtside.report.evaluation_pairs import find_changed_tasks
from courtside.report.folder.evaluation_names import EvaluationName
from courtside.report.folder.folder import RunFolder
from courtside.report.page.page import write_report
from courtside.report.page.reading import list_steps

NUM_TASKS = 12


def played(policy, step, wrong):
    """A test episode for each task, those in `wrong` with an error, and their evaluation."""
    episodes = [
        replace(
            make_episode(f"{policy}-{step}-{i}", wrong=(1,) if i in wrong else ()),
            grade=replace(make_episode("x", wrong=()).grade, passed=i not in wrong),
        )
        for i in range(NUM_TASKS)
    ]
    scores = {f"task-{i}": float(i not in wrong) for i in range(NUM_TASKS)}
    base = make_episode_evaluation(step, len(wrong) / NUM_TASKS, policy=policy)
    return replace(base, scores=scores, samples=tuple(episodes[:2])), episodes


@pytest.fixture
def run(tmp_path):
    """Evaluated before and after on two suites: better on one, worse on the other."""
    with RunFolder.open(tmp_path / "run", make_recipe(train={"steps": 3})) as folder:
        for policy, wrong in (("student", range(9)), ("student:held_out", range(2))):
            folder.record_evaluation(*played(policy, 0, set(wrong)))
        for step in range(3):
            batch = make_batch(step)
            update = make_update(step, batch)
            if step == 1:
                update = replace(update, num_tokens=dict.fromkeys(update.num_tokens, 0))
            folder.record(step, batch, update, seconds={}, store_trajectories=True)
        for policy, wrong in (("student", {0, 10}), ("student:held_out", range(9))):
            folder.record_evaluation(*played(policy, 3, set(wrong)))
    return RunFolder.read(tmp_path / "run")


def report(run, **options):
    return read(write_report(run, differences=compare_evaluations(run), **options))


def section(page, title, until):
    return page.text.split(f" {title} ", 1)[1].split(f" {until} ", 1)[0]


def test_fixed_and_broken_tasks_come_first_and_unchanged_ones_only_without_them(run):
    text, page = report(run)
    tasks = section(page, "Same tasks before and after", "Metrics")
    assert "student 8 1 3" in tasks and "student:held_out 0 7 5" in tasks
    titles = re.findall(r"<h3>(\w+), (\S+) <small>(.*?)</small>", text)
    assert titles == [
        ("Fixed", "student", "3 of 8"),
        ("Broken", "student", "1 of 1"),
        ("Broken", "student:held_out", "3 of 7"),
    ]
    assert tasks.count("score 0 → 1") == 3 and tasks.count("score 1 → 0") == 4
    # Of a fixed task the episode before has an error, and the one after has none.
    outlines = re.findall(r'<ol class="outline">.*?</ol>', text)
    assert ["not found" in outline for outline in outlines[:8]] == [True, False] * 3 + [False, True]


def test_of_several_samples_the_pair_shows_the_change(tmp_path):
    """Of a fixed task a failed answer and then a passed one, of a broken one the reverse."""

    def sampled(step, scores):
        answers = [
            make_trajectory(f"{step}-{task}-{n}", task, passed=passed)
            for task, passes in enumerate(scores)
            for n, passed in enumerate(passes)
        ]
        means = {f"task-{task}": sum(passes) / 2 for task, passes in enumerate(scores)}
        return replace(make_evaluation(step), scores=means, samples=()), answers

    with RunFolder.open(tmp_path / "run", make_recipe()) as folder:
        folder.record_evaluation(*sampled(0, [(True, False), (True, False)]))
        folder.record_evaluation(*sampled(4, [(True, True), (False, False)]))
    text, _ = report(RunFolder.read(tmp_path / "run"))
    cards = re.findall(r'<div class="pair">.*?</article>', text)
    labels = [re.findall(r'<span class="badge (\w+)"', card) for card in cards]
    assert labels == [["failed", "passed"], ["passed", "failed"]]


def test_changes_are_ordered_by_their_size():
    before, after = make_evaluation(0), make_evaluation(4)
    before = replace(before, scores={"a": 0.0, "b": 0.5, "c": 1.0, "d": 1.0, "e": 0.5, "gone": 0.0})
    after = replace(after, scores={"a": 0.5, "b": 1.0, "c": 0.75, "d": 0.0, "e": 0.5, "new": 1.0})
    changed = find_changed_tasks(before, after)
    assert changed.fixed == ("a", "b") and changed.broken == ("d", "c") and changed.same == ("e",)


def test_every_suite_has_paired_differences_of_scores_and_errors(run):
    differences = compare_evaluations(run)
    assert differences.keys() == {
        (policy, what)
        for policy in ("student", "student:held_out")
        for what in ("score", "error_rate")
    }
    better, worse = (
        differences[policy, "error_rate"] for policy in ("student", "student:held_out")
    )
    # A wrong episode has 1 of its 5 turns wrong; 8 of 12 tasks lose it, one gains it.
    assert better.mean == pytest.approx(-7 / 12 / 5) and better.low < better.mean < better.high < 0
    assert worse.mean == pytest.approx(7 / 12 / 5) and worse.low > 0 and worse.p_value < 0.05
    assert differences["student", "score"].mean == pytest.approx(7 / 12)
    _, page = report(run)
    result = section(page, "Result", "Errors")
    assert "student:held_out 12 test" in result and "worse −58.3 −83.3 to −33.3" in result
    assert "worse +11.7 +6.7 to +16.7" in section(page, "Errors", "Same tasks before and after")


def test_tasks_that_only_one_evaluation_has_are_left_out_of_the_pairs(tmp_path):
    """An environment's bug may have ended an episode of one of them."""
    before, after = make_evaluation(0), make_evaluation(4)
    before = replace(before, scores={"a": 0.0, "b": 0.0, "c": 1.0, "nan": float("nan")})
    after = replace(after, scores={"a": 1.0, "b": 0.0, "d": 0.0, "nan": 0.0})
    with RunFolder.open(tmp_path / "run", make_recipe()) as folder:
        folder.record_evaluation(before)
        folder.record_evaluation(after)
    differences = compare_evaluations(RunFolder.read(tmp_path / "run"))
    assert differences["student", "score"].mean == 0.5 and len(differences) == 1


def test_errors_that_got_worse_are_marked(run):
    _, page = report(run)
    errors = section(page, "Errors", "Same tasks before and after")
    kinds = errors.split("kind of error")[1]
    # 9 of 12 → 2 of 12 here, 2 → 9 there.
    assert "tool not found 56.2% → 12.5% worse 12.5% → 56.2%" in kinds
    assert "repeated call 7.5% → 0.0% new 0.0% → 7.5%" in kinds


def test_a_change_within_noise_is_called_that(tmp_path):
    with RunFolder.open(tmp_path / "run", make_recipe()) as folder:
        folder.record_evaluation(*played("student", 0, {0, 1}))
        folder.record_evaluation(*played("student", 3, {1, 2, 3}))
    _, page = report(RunFolder.read(tmp_path / "run"))
    assert "worse, within noise +" in section(page, "Errors", "Same tasks before and after")


def test_steps_that_trained_nothing_are_named_and_marked(run):
    text, page = report(run)
    assert "empty steps No token was trained in 1 of 3 steps (step 1); dotted" in page.text
    loss = next(f for f in re.findall("<figure>.*?</figure>", text) if "<b>Loss</b>" in f)
    assert len(re.findall(r'<path class="mark" d="M[\d. V]+"/>', loss)) == 1


def test_the_contents_lead_to_every_section(run):
    text, page = report(run)
    links = re.findall(r'<a href="#([^"]+)">', text)
    anchors = re.findall(r'<(?:section|details) id="([^"]+)">', text)
    assert links == anchors and len(set(links)) == len(links) >= 7
    assert links[:3] == ["result", "errors", "same-tasks-before-and-after"]
    assert " ".join(page.contents).split()[0] == "Result"


# ── damaged folders ──────────────────────────────────────────────────────────────────────────────


def damage(run, name, content):
    path = run.path / name
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("metrics.jsonl", b"{\n{}\n", "line 1: not valid JSON"),
        ("metrics.jsonl", b"[1]\n{}\n", "line 1: not a JSON object"),
        ("metrics.jsonl", b'{"loss": 1}\n', "line 1: no `step` with a whole number"),
        ("metrics.jsonl", b"", "has no metrics of steps 0 to 2"),
        (
            "evaluations.jsonl",
            b'{"schema_version": 1, "policy": "student"}\n',
            "line 1: no `step` with a whole number",
        ),
        (
            "evaluations.jsonl",
            b'{"schema_version": 1, "step": 0, "policy": "a", "split": "test", "scores": 5}\n',
            "the evaluation of step 0 is incomplete",
        ),
        ("alarms.jsonl", b"null\n", "not a JSON object"),
        ("costs.json", b"[]", "not a JSON object"),
        ("costs.json", b'{"rollout": {"second": 1}}', "not as courtside writes it"),
        ("environment.json", b"\xff", "not valid JSON"),
        ("trajectories/step-000002.parquet", b"PAR1 no more", "cannot be read as Parquet"),
        ("trajectories/step-000000.parquet", b"", "cannot be read as Parquet"),
        ("evaluations/step-000003-student-test.parquet", b"?", "cannot be read as Parquet"),
        ("evaluations/step-000000-student.held_out-test.parquet", b"", "cannot be read"),
        ("further_evaluations.jsonl", b"{}\n", "no `step` with a whole number"),
    ],
)
def test_a_damaged_part_is_named_and_the_rest_is_rendered(run, name, content, reason):
    path = damage(run, name, content)
    _, page = report(run)
    damaged = section(page, "Damaged files", "Result")
    assert path in damaged and reason in damaged
    assert "Recipe" in page.text
    assert ("No evaluation has been recorded." in page.text) == (name == "evaluations.jsonl")
    assert ("0 of 3 steps" in page.text) == (name == "metrics.jsonl")
    assert ("KL to the teacher" in page.text) == (name != "metrics.jsonl")


def test_an_intact_folder_has_no_damaged_files(run):
    _, page = report(run)
    assert "Damaged files" not in page.text


def test_the_report_of_a_damaged_newest_step_shows_the_one_before(run):
    damage(run, "trajectories/step-000002.parquet", b"")
    _, page = report(run)
    assert "step 1 · source: student" in page.text and "step 2 · source" not in page.text


def test_steps_are_listed_as_ranges():
    assert list_steps([3]) == "step 3" and list_steps([0, 1]) == "steps 0, 1"
    assert list_steps([9, 0, 1, 2]) == "steps 0 to 2, 9"
    assert list_steps(range(0, 60, 2)).endswith("20, 22 and 18 more")


@pytest.mark.parametrize("policy", ["student", "student:held_out", "teacher"])
def test_a_file_name_gives_its_evaluation_back(policy):
    name = EvaluationName(step=12, policy=policy, split="test")
    assert EvaluationName.parse(name.file_name) == name
    assert EvaluationName.parse("step-000001.parquet") is None


def test_answers_that_are_not_stored_are_told(run):
    evaluation = run.evaluations()[0]
    run.evaluation_file(EvaluationName.of(evaluation)).unlink()
    with pytest.raises(UserError, match=r"student-test\.parquet: no such file, so the answers of"):
        run.evaluation_trajectories(evaluation)
    _, page = report(run)  # and the page has the samples of the evaluation itself
    assert "Fixed, student 1 of 8" in page.text


def test_marks_that_reorder_text_do_not_act_in_the_report(tmp_path):
    batch = make_batch(0)
    turns = batch[0].trajectory.turns
    odd = replace(turns[1], text="run \u202etxt.exe")
    scored = replace(batch[0], trajectory=replace(batch[0].trajectory, turns=(turns[0], odd)))
    with RunFolder.open(tmp_path / "run", make_recipe()) as folder:
        update = make_update(0, [scored])
        folder.record(0, [scored], update, seconds={}, store_trajectories=True)
    text, page = read(write_report(folder))
    assert "run [U+202E]txt.exe" in page.text and "\u202e" not in text
