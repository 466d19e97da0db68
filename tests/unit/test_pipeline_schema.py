"""The JSON schema of pipelines accepts what the parser does, and refuses keys and types alike."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from courtside.errors import RecipeError
from courtside.recipe.pipeline import parse_pipeline
from courtside.recipe.pipeline_schema import make_pipeline_schema
from courtside.recipe.recipe import Recipe

ROOT = Path(__file__).parents[2]
SCHEMA = make_pipeline_schema()
TYPES = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list,
    "object": dict, "null": type(None),
}  # fmt: skip
CHECKED = {"$ref", "anyOf", "type", "const", "enum", "required", "properties", "items", "pattern",
           "additionalProperties", "minItems"}  # fmt: skip
NOT_CHECKED = {"$defs", "title", "description", "default", "format", "minimum", "maximum",
               "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "maxItems",
               "prefixItems", "propertyNames", "minProperties", "not"}  # fmt: skip


def accepts(schema: Any, value: Any) -> bool:
    """A validator of the keywords in `CHECKED`."""
    if isinstance(schema, bool):
        return schema
    assert schema.keys() <= CHECKED | NOT_CHECKED, schema.keys() - CHECKED - NOT_CHECKED
    if "$ref" in schema:
        return accepts(SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], value)
    if "anyOf" in schema and not any(accepts(member, value) for member in schema["anyOf"]):
        return False
    if "type" in schema:
        is_misplaced_bool = isinstance(value, bool) and schema["type"] != "boolean"
        if is_misplaced_bool or not isinstance(value, TYPES[schema["type"]]):
            return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return False
    if isinstance(value, list):
        is_long_enough = len(value) >= schema.get("minItems", 0)
        return is_long_enough and all(accepts(schema.get("items", True), item) for item in value)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        other_keys = schema.get("additionalProperties", True)
        has_required = set(schema.get("required", ())) <= value.keys()
        return has_required and all(
            accepts(properties.get(key, other_keys), item) for key, item in value.items()
        )
    return True


def read_pipelines() -> dict[str, Any]:
    """Those of the repository: in files, and in the code blocks of the docs."""
    texts = {str(path): path.read_text() for path in sorted((ROOT / "recipes").glob("*/*.toml"))}
    for path in sorted((ROOT / "docs").glob("*.md")):
        blocks = re.findall(r"```toml\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        texts |= {f"{path}, block {i}": block for i, block in enumerate(blocks)}
    return {
        name: tomllib.loads(text) for name, text in texts.items() if "\n[[stages]]" in f"\n{text}"
    }


def test_pipelines_of_the_repository_are_accepted() -> None:
    pipelines = read_pipelines()
    assert len(pipelines) >= 4
    assert [name for name, tree in pipelines.items() if not accepts(SCHEMA, tree)] == []


def base(**changes: Any) -> dict[str, Any]:
    return {
        "student": {"model": "smollm2-135m"},
        "tasks": {"kind": "arithmetic"},
        "losses": [{"kind": "policy_gradient", "advantage": "reward"}],
        **changes,
    }


def test_a_stage_may_have_a_part_of_a_section_without_its_kind() -> None:
    tree = {"base": base(), "stages": [{"name": "a", "tasks": {"digits": 3}, "seed": 1}]}
    assert accepts(SCHEMA, tree)
    assert parse_pipeline(tree).stages[0].recipe.seed == 1


@pytest.mark.parametrize(
    "tree",
    [
        {"base": base()},
        {"base": base(), "stages": []},
        {"base": base(), "stages": [{"name": "a"}], "train": {"steps": 1}},
        {"base": base(train={"stepz": 1}), "stages": [{"name": "a"}]},
        {"base": base(), "stages": [{"train": {"steps": 1}}]},
        {"base": base(), "stages": [{"name": "a/b"}]},
        {"base": base(), "stages": [{"name": "a", "train": {"stepz": 1}}]},
        {"base": base(), "stages": [{"name": "a", "train": {"steps": "one"}}]},
        {"base": base(), "stages": [{"name": "a", "tasks": {"kind": "no-such-kind"}}]},
        {"base": base(), "stages": [{"name": "a", "gate": {"suite": "x"}}]},
        {"base": base(), "stages": [{"repeat": 2, "stages": [{"name": "a", "nam": "b"}]}]},
        {"base": base(), "stages": [{"repeat": 2}]},
    ],
)
def test_what_the_parser_refuses_by_key_or_type_the_schema_refuses(tree: Any) -> None:
    with pytest.raises(RecipeError):
        parse_pipeline(tree)
    assert not accepts(SCHEMA, tree)


def test_every_reference_in_the_schema_leads_to_a_definition() -> None:
    references = set(re.findall(r"'#/\$defs/(\w+)'", str(SCHEMA)))
    assert references and references <= SCHEMA["$defs"].keys()
    stage = SCHEMA["$defs"]["StageConfig"]["properties"]
    assert stage.keys() == {"name", "recipe", "remove", "gate", *Recipe.model_fields}
