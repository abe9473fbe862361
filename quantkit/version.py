"""The version of the installed package."""

from importlib import metadata

VERSION = metadata.version("quantkit")
