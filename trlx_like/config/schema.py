"""A JSON Schema of the YAML configuration, with which editors complete, explain and check a file.

The schema is stricter than `TRLConfig` in two points: names are as they are registered, letter case included, and only
YAML values count, so that a model object is not an option. Rules between several fields are left to `TRLConfig`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from trlx_like.config.generation import ANYWHERE, FORBIDDING, LIST_VALUED, NEUTRAL, TYPES, option_type
from trlx_like.config.method import MethodConfig, OnlineTextMethodConfig, TextMethodConfig
from trlx_like.config.registries import METHODS
from trlx_like.config.section import Section
from trlx_like.config.trl import TRLConfig
from trlx_like.registry import Registry

Schema = dict[str, Any]


def configuration_schema(registries: Mapping[str, Registry[Any]]) -> Schema:
    """Make the JSON Schema (draft 7) of a whole configuration.

    Args:
        registries: For a dotted option such as "optimizer.name", the registry that it chooses from.

    Returns:
        The schema as plain mappings and lists.
    """
    methods = {name: METHODS.get(name) for name in METHODS.names()}
    sections = {name: kind for name, kind in TRLConfig.sections().items() if name != "method"}
    about = meanings(TRLConfig)
    root = section_schema(TRLConfig)
    root["properties"] |= {name: {"$ref": f"#/definitions/{kind.__name__}"} for name, kind in sections.items()}
    root["properties"]["method"] = {
        "description": about["method"],
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string", "description": meanings(MethodConfig)["name"]}},
        "allOf": [
            {
                "if": {"required": ["name"], "properties": {"name": {"const": name}}},
                "then": {"$ref": f"#/definitions/{method.__name__}"},
            }
            for name, method in methods.items()
        ],
    }
    fixed: Schema = {}  # checks that do not apply if a plugin may have registered the name
    for option, registry in registries.items():
        section, name = option.split(".")
        one = {"enum": [*registry.names(), *registry.aliases()]}
        many = {"anyOf": [one, {"type": "array", "items": one}, {"type": "null"}]}
        fixed.setdefault(section, {"properties": {}})["properties"][name] = many if option == "train.tracker" else one
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Configuration of trlx_like",
        **root,
        "if": {"required": ["plugins"], "properties": {"plugins": {"minItems": 1}}},
        "else": {"properties": fixed},
        "definitions": {
            **{kind.__name__: {"description": about[name], **section_schema(kind)} for name, kind in sections.items()},
            **{kind.__name__: {"description": kind.__doc__, **section_schema(kind)} for kind in methods.values()},
            **generation_schemas(),
        },
    }


def section_schema(section: type[Section]) -> Schema:
    """Make the schema of one section, with the docstring under each field as its description."""
    schema = section.model_json_schema()
    about = meanings(section)
    for name, field in section.model_fields.items():
        option = schema["properties"][name]
        option.pop("title", None)
        option["description"] = about[name]
        if not field.is_required() and "default" not in option:
            option["default"] = field.get_default(call_default_factory=True, validated_data={})
        if name in ("gen_kwargs", "gen_experience_kwargs") and issubclass(section, TextMethodConfig):
            exact = name != "gen_kwargs" and issubclass(section, OnlineTextMethodConfig) and section.exact_sampling
            kind = "GuidedGeneration" if section.generation_options else "Rollouts" if exact else "Generation"
            null = [{"type": "null"}] if option.pop("type", None) is None else []
            option.pop("additionalProperties", None)
            option["anyOf"] = [{"$ref": f"#/definitions/{kind}"}, *null]
    if issubclass(section, MethodConfig):
        schema["properties"]["name"]["default"] = section.__name__
    return {name: schema[name] for name in ("type", "properties", "required", "additionalProperties") if name in schema}


def generation_schemas() -> Schema:
    """Make schemas of generation options: for rollouts, for evaluation (lists are sweeps), and with ILQL's `beta`."""
    single, modelled = {name: option_type(name).json_schema() for name in TYPES}, {*ANYWHERE, *FORBIDDING}
    rollouts = {name: one if name in modelled else {"enum": list(NEUTRAL[name])} for name, one in single.items()}
    evaluation = {
        name: one if name in LIST_VALUED else {"anyOf": [one, {"type": "array", "items": one}]}
        for name, one in single.items()
    }
    guided = {**evaluation, "beta": {"type": ["number", "array"], "items": {"type": "number"}}}
    kinds = {"Rollouts": rollouts, "Generation": evaluation, "GuidedGeneration": guided}
    closed = {"type": "object", "required": ["max_new_tokens"], "additionalProperties": False}
    return {kind: {**closed, "properties": options} for kind, options in kinds.items()}


def meanings(section: type[Section]) -> dict[str, str]:
    """Return the docstring under each field. Pydantic would read the source of every section on each import."""
    found = {}
    for part in reversed([part for part in section.__mro__ if issubclass(part, Section)]):
        try:
            source = textwrap.dedent(inspect.getsource(part))
        except OSError:  # defined in a shell
            continue
        body = getattr(ast.parse(source).body[0], "body", [])
        for field, words in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(words, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(words.value)).split())
    return found
