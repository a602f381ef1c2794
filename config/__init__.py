"""The settings of every process of cellama, from the environment and a file."""

from .redis_url import mask_url
from .settings import MODEL_ID, ModelSettings, Settings, SettingsError, get_settings

__all__ = ["MODEL_ID", "ModelSettings", "Settings", "SettingsError", "get_settings", "mask_url"]
