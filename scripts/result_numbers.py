"""Writes numbers of recipes/*/results.json into README.md, docs/ and the recipes' pages.

    <!-- = distil-back; on-policy; after -->95.9% (91.6–100)<!-- /= -->
    <!-- = targeted-hints/N64; hint minus reward; error_rate; points -->…<!-- /= -->
    <!-- table: contrasts; pruned; nats -->
    …
    <!-- /table -->

The text between the markers is generated. With `--check` nothing is written: it exits with 1 if a
page is out of date, or has a percentage, a number of points or nats, or an interval outside of such
markers. A block with `<!-- numbers: WHY -->` is let through: settings, and runs without a JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NUMBER = re.compile(r"<!-- = (?P<spec>[^>]+?) -->.*?<!-- /= -->", re.S)
TABLE = re.compile(r"<!-- table: (?P<spec>[^>]+?) -->\n.*?<!-- /table -->", re.S)
CODE = re.compile(r"^```.*?^```$", re.M | re.S)
ALLOWED = "<!-- numbers: "
MEASURED = re.compile(
    r"\d[\d.,]*\s?%|\d[\d.]* (?:points|nats)\b|\(−?\d[\d.]*(?:%?–| to )−?\d[\d.]*%?\)"
)
SETTING = re.compile(r"\b9[05]%\s+intervals?|margin of 3 points|±3 points")


def pages() -> list[Path]:
    """Of recipes, those that have results."""
    results = sorted((ROOT / "recipes").glob("*/results.json"))
    recipes = [path.with_name("README.md") for path in results]
    return [ROOT / "README.md", ROOT / "docs/results.md", ROOT / "docs/hints.md", *recipes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only report what is out of date")
    check = parser.parse_args().check
    problems = []
    for page in pages():
        name, text = page.relative_to(ROOT), page.read_text(encoding="utf-8")
        new = rewrite(text)
        problems += [f"{name}: {line!r} is in no JSON" for line in find_loose(new)]
        if new != text and check:
            problems.append(f"{name} does not have the numbers of the JSON: run `make docs`")
        elif new != text:
            page.write_text(new, encoding="utf-8")
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


def rewrite(text: str) -> str:
    text = TABLE.sub(lambda match: render_table(match["spec"]), text)
    return NUMBER.sub(
        lambda match: f"<!-- = {match['spec']} -->{render_number(match['spec'])}<!-- /= -->", text
    )


def find_loose(text: str) -> Iterator[str]:
    """Measured numbers that stand outside of markers, and lines that begin with a marker: there
    Markdown ends the paragraph."""
    yield from re.findall(r"^ *<!-- = [^>]+ -->", text, re.M)
    text = CODE.sub("", NUMBER.sub("", TABLE.sub("", text)))
    for block in re.split(r"\n\s*\n", text):
        if ALLOWED not in block:
            for match in MEASURED.finditer(SETTING.sub("", block)):
                yield match[0]


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────


@cache
def read_results(study: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((ROOT / f"recipes/{study}/results.json").read_text())
    return results


def read_section(place: str) -> dict[str, Any]:
    """`place`: STUDY or STUDY/VARIANT."""
    study, _, variant = place.partition("/")
    results = read_results(study)
    section: dict[str, Any] = results["variants"][variant] if variant else results
    return section


def render_number(spec: str) -> str:
    """STUDY[/VARIANT]; ARM; MEASURE[; FORMAT], STUDY; FIRST minus OTHER; OUTCOME[; FORMAT], STUDY;
    sweep; ARM RATE COLUMN, or STUDY; cost. `both_sides` is the mean of the errors where a habit is
    wrong and where it is right; `step N` the validation score after N steps; `cells/OUTCOME` is
    that of `cost_cells`."""
    place, row, *more = (part.strip() for part in spec.split(";"))
    if row == "cost":
        return f"{count_minutes(read_results(place)):.0f} minutes"
    measure, *given_format = more
    section = read_section(place)
    if " minus " in row and measure == "both_sides":
        first, other = (section["arms"][name] for name in row.split(" minus "))
        return format_value(both_sides_difference(first, other), *(given_format or ["points"]))
    if " minus " in row:
        return format_value(find_difference(section, row, measure), *(given_format or ["points"]))
    if row == "sweep":
        return format_value(_over_seeds([find_trial(section, measure)]), *(given_format or ["%"]))
    arm = section["arms"][row]
    if measure == "both_sides":
        return format_value(_over_seeds(both_sides_of(arm)), *(given_format or ["%"]))
    if measure == "gain":  # after minus before, paired by seed
        return format_value(gain_of(arm), *(given_format or ["points"]))
    if measure == "teacher":
        return format_value(over_runs(arm, "teacher"), *(given_format or ["%"]))
    if measure.startswith("phases/"):
        _, phase, key = measure.split("/")
        return format_value(_over_seeds([arm["phases"][phase][key]]), *(given_format or ["k"]))
    if measure.startswith("step "):
        step = int(measure.removeprefix("step "))
        return format_value(curve_of(arm)[step], *(given_format or ["%"]))
    if measure.startswith("cells/"):
        return " | ".join(cost_cells(arm, measure.removeprefix("cells/")))
    if measure.startswith("uncut_"):
        return format_value(uncut_of(arm, measure.removeprefix("uncut_")), "mean %")
    return format_value(arm[measure], *(given_format or ["%"]))


def count_minutes(results: Mapping[str, Any]) -> float:
    """Of all runs, added up; of the final ones where the sweep's are not stored."""
    if "worker_minutes" in results or "minutes" in results:
        return float(results.get("worker_minutes") or results["minutes"])
    times = [arm["seconds"] for arm in results["arms"].values()]
    return float(sum(time["mean"] * time["seeds"] for time in times)) / 60


def find_trial(results: Mapping[str, Any], trial: str) -> float:
    """`trial`: ARM RATE COLUMN; the last validation of that run of the sweep."""
    arm, rate, column = trial.split()
    place = {"score": 2, "kl": 3, "errors": 4}[column]
    runs = [run for run in results["sweep"] if run["arm"] == arm]
    return float(next(r for r in runs if r["learning_rate"] == float(rate))["validation"][place])


def find_difference(section: Mapping[str, Any], row: str, outcome: str) -> Mapping[str, Any]:
    for contrast in section["contrasts"]:
        if (contrast["contrast"], contrast["outcome"]) == (row, outcome):
            return dict(contrast)
    difference: dict[str, Any] = section["exploratory"][row][outcome]
    return difference


def both_sides_of(arm: Mapping[str, Any], when: str = "after") -> list[float]:
    """Of each seed. Always following a habit, or never, is at one half."""
    sides = (arm[f"decisions/habit_{side}_{when}"]["values"] for side in ("wrong", "right"))
    return [(wrong + right) / 2 for wrong, right in zip(*sides, strict=True)]


def both_sides_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Paired by the seeds that both arms have."""
    of_first, of_other = (
        dict(zip((run["seed"] for run in arm["runs"]), both_sides_of(arm), strict=True))
        for arm in (first, other)
    )
    return _over_seeds([of_first[seed] - of_other[seed] for seed in of_first if seed in of_other])


def gain_of(arm: Mapping[str, Any]) -> dict[str, Any]:
    pairs = zip(arm["after"]["values"], arm["before"]["values"], strict=True)
    return _over_seeds([after - before for after, before in pairs])


def uncut_of(arm: Mapping[str, Any], when: str) -> dict[str, Any]:
    """Score of the answers that were not cut, where all that were cut failed."""
    pairs = zip(arm[when]["values"], arm[f"truncated_{when}"]["values"], strict=True)
    return _over_seeds([score / (1 - cut) for score, cut in pairs])


def curve_of(arm: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """By step: the validation score over seeds."""
    return {point["step"]: point for point in arm["curve"]}


def over_runs(arm: Mapping[str, Any], key: str) -> dict[str, Any]:
    return _over_seeds([run[key] for run in arm["runs"]])


def _over_seeds(values: list[float]) -> dict[str, Any]:
    from courtside.experiment.arms import over_seeds

    return over_seeds(values)


def format_value(value: Mapping[str, Any], style: str) -> str:
    """Styles: `%`, `nats` and `points` with the interval, `mean %` and `mean nats` without,
    `k` in thousands, `s` in seconds, `verdict`; `seed N`: the value of the run at that place."""
    if style.startswith("seed "):
        return f"{value['values'][int(style.removeprefix('seed '))]:.1%}"
    mean, low, high = (value[name] for name in ("mean", "low", "high"))
    match style:
        case "%" if value["seeds"] > 1:
            # A rate outside of 0 and 1 is Student's doing.
            return f"{mean:.1%} ({_bound(low)}–{_bound(high)})"
        case "%" | "mean %":
            return f"{mean:.1%}"
        case "nats":
            return f"{mean:.2f} ({low:.2f}–{high:.2f})"
        case "fine nats":
            return f"{mean:.3f} ({low:.3f}–{high:.3f})"
        case "mean nats":
            return f"{mean:.2f}"
        case "difference nats":
            return f"{_signed(mean, 2)} ({_signed(low, 2)} to {_signed(high, 2)})"
        case "points":
            return f"{_signed(mean)} ({_signed(low)} to {_signed(high)})"
        case "opposite points":
            return f"{_signed(-mean)} ({_signed(-high)} to {_signed(-low)})"
        case "k":
            return f"{mean / 1000:.0f}k"
        case "s":
            return f"{mean:.0f} s"
        case "verdict":
            return str(value["verdict"])
    raise ValueError(f"no style {style!r}")


def _bound(rate: float) -> str:
    return f"{100 * min(max(rate, 0), 1):.1f}".replace("100.0", "100")


def _signed(value: float, digits: int = 0) -> str:
    """In points, or in nats with two digits."""
    text = f"{value:.2f}" if digits else f"{100 * value:.1f}"
    return "0" + text[2:] if re.fullmatch(r"-0\.?0*", text) else text.replace("-", "−")


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


def render_table(spec: str) -> str:
    kind, *parts = (part.strip() for part in spec.split(";"))
    rows = TABLES[kind](*parts)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join([f"<!-- table: {spec} -->", *lines, "<!-- /table -->"])


def arm_rows(study: str, measure: str, style: str = "%") -> list[list[str]]:
    """Arms down, variants across: the measure after training."""
    variants: dict[str, Any] = read_results(study)["variants"]
    arms = dict.fromkeys(name for section in variants.values() for name in section["arms"])
    header = ["", *(f"{variant}, before {_before(s, measure)}" for variant, s in variants.items())]
    return [header] + [
        [f"`{arm}`"]
        + [
            format_value(section["arms"][arm][_key(measure, "after")], style)
            if arm in section["arms"]
            else ""
            for section in variants.values()
        ]
        for arm in arms
    ]


def _before(section: Mapping[str, Any], measure: str) -> str:
    first = next(iter(section["arms"].values()))
    return f"{first[_key(measure, 'before')]['mean']:.1%}"


def _key(measure: str, when: str) -> str:
    """A score, of a suite's too, is stored without its name."""
    suite, slash, name = measure.rpartition("/")
    return f"{suite}{slash}{when}" if name == "score" else f"{measure}_{when}"


def curve_rows(place: str) -> list[list[str]]:
    """Arms down, steps across: validation scores along training."""
    arms = read_section(place)["arms"]
    curves = {name: curve_of(arm) for name, arm in arms.items()}
    steps = sorted(set().union(*curves.values()))
    rows = [["arm", "seeds", *(f"step {step}" for step in steps)]]
    for name, curve in curves.items():
        cells = [format_value(curve[step], "%") if step in curve else "" for step in steps]
        rows.append([f"`{name}`", str(arms[name]["after"]["seeds"]), *cells])
    return rows


def cost_rows(place: str, *measures: str) -> list[list[str]]:
    """Arms down: what they end at, and what a run of each costs, means over seeds."""
    units = {"student_tokens": "student tokens", "teacher_tokens": "teacher tokens"}
    results = read_section(place)
    rows = [["arm", "rate", *(f"`{m}`" for m in measures), *units.values(), "PFLOP", "steps"]]
    if measures:
        rows.append(["start", "", *(_before(results, measure) for measure in measures), *[""] * 4])
    for name, arm in results["arms"].items():
        spent = {unit: value["mean"] for unit, value in arm["spent"].items()}
        rows.append(
            [
                f"`{name}`",
                f"{arm['learning_rate']:g}",
                *(format_value(arm[_key(measure, "after")], "%") for measure in measures),
                *(f"{spent[unit] / 1000:.0f}k" for unit in units),
                f"{spent['flops'] / 1e15:.2f}",
                f"{spent['steps']:.0f}",
            ]
        )
    return rows


def cost_cells(arm: Mapping[str, Any], outcome: str) -> list[str]:
    """Of a table's row: what an arm ends at, tokens of student and teacher, PFLOP and seconds of
    training."""
    spent = {unit: value["mean"] for unit, value in arm["spent"].items()}
    return [
        format_value(arm[_key(outcome, "after")], "%"),
        " / ".join(f"{spent[f'{who}_tokens'] / 1000:.0f}k" for who in ("student", "teacher")),
        f"{spent['flops'] / 1e15:.2f}",
        f"{spent['seconds']:.0f}",
    ]


def contrast_rows(study: str, style: str = "points", variant: str = "") -> list[list[str]]:
    """The fixed contrasts of a study, or of one of its variants."""
    results = read_results(study)
    sections = results.get("variants") or {"": results}
    digits = 2 if style == "nats" else 0
    rows = [["contrast", "outcome", "difference", "by", "Holm's p", "detectable", "verdict"]]
    for name, section in sections.items():
        for row in section["contrasts"] if variant in ("", name) else ():
            rows.append(
                [
                    f"{name} {row['contrast']}".strip(),
                    f"`{row['outcome']}`",
                    f"{_signed(row['mean'], digits)} "
                    f"({_signed(row['low'], digits)} to {_signed(row['high'], digits)})",
                    f"{row['method']}, {row['seeds']} seeds",
                    f"{row['p_holm']:.3f}",
                    _signed(row["detectable"], digits),
                    row["verdict"],
                ]
            )
    return rows


FAULTS = ("date", "desk", "confirm", "talk")


def side_rows(place: str) -> list[list[str]]:
    """Arms of the switchboard: errors where habits are wrong, where they are right, of both."""
    arms = read_section(place)["arms"]
    rows = [["arm", "seeds", "habit wrong", "habit right", "mean of both", "filler"]]
    for name, arm in arms.items():
        cells = [
            arm["decisions/habit_wrong_after"],
            arm["decisions/habit_right_after"],
            _over_seeds(both_sides_of(arm)),
            arm["decisions/filler_after"],
        ]
        values = [format_value(cell, "%") for cell in cells]
        rows.append([f"`{name}`", str(cells[0]["seeds"]), *values])
    return [rows[0], _start_row(arms), *rows[1:]]


def _start_row(arms: Mapping[str, Any]) -> list[str]:
    """Over the seeds of the arm that has the most: they start alike."""
    arm = max(arms.values(), key=lambda arm: len(arm["runs"]))
    cells = [arm[f"decisions/{name}_before"] for name in ("habit_wrong", "habit_right", "filler")]
    cells.insert(2, _over_seeds(both_sides_of(arm, "before")))
    return ["start", "", *(format_value(cell, "mean %") for cell in cells)]


def fault_rows(place: str) -> list[list[str]]:
    """Means over seeds by fault: error where the habit is wrong / where it is right."""
    arms = read_section(place)["arms"]
    start = max(arms.values(), key=lambda arm: len(arm["runs"]))
    rows = [["wrong / right", *(f"`{fault}`" for fault in FAULTS)]]
    rows.append(["start", *(_fault_cell(start, fault, "before") for fault in FAULTS)])
    for name, arm in arms.items():
        rows.append([f"`{name}`", *(_fault_cell(arm, fault, "after") for fault in FAULTS)])
    return rows


def _fault_cell(arm: Mapping[str, Any], fault: str, when: str) -> str:
    means = (arm[f"decisions/{fault}/habit_{s}_{when}"]["mean"] for s in ("wrong", "right"))
    return " / ".join(f"{mean:.1%}" for mean in means)


def gate_rows(study: str) -> list[list[str]]:
    """Right replies where a habit is wrong, with each wording of the hints and without one."""
    files = sorted((ROOT / f"recipes/{study}").glob("gate-*.json"))
    gates = {path.stem.removeprefix("gate-"): json.loads(path.read_text()) for path in files}
    first = next(iter(gates.values()))
    rows = [["fault", "turns × replies", "no hint", *(f"hint as {name}" for name in gates)]]
    for fault in FAULTS:
        cell = first["gate"][fault]
        rates = [cell["without"], *(gate["gate"][fault]["with"] for gate in gates.values())]
        turns = f"{cell['turns']} × {first['replies']}"
        rows.append([f"`{fault}`", turns, *(f"{rate:.1%}" for rate in rates)])
    return rows


TABLES: Mapping[str, Callable[..., list[list[str]]]] = {
    "arms": arm_rows,
    "costs": cost_rows,
    "curves": curve_rows,
    "contrasts": contrast_rows,
    "sides": side_rows,
    "faults": fault_rows,
    "gate": gate_rows,
}


if __name__ == "__main__":
    sys.exit(main())
