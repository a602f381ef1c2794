"""Estimate a run's rows, tokens, time and disk space without starting the run, and show the first prompt."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from celery.exceptions import TimeoutError as CeleryTimeout
from redis import Redis

from cellama.tasks.app import CellamaApp
from cellama.tasks.contract.errors import JobError, RedisUnreachable
from cellama.tasks.contract.kinds.chunk import LINE_JOBS
from cellama.tasks.contract.kinds.tokens import TASK_APPLY_CHAT_TEMPLATE, TASK_TOKENIZE, TemplateJob
from cellama.tasks.contract.names import DEFAULT_MODEL
from cellama.tasks.state.registry import live_workers

from .checks import check_files
from .formats import output_kind
from .lines import StoredLine
from .options import BatchOptions
from .run import check_model
from .sources import STANDARD
from .start import OnRead, open_work, paths_of, read_input
from .work import PENDING, TWIN, WorkFile

NUM_SAMPLES = 50  # rows whose prompts are tokenized: the mean of longer inputs then errs by about a tenth
NUM_ERRORS = 3  # invalid rows that are shown
TOKENIZE_TIMEOUT_S = 30.0  # for all samples; busy workers still tokenize, because this needs no slot
CHARS_PER_TOKEN = 4.0  # in English text, if no worker can tokenize
BYTES_PER_TOKEN = 4.0  # of generated text
RESULT_BYTES = 350  # of a result without its text, as JSON


@dataclass(frozen=True, slots=True)
class DryRun:
    """An estimate of a run. Token counts, times and sizes are None if they are unknown."""

    num_rows: int
    num_invalid: int
    errors: list[dict[str, Any]]  # of the first invalid rows
    prompt_tokens: int
    is_measured: bool  # whether a worker has tokenized a sample of the prompts
    max_completion_tokens: int  # if each row uses its max_tokens
    max_seconds: float | None  # at the rates that the workers measured in their last second of work
    work_bytes: int  # size of the work file
    output_bytes: int  # size of the output as JSON lines
    first_prompt: str
    notes: list[str] = field(default_factory=list)


def dry_run(redis: Redis, app: CellamaApp, options: BatchOptions, on_read: OnRead = lambda count: None) -> DryRun:
    """Read and check the whole input, and estimate the run. Raises the same errors as a run.

    The input is read into a temporary work file. No files are written next to the output, and no lines are processed.
    """
    check_model(redis, options.model)
    check_files(options)
    with tempfile.TemporaryDirectory(prefix="cellama-batch-") as directory:
        paths = paths_of(Path(directory) / "output.jsonl")
        fresh = replace(options, errors=None, overwrite=False, retry_failed=False)
        with contextlib.closing(open_work(paths, fresh)) as work:
            with contextlib.closing(read_input(work, fresh, paths, on_read, None)) as errors:
                invalid = [value for value, _ in zip(errors.lines(), range(NUM_ERRORS), strict=False)]
                num_invalid = int(work.get("unreadable", "0"))
            found = _estimate(redis, app, work, invalid, num_invalid)
    is_appended = options.output == STANDARD or output_kind(options.output).is_appended
    return found if is_appended else replace(found, work_bytes=found.work_bytes + found.output_bytes)


def _estimate(redis: Redis, app: CellamaApp, work: WorkFile, invalid: list[dict[str, Any]], num_invalid: int) -> DryRun:
    count = work.count(PENDING)
    num_twins = work.count(TWIN)
    lines = work.sample(NUM_SAMPLES)
    texts = {line.number: _prompt_of(line) for line in lines}
    measured = _measured(app, lines) if live_workers(redis) else None
    num_chars = sum(map(len, texts.values()))
    mean = (num_chars / CHARS_PER_TOKEN if measured is None else measured) / max(1, len(lines))
    completions = sum(map(_max_completion, lines)) / max(1, len(lines))
    columns = sum(len(json.dumps(line.columns)) for line in lines) / max(1, len(lines))
    prompt_tokens, completion_tokens = round(mean * count), round(completions * count)
    embeds = sum(line.kind == "embed" for line in lines) / max(1, len(lines))
    size = RESULT_BYTES + columns + completions * BYTES_PER_TOKEN + embeds * _dimensions(redis, lines) * 12
    notes = [f"{num_twins} identical rows copy the result of another row"] if num_twins else []
    return DryRun(
        num_rows=count + num_twins,
        num_invalid=num_invalid,
        errors=invalid,
        prompt_tokens=prompt_tokens,
        is_measured=measured is not None,
        max_completion_tokens=completion_tokens,
        max_seconds=_seconds(redis, {line.model for line in lines}, prompt_tokens, completion_tokens),
        work_bytes=work.size_bytes(),
        output_bytes=round(size * (count + num_twins)),
        first_prompt=texts[lines[0].number] if lines else "",
        notes=notes,
    )


def _prompt_of(line: StoredLine) -> str:
    """Return the prompt's text as the model receives it, without the chat template's control tokens."""
    if line.kind == "chat":
        system = line.params.get("system")
        turns = [*([{"role": "system", "content": system}] if system else []), *line.params["messages"]]
        return "\n".join(f"{turn['role']}: {turn.get('content') or ''}" for turn in turns)
    if line.kind == "rerank":
        return "\n".join([line.params["query"], *line.params["documents"]])
    content = line.params["prompt" if line.kind == "generate" else "texts"]
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _measured(app: CellamaApp, lines: Iterable[StoredLine]) -> int | None:
    """Return the number of tokens in these lines' prompts, or None if no worker answers."""
    known = TemplateJob.model_fields.keys() - {"messages", "model", "priority"}
    try:
        jobs = []
        for line in lines:
            if line.kind == "chat":
                params = {name: value for name, value in line.params.items() if name in known}
                jobs.append(
                    app.tasks[TASK_APPLY_CHAT_TEMPLATE].apply_async((line.model, line.params["messages"]), params)
                )
            elif isinstance(text := line.params.get("prompt", line.params.get("texts")), str):
                jobs.append(app.tasks[TASK_TOKENIZE].apply_async((line.model, text), {}))
        return sum(len(job.get(timeout=TOKENIZE_TIMEOUT_S)["tokens"]) for job in jobs)
    except (JobError, RedisUnreachable, CeleryTimeout, TimeoutError):
        return None


def _max_completion(line: StoredLine) -> int:
    if line.kind in ("embed", "rerank"):
        return 0
    default = LINE_JOBS[line.kind].model_fields["max_tokens"].default
    return int(line.params.get("max_tokens", default)) * int(line.params.get("n", 1))


def _models(redis: Redis, names: Iterable[str]) -> list[Any]:
    """Return each worker's report about these models."""
    wanted = set(names)
    found = []
    for worker in live_workers(redis):
        for model in worker.models:
            if model["id"] in wanted or (DEFAULT_MODEL in wanted and model["default"]):
                found.append(model)
    return found


def _dimensions(redis: Redis, lines: Iterable[StoredLine]) -> int:
    return max((model.get("n_embd", 0) for model in _models(redis, {line.model for line in lines})), default=0)


def _seconds(redis: Redis, names: set[str], prompt_tokens: int, completion_tokens: int) -> float | None:
    """Return how many seconds all workers combined need for these tokens, or None if no rate has been measured."""
    prompts = completions = 0.0
    for model in _models(redis, names):
        for state in (model.get("engine"), model.get("embedder")):
            if state:
                prompts += state.get("prompt_rate", 0.0)
                completions += state.get("generation_rate", 0.0)
    if not prompts or (completion_tokens and not completions):
        return None
    return prompt_tokens / prompts + (completion_tokens / completions if completion_tokens else 0.0)
