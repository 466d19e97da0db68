"""What the documentation shows works: recipes, commands, links, columns, messages, examples."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import courtside
from courtside import errors
from courtside.cli.app import app
from courtside.experiment.config import ExperimentConfig, find_experiment
from courtside.experiment.plan import read_plan
from courtside.experiment.schedule import list_recipes
from courtside.losses.divergences import registry
from courtside.recipe import Recipe
from courtside.recipe.builtin import builtin_recipe_files, find_recipe
from courtside.recipe.load import load_recipe, parse_recipe, parse_tasks_section
from courtside.recipe.pipeline import is_pipeline, load_pipeline, parse_pipeline
from courtside.recipe.schema import field_type, sections_by_kind, union_members

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (
    *(REPOSITORY / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
)
HINTED: dict[str, Any] = {
    "teacher": {"kind": "self", "weights": "live"},
    "losses": [{"kind": "divergence", "on": "hinted_turns"}],
}
SECTIONS: dict[str, dict[str, Any]] = {
    "student": {"student": {"model": "smollm2-135m"}},
    "tasks": {"tasks": {"kind": "arithmetic"}},
    "teacher": {"teacher": {"kind": "model", "model": "models/teacher"}},
    "losses": {"losses": [{"kind": "divergence"}]},
    "hinted": HINTED,
    "agent": {"student": {"model": "smollm2-135m"}, "tasks": {"kind": "toolbox"}} | HINTED,
}
"""The sections that `<!-- partial: student, tasks -->` above a block stands for."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    comment: str
    """The HTML comment right above it."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


FENCE = re.compile(
    r"(?:^<!-- (?P<comment>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)


@cache
def blocks(language: str) -> list[Block]:
    code_blocks = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            block = Block(page, line, match["language"], match["comment"] or "", match["text"])
            code_blocks.append(block)
    return [block for block in code_blocks if block.language == language]


@cache
def prose(page: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def code_spans(text: str) -> list[str]:
    spans = re.findall(r"``(.+?)``|`([^`\n]+)`", text)
    return [(double or single).strip() for double, single in spans]


def section(page: str, heading: str) -> str:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    level = heading.split(" ")[0]
    _, _, after = text.partition(f"\n{heading}\n")
    assert after, f"{page} has no {heading!r}"
    return re.split(rf"^#{{1,{len(level)}}} ", after, maxsplit=1, flags=re.M)[0]


def first_column(text: str) -> Iterator[str]:
    """The code spans in the first cell of each row of the tables in a text."""
    for row in re.findall(r"^\| (.+?) \|", text, re.M):
        yield from code_spans(row)


# ── recipes ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_recipes_in_the_docs_are_valid(block: Block) -> None:
    tree = tomllib.loads(block.text)
    if block.comment == "experiment":
        ExperimentConfig.model_validate_json(json.dumps(tree), strict=True)
        return
    if "stages" in tree:
        parse_pipeline(tree, name=str(block))
        return
    if block.comment:
        kind, _, names = block.comment.partition(": ")
        assert kind == "partial"
        for name in names.split(", "):
            assert not SECTIONS[name].keys() & tree.keys(), "a section that the block has itself"
            tree |= SECTIONS[name]
    parse_recipe(tree, name=str(block))


@pytest.mark.parametrize("block", blocks(""), ids=str)
def test_recipes_are_marked_as_such(block: Block) -> None:
    """A block without a language is tested by nobody."""
    assert not re.search(r"^\[+[a-z_.]+\]+\s*(#.*)?$", block.text, re.M), "write ```toml"


def test_every_recipe_in_the_tree_is_valid() -> None:
    assert {"shared-rule"} <= builtin_recipe_files().keys()
    for file in (REPOSITORY / "recipes").glob("*/*.toml"):
        if is_pipeline(file):
            load_pipeline(file)
        elif file.name != "experiment.toml":
            load_recipe(file)


FIELD = re.compile(
    r"(student|tasks|rollout|reader|hints|teacher|takeover|losses|train|evaluate|run)"
    r"\.([a-z_.]+)(?: = .*)?"
)


def has_field(section_type: Any, keys: list[str]) -> bool:
    if not keys:
        return True
    if keys[0].isdecimal():
        return has_field(field_type(section_type, 0), keys[1:])
    sections = [
        *(sections_by_kind(section_type).values() or union_members(section_type) or (section_type,))
    ]
    after = [field_type(inner_type, keys[0]) for inner_type in sections]
    return any(inner_type is not Any and has_field(inner_type, keys[1:]) for inner_type in after)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fields_named_in_the_text_exist(page: Path) -> None:
    for span in code_spans(prose(page)):
        if (match := FIELD.fullmatch(span)) and not span.endswith((".py", ".jsonl")):
            assert has_field(Recipe, [match[1], *match[2].split(".")]), span


def test_jsonl_in_the_docs_is_tasks(tmp_path: Path) -> None:
    from courtside.tasks.parsing import read_jsonl_tasks

    assert blocks("jsonl")
    for block in blocks("jsonl"):
        file = tmp_path / "tasks.jsonl"
        file.write_text(block.text)
        assert len(read_jsonl_tasks(file)) == len(block.text.splitlines())


# ── commands ─────────────────────────────────────────────────────────────────────────────────────


def commands(program: str) -> list[str]:
    commands = [line for block in blocks("bash") for line in block.text.splitlines()]
    spans = [span for page in PAGES for span in code_spans(prose(page))]
    return sorted({line for line in (*commands, *spans) if line.startswith(f"{program} ")})


def recipe_meant_by(target: str) -> Path | None:
    """None: a name that stands for the reader's own recipe or run."""
    return (
        find_recipe(target) if target in builtin_recipe_files() or Path(target).is_file() else None
    )


@pytest.mark.parametrize("line", commands("courtside"))
def test_commands_parse(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    verb, *arguments = shlex.split(line, comments=True)[1:]
    group: Any = get_command(app)
    if verb.startswith("--"):
        assert verb in ("--help", *(flag for p in group.params for flag in p.opts))
        return
    if not arguments:
        assert verb in group.commands  # A verb that is only talked about.
        return
    parsed = group.commands[verb].make_context(verb, arguments).params
    if verb == "init" and not parsed["name"].isupper():
        assert parsed["name"] in builtin_recipe_files()
    if "overrides" not in parsed:
        return
    if verb == "experiment":
        if Path(parsed["path"]).exists():
            plan = read_plan(find_experiment(parsed["path"]), tmp_path, parsed["overrides"] or ())
            assert list(list_recipes(plan))
        return
    if verb == "check-env" and ":" in parsed["target"]:
        tasks = {"kind": "environment", "path": parsed["target"]}
        parse_tasks_section(tasks, parsed["overrides"] or ())
        return
    # The reader's own recipe is the quickstart's.
    file = tmp_path / "mine.toml"
    file.write_text(next(b.text for b in blocks("toml") if b.page.name == "quickstart.md"))
    target = parsed.get("recipe") or parsed.get("target") or str(parsed["run"])
    overrides = parsed["overrides"] or ()
    if any(override.startswith(("stages.", "base.")) for override in overrides):
        file.write_text(next(b.text for b in blocks("toml") if b.page.name == "pipelines.md"))
    recipe = recipe_meant_by(target) or file
    (load_pipeline if is_pipeline(recipe) else load_recipe)(recipe, overrides)


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for line in commands("make"):
        assert re.search(rf"^{shlex.split(line)[1]}:", makefile, re.M), line


# ── links and names ──────────────────────────────────────────────────────────────────────────────


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


PLACES = tuple(f"{name}/" for name in ("src", "recipes", "examples", "tests", "benchmarks", "docs"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_the_text_exist(page: Path) -> None:
    for span in code_spans(prose(page)):
        if span.startswith(PLACES) and not re.search(r"NAME|[ =*…]", span):
            assert (REPOSITORY / span).exists(), span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_named_in_the_text_exist(page: Path) -> None:
    """Such as `losses/fused/kernels.py`; the lab log and the changelog are history."""
    package = REPOSITORY / "src" / "courtside"
    folders = tuple(f"{path.parent.name}/" for path in package.glob("*/__init__.py"))
    if page.name in ("lab-log.md", "CHANGELOG.md"):
        return
    for span in code_spans(prose(page)):
        name = span.partition(":")[0]
        if name.startswith(folders) and re.fullmatch(r"[\w/]+(\.py|/)", name):
            assert (package / name).exists(), span


def test_the_file_map_is_whole() -> None:
    listed = set(first_column(section("docs/architecture.md", "## File map")))
    assert all((REPOSITORY / name).exists() for name in listed)
    packages = {path.parent for path in (REPOSITORY / "src" / "courtside").glob("*/__init__.py")}
    assert {f"src/courtside/{path.name}/" for path in packages} <= listed


def test_the_glossary_names_modules_that_exist() -> None:
    rows = re.findall(r"^\| (.+?) \| .+? \| (`.+?) \|$", glossary(), re.M)
    assert 20 <= len(rows) <= 50
    modules = [span for _, cell in rows for span in code_spans(cell)]
    assert [m for m in modules if not (REPOSITORY / "src" / "courtside" / m).exists()] == []


def glossary() -> str:
    return (REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8")


def test_functions_of_the_docs_exist() -> None:
    text = (REPOSITORY / "docs" / "algorithm.md").read_text(encoding="utf-8")
    references = re.findall(r"`(?:(\w+)/)?(\w+)\.py: (\w+)`", text)
    assert len(references) > 5
    for package, module, function in references:
        path = f"courtside.{package or 'losses'}.{module}"
        assert hasattr(importlib.import_module(path), function), function


def test_the_loop_on_the_page_is_the_loop() -> None:
    loop = (REPOSITORY / "src" / "courtside" / "loop.py").read_text(encoding="utf-8")
    lines = [line.strip() for line in loop.splitlines()]
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    (loop_code,) = re.findall(r"^```\n(for step in .*?)^```$", text, re.M | re.S)
    quoted = [line.strip() for line in loop_code.splitlines()]
    assert [line for line in quoted if line not in lines] == []
    body = lines[lines.index(quoted[1]) :]
    assert [line for line in body if not line.startswith("with ")] == quoted[1:]


def test_pictures_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPOSITORY / "scripts" / "pictures.py"), run_name="__main__")
    assert ended.value.code == 0


# ── measured numbers ─────────────────────────────────────────────────────────────────────────────

STEP_ROWS = [
    (name, side, peer)
    for name, peer in (
        ("opd_step_gpu_vllm_h200", "trl_vllm"),
        ("opd_step_gpu_h200", "trl"),
        ("opd_step_gpu_1.7b_h200", "trl"),
    )
    for side in ("courtside", "courtside_lean")
]


def step_cells(name: str, side: str, peer_side: str) -> tuple[str, str, str]:
    """The cells of a row of the README's step table, from the benchmark's JSON."""
    file = REPOSITORY / "benchmarks" / "results" / f"{name}.json"
    sides = {row["side"]: row for row in json.loads(file.read_text("utf-8"))["summary"]}

    def cell(row: dict[str, Any]) -> str:
        seconds, rollout = (f"{x:.3g}" for x in (row["seconds"], row["phases"]["rollout"]))
        return f"{seconds} ({rollout}), {row['gpu_peak'] / 2**30:.1f}"

    ours, peer = sides[side], sides[peer_side]
    ratios = f"{peer['seconds'] / ours['seconds']:.1f}; {ours['gpu_peak'] / peer['gpu_peak']:.2f}"
    return cell(ours), cell(peer), ratios


@pytest.mark.parametrize(("name", "side", "peer"), STEP_ROWS)
def test_the_step_table_is_the_benchmarks(name: str, side: str, peer: str) -> None:
    assert " | ".join(step_cells(name, side, peer)) in section("README.md", "## Results")


# ── messages ─────────────────────────────────────────────────────────────────────────────────────


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text of a program, with … for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_are_those_of_the_code() -> None:
    sources = sorted((REPOSITORY / "src" / "courtside").rglob("*.py"))
    strings = "\n".join(
        text for file in sources for text in texts(ast.parse(file.read_text("utf-8")))
    )
    messages = list(first_column(section("docs/troubleshooting.md", "## Messages")))
    assert len(messages) > 30
    notes = list(
        first_column(section("docs/supported-models.md", "## What a note at the start means"))
    )
    assert len(notes) == 7
    messages += notes
    assert [message for message in messages if message not in strings] == []


def test_install_commands_in_messages_are_those_of_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    commands = []
    for file in (REPOSITORY / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                commands += re.findall(r"pip install (.+)", node.value)
    assert len(commands) >= 7 and "pip install -e ." in readme
    for command in commands:
        extra = re.match(r"-e '\.\[(\w+)\]'", command)
        if extra is not None:
            assert extra[1] in extras
        else:
            plain = command.replace("--force-reinstall ", "").strip()
            assert f"pip install {plain}" in readme, command


def test_every_error_has_a_word_on_it() -> None:
    spans = code_spans((REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    assert {name for name in vars(errors) if isinstance(getattr(errors, name), type)} <= set(spans)


# ── Python ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def runs(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/mine`, of a recipe whose losses log whatever there is to log."""
    from support.small_runs import small_recipe, write_jsonl

    folder = tmp_path_factory.mktemp("docs")
    common = {
        "privileged": {"rule": "Be brief."},
        "grader": "regex",
        "grader_args": {"pattern": "a"},
    }
    rows = [
        {"prompt": f"Say {n}.", "completion": f"{n}", "split": split, **common}
        for n, split in enumerate(["train", "train", "validation", "test"])
    ]
    recipe = small_recipe(
        tiny_folder,
        tasks={"kind": "jsonl", "path": str(write_jsonl(folder / "tasks.jsonl", rows))},
        teacher={"kind": "self", "weights": "ema", "context": {"kind": "field", "field": "rule"}},
        rollout={"samples_per_prompt": 2, "max_new_tokens": 4, "student_fraction": 0.5},
        losses=[
            {"kind": "divergence", "support": {"kind": "top_k", "k": 4}},
            {"kind": "policy_gradient", "on": "student"},
            {"kind": "cross_entropy", "on": "dataset"},
        ],
        train={"steps": 2, "prompts_per_step": 2},
        evaluate={"num_tasks": 1, "forward_kl": True},
    )
    courtside.train(recipe, folder / "runs" / "mine")
    hinted = small_recipe(
        tiny_folder,
        tasks={"kind": "toolbox", "turns": 2, "num_tools": 1, "tool_call_format": "plain"},
        rollout={"samples_per_prompt": 1, "max_new_tokens": 4},
        reader={"kind": "rules"},
        hints={"resamples": 1, "min_shift": 0.0},
        teacher={"kind": "self", "weights": "live"},
        losses=[{"kind": "divergence", "on": "hinted_turns"}],
        train={"steps": 1, "prompts_per_step": 8},
    )
    courtside.train(hinted, folder / "runs" / "hinted")
    return folder


def test_the_readme_shows_the_example() -> None:
    [block] = [block for block in blocks("python") if block.page.name == "README.md"]
    example = (REPOSITORY / "examples" / "ten_lines.py").read_text(encoding="utf-8")
    assert block.text.strip() == example.split('"""', 2)[2].strip()
    assert len([line for line in block.text.splitlines() if line.strip()]) == 10


def test_python_in_the_docs_runs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    # An example registers a divergence; other tests list those of the package.
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    examples = [block for block in blocks("python") if block.page.name != "README.md"]
    assert examples
    for block in examples:
        exec(compile(block.text, str(block), "exec"), {})


def test_every_file_and_column_of_a_run_is_described(runs: Path) -> None:
    import pyarrow.parquet as pq

    folder = runs / "runs" / "mine"
    files = " ".join(first_column(section("docs/concepts.md", "## The run folder")))
    row: dict[str, Any] = {}
    for run_folder in (folder, runs / "runs" / "hinted"):
        for path in run_folder.iterdir():
            assert path.name.startswith(".") or path.name in files, path.name
        row |= courtside.RunFolder.read(run_folder).metrics()[0]
    for key in row:
        assert any(pattern.fullmatch(key) for pattern in documented_metrics()), key
    # By file: a folder of such a name would be read as a data set with partitions.
    with (folder / "trajectories" / "step-000000.parquet").open("rb") as file:
        columns = set(pq.read_schema(file).names)
    assert columns == set(
        first_column(section("docs/concepts.md", "### Columns of a trajectories file"))
    )
    evaluations = courtside.RunFolder.read(folder).evaluations()
    keys = {key for evaluation in evaluations for key in evaluation.metrics}
    assert {"kl_estimate", "forward_kl_estimate"} <= keys
    for key in keys:
        assert any(pattern.fullmatch(key) for pattern in documented_metrics()), key


def documented_metrics() -> list[re.Pattern[str]]:
    """Keys of the tables in docs/metrics.md; names in capitals match any text."""
    text = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    keys = re.findall(r"^\| `([^`]+)` \|", text, re.M)
    return [re.compile(re.sub(r"[A-Z][A-Z_]+", r"[\\w/]+", key)) for key in keys]


def test_ten_lines(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tmp_path / "recipes" / "shared-rule" / "recipe.toml"
    recipe.parent.mkdir(parents=True)
    recipe.write_bytes(find_recipe("shared-rule").read_bytes())
    small = (
        "train.steps=1",
        "train.prompts_per_step=2",
        "rollout.max_new_tokens=4",
        "evaluate.num_tasks=2",
    )
    arguments = (f"student.model={tiny_folder}", *small)
    run_example("ten_lines.py", *arguments, at=tmp_path, with_=monkeypatch)
    output = capsys.readouterr().out
    assert "student 0: " in output and "teacher 0: " in output
    assert "student 1: " in output and "The teacher disliked token" in output


def test_own_tasks(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--model", str(tiny_folder), "--steps", "1")
    run_example("own_tasks.py", *arguments, at=tmp_path, with_=monkeypatch)
    output = capsys.readouterr().out
    assert re.search(r"step 0: KL \d", output) and "student 1: " in output


@pytest.mark.filterwarnings("ignore:.*without a tail")
def test_losses_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("losses_alone.py", at=tmp_path, with_=monkeypatch)
    output = capsys.readouterr().out
    assert "naive: the student ends with 0.368" in output
    assert "tail: the student ends with 1.000" in output


def run_example(name: str, *arguments: str, at: Path, with_: pytest.MonkeyPatch) -> None:
    with_.chdir(at)
    with_.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(REPOSITORY / "examples" / name), run_name="__main__")


def test_every_example_is_run_here() -> None:
    names = {path.stem for path in (REPOSITORY / "examples").glob("*.py")}
    assert {f"test_{name}" for name in names} <= globals().keys()
