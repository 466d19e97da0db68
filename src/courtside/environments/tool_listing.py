"""Where the tools of a class are listed: by the model's chat template, or in a message."""

from __future__ import annotations

from typing import NamedTuple

from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import PROBE_CALL, ChatTemplate
from courtside.environments.tool_calls import ToolCall, parse_call
from courtside.errors import ModelError, RecipeError
from courtside.recipe.tasks import EnvironmentTasks, TasksConfig, ToolboxTasks
from courtside.types import Message


class ToolListing(NamedTuple):
    uses_template: bool
    """Whether the template renders the schemas; a message lists them otherwise."""
    note: str | None = None
    """Why a message lists them although the recipe leaves the choice open."""


def choose_tool_listing(config: TasksConfig, template: ChatTemplate) -> ToolListing:
    """The template's, where it renders tools and its calls are of a format that is parsed.

    A recipe that names a format of calls, or has no role for tools, gets the message.
    """
    if not isinstance(config, EnvironmentTasks) or config.rows is None:
        return ToolListing(uses_template=False)
    if config.tool_call_format is not None or config.tool_role is False:
        return ToolListing(uses_template=False)
    if not template.takes_tools:
        reason = "renders no `tools`"
    elif not _is_parsed(template.probe_call_text):
        reason = "writes calls otherwise than <tool_call>JSON</tool_call>"
    else:
        return ToolListing(uses_template=True)
    return ToolListing(
        uses_template=False,
        note=f"{template.name}: its chat template {reason}, so a system message lists the tools of "
        f"{config.path} and the format of a call",
    )


def check_tool_role(config: TasksConfig, template: IncrementalTemplate, field: str) -> None:
    """Refuses an environment whose results are a tool's messages where the template takes none."""
    if isinstance(config, EnvironmentTasks):
        has_tool_role = config.rows is not None and config.tool_role is not False
    else:
        has_tool_role = isinstance(config, ToolboxTasks) and config.tool_role
    if not has_tool_role:
        return
    try:
        template.render_continuation([Message(role="tool", content="1")])
    except ModelError as error:
        raise RecipeError(
            f"{field}.tool_role: results are messages of a tool, which has no place here: {error}. "
            f"Set {field}.tool_role = false, and they are a user's"
        ) from None


def _is_parsed(text: str | None) -> bool:
    call = None if text is None else parse_call(text, "json")
    expected = PROBE_CALL["function"]
    return isinstance(call, ToolCall) and (call.name, dict(call.arguments)) == (
        expected["name"],
        expected["arguments"],
    )
