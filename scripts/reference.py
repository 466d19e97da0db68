"""Write docs/reference from the code: the recipe's fields, the command line, the JSON schema.

`python scripts/reference.py` writes the files; with `--check` it only says which of them are out of
date, and exits with 1 if any is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from courtside.recipe import Recipe
from courtside.recipe.base import RefusedValue
from courtside.recipe.schema import (
    is_section,
    section_kind,
    sections_by_kind,
    union_members,
    unwrap,
)

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
TYPE_NAMES = {int: "integer", float: "number", str: "string", bool: "true or false", Path: "path"}
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
GENERATED_BY = "<!-- Written by scripts/reference.py; `make docs` writes it again. -->"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/reference from the code.")
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    check = parser.parse_args().check
    pages = {
        "recipe.md": recipe_page(),
        "cli.md": command_page(),
        "recipe.schema.json": json.dumps(Recipe.model_json_schema(), indent=2, ensure_ascii=False),
    }
    stale = [name for name, text in pages.items() if _read(FOLDER / name) != text.rstrip() + "\n"]
    if check:
        for name in stale:
            print(f"docs/reference/{name} is out of date: run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (FOLDER / name).write_text(pages[name].rstrip() + "\n", encoding="utf-8")
    return 0


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


# ── the recipe ───────────────────────────────────────────────────────────────────────────────────


class Headings:
    """Each section is described once, where it is first met; elsewhere there is a link to it."""

    def __init__(self) -> None:
        self.titles: dict[type[BaseModel], str] = {}

    def link(self, section: type[BaseModel]) -> str:
        title = self.titles[section]
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        return f"[{section_kind(section) or title}](#{slug})"


def recipe_page() -> str:
    headings = Headings()
    sections = [("recipe", Recipe)]
    for name, field in Recipe.model_fields.items():
        sections += _sections(name, field.annotation)
    for title, section in sections:
        headings.titles.setdefault(section, title)
    blocks = [
        "# The recipe, key by key",
        GENERATED_BY,
        "A recipe is a TOML file. A key can be changed on the command line, as in "
        "`courtside train recipe.toml train.steps=10 losses.0.weight=2`; `key=null` removes one. "
        "Unknown keys, wrong types and combinations that cannot work are refused. "
        "`courtside schema` prints the same as JSON schema, for editors.",
    ]
    for section, title in headings.titles.items():
        blocks += _section_block(section, title, headings)
    return "\n\n".join(blocks)


def _sections(path: str, annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """All sections at and below a key, with the titles they get."""
    annotation = unwrap(annotation)
    if tagged := sections_by_kind(annotation):
        for kind, section in tagged.items():
            if not issubclass(section, RefusedValue):
                yield from _one_section(f"{path}, kind {kind}", path, section)
    elif is_section(annotation):
        yield from _one_section(path, path, annotation)
    else:
        for inner in union_members(annotation) or get_args(annotation):
            if inner not in (Ellipsis, NoneType) and get_origin(annotation) is not Literal:
                yield from _sections(path, inner)


def _one_section(
    title: str, path: str, section: type[BaseModel]
) -> Iterator[tuple[str, type[BaseModel]]]:
    yield title, section
    for name, field in section.model_fields.items():
        yield from _sections(f"{path}.{name}", field.annotation)


def _section_block(section: type[BaseModel], title: str, headings: Headings) -> Iterator[str]:
    yield f"## {title}"
    if text := section.__dict__.get("__doc__"):
        yield " ".join(text.split())
    rows = [
        (f"`{name}`", type_words(field, headings), _default(field), _one_line(field.description))
        for name, field in section.model_fields.items()
        if name != "kind"
    ]
    if kind := section_kind(section):
        rows.insert(0, ("`kind`", f'`"{kind}"`', "required", ""))
    yield table(("key", "value", "default", "meaning"), rows)


def type_words(field: FieldInfo, headings: Headings) -> str:
    return _describe_type(field.annotation, field.metadata, headings)


def _describe_type(annotation: Any, metadata: Sequence[Any], headings: Headings) -> str:
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _describe_type(inner, [*metadata, *more], headings)
    limits = _limits(metadata)
    members = [member for member in get_args(annotation) if member is not NoneType]
    if tagged := sections_by_kind(annotation):
        usable = [option for option in tagged.values() if not issubclass(option, RefusedValue)]
        return f"section of kind {', '.join(headings.link(option) for option in usable)}"
    if union_members(annotation) or (NoneType in get_args(annotation)):
        return " or ".join(_describe_type(member, metadata, headings) for member in members)
    if is_section(annotation):
        return headings.link(annotation)
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{toml(value)}`" for value in members)
    if get_origin(annotation) is tuple:
        if members[-1] is Ellipsis:
            return f"list of: {_describe_type(members[0], [], headings)}{limits}"
        return f"list of {len(members)}: {_describe_type(members[0], [], headings)}"
    if get_origin(annotation) is Mapping:
        return f"table: name → {_describe_type(members[1], [], headings)}{limits}"
    return TYPE_NAMES[annotation] + limits


def _limits(metadata: Sequence[Any]) -> str:
    texts: list[str] = []
    for constraint in metadata:
        inner = constraint.metadata if isinstance(constraint, FieldInfo) else [constraint]
        for limit in inner:
            texts += [
                f"{sign} {getattr(limit, name)}"
                for name, sign in SIGNS.items()
                if getattr(limit, name, None) is not None
            ]
            if (least := getattr(limit, "min_length", None)) is not None:
                texts.append(f"(at least {least})")
    return f" {' and '.join(texts)}" if texts else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        kind = getattr(value, "kind", None)
        return f'`{{ kind = "{kind}" }}`' if kind else "its defaults"
    return "unset" if value is None else f"`{toml(value)}`"


def toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str() | Path():
            return json.dumps(str(value), ensure_ascii=False)
        case tuple() | list():
            return f"[{', '.join(toml(item) for item in value)}]"
        case Mapping():
            return f"{{ {', '.join(f'{key} = {toml(item)}' for key, item in value.items())} }}"
    return str(value)


# ── the command line ─────────────────────────────────────────────────────────────────────────────


def command_page() -> str:
    from typer.main import get_command

    from courtside.cli import app as cli

    group: Any = get_command(cli.app)
    blocks = [
        "# The command line, verb by verb",
        GENERATED_BY,
        "Exit status: 0 done; 1 the run failed, and the message says what is kept and what to do; "
        "2 bad usage or recipe, nothing was done; 130 interrupted with Ctrl-C. "
        "`courtside --version` prints the version.",
    ]
    for name, command in group.commands.items():
        blocks += _command_block(name, command)
    return "\n\n".join(blocks)


def _command_block(name: str, command: Any) -> Iterator[str]:
    arguments = [
        parameter for parameter in command.params if parameter.param_type_name == "argument"
    ]
    flags = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    visible_flags = [parameter for parameter in flags if parameter.name != "help"]
    usage = ["courtside", name, *map(_usage, arguments), *(["[OPTIONS]"] if visible_flags else [])]
    yield f"## {name}"
    yield f"```\n{' '.join(usage)}\n```"
    yield "\n\n".join(" ".join(part.split()) for part in command.help.split("\n\n"))
    if arguments:
        rows = [(f"`{parameter.metavar}`", _one_line(parameter.help)) for parameter in arguments]
        yield table(("argument", "meaning"), rows)
    if visible_flags:
        rows = [(f"`{_option(parameter)}`", _option_help(parameter)) for parameter in visible_flags]
        yield table(("option", "meaning"), rows)


def _usage(argument: Any) -> str:
    name = argument.metavar + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _option(option: Any) -> str:
    if option.is_flag:
        return str(option.opts[0])
    assert option.metavar, f"{option.opts[0]} needs a metavar"
    return f"{option.opts[0]} {option.metavar}"


def _option_help(option: Any) -> str:
    text = _one_line(option.help)
    return text if option.is_flag or option.default is None else f"{text} Default: {option.default}"


# ── Markdown ─────────────────────────────────────────────────────────────────────────────────────


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    sys.exit(main())
