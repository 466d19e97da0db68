"""Prometheus' text format (version 0.0.4): families of counters and gauges as lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamily:
    name: str
    kind: Kind
    help: str
    samples: Sequence[tuple[Mapping[str, str], float]]
    """Labels and value; no two have the same labels."""

    def __post_init__(self) -> None:
        assert NAME.fullmatch(self.name) and (self.kind == "counter") == self.name.endswith(
            "_total"
        )
        assert all(NAME.fullmatch(name) for labels, _ in self.samples for name in labels)


def format_metrics(families: Iterable[MetricFamily]) -> str:
    """A family without samples is left out."""
    lines = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escape(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for labels, value in family.samples:
            pairs = [f'{name}="{_escape(text, quotes=True)}"' for name, text in labels.items()]
            inside = f"{{{','.join(pairs)}}}" if pairs else ""
            lines.append(f"{family.name}{inside} {_format_value(value)}")
    return "".join(f"{line}\n" for line in lines)


def _escape(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _format_value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
