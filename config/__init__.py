"""The settings of every process of cellama, from the environment and a file."""

from .settings import MODEL_ID, ModelSettings, Settings, SettingsError, get_settings, mask_url

__all__ = ["MODEL_ID", "ModelSettings", "Settings", "SettingsError", "get_settings", "mask_url"]
