"""The page of a comparison: self-contained, with a table for every curve, names escaped."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import courtside


class Outline(HTMLParser):
    """Counts tags and remembers addresses, and that what is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open_tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "br"):
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag


def parse(page: Path) -> Outline:
    outline = Outline()
    outline.feed(page.read_text())
    assert not outline.open_tags
    return outline


def test_the_page_is_whole_and_needs_nothing_else(runs: Path, tmp_path: Path) -> None:
    page = courtside.compare([runs], price_per_hour=2.5).write_html(tmp_path / "page.html")
    outline = parse(page)
    assert all(address.startswith("#") for address in outline.addresses)
    assert "script" not in outline.tags and "link" not in outline.tags and "img" not in outline.tags
    text = page.read_text()
    assert not re.search(r"https?://|url\(", text)
    num_curves = text.count('<div class="curve">')
    assert num_curves == 6 == text.count(', as a table"'), "a table for every curve"
    assert "prefers-color-scheme: dark" in text
    for arm in ("rewarded", "taught"):
        assert text.count(f"<th>{arm}</th>") > 10


def test_names_are_escaped(runs: Path, tmp_path: Path) -> None:
    name = "<b>x & y"
    shutil.copytree(runs / "taught-seed0", tmp_path / name)
    page = courtside.compare([tmp_path / name]).write_html(tmp_path / "page.html")
    parse(page)
    assert "&lt;b&gt;x &amp; y" in page.read_text() and name not in page.read_text()


def test_many_arms_share_no_color_in_a_figure(runs: Path, tmp_path: Path) -> None:
    for number in range(8):
        folder = tmp_path / "runs" / f"arm{number}"
        shutil.copytree(runs / "taught-seed0", folder)
        recipe = (folder / "recipe.toml").read_text()
        rate = "learning_rate = 0.003\n"
        assert rate in recipe
        (folder / "recipe.toml").write_text(recipe.replace(rate, f"learning_rate = 0.{number}1\n"))
    comparison = courtside.compare([tmp_path / "runs"])
    assert len(comparison.arms) == 8 and len(comparison.differences) == 28
    text = comparison.write_html(tmp_path / "page.html").read_text()
    assert text.count('<div class="curve">') == 2 * 5
