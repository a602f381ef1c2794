"""Settings, limits and logging for all cellama processes."""

from .model_ids import DEFAULT_MODEL, MODEL_ID, MODEL_ID_RULE, id_of_source
from .redis_url import mask_url
from .settings import DEFAULT_KEY_PREFIX, ModelSettings, Settings, SettingsError, get_settings

__all__ = [
    "DEFAULT_KEY_PREFIX",
    "DEFAULT_MODEL",
    "MODEL_ID",
    "MODEL_ID_RULE",
    "ModelSettings",
    "Settings",
    "SettingsError",
    "get_settings",
    "id_of_source",
    "mask_url",
]
