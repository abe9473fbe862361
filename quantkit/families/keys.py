"""The keys of a language model's config: null is absent, and what is missing or of a wrong type is named."""

from typing import Any

from quantkit.checkpoint.source import CONFIG_FILE, Source
from quantkit.errors import SourceError


class ConfigKeys:
    """Reads the keys of the language model's part of a config.

    why  what a missing key means, for errors: "without which the model cannot be run"
    """

    def __init__(self, source: Source, why: str) -> None:
        self.name, self.config, self._why = source.name, source.text_config, why

    def get(self, key: str, default: Any = None) -> Any:
        """A key's value, or `default` where it is missing or null."""
        value = self.config.get(key)
        return default if value is None else value

    def number(self, key: str, default: int | None = None) -> int:
        """A key that must be a positive whole number; it may be missing where there is a default."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) is not int or value < 1:
            raise SourceError(f"{self.name}: {key} in {CONFIG_FILE} is {value!r}, not a positive whole number")
        return value

    def need(self, key: str) -> Any:
        """A key that must be there."""
        if self.get(key) is None:
            raise SourceError(f"{self.name}: {CONFIG_FILE} has no {key}, {self._why}")
        return self.config[key]

    def only(self, key: str, value: Any) -> None:
        """A key that must have this value, if it is there."""
        if self.get(key, value) != value:
            raise SourceError(f"{self.name}: {key} is {self.get(key)!r}; only {value!r} can be run")
