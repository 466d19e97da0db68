"""Draw docs/layers.svg and docs/step.svg; `--check` only says whether they are up to date.

    python scripts/pictures.py

The layers are those of the import contracts in pyproject.toml. The files of a step are listed here,
and must exist.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "courtside"

STYLE = """\
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
  .title { font-weight: 600; font-size: 14px }
  .small { font-size: 12px; fill: #59636e }
  .code { font: 12px ui-monospace, "SFMono-Regular", Menlo, monospace }
  .mid { text-anchor: middle }
  .band { fill: #818b98; fill-opacity: .10 }
  .box { fill: none; stroke: #818b98; stroke-width: 1.2 }
  .student { stroke: #1a7f37; stroke-width: 1.8 }
  .teacher { stroke: #0969da; stroke-width: 1.8 }
  .line { fill: none; stroke: #818b98; stroke-width: 1.4 }
  .tip { fill: #818b98 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9198a1 }
    .student { stroke: #3fb950 }
    .teacher { stroke: #4493f8 }
  }"""

TIP = (
    '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
)

LAYER_NAMES = {
    "cli": "command line",
    "api": "Python API",
    "loop": "composition",
    "tasks": "stages",
    "environments": "environments",
    "chat": "tools of the stages",
    "recipe": "recipe",
    "hashing": "ids, plugins",
    "types": "records",
    "local": "model in process",
    "generation": "sampling",
    "forward": "scoring and update",
    "patches": "patched layers",
    "kernels": "Triton kernels",
    "loading": "loading and probes",
    "base": "protocol, LM head",
}
"""What a layer is called, by its first module."""


class Stage(NamedTuple):
    title: str
    gives: str
    files: tuple[tuple[str, str], ...]
    """(file below src/courtside, what it does in a step)"""
    owner: str = ""


STEP = (
    Stage("tasks", "Task", (("tasks/base.py", "the batch of this step, by seed"),)),
    Stage(
        "rollout", "Trajectory",
        (
            ("rollout/single_turn.py", "prompts, samples, grades"),
            ("chat/template.py", "messages to token ids"),
            ("engines/local.py", "the model in process"),
            ("engines/generation/session.py", "prefill and decode, KV cache"),
            ("engines/generation/sampler.py", "tokens with log-probs"),
        ),
        owner="student",
    ),
    Stage("drafts", "Trajectory", (("drafts/base.py", "drafts chosen, rewritten, criticized"),)),
    Stage("reader", "Hint", (("reader/base.py", "hints for turns that went wrong"),)),
    Stage(
        "teacher", "Scored, Target",
        (
            ("teacher/teacher.py", "targets of a batch and its hints"),
            ("teacher/hint_scoring.py", "hints, spliced and scored"),
            ("engines/forward/forward.py", "packed passes, log-probs"),
            ("engines/forward/batching.py", "prompts once per group"),
            ("engines/forward/varlen.py", "attention in each sequence"),
        ),
        owner="teacher",
    ),
    Stage(
        "update", "Update",
        (
            ("training/student.py", "micro-batches, optimizer step"),
            ("training/loss_terms.py", "weights and denominators"),
            ("training/token_batch.py", "trained positions"),
            ("training/head.py", "LM head with its loss"),
            ("losses/fused/linear_divergence.py", "the loss of a token"),
        ),
        owner="student",
    ),
    Stage(
        "record", "run folder",
        (
            ("run.py", "counts, saves, evaluates"),
            ("report/folder/folder.py", "metrics, trajectories"),
        ),
    ),
)  # fmt: skip


def main() -> int:
    pictures = {"layers.svg": draw_layers(), "step.svg": draw_step()}
    stale = [name for name, text in pictures.items() if read(ROOT / "docs" / name) != text]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"docs/{name} is out of date: run scripts/pictures.py")
        return 1 if stale else 0
    for name in stale:
        (ROOT / "docs" / name).write_text(pictures[name], encoding="utf-8")
    return 0


def read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


# ── layers ───────────────────────────────────────────────────────────────────────────────────────

LAYER_HEIGHT = 40
LABEL_WIDTH = 148
CHAR = 7.4
"""Pixels of a monospace character at 12px."""


def read_layers(container: str | None) -> list[list[str]]:
    """Rows of modules, top first, of the contract over the whole package or over one container."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in project["tool"]["importlinter"]["contracts"]:
        container_names = [f"courtside.{container}"] if container else None
        if contract["type"] == "layers" and contract.get("containers") == container_names:
            return [
                [
                    name.strip().removeprefix("courtside.")
                    for name in row.replace(":", "|").split("|")
                ]
                for row in contract["layers"]
            ]
    raise SystemExit(f"pyproject.toml has no layers contract for {container or 'courtside'}")


def draw_layers() -> str:
    package, engines = read_layers(None), read_layers("engines")
    top = 40
    body = [
        text(12, 22, "courtside: each layer imports only those below it", "title"),
        *draw_rows(package, x=12, y=top, width=836, step=LAYER_HEIGHT),
    ]
    second = top + len(package) * LAYER_HEIGHT + 34
    body += [
        text(12, second - 10, "courtside.engines, by the same rule", "title"),
        *draw_rows(engines, x=12, y=second, width=836, step=34),
    ]
    height = second + len(engines) * 34 + 8
    description = "Layers from top to bottom: " + "; ".join(", ".join(row) for row in package) + "."
    return svg(860, height, "Layers of the package", description, body)


def draw_rows(
    rows: Sequence[Sequence[str]], *, x: int, y: int, width: int, step: int
) -> Iterator[str]:
    for i, row in enumerate(rows):
        at = y + i * step
        yield rect(x, at, width, step - 6, "band")
        yield text(x + 10, at + step / 2 + 1, LAYER_NAMES.get(row[0], ""), "small")
        box_x = x + LABEL_WIDTH
        for name in row:
            box = len(name) * CHAR + 16
            yield rect(box_x, at + 4, box, step - 14, "box")
            yield text(box_x + box / 2, at + step / 2 + 1, name, "code mid")
            box_x += box + 8
        assert box_x <= x + width, f"{row} does not fit"


# ── one step ─────────────────────────────────────────────────────────────────────────────────────


def draw_step() -> str:
    missing = [file for stage in STEP for file, _ in stage.files if not (PACKAGE / file).exists()]
    if missing:
        raise SystemExit(f"{missing[0]} is gone: name the file that does its work in STEP")
    body = [text(12, 22, "One training step, top to bottom: loop.py calls the stages", "title")]
    at = 38
    for stage in STEP:
        height = 14 + 22 * len(stage.files)
        body += [
            rect(12, at, 760, height, f"box {stage.owner}".strip()),
            text(26, at + height / 2 + 5, stage.title, "title"),
        ]
        for i, (file, work) in enumerate(stage.files):
            line = at + 22 + 22 * i
            body += [text(120, line, file, "code"), text(440, line, work, "small")]
        at += height
        if stage is not STEP[-1]:
            body.append(f'<path class="line" d="M66 {at}V{at + 27}" marker-end="url(#a)"/>')
        body.append(text(78, at + 19, stage.gives, "small"))
        at += 30
    body += [
        f'<path class="line" d="M772 {at - 59}H812V56H776" marker-end="url(#a)"/>',
        text(780, 46, "next step", "small"),
        text(440, at - 11, "Green: the student's model runs. Blue: the teacher's.", "small"),
    ]
    description = "Stages of a step in order: " + ", ".join(stage.title for stage in STEP) + "."
    return svg(860, at + 2, "One training step", description, body)


# ── SVG ──────────────────────────────────────────────────────────────────────────────────────────


def text(x: float, y: float, content: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'
    )


def svg(width: int, height: float, title: str, description: str, body: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" role="img" '
            'aria-labelledby="t d">',
            f'<title id="t">{escape(title)}</title>',
            f'<desc id="d">{escape(description)}</desc>',
            f"<style>\n{STYLE}\n</style>",
            TIP,
            *body,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
