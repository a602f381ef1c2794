"""Settings of the gateway and of metrics: lists from the environment, and secrets that no message contains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import SecretStr

from cellama.config import ModelSettings, Settings, SettingsError, get_settings
from cellama.config.settings import SECRETS

SetVariables = Callable[..., None]


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("https://a.example", ["https://a.example"]),
        ("https://a.example, http://b.example:3000", ["https://a.example", "http://b.example:3000"]),
        ('["https://a.example"]', ["https://a.example"]),
        ("app://notes.md, chrome-extension://abc", ["app://notes.md", "chrome-extension://abc"]),
        ("*", ["*"]),
        ("", []),
    ],
)
def test_cors_origins_may_be_a_json_list_or_a_comma_separated_list(
    settings_environment: SetVariables, text: str, origins: list[str]
) -> None:
    settings_environment(gateway_cors_origins=text)
    assert get_settings().gateway_cors_origins == origins


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gateway_cors_origins", "[https://a.example]", "the value is not valid JSON"),
        ("gateway_cors_origins", "a.example", "write it as https://chat.example.org"),
        ("gateway_metrics_token", "mine", "the token has 4 characters; use at least 16"),
    ],
)
def test_invalid_gateway_setting_is_explained_on_one_line(
    settings_environment: SetVariables, name: str, value: str, message: str
) -> None:
    settings_environment(**{name: value})
    with pytest.raises(SettingsError) as raised:
        get_settings()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert (value in str(raised.value)) == (name not in SECRETS)


def test_secrets_contains_the_names_of_all_secret_settings() -> None:
    hidden = {
        name for name, field in Settings.model_fields.items() if SecretStr in getattr(field.annotation, "__args__", ())
    }
    hidden |= {name for name, field in ModelSettings.model_fields.items() if not field.repr}
    assert hidden == SECRETS
