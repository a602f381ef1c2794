"""What the settings say of models: options for the engine, and a check of all models before anything is started."""

from __future__ import annotations

from cellama.config import ModelSettings, Settings, SettingsError
from cellama.engine import EngineError, EngineOptions
from cellama.engine.models.sources import check_source

NOT_OPTIONS = {name for name in ModelSettings.model_fields if name not in EngineOptions.__dataclass_fields__}


def options_of(model: ModelSettings, settings: Settings) -> EngineOptions:
    """The options of a model, with what the worker's own settings say of all. Raises InvalidRequest."""
    given = model.model_dump(exclude=NOT_OPTIONS)
    for name in ("cache_dir", "cache_disk_bytes"):
        if given[name] is None:
            given[name] = getattr(settings, name)
    return EngineOptions(**given)


def check_models(settings: Settings) -> None:
    """Raise SettingsError if a model can't be loaded as the settings describe it, with one line for each mistake.

    Fetch and load nothing: files of the hub and the content of files on this machine stay unchecked.
    """
    problems = []
    for model in settings.models:
        sources = {"source": model.source, "draft": model.draft}
        sources |= {f"adapters.{name}": adapter.source for name, adapter in model.adapters.items()}
        for field, source in sources.items():
            try:
                if source is not None:
                    check_source(source)
            except EngineError as error:
                problems.append(f"models.{model.id}.{field}: {error}")
        try:
            options_of(model, settings)
        except EngineError as error:
            problems.append(f"models.{model.id}: {error}")
    if problems:
        raise SettingsError("\n".join(problems))
