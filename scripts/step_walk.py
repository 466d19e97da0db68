"""Count the file-to-file hops of one steady-state training step, by tracing it.

    python scripts/step_walk.py                          # both cases, this tree
    python scripts/step_walk.py --tree PATH --list       # another tree, every hop
    python scripts/step_walk.py --device cuda            # the way on a GPU

A hop is a pair (file, other file) of the package such that code of the first calls stage work in
the second; calls through torch and transformers belong to the innermost file of the package below
them. A pair counts once, however often and by however many functions it is called. Stage work is a
function or method: properties, constructors, lambdas, comprehensions and autograd's backward do not
count, and neither do calls into records, seeds, errors and the recipe, which hold data. The third
of four steps of a tiny model is traced: probes have run, nothing is saved or evaluated. On a GPU,
kernels that a CUDA graph replays are no calls.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

DATA_MODULES = (
    "config/", "errors.py", "hashing.py", "plain_text.py", "recipe/", "sanitize.py", "seeds.py",
    "types.py",
)  # fmt: skip
"""Modules that hold data, as this tree and older ones call them."""

RENDERING = "apply_chat_template"
"""The function of transformers that renders messages; the template is slow, so it is counted."""

CASES: dict[str, dict[str, Any]] = {
    "single-turn": {
        "tasks": {"kind": "arithmetic"},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 8},
        "losses": [{"kind": "divergence"}],
    },
    "hints": {
        "tasks": {"kind": "toolbox", "turns": 2, "num_tools": 1, "tool_call_format": "plain"},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6},
        "reader": {"kind": "rules"},
        "teacher": {"kind": "self", "weights": "live"},
        "losses": [{"kind": "divergence", "on": "hinted_turns"}],
    },
}
TRACED_STEP = 2

OLDER_FIELDS = {
    "num_tasks": "tasks",
    "prompts_per_step": "prompts",
    "samples_per_prompt": "samples",
    "tool_call_format": "call_format",
}
"""What trees whose recipe is in `config/` call these fields."""

HELPER_MODULES = {
    "save_tiny": ("support.tiny_model", "tiny"),
    "small_recipe": ("support.small_runs", "small_runs"),
}
"""Modules of `tests/` that define a helper: this tree's, and that of trees without `support/`."""


class Call(NamedTuple):
    caller_file: str
    caller: str
    file: str
    function: str

    @property
    def crosses_files(self) -> bool:
        return self.caller_file != self.file


RENDERED = Call("", "", "", RENDERING)


class Walk(NamedTuple):
    hops: tuple[tuple[str, str], ...]
    """(file, other file), in the order in which they first happen."""
    num_calls: int
    """Distinct (function, function of another file) behind these hops."""
    num_files: int
    """Files of the package whose code ran at all."""
    num_mutual: int
    """Pairs of files that call each other: the way goes back and forth."""
    num_renderings: int
    """How often the chat template ran."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--list", action="store_true", help="print every hop")
    args = parser.parse_args()
    for case in args.case or CASES:
        walk = walk_step(args.tree.resolve(), CASES[case], device=args.device)
        print(
            f"{case}: {len(walk.hops)} hops by {walk.num_calls} calls, {walk.num_mutual} pairs of "
            f"files call each other, {walk.num_files} files ran, the chat template ran "
            f"{walk.num_renderings} times"
        )
        if args.list:
            print(*(f"  {caller} -> {callee}" for caller, callee in walk.hops), sep="\n")


def walk_step(tree: Path, sections: dict[str, Any], *, device: str = "cpu") -> Walk:
    sys.path[:0] = [str(tree / "src"), str(tree / "tests")]
    courtside, loop = (importlib.import_module(name) for name in ("courtside", "courtside.loop"))
    save_tiny, small_recipe = (
        import_helper(tree / "tests", function) for function in ("save_tiny", "small_recipe")
    )
    calls: Counter[Call] = Counter()
    train_step = loop.train_step

    def traced_step(parts: Any, run: Any, step: int) -> None:
        with trace_calls(tree / "src" / "courtside", calls, enabled=step == TRACED_STEP):
            train_step(parts, run, step)

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        models = [save_tiny(Path(folder) / str(seed), seed=seed) for seed in (0, 1)]
        sections = sections | {
            "student": {"model": str(models[0]), "device": device},
            "train": {"steps": TRACED_STEP + 2, "prompts_per_step": 2, "learning_rate": 1e-3},
            "evaluate": {"num_tasks": 2},
            "run": {"checkpoint_every": 100},
        }
        if (tree / "src" / "courtside" / "config").is_dir():
            sections = with_older_fields(sections)
        recipe = small_recipe(*models[: 1 if "teacher" in sections else 2], **sections)
        loop.train_step = traced_step
        try:
            courtside.train(recipe, Path(folder) / "run")
        finally:
            loop.train_step = train_step
    return summarize(calls, property_codes())


def import_helper(tests: Path, function: str) -> Any:
    module, older_module = HELPER_MODULES[function]
    has_module = (tests / f"{module.replace('.', '/')}.py").exists()
    return getattr(importlib.import_module(module if has_module else older_module), function)


def with_older_fields(section: Any) -> Any:
    if not isinstance(section, dict):
        return section
    return {OLDER_FIELDS.get(k, k): with_older_fields(v) for k, v in section.items()}


@contextlib.contextmanager
def trace_calls(package: Path, calls: Counter[Call], *, enabled: bool) -> Any:
    prefix = f"{package}/"

    def record_call(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if frame.f_code.co_name == RENDERING:
            calls[RENDERED] += 1
        if not frame.f_code.co_filename.startswith(prefix):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(prefix):
            caller = caller.f_back
        if caller is not None:
            calls[Call(*_name(caller.f_code, prefix), *_name(frame.f_code, prefix))] += 1

    with _profiled(record_call) if enabled else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _profiled(callback: Callable[[FrameType, str, Any], None]) -> Any:
    sys.setprofile(callback)
    try:
        yield
    finally:
        sys.setprofile(None)


def _name(code: CodeType, prefix: str) -> tuple[str, str]:
    return code.co_filename.removeprefix(prefix), code.co_qualname


def property_codes() -> set[str]:
    """Qualified names of every property of the package's classes."""
    modules = [m for name, m in sys.modules.items() if name.startswith("courtside")]
    classes = {c for module in modules for c in vars(module).values() if isinstance(c, type)}
    return {
        member.fget.__code__.co_qualname
        for cls in classes
        for member in vars(cls).values()
        if isinstance(member, property) and hasattr(member.fget, "__code__")
    }


def summarize(calls: Counter[Call], properties: set[str]) -> Walk:
    work = [c for c in calls if c.crosses_files and does_stage_work(c, properties)]
    hops = dict.fromkeys((call.caller_file, call.file) for call in work)
    files = {name for call in calls for name in (call.caller_file, call.file) if name}
    mutual = {hop for hop in hops if hop[::-1] in hops and hop[0] < hop[1]}
    return Walk(
        hops=tuple(hops),
        num_calls=len(work),
        num_files=len(files),
        num_mutual=len(mutual),
        num_renderings=calls[RENDERED],
    )


def does_stage_work(call: Call, properties: set[str]) -> bool:
    name = call.function.rpartition(".")[2]
    is_constructor = name.startswith("__") and name != "__call__"
    is_inline = name.startswith("<")
    holds_data = call.file.startswith(DATA_MODULES)
    return not (
        is_constructor
        or is_inline
        or holds_data
        or name == "backward"
        or call.function in properties
    )


if __name__ == "__main__":
    main()
