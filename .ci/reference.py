"""Write the generated parts of the documentation: tables of settings, parameters, options and metrics.

Each generated part is enclosed in `<!-- generated: KIND NAME -->` and `<!-- end of generated part -->`. Run this script
after you change a description, a command, a docstring or an error code. With `--check`, the script writes nothing, and
fails if a page differs from the code. `make check` uses this option. On the site, a page with `<!-- include: PATH -->`
also shows the file at that path, which `page_for_site` inserts.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import typer
from pydantic import BaseModel
from typing_extensions import get_original_bases, is_typeddict

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.append(str(ROOT))  # for tables in tests/
PART = re.compile(
    r"^(?P<head><!-- generated: (?P<kind>\w+)(?: (?P<name>[\w./-]+))? -->\n)"
    r"(?P<text>.*?)(?P<end><!-- end of generated part -->)$",
    re.MULTILINE | re.DOTALL,
)
INCLUDED = re.compile(r"^.*<!-- include: ([\w./-]+) -->$", re.MULTILINE)  # the whole line is replaced
FIELD = re.compile(r"^    (\w+): ([^#\n=]*[^#\n= ])(?: = [^#\n]*)?(?: +#\s*(.*))?$", re.MULTILINE)  # with its comment
FIGURE = re.compile(r"(?<=[\d.,])<!-- \w+.*? -->")  # where a number is from (bench/harness/kept.py)
LINK_OUT = re.compile(r"\]\((?!\w+:|#)(?:\.\./)?(?:docs/)?([^)]+)\)")


def filled(markdown: str) -> str:
    """Return a page whose generated parts match the code. Raises KeyError for an unknown kind."""
    return PART.sub(
        lambda part: f"{part['head']}\n{KINDS[part['kind']](*filter(None, [part['name']])).strip()}\n\n{part['end']}",
        markdown,
    )


def page_for_site(markdown: str) -> str:
    """Return a page for the site. Included files are inserted, and the sources of figures are removed."""
    return FIGURE.sub("", INCLUDED.sub(lambda found: include(found[1]), markdown))


def update_pages(only_check: bool) -> list[str]:
    """Write the generated parts of all pages, and return the paths of the changed pages, relative to the root."""
    changed = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            changed.append(str(page.relative_to(ROOT)))
            if not only_check:
                page.write_text(new, encoding="utf-8")
    return changed


def find(name: str) -> Any:
    """Return the object that a dotted name refers to, for instance `cellama.config.Settings`."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(p if p.startswith("`") else p.replace("<", "&lt;") for p in parts).replace("|", "\\|")


def fields(name: str) -> str:
    """Return the fields of a pydantic model, except inherited fields whose base class has a table of its own."""
    model: type[BaseModel] = find(name)
    schema = model.model_json_schema()
    bases = [base for base in model.__mro__[1:] if f"{base.__module__}.{base.__qualname__}" in _described()]
    inherited = {field for base in bases for field in base.model_fields}  # type: ignore[attr-defined]
    rows = [
        (f"`{field}`", spec.get("description", ""), _type(spec, schema), _default(field, spec, schema))
        for field, spec in schema["properties"].items()
        if field not in inherited
    ]
    return table(("name", "description", "type", "default"), rows)


@functools.cache
def _described() -> frozenset[str]:
    """Return the names of the pydantic models that have a table in the documentation."""
    parts = (part for page in DOCS.rglob("*.md") for part in PART.finditer(page.read_text(encoding="utf-8")))
    return frozenset(part["name"] for part in parts if part["kind"] == "fields")


def _type(spec: dict[str, Any], schema: dict[str, Any]) -> str:
    """Describe a JSON schema in words, for instance `integer, from 1 to 256`."""
    if "$ref" in spec:
        return _type(schema["$defs"][spec["$ref"].rpartition("/")[2]], schema)
    for several in ("anyOf", "oneOf"):
        if several in spec:
            kinds = dict.fromkeys(_type(one, schema) for one in spec[several] if one.get("type") != "null")
            return " or ".join(kinds)
    if "enum" in spec:
        return ", ".join(f"`{value}`" for value in spec["enum"])
    if "const" in spec:
        return f"`{spec['const']}`"
    if spec.get("type") == "array":
        inner = spec.get("items")
        return "list" + (f" of {_type(inner, schema)}" if inner else "")
    return {"number": "number", "object": "object"}.get(spec.get("type", ""), spec.get("type", "any")) + _range(spec)


def _range(spec: dict[str, Any]) -> str:
    above = f"above {spec['exclusiveMinimum']:g}" if "exclusiveMinimum" in spec else ""
    low = f"from {spec['minimum']:,.12g}" if "minimum" in spec else ""
    high = f"to {spec['maximum']:,.12g}" if "maximum" in spec else ""
    if above and high:
        return f", {above} and up {high}"
    return f", {above or low} {high}".rstrip() if above or low or high else ""


def _default(field: str, spec: dict[str, Any], schema: dict[str, Any]) -> str:
    if field in schema.get("required", ()):
        return "required"
    value = spec.get("default", "")
    if value is None and "auto:" in spec.get("description", ""):
        return "`auto`"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"`{value[0].get('id')}={value[0].get('source')}`"
    return "" if value is None or value == "" else f"`{value!r}`" if isinstance(value, list) else f"`{value}`"


def commands(_: str = "") -> str:
    """Return every cellama command with its help."""
    root = typer.main.get_command(find("cellama.api.cli.app"))
    return "\n".join(_command(path, command) for path, command in leaves("cellama", root))


def leaves(path: str, command: click.Command) -> Iterable[tuple[str, click.Command]]:
    """Yield all commands below a group, with their full names."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name, child in inner.items():
        yield from leaves(f"{path} {name}", child)


def _command(path: str, command: click.Command) -> str:
    text, _, example = inspect.cleandoc(command.help or "").partition("Example:")
    options = [p for p in command.params if p.param_type_name == "option"]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([path, *map(_metavar, arguments), "[OPTIONS]" if options else ""])
    rows = [(f"`{_names(p)}`", _shown(p), getattr(p, "help", "") or "") for p in [*arguments, *options]]
    parts = [f"## {path}\n", f"{text.strip()}\n", f"```text\n{usage.strip()}\n```\n"]
    parts += [table(("argument or option", "default", "description"), rows)] if rows else []
    parts += [f"Example: `{example.strip()}`\n"] if example else []
    return "\n".join(parts)


def _metavar(argument: click.Parameter) -> str:
    name = (argument.name or "").upper() + ("…" if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _names(parameter: click.Parameter) -> str:
    if parameter.param_type_name == "argument":
        return (parameter.name or "").upper()
    return ", ".join(parameter.opts + parameter.secondary_opts)


def _shown(parameter: click.Parameter) -> str:
    if parameter.required:
        return "required"
    value = parameter.default() if callable(parameter.default) else parameter.default
    if isinstance(value, enum.Enum) or value in (None, False, "", (), []) or type(value).__name__ == "Sentinel":
        return ""
    return f"`{value}`"


def members(name: str) -> str:
    """Return the signatures and docstrings of a class and its public methods, or of a function."""
    thing = find(name)
    if not inspect.isclass(thing):
        return _signature(name.rpartition(".")[2], thing)
    methods = {n: m for owner in thing.__mro__[:-1] for n, m in vars(owner).items() if inspect.isfunction(m)}
    public = [_signature(f"{thing.__name__}.{n}", m) for n, m in methods.items() if not n.startswith("_")]
    return "\n".join([f"## {thing.__name__}\n", f"{inspect.getdoc(thing) or ''}\n", *public])


def _signature(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.name != "self"]
    text = re.sub(r"<function \S+ at 0x\w+>", "...", str(signature.replace(parameters=shown)).replace("'", ""))
    if len(name + text) > 90:
        inner, arrow, result = text[1:].rpartition(") -> ")
        text = "(\n    " + re.sub(r", (?=\*|\w+:|\w+ =)", ",\n    ", inner) + f"\n{arrow}{result}"
    doc = inspect.getdoc(function) or ""
    return f"### {name}\n\n```python\n{name.rpartition('.')[2]}{text}\n```\n\n{doc}\n"


def dataclass_fields(name: str) -> str:
    """Return the fields of a dataclass or TypedDict with their comments."""
    kind = find(name)
    rows = [(f"`{field}`", f"`{type_}`", comment) for field, type_, comment in declared(kind)]
    return f"{inspect.getdoc(kind)}\n\n" + table(("field", "type", "description"), rows)


def declared(kind: Any) -> Iterable[tuple[str, str, str]]:
    """Yield the name, type and comment of each field, with inherited fields first."""
    for base in get_original_bases(kind) if is_typeddict(kind) else kind.__bases__:
        if is_typeddict(base) or dataclasses.is_dataclass(base):
            yield from declared(base)
    yield from FIELD.findall(inspect.getsource(kind))


def events(_: str = "") -> str:
    """Return a table of event types with their fields and meanings."""
    rows = []
    for kind in get_args(find("cellama.tasks.contract.events.Event")):
        fields = get_type_hints(kind, include_extras=True)
        (name,) = get_args(fields["type"])
        always = ", ".join(f"`{field}`" for field in fields if field in kind.__required_keys__ - {"type"})
        perhaps = ", ".join(f"`{field}`" for field in fields if field in kind.__optional_keys__ - {"seq"})
        rows.append((f"`{name}`", always, perhaps, inspect.getdoc(kind) or ""))
    return table(("type", "fields", "optional fields", "meaning"), rows)


def codes(_: str = "") -> str:
    """Return a table of error codes, with the command line's exit code for each."""
    rows = [
        (
            f"`{row.code}`",
            row.meaning,
            "yes" if row.retryable else "",
            str(row.http_status),
            str(int(row.exit_code)),
        )
        for row in find("cellama.tasks.contract.codes.CODES").values()
    ]
    return table(("code", "meaning", "retryable", "HTTP status", "exit code"), rows)


def gateway_codes() -> str:
    """Return a table of the error codes that only the gateway uses."""
    rows = [
        (f"`{row.code}`", row.meaning, "yes" if row.retryable else "", str(row.http_status))
        for row in find("cellama.api.http.errors.GATEWAY_CODES").values()
    ]
    return table(("code", "meaning", "retryable", "HTTP status"), rows)


def json_schema() -> str:
    """Return a table for each group of JSON Schema keywords, which shows how strict and lenient mode handle them."""
    keywords = find("cellama.engine.grammar.schema.keywords.KEYWORDS")
    return "\n".join(
        f"### {group.capitalize()}\n\n"
        + table(
            ("keyword", "strict", "lenient", "notes"),
            [(f"`{name}`", k.strict, k.lenient, k.note) for name, k in keywords.items() if k.group == group],
        )
        for group in dict.fromkeys(keyword.group for keyword in keywords.values())
    )


def json_schema_formats() -> str:
    """Return the values of the JSON Schema keyword `format` that are enforced."""
    formats = find("cellama.engine.grammar.schema.formats.FORMATS")
    return "- " + "\n- ".join(f"`{name}`" for name in formats) + "\n"


def measured(path: str) -> str:
    """Return the stored benchmark results that a page's figures are based on."""
    results = find("cellama.bench.harness.kept.Results")()
    found = find("cellama.bench.harness.kept.figures")((ROOT / path).read_text(encoding="utf-8"))
    lines = {(f.name, line["model"], line["commit"], line["machine"]) for f in found if (line := f.source(results))}
    return table(("benchmark", "model", "commit", "machine"), sorted(lines))


def include(path: str) -> str:
    """Return a file from the repository, with its links made relative to docs/."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return LINK_OUT.sub(r"](\1)", text.partition("\n")[2])


def openai() -> str:
    """Return how each of OpenAI's parameters is handled, by endpoint."""
    tables = {
        **find("cellama.api.openai.parameters.PARAMETERS"),
        "/v1/responses": find("cellama.api.openai.responses.parameters.RULES"),
    }
    return _tables_of_rules(tables)


def other_servers() -> str:
    """Return how each parameter of vLLM and llama-server is handled."""
    rules = find("cellama.api.openai.parameters.OTHER_SERVERS")
    rows = [(f"`{name}`", rule.handling, _handling(rule), _harmless(rule)) for name, rule in sorted(rules.items())]
    return table(("parameter", "handling", "details", "accepted values"), rows)


def anthropic() -> str:
    """Return how each of Anthropic's parameters is handled."""
    return _table_of_rules("parameter", find("cellama.api.anthropic.parameters.PARAMETERS"))


def ollama() -> str:
    """Return how each of Ollama's parameters is handled, by endpoint, and how each option is handled."""
    parameters, options = (find(f"cellama.api.ollama.parameters.{name}") for name in ("PARAMETERS", "OPTIONS"))
    return f"{_tables_of_rules(parameters)}\n`options`:\n\n{_table_of_rules('option', options)}"


def _tables_of_rules(tables: Mapping[str, Any]) -> str:
    return "\n".join(f"`{url}`:\n\n{_table_of_rules('parameter', rules)}" for url, rules in tables.items())


def _table_of_rules(kind: str, rules: Mapping[str, Any]) -> str:
    rows = [(f"`{name}`", rule.handling, _handling(rule)) for name, rule in sorted(rules.items())]
    return table((kind, "handling", "details"), rows)


def differences(name: str) -> str:
    """Return how replies differ from another server's replies, based on the table of pairs in tests/pairs."""
    pairs = find("tests.pairs.summary"), find("tests.pairs.rows")
    summary, rows = (function(find(f"tests.pairs.{name}.TABLE")) for function in pairs)
    return f"{summary}\n\n" + table(("there", "cellama", "use instead"), rows)


def metrics(source: str) -> str:
    """Return a table of a source's metrics: names, types, help texts, labels, and the bucket ranges of histograms."""
    rows = [row for row in find("cellama.tasks.metrics.table.TABLE").values() if row.source == source]
    return table(("metric", "type", "meaning"), ((f"`{row.name}`", row.kind, _meaning(row)) for row in rows))


def _meaning(row: Any) -> str:
    labels = ", ".join(f"`{label}`" for label in row.labels)
    bounds = row.bounds and f"{len(row.bounds)} buckets from {row.bounds[0]:g} to {row.bounds[-1]:g}."
    return " ".join(filter(None, (row.help, labels and f"By {labels}.", bounds)))


def _handling(rule: Any) -> str:
    job = f"`{rule.to}`" if rule.to else ""
    return f"{job}: {rule.note}" if job and rule.note else job or rule.note


def _harmless(rule: Any) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in rule.harmless)


KINDS: dict[str, Callable[..., str]] = {
    "metrics": metrics,
    "openai": openai,
    "other_servers": other_servers,
    "anthropic": anthropic,
    "differences": differences,
    "ollama": ollama,
    "fields": fields,
    "commands": commands,
    "members": members,
    "dataclass": dataclass_fields,
    "events": events,
    "codes": codes,
    "gateway_codes": gateway_codes,
    "json_schema": json_schema,
    "json_schema_formats": json_schema_formats,
    "measured": measured,
}


def main() -> None:
    only_check = sys.argv[1:] == ["--check"]
    changed = update_pages(only_check)
    if only_check and changed:
        sys.exit(f"reference: {', '.join(changed)} differ from the code; run: .venv/bin/python .ci/reference.py")
    print(*(changed or ["reference: the pages agree with the code"]), sep="\n")


if __name__ == "__main__":
    main()
