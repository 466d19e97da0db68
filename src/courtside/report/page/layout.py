"""The frame of a self-contained page: style sheet, contents and sections, no scripts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import NamedTuple

from courtside.sanitize import show_invisible


class Section(NamedTuple):
    title: str
    body: str
    """Empty: the section is left out."""
    is_folded: bool = False

    @property
    def anchor(self) -> str:
        """
        >>> Section("Samples before and after", "").anchor
        'samples-before-and-after'
        """
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def render(self) -> str:
        title = escape(self.title)
        if self.is_folded:
            return f'<details id="{self.anchor}"><summary>{title}</summary>{self.body}</details>'
        return f'<section id="{self.anchor}"><h2>{title}</h2>{self.body}</section>'


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title} · courtside</title>
<style>
{style}</style>
</head>
<body>
<main>
<header class="top"><p class="brand">courtside</p><h1>{title}</h1>
<p class="summary">{summary}</p><p class="progress">{progress}</p></header>
{contents}
{body}
</main>
</body>
</html>
"""


def render_page(
    *, title: str, summary: str, progress: str, alerts: str, sections: Sequence[Section]
) -> bytes:
    """`alerts` are HTML, above the sections; empty sections are left out."""
    filled = [section for section in sections if section.body]
    page = PAGE.format(
        title=escape(title),
        summary=escape(summary),
        progress=escape(progress),
        style=resources.files("courtside.report.page").joinpath("report.css").read_text("utf-8"),
        contents=_render_contents(filled),
        body="\n".join([alerts, *(section.render() for section in filled)]),
    )
    return show_invisible(page).encode("utf-8", "replace")


def _render_contents(sections: Sequence[Section]) -> str:
    links = "".join(f'<a href="#{s.anchor}">{escape(s.title)}</a>' for s in sections)
    return f'<nav class="contents" aria-label="Contents">{links}</nav>'
