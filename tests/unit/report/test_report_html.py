"""The page: well-formed, self-contained, escaped, and true to the numbers, at any length of run."""

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from unit.report.pages import read

from courtside.report.costs import PhaseCost
from courtside.report.evaluation_pairs import Difference, first_and_last_evaluation
from courtside.report.folder.folder import RunFolder
from courtside.report.page.page import write_report
from courtside.report.page.svg import Series, downsample, line_chart, moving_average, ticks
from courtside.report.page.token_gaps import shade


def decode(token_ids):
    return [f"[{i}]" if i % 2 else "<i>\n" for i in token_ids]


@pytest.fixture
def build(tmp_path, recipe, batch, update, evaluation):
    def build(num_steps, *, evaluations=True, spoil=()):
        folder = RunFolder.open(tmp_path / "a <run>", recipe(train={"steps": max(num_steps, 1)}))
        if evaluations:
            folder.record_evaluation(evaluation(0, rate=0.25))
            folder.record_evaluation(evaluation(0, policy="teacher", rate=0.875))
        for step in range(num_steps):
            scored = batch(step)
            kl = {"kl": float("nan")} if step in spoil else {}
            folder.record(
                step,
                scored,
                update(step, scored, **kl, **{"entropy/student": 0.3, "odd/thing": 1.0}),
                seconds={"rollout": 1.0},
                store_trajectories=step in (0, num_steps - 1),
            )
        if evaluations:
            folder.record_evaluation(evaluation(num_steps, rate=0.75))
        folder.close()
        return folder

    return build


def test_a_whole_run(build):
    folder = build(6)
    with RunFolder.open(folder.path, folder.recipe()) as opened:
        opened.record_alarm({"step": 2, "message": "<script>alert(1)</script>"})
        opened.write_costs(
            {
                "rollout": PhaseCost(
                    seconds=30.0, input_tokens=1000, output_tokens=2000, flops=1e12
                ),
                "update": PhaseCost(seconds=10.0, input_tokens=3000, flops=3e12),
            }
        )
    differences = {("student", "score"): Difference(0.5, 0.31, 0.69, 0.0004)}
    path = write_report(folder, differences=differences, decode=decode)
    assert path == folder.path / "report.html"
    text, page = read(path)
    assert "6 of 6 steps" in page.text
    assert "before 25.0% 5.0% to 45.0%" in page.text
    assert "after 6 steps 75.0% 55.0% to 95.0%" in page.text
    assert "teacher, with its context 87.5%" in page.text
    assert "+50.0 +31.0 to +69.0, p < 0.001" in page.text
    assert "rollout 30s 75% 1,000 2,000 1T 25%" in page.text
    assert "total 40s 100% 4,000 2,000 4T 100%" in page.text
    for title in ("KL to the teacher", "Loss", "Entropy", "Gradient norm", "odd", "Recipe"):
        assert title in page.text
    assert "<script>alert(1)</script>" in page.text and "<script" not in text
    # Tokens, folder and alarm have tags in them: shown, not obeyed.
    assert "&lt;i&gt;" in text and "<i>" not in text
    assert "a <run>" in page.text


def test_nothing_is_fetched(build):
    text, page = read(write_report(build(2), decode=decode))
    loads = {"script", "link", "img", "iframe", "image", "use", "object", "embed", "base", "form"}
    assert not loads & {tag for tag, _ in page.tags}
    assert not any({"src", "xlink:href"} & attrs.keys() for _, attrs in page.tags)
    links = [attrs["href"] for _, attrs in page.tags if "href" in attrs]
    assert links and all(link.startswith("#") for link in links)
    assert "url(" not in text and "@import" not in text and "http://" not in text
    assert "default-src 'none'" in text


def test_tokens_are_coloured_by_the_gap(build, batch):
    text, page = read(write_report(build(1), decode=decode))
    first = batch(0)[0]
    student, teacher = first.trajectory.sampler_logp, first.target.logp_T.tolist()
    titles = [attrs["title"] for tag, attrs in page.tags if "gap" in attrs.get("title", "")]
    for s, t in zip(student, teacher, strict=True):
        gap = f"{t - s:+.2f}".replace("-", "−")
        assert f"teacher {t:.2f}, student {s:.2f}, gap {gap}" in titles
    # Three scored trajectories of six completion tokens; the template's token is never coloured.
    assert len(titles) == 18
    assert text.count('class="given"') == 3
    assert "not scored by a teacher" in page.text


def test_shades_are_symmetric_and_bounded():
    assert [shade(g) for g in (-99, -1.5, -0.3, 0, 0.3, 1.5, 99)] == [-5, -2, 0, 0, 0, 2, 5]


def test_without_decode_the_text_is_plain(build):
    text, page = read(write_report(build(1)))
    assert 'class="legend"' not in text and "gap −" not in str(page.tags)
    assert "we add the digits from the" in page.text


def test_samples_stand_side_by_side_for_the_same_task(build):
    _, page = read(write_report(build(3)))
    section = page.text.split(" Same tasks before and after ")[1].split(" Metrics ")[0]
    assert section.count("before ·") == section.count("after 3 steps ·") == 1
    assert "2 + 4 = ?" in section and "score 0 → 1" in section  # the one that was fixed


@pytest.mark.parametrize("num_steps", [0, 1])
def test_hardly_anything_recorded(build, num_steps):
    _, page = read(write_report(build(num_steps, evaluations=False)))
    assert "No evaluation has been recorded." in page.text
    assert ("No step has been recorded." in page.text) == (num_steps == 0)


def test_a_thousand_steps_stay_a_small_page(tmp_path, recipe, batch, update):
    scored = batch(0)
    with RunFolder.open(tmp_path / "run", recipe(train={"steps": 1000})) as folder:
        for step in range(1000):
            step_update = update(step, scored)
            folder.record(
                step, scored, step_update, seconds={"rollout": 1.0}, store_trajectories=False
            )
        path = write_report(folder)
    text, page = read(path)
    assert len(text) < 500_000
    assert "moving average" in page.text


def test_a_value_that_was_not_finite_is_a_gap(build):
    text, _ = read(write_report(build(5, spoil=(2,))))
    figure = next(f for f in re.findall("<figure>.*?</figure>", text) if "KL to the teacher" in f)
    line = re.search(r'class="line" d="([^"]*)"', figure)[1]
    assert line.count("M") == 2 and line.count("L") == 2
    assert figure.count("<circle") == 4


def test_before_and_after_prefers_the_test_split(evaluation):
    test = [evaluation(0), evaluation(9)]
    validation = [replace(evaluation(step), split="validation") for step in (5, 7)]
    teacher = evaluation(0, policy="teacher")
    both = first_and_last_evaluation([teacher, *test[:1], *validation, *test[1:]])
    assert both == (test[0], test[1])
    assert first_and_last_evaluation([*test[:1], *validation]) == tuple(validation)
    assert first_and_last_evaluation([teacher, test[0]]) == (test[0], None)
    assert first_and_last_evaluation([teacher]) == (None, None)


# ── curves ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 0.93), (-3, 7), (1e-5, 1.1e-5), (0, 12345), (99, 101)]
)
def test_ticks_are_few_inside_and_even(low, high):
    positions = ticks(low, high, 5)
    assert 2 <= len(positions) <= 6
    assert all(low - 1e-9 * high <= tick <= high + 1e-9 * high for tick in positions)
    steps = [b - a for a, b in pairwise(positions)]
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_thinning_keeps_every_spike():
    points = [(float(x), 0.0) for x in range(5000)]
    points[1234] = (1234.0, 9.0)
    points[4321] = (4321.0, -9.0)
    thinned = downsample(points)
    assert len(thinned) <= 600
    assert (1234.0, 9.0) in thinned and (4321.0, -9.0) in thinned
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)


def test_the_moving_average_of_a_line_is_the_line():
    points = [(float(x), 2.0 * x) for x in range(90)]
    averaged = [y for _, y in moving_average(points)]
    assert averaged[3:-3] == pytest.approx([y for _, y in points[3:-3]])


@pytest.mark.parametrize("values", [[5.0], [0.0, 0.0], [-1.0, -1.0], [1e-9, 2e-9], [1e12, -1e12]])
def test_charts_of_awkward_values(values):
    series = Series(name="a & b", points=tuple(enumerate(values)))
    figure = line_chart([series], title="<t>", x_label="step", y_label="y")
    root = ElementTree.fromstring(figure)
    places = [float(c.get("cy")) for c in root.iter("circle")]
    assert len(places) == len(values) and all(0 <= y <= 210 for y in places)
