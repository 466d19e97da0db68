"""A page as the tests look at it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Fails on tags that do not match; keeps what the tests look at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.texts, self.contents = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        # The table of contents repeats the titles, which the tests look for.
        (self.contents if "nav" in self.open else self.texts).append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def read(path: Path) -> tuple[str, Page]:
    text = path.read_text(encoding="utf-8")
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ElementTree.fromstring(svg)
    return text, Page(text)
