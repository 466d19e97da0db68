"""The JSON schema of a pipeline's file, for editors."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from courtside.recipe.pipeline_sections import GateConfig, LoopConfig, PipelineConfig, StageConfig
from courtside.recipe.recipe import Recipe

PIPELINE_SECTIONS = (PipelineConfig, LoopConfig, StageConfig, GateConfig)


def make_pipeline_schema() -> dict[str, Any]:
    """No key of a recipe is required in it: a stage may have it from `base` or its recipe."""
    _, tree = models_json_schema([(s, "validation") for s in (*PIPELINE_SECTIONS, Recipe)])
    names = {section.__name__ for section in PIPELINE_SECTIONS}
    definitions = {
        name: definition if name in names else _allow_parts(definition)
        for name, definition in tree["$defs"].items()
    }
    stage = definitions[StageConfig.__name__]["properties"]
    # In the file, the sections stand in the stage itself.
    del stage["changes"]
    stage.update(definitions[Recipe.__name__]["properties"])
    pipeline = definitions.pop(PipelineConfig.__name__)
    pipeline["properties"]["base"]["anyOf"] = [{"type": "string"}, _refer_to(Recipe)]
    pipeline["properties"]["stages"]["items"] = {
        "anyOf": [_refer_to(StageConfig), _refer_to(LoopConfig)]
    }
    return {"$defs": definitions, **pipeline}


def _refer_to(section: type) -> dict[str, str]:
    return {"$ref": f"#/$defs/{section.__name__}"}


def _allow_parts(node: Any) -> Any:
    """A schema that a part of a section satisfies, too: also without the `kind` of a union."""
    if isinstance(node, list):
        return [_allow_parts(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        "anyOf" if key == "oneOf" else key: _allow_parts(value)
        for key, value in node.items()
        if key != "discriminator" and not (key == "required" and isinstance(value, list))
    }
