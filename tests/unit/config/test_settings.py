"""Settings are read from the environment and a file, and every mistake has a clear error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cellama.config import Settings, SettingsError, get_settings, id_of_source, mask_url
from cellama.config.settings import DEFAULT_SLOTS
from cellama.engine import EngineOptions
from cellama.engine.models.manager import new_id
from cellama.tasks.app import EMBEDDING_JOBS, concurrency, num_jobs_of
from cellama.tasks.contract.kinds.tokens import TokenizeJob
from cellama.tasks.contract.names import DEFAULT_MODEL, queue_name, queues_of_model
from cellama.tasks.contract.payloads import parse_job
from cellama.tasks.worker.model_loading import NOT_OPTIONS

SetVariables = Callable[..., None]


def test_settings_default_to_a_local_redis_and_the_bundled_model(settings_environment: SetVariables) -> None:
    settings = get_settings()
    assert settings.redis_url == "redis://127.0.0.1:6379/0"
    assert [(m.id, m.source) for m in settings.models] == [("tiny", "bundled://tiny")]
    assert settings.default_model.id == "tiny"


def test_settings_environment_overrides_the_file(settings_environment: SetVariables, tmp_path: Path) -> None:
    (tmp_path / "cellama.toml").write_text(
        'look_ahead = 7\nlog_level = "DEBUG"\n[[models]]\nid = "a"\nsource = "a.gguf"\nn_parallel = 3\n'
    )
    settings_environment(look_ahead="2")
    settings = get_settings()
    assert (settings.look_ahead, settings.log_level) == (2, "DEBUG")
    assert [(m.id, m.n_parallel) for m in settings.models] == [("a", 3)]


@pytest.mark.parametrize(
    "text",
    [
        "tiny=bundled://tiny, big=/m/big.gguf",
        '[{"id":"tiny","source":"bundled://tiny"},{"id":"big","source":"/m/big.gguf"}]',
    ],
)
def test_settings_models_accept_a_short_format_and_json(settings_environment: SetVariables, text: str) -> None:
    settings_environment(models=text)
    settings = get_settings()
    assert [(m.id, m.source) for m in settings.models] == [("tiny", "bundled://tiny"), ("big", "/m/big.gguf")]
    assert settings.default_model.id == "tiny"


def test_settings_models_without_an_id_are_named_after_their_files(settings_environment: SetVariables) -> None:
    settings_environment(models="/m/big.gguf, qwen2.5:7b=/m/q.gguf, bundled://tiny, /other/big.gguf")
    assert [model.id for model in get_settings().models] == ["big", "qwen2.5:7b", "tiny", "big-2"]
    for source in ("bundled://tiny", "hf://org/repo/a b.gguf", "/m/x:1.gguf", "/m/.gguf"):
        assert id_of_source(source, {"tiny"}) == new_id(source, {"tiny": None})  # type: ignore[dict-item]


def test_settings_adapters_accept_a_source_or_a_table(settings_environment: SetVariables, tmp_path: Path) -> None:
    (tmp_path / "cellama.toml").write_text(
        '[[models]]\nid = "a"\nsource = "a.gguf"\n'
        'adapters = {pirate = "/p.gguf", calm = {source = "hf://o/r/c.gguf", scale = 0}}\n'
    )
    (model,) = get_settings().models
    assert {name: (a.source, a.scale) for name, a in model.adapters.items()} == {
        "pirate": ("/p.gguf", 1.0),
        "calm": ("hf://o/r/c.gguf", 0.0),
    }


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"redis_ulr": "x"}, r"CELLAMA_REDIS_ULR: no such setting .* did you mean CELLAMA_REDIS_URL\?"),
        ({"redis_url": "http://x"}, "redis_url is 'http://x': it must look like redis://"),
        ({"look_ahead": "-1"}, "look_ahead is '-1': .*greater than or equal to 0"),
        ({"look_ahead": "many"}, "look_ahead is 'many': .*valid integer"),
        ({"log_level": "LOUD"}, "log_level is 'LOUD'"),
        ({"telemetry_hook": "mine"}, "telemetry_hook is 'mine'"),
        ({"telemetry_log": "all"}, "telemetry_log is 'all': .*'off', 'requests' or 'steps'"),
        ({"models": "tiny"}, "'tiny' is neither ID=SOURCE nor a source; write, for example, tiny=bundled://tiny"),
        ({"models": "a=x,a=y"}, "duplicate id 'a'"),
        ({"models": '[{"id":"a","source":"x","adapters":{"p":{"source":"y","scale":"much"}}}]'}, "scale is 'much'"),
        (
            {"models": '[{"id":"a","source":"x","n_paralel":4}]'},
            r"n_paralel: no such setting; did you mean n_parallel\?",
        ),
        ({"models": '[{"id":"a","source":"x","n_parallel":0}]'}, r"models\.0\.n_parallel is 0"),
        ({"models": '[{"id":":a","source":"x"}]'}, r"models\.0\.id is ':a'"),
        ({"models": '[{"id":"a ","source":"x"}]'}, r"models\.0\.id is 'a '"),
        ({"models": '[{"id":"","source":"x"}]'}, r"models\.0\.id is ''"),
        ({"model_aliases": "gpt"}, "'gpt' is not an alias; write it as ALIAS=MODEL, for example gpt-4o-mini=chat"),
        ({"model_aliases": "a=b,b=c"}, "'a' refers to 'b', which is also an alias; name the model itself"),
        ({"model_aliases": ":a=b"}, "':a' is not valid, because a model id must not .* choose another alias"),
        ({"model_aliases": "tiny=b"}, "model_aliases: 'tiny' is the id of a model; choose another alias"),
        ({"config": "nowhere.toml"}, "CELLAMA_CONFIG: 'nowhere.toml' does not exist"),
    ],
)
def test_settings_error_names_setting_value_and_remedy(
    settings_environment: SetVariables, variables: dict[str, str], message: str
) -> None:
    settings_environment(**variables)
    with pytest.raises(SettingsError, match=message):
        get_settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [("redis_ulr = 1", r"redis_ulr: no such setting .* did you mean redis_url\?"), ("= 3", "can't be read .Invalid")],
)
def test_settings_file_error_describes_the_mistake(
    settings_environment: SetVariables, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "cellama.toml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        get_settings()


@pytest.mark.parametrize("text", ["gpt-4o-mini=tiny, x=:default", '{"gpt-4o-mini": "tiny", "x": ":default"}'])
def test_alias_is_resolved_to_its_model_in_queue_names_and_payloads(
    settings_environment: SetVariables, text: str
) -> None:
    settings_environment(model_aliases=text)
    assert get_settings().model_aliases == {"gpt-4o-mini": "tiny", "x": ":default"}
    assert queue_name("gpt-4o-mini") == queue_name("tiny") == "cellama:queue:tiny"
    assert queues_of_model("tiny") == ["cellama:queue:tiny", "cellama:queue:gpt-4o-mini"]
    assert queues_of_model(DEFAULT_MODEL) == ["cellama:queue::default", "cellama:queue:x"]
    assert parse_job(TokenizeJob, ("model", "text"), ("x", "a"), {}).model == DEFAULT_MODEL


def test_settings_hide_the_password(settings_environment: SetVariables) -> None:
    settings_environment(redis_url="redis://me:secret@host:1/0")
    settings = get_settings()
    assert "secret" not in repr(settings) + str(settings) + settings.redis_url_masked
    assert mask_url("redis://:secret@host/0") == "redis://:***@host/0"
    settings_environment(redis_url="http://me:secret@host:1/0")
    with pytest.raises(SettingsError) as caught:
        get_settings()
    assert "secret" not in str(caught.value)


def test_model_settings_accept_auto_for_tuned_options(settings_environment: SetVariables) -> None:
    settings_environment(
        models='[{"id":"a","source":"x","n_parallel":"auto","n_ubatch":"auto","threads":"auto","kv_layout":"auto"}]',
        look_ahead="0",
    )
    (model,) = get_settings().models
    assert (model.n_parallel, model.n_ubatch, model.threads, model.kv_layout) == (None, None, None, "auto")
    assert num_jobs_of(model) == DEFAULT_SLOTS == concurrency(get_settings())
    assert num_jobs_of(model, 20, {"generate", "embed"}) == 20
    assert num_jobs_of(model, 20, {"embed"}) == EMBEDDING_JOBS
    assert EngineOptions().num_slots == DEFAULT_SLOTS


def test_model_settings_match_the_engine_options() -> None:
    """The options of ModelSettings and EngineOptions must have the same names and defaults."""
    model = Settings.model_fields["models"].default[0].__class__
    options = {n: f.default for n, f in model.model_fields.items() if n not in NOT_OPTIONS}
    own = {name: f.default for name, f in EngineOptions.__dataclass_fields__.items()}
    assert own.pop("max_queue") == 0  # a worker accepts every job that it has taken
    quota = Settings.model_fields["cache_disk_bytes"].default  # the default of a model is that of its worker
    assert (options.pop("cache_disk_bytes"), own.pop("cache_disk_bytes")) == (None, quota)
    assert options == own


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("auto", "auto"),
        ("unlimited", "unlimited"),
        ("8GB", 8 * 10**9),
        ("8 gib", 8 << 30),
        ("1.5G", 1_500_000_000),
        ("512MiB", 512 << 20),
        ("8000000000", 8_000_000_000),
    ],
)
def test_memory_budget_accepts_a_keyword_or_a_size(
    settings_environment: SetVariables, text: str, budget: int | str
) -> None:
    settings_environment(memory_budget=text)
    assert get_settings().memory_budget == budget


@pytest.mark.parametrize("text", ["much", "-1GB", "0", "8GB RAM", "1e9", "8XB"])
def test_invalid_memory_budget_is_rejected(settings_environment: SetVariables, text: str) -> None:
    settings_environment(memory_budget=text)
    with pytest.raises(SettingsError, match=f"memory_budget.* is '?{text}'?: "):
        get_settings()


def test_settings_environment_holds_tables_and_lists_as_json(settings_environment: SetVariables) -> None:
    settings_environment(fairness_weights='{"acme": 2}', middleware='["package.module:Class"]')
    assert get_settings().fairness_weights == {"acme": 2.0}
    assert get_settings().middleware == ["package.module:Class"]


def test_settings_explain_invalid_json(settings_environment: SetVariables) -> None:
    settings_environment(model_limits="{tiny: 3}")
    with pytest.raises(SettingsError, match=r"model_limits is '\{tiny: 3\}': the value is not valid JSON: .*column 2"):
        get_settings()
