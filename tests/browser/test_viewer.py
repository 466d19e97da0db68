"""A person with a browser: reads a run, and writes hints that the reader `person` takes."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from unit.report.corrected import HOSTILE as CORRECTION_HOSTILE
from unit.report.corrected import make_corrected_batch
from unit.report.played import hinted, make_episode, make_episode_evaluation
from unit.viewer.viewed_runs import HOSTILE, hostile, start_run, store, write_run

from courtside.reader.human import HumanReader
from courtside.recipe.load import parse_recipe
from courtside.recipe.reader import HumanReaderConfig
from courtside.report.folder.folder import RunFolder
from courtside.types import Hint, Message

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HINT = "Read the list of tools: it is called meteo_lookup here."


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Fails a test whose page has had a mistake of its own."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(5000)
    page = context.new_page()
    mistakes: list[str] = []
    page.on("pageerror", lambda error: mistakes.append(str(error)))
    page.on("dialog", lambda dialog: mistakes.append(dialog.message))
    yield page
    context.close()
    assert mistakes == []


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return write_run(tmp_path / "first")


@pytest.fixture
def hints(folder: RunFolder) -> Path:
    return folder.path / "hints.jsonl"


def turn(page: Page, number: int) -> Any:
    return page.locator(f'[data-turn="{number}"]')


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(page: Page, number: int, text: str) -> None:
    turn(page, number).get_by_role("button", name="write a hint").click()
    area = turn(page, number).get_by_role("textbox")
    area.fill(text)
    area.press("Control+Enter")
    area.wait_for(state="detached")


def test_reading_filtering_writing_editing_removing(
    page: Page, serve: Callable[..., str], folder: RunFolder, hints: Path
) -> None:
    from playwright.sync_api import expect

    page.goto(serve(folder, hints))
    expect(page.locator("#rows a")).to_have_count(6)
    expect(page.locator("#hints-file")).to_have_text(f"0 hints in {hints}")
    expect(page.locator("#recipe")).to_contain_text('kind = "human"')

    page.get_by_role("button", name="with errors").click()
    expect(page.locator("#rows a")).to_have_count(5)
    page.get_by_role("button", name="with errors").click()
    page.get_by_label("Search in all turns").fill("not found: calculator")
    expect(page.locator("#rows a")).to_have_count(2)
    page.get_by_label("Search in all turns").fill("")
    page.select_option("#step", "0")
    expect(page).to_have_url(re.compile(r"#/0/0-0$"))

    wrong = turn(page, 1)
    expect(wrong.locator(".badge")).to_have_text("tool not found")
    expect(wrong.locator(".entry.hint")).to_contain_text("The tool is called meteo_lookup here")
    expect(wrong.locator(".entry.hint small")).to_contain_text("shift +")
    expect(wrong.locator(".entry.assistant .bad")).to_have_text("weather")
    page.locator("main").press("n")
    expect(page).to_have_url(re.compile(r"#/0/0-0/1$"))
    page.keyboard.press("n")
    expect(turn(page, 7)).to_have_class(re.compile("current"))

    write(page, 1, HINT)
    assert rows(hints) == [{"trajectory": "0-0", "turn": 1, "text": HINT}]
    expect(page.locator("#hints-file")).to_have_text(f"1 hint in {hints}")
    expect(page.locator("#rows a .chip.user-hint")).to_have_text("1 own hint")
    # Right above the turn, and below what stands before it.
    user_hint, reply = wrong.locator(".user-hint .text"), wrong.locator(".entry.assistant .text")
    assert user_hint.bounding_box()["y"] < reply.bounding_box()["y"]

    page.reload()
    expect(turn(page, 1).locator(".user-hint .text")).to_have_text(HINT)
    page.get_by_role("button", name="with my hints").click()
    expect(page.locator("#rows a")).to_have_count(1)

    turn(page, 1).get_by_role("button", name="edit").click()
    turn(page, 1).get_by_role("textbox").fill("Shorter.")
    turn(page, 1).get_by_role("button", name="save").click()
    expect(turn(page, 1).locator(".user-hint .text")).to_have_text("Shorter.")
    assert rows(hints)[-1]["text"] == "Shorter."

    turn(page, 1).get_by_role("button", name="remove").click()
    expect(page.locator("#hints-file")).to_have_text(f"0 hints in {hints}")
    assert rows(hints) == []
    page.get_by_role("button", name="undo").click()
    expect(turn(page, 1).locator(".user-hint .text")).to_have_text("Shorter.")
    assert [row["text"] for row in rows(hints)] == ["Shorter."]


def test_half_written_text_is_never_lost(
    page: Page, serve: Any, folder: RunFolder, hints: Path
) -> None:
    from playwright.sync_api import expect

    url = serve(folder, hints)
    page.goto(f"{url}#/0/0-0/1")
    expect(turn(page, 1)).to_have_class(re.compile("current"))
    page.locator("main").press("h")
    area = turn(page, 1).get_by_role("textbox")
    expect(area).to_be_focused()
    page.keyboard.type("half a jkn/ thought")
    # Somebody else writes: the page follows the file, and the editor stays.
    hints.write_text('{"trajectory": "0-0", "turn": 3, "text": "from an editor"}\n')
    expect(turn(page, 3).locator(".user-hint .text")).to_have_text("from an editor")
    expect(area).to_have_value("half a jkn/ thought")
    expect(area).to_be_focused()
    page.keyboard.press("Escape")
    expect(turn(page, 1).get_by_role("button", name="continue your draft")).to_be_focused()
    page.keyboard.press("j")
    expect(page.locator(".head")).to_contain_text("step 0 · 0-1")
    page.keyboard.press("k")
    expect(turn(page, 1).get_by_role("textbox")).to_have_value("half a jkn/ thought")
    page.reload()
    expect(turn(page, 1).get_by_role("textbox")).to_have_value("half a jkn/ thought")
    # The server goes away and comes back: the text is still there, and then it is written.
    serve.stop()
    turn(page, 1).get_by_role("button", name="save").click()
    expect(page.locator("#unreachable")).to_contain_text("does not answer")
    expect(turn(page, 1).get_by_role("textbox")).to_have_value("half a jkn/ thought")
    serve(folder, hints, port=int(url.rsplit(":", 1)[1].strip("/")))
    turn(page, 1).get_by_role("button", name="save").click()
    expect(turn(page, 1).get_by_role("alert")).to_contain_text("Reload it")
    page.reload()
    turn(page, 1).get_by_role("button", name="save").click()
    expect(turn(page, 1).locator(".user-hint .text")).to_have_text("half a jkn/ thought")
    assert [row["text"] for row in rows(hints)] == ["from an editor", "half a jkn/ thought"]


def test_what_is_refused_is_said_where_it_was_written(
    page: Page, serve: Callable[..., str], folder: RunFolder, hints: Path
) -> None:
    from playwright.sync_api import expect

    page.goto(f"{serve(folder, hints)}#/0/0-0/1")
    turn(page, 1).get_by_role("button", name="write a hint").click()
    area = turn(page, 1).get_by_role("textbox")
    area.fill("x" * 1001)
    expect(turn(page, 1).get_by_role("button", name="save")).to_be_disabled()
    expect(turn(page, 1).locator(".chars")).to_have_text("1,001 of 1,000")
    area.fill("x")
    hints.write_text("broken\n")
    area.press("Control+Enter")
    expect(turn(page, 1).get_by_role("alert")).to_contain_text("hints.jsonl:1: not valid JSON")
    expect(area).to_have_value("x")
    expect(page.locator("#problem")).to_contain_text("hints.jsonl:1: not valid JSON")
    assert hints.read_text() == "broken\n"


def test_a_run_without_trajectories_and_one_that_starts_to_have_some(
    page: Page, serve: Callable[..., str], tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    with start_run(tmp_path / "run") as run:
        page.goto(serve(RunFolder.read(run.path), tmp_path / "hints.jsonl"))
        expect(page.locator("main")).to_contain_text("run.trajectories_every")
        store(run, 0)
        expect(page.locator("#rows a")).to_have_count(6)
        expect(turn(page, 1)).to_be_visible()


def test_long_messages_are_folded(page: Page, serve: Callable[..., str], tmp_path: Path) -> None:
    from playwright.sync_api import expect

    episode = hinted(make_episode("0-0"))
    turns = list(episode.trajectory.turns)
    content = "word " * 1000 + "end"
    turns[2] = replace(turns[2], messages=(Message(role="tool", content=content),))
    with start_run(tmp_path / "run") as run:
        long = replace(episode, trajectory=replace(episode.trajectory, turns=tuple(turns)))
        store(run, 0, [long])
    page.goto(serve(RunFolder.read(run.path), tmp_path / "hints.jsonl"))
    text = turn(page, 2).locator(".text")
    expect(text).not_to_contain_text("end")
    turn(page, 2).get_by_role("button", name="show all 5,003 characters").click()
    expect(text).to_contain_text("word end")
    turn(page, 2).get_by_role("button", name="collapse").click()
    expect(text).not_to_contain_text("end")


def test_texts_are_texts(page: Page, serve: Callable[..., str], tmp_path: Path) -> None:
    from playwright.sync_api import expect

    with start_run(tmp_path / HOSTILE.replace("/", "")[:60]) as run:
        store(run, 0, [hostile(hinted(make_episode("0-0")))])
    hints = tmp_path / "hints.jsonl"
    hints.write_text(json.dumps({"trajectory": "0-0", "turn": 1, "text": HOSTILE}) + "\n")
    # A policy would stop a script that got in; none may get in.
    page.add_init_script("document.addEventListener('securitypolicyviolation',"
                         "(event) => { window.violated = event.violatedDirective; })")  # fmt: skip
    page.goto(serve(RunFolder.read(run.path), hints))
    expect(turn(page, 1).locator(".user-hint .text")).to_have_text(HOSTILE)
    expect(page.locator("h2")).to_have_text(HOSTILE)
    assert page.locator(".turn script, .turn img, .list script, .list img, .head img").count() == 0
    assert page.locator("script").count() == 1
    assert "owned" not in page.title().replace(HOSTILE.replace("/", "")[:60], "")
    assert page.evaluate("window.violated") is None


def test_the_newest_file_is_unreadable(
    page: Page, serve: Callable[..., str], folder: RunFolder, hints: Path
) -> None:
    from playwright.sync_api import expect

    intact = folder.stored_file(1).read_bytes()
    folder.stored_file(1).write_bytes(b"half a file")
    url = serve(folder, hints)
    page.goto(url)
    expect(page).to_have_url(re.compile(r"#/0/0-0$"))
    expect(page.locator("#notice")).to_have_text("step 1 cannot be read; showing step 0.")
    expect(page.locator("#rows a")).to_have_count(6)
    expect(turn(page, 1)).to_be_visible()
    # Asked for, it says what is wrong; the page is never blank.
    page.select_option("#step", "1")
    expect(page.locator("main")).to_contain_text("step 1 cannot be read.")
    expect(page.locator("main")).to_contain_text("cannot be read as Parquet")
    folder.stored_file(1).write_bytes(intact)
    expect(page.locator("#rows a")).to_have_count(6)
    expect(turn(page, 1)).to_be_visible()


def test_held_out_answers_have_no_editors(
    page: Page, serve: Callable[..., str], tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    with start_run(tmp_path / "run") as run:
        episodes = [make_episode(f"student-0-{i}", wrong=(1,) if i else ()) for i in range(3)]
        evaluation = make_episode_evaluation(0, 0.5, policy="student:a_b")
        run.record_evaluation(evaluation, episodes)
        store(run, 0)
    page.goto(serve(RunFolder.read(run.path), tmp_path / "hints.jsonl"))
    expect(page).to_have_url(re.compile(r"#/0/0-0$"))
    labels = page.locator("#step optgroup").evaluate_all("groups => groups.map((g) => g.label)")
    assert labels == ["training steps", "held-out evaluations"]
    page.select_option("#step", label="test (a_b) after 0 steps · 2 of 3 with errors")
    # The first with an error is opened.
    expect(page.locator(".head")).to_contain_text("test (a_b) after 0 steps · student-0-1")
    expect(page.locator(".head")).to_contain_text("A held-out answer.")
    expect(turn(page, 3).locator(".badge")).to_have_text("tool not found")
    assert page.locator(".hint-editor").count() == 0
    page.locator("main").press("h")  # does nothing
    page.reload()
    expect(page.locator(".head")).to_contain_text("student-0-1")


def test_marks_that_reorder_text_do_not_act(
    page: Page, serve: Callable[..., str], tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    episode = hinted(make_episode("0-0"))
    turns = list(episode.trajectory.turns)
    turns[1] = replace(turns[1], text="run \u202etxt.exe")
    with start_run(tmp_path / "run") as run:
        trajectory = replace(episode.trajectory, turns=tuple(turns))
        store(run, 0, [replace(episode, trajectory=trajectory)])
    page.goto(serve(RunFolder.read(run.path), tmp_path / "hints.jsonl"))
    expect(turn(page, 1).locator(".entry.assistant .text")).to_have_text("run [U+202E]txt.exe")


def test_the_whole_recipe_is_there_to_copy(
    page: Page, serve: Callable[..., str], folder: RunFolder, hints: Path
) -> None:
    page.goto(serve(folder, hints))
    page.get_by_text("Recipe to train on these hints").click()
    recipe = parse_recipe(tomllib.loads(page.locator("#recipe").inner_text()))
    assert recipe.student == folder.recipe().student
    assert recipe.human_readers[0].path == hints


def test_a_narrow_screen(
    browser: Browser, serve: Callable[..., str], folder: RunFolder, hints: Path
) -> None:
    from playwright.sync_api import expect

    context = browser.new_context(viewport={"width": 390, "height": 800})
    page = context.new_page()
    page.goto(serve(folder, hints))
    expect(page.locator("main")).to_be_hidden()
    page.locator("#rows a").first.click()
    expect(turn(page, 1)).to_be_visible()
    expect(page.locator(".list")).to_be_hidden()
    write(page, 1, HINT)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("link", name="all trajectories").click()
    expect(page.locator("#rows a")).to_have_count(6)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


def test_what_was_written_is_what_the_reader_says(
    page: Page, serve: Callable[..., str], folder: RunFolder, hints: Path
) -> None:
    page.goto(f"{serve(folder, hints)}#/1/1-2")
    write(page, 7, f"  {HINT}\n")
    trajectories = [record.trajectory for record in folder.trajectories(1)]
    reading = HumanReader(HumanReaderConfig(kind="human", path=hints))(trajectories)
    assert reading.hints == (Hint(trajectory="1-2", turn=7, text=HINT, source="human"),)
    assert trajectories[2].turns[7].events[0].details["message"] == "Tool not found: weather"


# ── corrected drafts ─────────────────────────────────────────────────────────────────────────────


def test_from_a_draft_to_its_corrections_and_back(
    page: Page, serve: Callable[..., str], tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    with start_run(tmp_path / "run") as folder:
        store(folder, 0, make_corrected_batch())
    url = serve(RunFolder.read(tmp_path / "run"), tmp_path / "hints.jsonl")
    head = page.locator(".head")
    page.goto(f"{url}#/0/0-1-0")
    expect(page.locator(".critique .text")).to_have_text(f"Count again. {CORRECTION_HOSTILE}")
    head.get_by_role("link", name="its repair").click()
    expect(head.locator(".badge.corrected")).to_have_text("repair")
    expect(turn(page, 1).locator(".fork")).to_have_text("the repaired turn")
    head.get_by_role("link", name="its draft").click()
    expect(page.locator(".critique")).to_be_visible()

    row = page.locator("#rows a", has_text="length −0.25")
    expect(row).to_contain_text(f"rewards: grade 0, length −0.25, {CORRECTION_HOSTILE} not comp")
    row.click()
    head.get_by_role("link", name="chosen above it").click()
    expect(head.locator(".badge.corrected")).to_have_text(["chosen", "better"])
    page.goto(f"{url}#/0/{quote('0-2-0+takeover')}")
    mark = "the teacher takes over after 3 tokens of the student"
    expect(turn(page, 1).locator(".fork")).to_have_text(mark)
    expect(page.locator("#rows a", has_text="2 tokens replaced by the teacher")).to_have_count(1)
    assert page.title() == "run · courtside"
