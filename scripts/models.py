"""Runs every small causal language model of transformers through engines and an update.

    make models                                    # all kinds, some ten minutes on two cores
    python scripts/models.py --only llama gemma2   # these rows, printed
    python scripts/models.py --only llama --merge  # and written in place of the former ones
    python scripts/models.py --render              # the table again, from the JSON

Each kind runs in a process of its own with limits of time and memory, so that a crash costs one
row. Writes docs/models.json and the table of docs/models.md, and exits with 1 if anything differs
from plain passes of transformers, or raises what is not a refusal.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
PAGE, RESULTS = ROOT / "docs" / "models.md", ROOT / "docs" / "models.json"
BEGIN, END = "<!-- models: begin, written by make models -->", "<!-- models: end -->"
MAX_SECONDS = 240
MAX_BYTES = 6 * 2**30
NUM_PROCESSES = 2
BAD = ("WRONG", "traceback", "crash")
PATHS = ("passes", "sampling", "hints")
"""In the order of the table's header."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="KIND", help="rows or model types")
    parser.add_argument("--merge", action="store_true", help="write the rows of --only")
    parser.add_argument("--render", action="store_true", help="write the table from the JSON")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where results are written")
    options = parser.parse_args()
    if options.render:
        PAGE.write_text(render_page(PAGE.read_text("utf-8"), load_results()), "utf-8")
        return 0
    rows = run_kinds(options.only)
    if options.only is None or options.merge:
        results = {**describe_versions(), "kinds": rows}
        if options.only is not None:
            results["kinds"] = merge_rows(load_results(), results)
        options.json.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")
        if options.json == RESULTS:
            PAGE.write_text(render_page(PAGE.read_text("utf-8"), results), "utf-8")
    print(summarize(rows))
    return 1 if any(row["status"] in BAD for row in rows) else 0


def merge_rows(former: Mapping[str, Any], results: Mapping[str, Any]) -> list[dict[str, Any]]:
    versions = ("transformers", "torch", "peft")
    if any(former[name] != results[name] for name in versions):
        raise SystemExit(f"{RESULTS} is of other versions. Run all kinds: make models")
    rows = {row["name"]: row for row in (*former["kinds"], *results["kinds"])}
    return sorted(rows.values(), key=lambda row: row["name"])


def load_results() -> Any:
    return json.loads(RESULTS.read_text("utf-8"))


# ── processes ────────────────────────────────────────────────────────────────────────────────────


def run_kinds(only: Sequence[str] | None) -> list[dict[str, Any]]:
    """Rows in the order of `all_kinds`. Children are forked: importing torch takes seconds."""
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.filterwarnings("ignore")
    import torch
    import transformers
    from support.kind_checks import check_kind  # loads the rest before the fork
    from support.model_kinds import all_kinds

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    kinds = [k for k in all_kinds() if only is None or {k.name, k.model_type} & set(only)]
    context = multiprocessing.get_context("fork")
    running: dict[Any, tuple[Any, Any, float]] = {}
    rows: dict[str, dict[str, Any]] = {}
    waiting = list(reversed(kinds))
    while waiting or running:
        while waiting and len(running) < NUM_PROCESSES:
            kind = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=_run_kind, args=(check_kind, kind, sender))
            child.start()
            sender.close()
            running[kind.name] = (child, receiver, time.monotonic())
        for name, (child, receiver, start) in list(running.items()):
            row = None
            if receiver.poll():
                try:
                    row = receiver.recv()
                except EOFError:
                    child.join()
                    row = {"name": name, "status": "crash",
                           "problems": {"process": f"exit code {child.exitcode}"}}  # fmt: skip
            elif time.monotonic() - start > MAX_SECONDS:
                child.kill()
                row = {"name": name, "status": "crash",
                       "problems": {"process": f"more than {MAX_SECONDS} s"}}  # fmt: skip
            if row is not None:
                child.join()
                del running[name]
                rows[name] = row
                print(format_line(row), flush=True)
        time.sleep(0.02)
    return [rows[kind.name] for kind in kinds]


def _run_kind(check_kind: Any, kind: Any, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    result = check_kind(kind)
    sender.send({name: getattr(result, name) for name in result.__slots__})
    sender.close()


# ── what is written ──────────────────────────────────────────────────────────────────────────────


def describe_versions() -> dict[str, str]:
    import peft
    import torch
    import transformers

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


def format_line(row: Mapping[str, Any]) -> str:
    errors = ", ".join(f"{name} {error:.1e}" for name, error in row.get("errors", {}).items())
    paths = ", ".join(row.get("paths", {}).values())
    problems = "".join(f"\n    {name}: {why}" for name, why in row.get("problems", {}).items())
    return f"{row['name']}: {row['status']} [{paths}] {errors}{problems}"


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(row["status"] for row in rows)
    names = ("right", "right without LoRA", "refused", "not built", *BAD)
    return f"{len(rows)} rows: " + ", ".join(f"{counts[name]} {name}" for name in names)


def render_page(text: str, results: Mapping[str, Any]) -> str:
    before, _, following = text.partition(BEGIN)
    _, _, after = following.partition(END)
    return before + BEGIN + "\n\n" + "\n".join(render(results)) + "\n\n" + END + after


def render(results: Mapping[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {results[name]}" for name in ("transformers", "torch", "peft"))
    yield f"{results['date']}, {versions}. {summarize(results['kinds'])}."
    yield ""
    yield "| kind | result | passes; sampling; hints | nats | gradient | refused, or not built |"
    yield "|---|---|---|---|---|---|"
    for row in results["kinds"]:
        errors = dict(row.get("errors", {}))
        gradient = errors.pop("gradient", None)
        cells = [
            f"`{row['name']}`",
            row["status"],
            "; ".join(row["paths"][name] for name in PATHS if name in row.get("paths", {})),
            f"{max(errors.values()):.0e}" if errors else "",
            "" if gradient is None else f"{gradient:.0e}",
            " · ".join(f"{name}: {why}" for name, why in row.get("problems", {}).items()),
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    raise SystemExit(main())
