"""Chat templates that write reasoning and tool calls in the styles of common model families."""

from __future__ import annotations

from typing import Any

from cellama.engine.text.chat_template import for_template
from cellama.engine.text.derivation.probes import probes
from cellama.engine.text.derivation.reply_markup import ReplyMarkup, derive_markup
from cellama.engine.text.markup import FROM_CALLER
from cellama.engine.text.template_process import Renderer

_TURNS = """
{%- for tool in tools or [] %}{{ '<|im_start|>system\n' ~ (tool | tojson) ~ '<|im_end|>\n' }}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' ~ m.role ~ '\n' }}
{%- if m.reasoning_content %}REASONING{% endif %}
{{- m.content }}
{%- if m.tool_calls %}CALLS{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}BEGIN{% endif %}"""
THINK = "{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}"

_EACH = "{%- for c in m.tool_calls %}{%- set f = c.function %}"
_JSON = """'{"name": "' ~ f.name ~ '", "arguments": ' ~ (f.arguments | tojson) ~ '}'"""
_RAW = "(v if v is string else v | tojson)"


def _tagged(head: str, sep: str, close: str, end: str) -> str:
    """Return a template of calls with a tag around each argument. `sep` and `close` are Jinja, and may use k and v."""
    argument = f"{{{{ {sep} ~ {_RAW} ~ {close} }}}}"
    items = f"{{%- for k, v in f.arguments | items %}}{argument}{{%- endfor %}}"
    return f"{_EACH}{{{{ {head} }}}}{items}{{{{ {end} }}}}{{%- endfor %}}"


def _xml(begin: str, parameter: str, end: str) -> str:
    return _tagged(begin, parameter, "'</parameter>\n'", end)


CALLS = {
    "hermes": f"{_EACH}{{{{ '\n<tool_call>\n' ~ {_JSON} ~ '\n</tool_call>' }}}}{{%- endfor %}}",
    "llama3": "{%- if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    """{{- '{"name": "' ~ m.tool_calls[0].function.name ~ '", "parameters": ' }}"""
    "{{- m.tool_calls[0].function.arguments | tojson ~ '}' }}",
    "mistral": "{{ '[TOOL_CALLS][' }}" + _EACH + """{{ '{"name": "' ~ f.name ~ '", "arguments": ' }}"""
    """{{- (f.arguments | tojson) ~ ', "id": "' ~ c.id ~ '"}' ~ (']' if loop.last else ', ') }}{%- endfor %}""",
    "mistral with tags": _EACH + "{{ '[TOOL_CALLS]' ~ f.name ~ '[CALL_ID]' ~ c.id ~ '[ARGS]' }}"
    "{{- f.arguments | tojson }}{%- endfor %}",
    "qwen coder": _tagged(
        "'\n<tool_call>\n<function=' ~ f.name ~ '>\n'",
        "'<parameter=' ~ k ~ '>\n'",
        "'\n</parameter>\n'",
        "'</function>\n</tool_call>'",
    ),
    "seed": "{{ '\n' }}"
    + _tagged(
        "'<seed:tool_call>\n<function=' ~ f.name ~ '>\n'",
        "'<parameter=' ~ k ~ '>'",
        "'</parameter>\n'",
        "'</function>\n</seed:tool_call>'",
    ),
    "glm": _tagged(
        "'\n<tool_call>' ~ f.name ~ '\n'",
        "'<arg_key>' ~ k ~ '</arg_key>\n<arg_value>'",
        "'</arg_value>\n'",
        "'</tool_call>'",
    ),
    "minimax": "{{ '\n<minimax:tool_call>\n' }}"
    + _xml("""'<invoke name="' ~ f.name ~ '">\n'""", """'<parameter name="' ~ k ~ '">'""", "'</invoke>\n'")
    + "{{ '</minimax:tool_call>' }}",
    "keys as tags": "{{ '\n]#[<tool_call>\n' }}"
    + _tagged("""']#[<invoke name="' ~ f.name ~ '">'""", "']#[<' ~ k ~ '>'", "']#[</' ~ k ~ '>'", "']#[</invoke>\n'")
    + "{{ ']#[</tool_call>' }}",
    "deepseek v3.2": "{{ '\n\n<｜DSML｜calls>\n' }}"
    + _xml(
        """'<｜DSML｜invoke name="' ~ f.name ~ '">\n'""",
        """'<｜DSML｜parameter name="' ~ k ~ '" string="' ~ ('true' if v is string else 'false') ~ '">'""",
        "'</｜DSML｜invoke>\n'",
    ).replace("</parameter>", "</｜DSML｜parameter>")
    + "{{ '</｜DSML｜calls>' }}",
    "deepseek r1": "{{ '<｜calls▁begin｜>' }}" + _EACH + "{{ '<｜call▁begin｜>function<｜sep｜>' ~ f.name }}"
    "{{- '\n```json\n' + f.arguments + '\n```<｜call▁end｜>' ~ ('' if loop.last else '\n') }}{%- endfor %}"
    "{{ '<｜calls▁end｜>' }}",
    "deepseek v3.1": "{{ '<｜calls▁begin｜>' }}" + _EACH + "{{ '<｜call▁begin｜>' ~ f.name ~ '<｜sep｜>' }}"
    "{{- (f.arguments | tojson) ~ '<｜call▁end｜>' }}{%- endfor %}{{ '<｜calls▁end｜>' }}",
    "kimi": "{{ '<|calls_begin|>' }}{%- for c in m.tool_calls %}{{ '<|call_begin|>' ~ c.id ~ '<|arguments|>' }}"
    "{{- (c.function.arguments | tojson) ~ '<|call_end|>' }}{%- endfor %}{{ '<|calls_end|>' }}",
    "command-r": "{{ '<|START_ACTION|>[' }}" + _EACH + """{{ '\n    {"tool_call_id": "' ~ loop.index0 }}"""
    """{{- '", "tool_name": "' ~ f.name ~ '", "parameters": ' ~ (f.arguments | tojson) }}"""
    "{{- '}' ~ ('' if loop.last else ',') }}{%- endfor %}{{ '\n]<|END_ACTION|>' }}",
    "nemotron": "{{ '<TOOLCALL>[' }}" + _EACH + f"{{{{ {_JSON} ~ ('' if loop.last else ', ') }}}}"
    "{%- endfor %}{{ ']</TOOLCALL>' }}",
    "apertus": "{{ '<|tools_prefix|>[' }}" + _EACH + """{{ '{"' ~ f.name ~ '": ' ~ (f.arguments | tojson) ~ '}' }}"""
    "{{- '' if loop.last else ', ' }}{%- endfor %}{{ ']<|tools_suffix|>' }}",
    "functionary": _EACH + "{{ '<function=' ~ f.name ~ '>' ~ (f.arguments | tojson) ~ '</function>' }}{%- endfor %}",
    "solar": "{{ '<|tool_calls|>' }}" + _EACH + "{{ '<|call:begin|>' ~ c.id ~ '<|call:name|>' ~ f.name }}"
    "{{- '<|call:args|>' ~ (f.arguments | tojson) ~ '<|call:end|>' }}{%- endfor %}",
    "openai": "{{ '<calls>' ~ (m.tool_calls | tojson) ~ '</calls>' }}",
}
STYLES = {
    "llama3": "json", "mistral": "json", "hermes": "json", "command-r": "json", "nemotron": "json", "apertus": "json",
    "openai": "json", "mistral with tags": "tag", "deepseek r1": "tag", "deepseek v3.1": "tag", "kimi": "tag",
    "functionary": "tag", "solar": "tag", "qwen coder": "tagged", "seed": "tagged", "glm": "tagged",
    "minimax": "tagged", "keys as tags": "tagged", "deepseek v3.2": "tagged",
}  # fmt: skip

CHANNELS = """
{%- for m in messages %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}{% endif %}
{%- if m.tool_calls %}{%- set f = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' ~ f.name ~ '<|channel|>commentary json<|message|>' }}
{{- (f.arguments | tojson) ~ '<|call|>' }}
{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|return|>' }}
{%- else %}{{ '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}{% if tools and false %}{% endif %}"""


def template(calls: str = "", reasoning: str = "", begin: str = "") -> str:
    """Return a ChatML template whose assistant writes calls and reasoning in this way."""
    return _TURNS.replace("CALLS", calls).replace("REASONING", reasoning).replace("BEGIN", begin)


def renderer(source: str) -> Renderer:
    return Renderer(
        {"source": source, "bos": "<s>", "eos": "<|im_end|>", "control": [], "markup": [], "from_caller": FROM_CALLER}
    )


def derived(source: str) -> ReplyMarkup:
    """Return the markup of a template, rendered in this process."""
    texts = renderer(source).answer({"probes": probes(for_template)})["texts"]
    return derive_markup(texts, source, ["<|im_end|>"])


def reply_of(source: str, markup: ReplyMarkup, turn: dict[str, Any], tools: list[Any]) -> str:
    """Return the reply of a model that writes this turn as its template does."""
    question = [{"role": "user", "content": "Well?"}]
    rendering = renderer(source)
    answer = for_template({"role": "assistant", **turn}, arguments_as_text=markup.arguments_as_text)
    prompt, whole = (
        rendering.answer({"mark": False, "messages": messages, "variables": {"tools": tools, **variables}})["text"]
        for messages, variables in ((question, {"add_generation_prompt": True}), ([*question, answer], {}))
    )
    assert whole.startswith(prompt)
    return str(whole[len(prompt) :].removesuffix("<|im_end|>\n"))
