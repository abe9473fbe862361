"""From what the user calls a model to a source: a folder, an alias of `recipes/models.yaml`, or a Hub repository id."""

from pathlib import Path

from quantkit import remote
from quantkit.checkpoint.source import CONFIG_FILE, Source, open_source
from quantkit.errors import SourceError, UsageError
from quantkit.families.inventory import inventory
from quantkit.recipe import find_alias


def open_model(model: str | Path, revision: str | None = None) -> Source:
    """Open the checkpoint called `model`, fetching it from the Hub if it is not a folder here."""
    name = str(model)
    if _is_local(model, revision):
        return open_source(Path(model), name)
    repo, revision = _repository(name, revision)
    folder = remote.download(repo, revision)
    return open_source(folder, name, revision=folder.name)


def describe_model(model: str | Path, revision: str | None = None) -> Source:
    """The headers of the checkpoint called `model`, without its weights: a folder's own, else made from its config.

    A config may also be given itself, as a JSON file.
    """
    name = str(model)
    if name.endswith(".json") and Path(model).is_file():
        return inventory(name, _read(Path(model)))
    if _is_local(model, revision):
        return open_source(Path(model), name)
    if alias := find_alias(name):
        return inventory(name, alias.config_text)
    repo, revision = _repository(name, revision)
    return inventory(name, remote.download_file(repo, CONFIG_FILE, revision).read_text(encoding="utf-8"))


def _is_local(model: str | Path, revision: str | None) -> bool:
    if not Path(model).is_dir():
        return False
    if revision is not None:
        raise UsageError(f"{model} is a folder and has no revision {revision}", hint="Leave --revision out.")
    return True


def _repository(name: str, revision: str | None) -> tuple[str, str | None]:
    if alias := find_alias(name):
        return alias.repo, revision or alias.revision
    if Path(name).exists():
        raise SourceError(f"{name} is a file, not the folder of a checkpoint", hint="Give the folder that it is in.")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise SourceError(
            f"{name}: no such folder, and neither an alias nor a Hub repository id (owner/name)",
            hint="Check the path.",
        )
    return name, revision


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read as UTF-8 text: {error}") from error
