"""The switches of a chat template: variables that it reads besides messages and tools; the date.

`enable_thinking` and `reasoning_effort` are such variables. A variable that a template does not
read is refused. Templates that write today's date see one date for the whole process, or that of
the recipe, so a conversation is not rendered differently after midnight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime
from functools import cache
from typing import Any

from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from courtside.errors import ModelError

RENDERER_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
     "raise_exception", "strftime_now"}
)  # fmt: skip
"""Set by the renderer or by transformers for each conversation."""


class _GenerationTag(Extension):
    """`{% generation %}`, by which transformers marks answers: its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it from the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def find_variables(source: str) -> frozenset[str]:
    """Names that a template reads from outside, functions included. A name that it sets itself
    counts where it asks whether the name is defined."""
    environment = Environment(extensions=[_GenerationTag, loopcontrols])
    try:
        tree = environment.parse(source)
        undeclared = meta.find_undeclared_variables(tree)
        tests = [
            test for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")
        ]
        optional = {test.node.name for test in tests if isinstance(test.node, nodes.Name)}
        assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
        return frozenset(undeclared - assigned | undeclared & optional)
    except TemplateError as error:
        raise ModelError(
            f"a chat template is not valid Jinja ({error}), so no message can be rendered. Put a "
            "chat_template.jinja that is beside its tokenizer"
        ) from None


def template_sources(tokenizer: Any) -> tuple[str, ...]:
    """A tokenizer may have several templates, by name: one for tools, one for all else."""
    template = tokenizer.chat_template
    return tuple(template.values()) if isinstance(template, Mapping) else (template,)


def check_args(tokenizer: Any, args: Mapping[str, Any], *, name: str, field: str) -> None:
    """`field`: the recipe's section whose `chat_template_args` these are."""
    variables = frozenset[str]().union(*map(find_variables, template_sources(tokenizer)))
    tokens = {key for key in variables if key.endswith("_token")}
    switches = sorted(variables - RENDERER_VARIABLES - tokens)
    for key in args:
        if key in RENDERER_VARIABLES or key in tokens:
            fix = "set chat_template_date" if key == "strftime_now" else "remove it"
            raise ModelError(
                f"{field}.chat_template_args.{key}: rendering sets that variable itself; {fix}"
            )
        if key not in variables:
            fix = "Remove it, or use a model whose template has that switch"
            if field != "student":
                fix = f"Set {field}.chat_template_args without it; unset, it is the student's"
            raise ModelError(
                f"{field}.chat_template_args.{key}: the chat template of {name} reads no variable "
                f"of that name (it reads: {', '.join(switches) or 'none'}). {fix}"
            )


def check_date(tokenizer: Any, day: date, *, name: str, field: str) -> None:
    if not writes_date(tokenizer):
        raise ModelError(
            f"{field}.chat_template_date = {day.isoformat()!r}: the chat template of {name} writes "
            "no date. Remove the field"
        )


def writes_date(tokenizer: Any) -> bool:
    return any("strftime_now" in find_variables(source) for source in template_sources(tokenizer))


def set_clock(tokenizer: Any, day: date | None) -> None:
    """Give the tokenizer's templates a `strftime_now` for a day that does not change (None: the
    process's first).

    It is a global of the compiled template, of which transformers keeps one for each source: from
    5.23 on, a function among the variables of a rendering is replaced by text.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    clock: Callable[[str], str] = (day or _first_day()).strftime
    for source in template_sources(tokenizer):
        _compile_jinja_template(source).globals["strftime_now"] = clock


@cache
def _first_day() -> date:
    return datetime.now().date()
