"""Generate JSON Schemas for types and request bodies. Named types become components of the document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_type_hints

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import is_typeddict

from cellama.api.openai.parameters import ParameterRule
from cellama.tasks.contract.kinds import Kind
from cellama.tasks.contract.payloads import TypedAs
from cellama.tasks.contract.shapes import parameters

REF = "#/components/schemas/{model}"
NULL = {"type": "null"}
GATEWAY_ONLY = ("model", "priority", "cache_scope")  # parameters of jobs that the gateway sets, or names differently
_CALLERS_TYPES = {**vars(parameters), "Mapping": Mapping, "Sequence": Sequence}


class UntitledSchemas(GenerateJsonSchema):
    """Generates schemas without titles because titles only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyTable:
    """Describes an endpoint's JSON body with the tables that the endpoint itself uses.

    If `own` defines a shape for a parameter, the parameter has this shape. For other parameters, `rules` determine the
    handling, and a parameter without a rule has the shape of the job parameter. `names` lists the accepted parameters
    (default: all parameters of `own`, `rules` and the job).
    """

    own: type
    kind: Kind
    required: tuple[str, ...]
    rules: Mapping[str, ParameterRule] = field(default_factory=dict)
    names: tuple[str, ...] = ()


class Schemas:
    """Generates schemas, and collects the components that the schemas refer to."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}

    def of(self, type_: Any) -> dict[str, Any]:
        """Return a type's schema. A TypedDict becomes a reference to a component."""
        # In a list, pydantic refers to the type instead of inlining it.
        schema = TypeAdapter(list[type_]).json_schema(ref_template=REF, schema_generator=UntitledSchemas)
        for name, component in schema.get("$defs", {}).items():
            component.pop("title", None)
            if is_typeddict(vars(parameters).get(name)):  # a part of a payload, which rejects unknown members
                component.setdefault("additionalProperties", False)
            self.components[name] = component
        items: dict[str, Any] = schema.get("items", {})
        return items

    def body(self, table: BodyTable) -> dict[str, Any]:
        """Return the schema of a JSON body. Raises LookupError for a parameter without a shape."""
        own = get_type_hints(table.own, include_extras=True)
        properties = {name: self._parameter(table, name, own) for name in sorted(_names(table))}
        for name in properties.keys() - set(table.required):
            properties[name] = _or_null(properties[name])
        return {
            "type": "object",
            "properties": properties,
            "required": list(table.required),
            "additionalProperties": False,
        }

    def _parameter(self, table: BodyTable, name: str, own: Mapping[str, Any]) -> dict[str, Any]:
        rule, job = table.rules.get(name), table.kind.payload.model_fields
        job_name = rule.to if rule is not None and rule.handling == "renamed" else name
        about = [] if rule is None or not rule.note else [_sentence(rule.note)]
        if rule is not None and rule.handling == "ignored":
            schema, about = {}, ["Ignored.", *about]
        elif rule is not None and rule.handling == "rejected":
            schema, about = dict[str, Any](enum=list(rule.harmless)), ["Other values are rejected.", *about]
        elif name in own:
            schema = self.of(own[name])
            if rule is None and name in job:
                about = [job[name].description or ""]
        elif name == "model":
            schema, about = dict[str, Any](type="string", minLength=1), ["Id of a model that `GET /v1/models` lists."]
        elif job_name in job:
            schema, about = self.of(_callers_type(job[job_name])), [job[job_name].description or "", *about]
        else:
            raise LookupError(
                f"parameter {name!r} has no shape; add it to {table.own.__name__}, from which the OpenAPI document is "
                "generated"
            )
        description = " ".join(filter(None, about))
        return {**schema, **({"description": description} if description else {})}


def _names(table: BodyTable) -> set[str]:
    if table.names:
        return set(table.names)
    accepted = {name for name, rule in table.rules.items() if rule.handling != "rejected" or rule.harmless}
    of_job = table.kind.payload.model_fields.keys() - table.rules.keys() - {*table.kind.positional, *GATEWAY_ONLY}
    return accepted | of_job | set(get_type_hints(table.own)) | {"model"}


def _callers_type(info: FieldInfo) -> Any:
    """Return the type that callers may use for a job parameter.

    If the payload converts the value, `TypedAs` specifies the callers' type.
    """
    texts = [each.text for each in info.metadata if isinstance(each, TypedAs)]
    if texts:
        return eval(texts[-1], _CALLERS_TYPES)
    return Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an optional parameter's schema, extended to allow null.

    Null has the same effect as omitting the parameter.
    """
    description = {"description": schema["description"]} if "description" in schema else {}
    kind = {name: value for name, value in schema.items() if name != "description"}
    if not kind:
        return schema
    if "anyOf" in kind and len(kind) == 1:
        kinds = kind["anyOf"] if NULL in kind["anyOf"] else [*kind["anyOf"], NULL]
    else:
        kinds = [kind, NULL]
    return {"anyOf": kinds, **description}


def _sentence(note: str) -> str:
    return f"{note[0].upper()}{note[1:]}{'' if note.endswith('.') else '.'}"
