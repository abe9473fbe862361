"""Fetching from the Hub into its cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.errors import RemoteError
from quantkit.remote.client import first_line, quiet_unless_terminal
from quantkit.remote.hashes import Cached, check_files


def download(repo: str, revision: str | None = None) -> Path:
    """Fetch a repository into the Hub cache and return its snapshot folder, whose name is the commit.

    Raises RemoteError for what the Hub does not give, and for a file that is not the one that the Hub says.
    """
    from huggingface_hub import snapshot_download

    with _explained(repo, revision), quiet_unless_terminal():
        folder = Path(snapshot_download(repo, revision=revision))
        links = sorted(path for path in folder.rglob("*") if path.is_file())
        check_files(repo, folder.name, (Cached.at(link, link.relative_to(folder).as_posix()) for link in links))
        return folder


def download_file(repo: str, file: str, revision: str | None = None) -> Path:
    """Fetch one file of a repository into the Hub cache; its folder's name is the commit. Raises as `download` does."""
    from huggingface_hub import hf_hub_download

    with _explained(repo, revision, file), quiet_unless_terminal():
        link = Path(hf_hub_download(repo, file, revision=revision))
        commit = link.parents[file.count("/")].name
        check_files(repo, commit, [Cached.at(link, file)])
        return link


@contextmanager
def _explained(repo: str, revision: str | None, file: str | None = None) -> Iterator[None]:
    import httpx
    from huggingface_hub import errors as hub

    what = repo if revision is None else f"{repo} at {revision}"
    try:
        yield
    except hub.GatedRepoError as error:
        raise RemoteError(f"{what} is gated", hint="Accept its terms on the Hub and set HF_TOKEN.") from error
    except hub.RepositoryNotFoundError as error:
        hint = "Check the spelling; for a private repository set HF_TOKEN; a local folder must exist."
        raise RemoteError(f"there is no repository {repo} on the Hub, or it is private", hint=hint) from error
    except hub.RevisionNotFoundError as error:
        hint = "Give a branch, a tag or a commit of the repository."
        raise RemoteError(f"{repo} has no revision {revision}", hint=hint) from error
    except hub.HFValidationError as error:
        raise RemoteError(f"{repo!r} is neither a folder nor a Hub repository id", hint=first_line(error)) from error
    except hub.RemoteEntryNotFoundError as error:
        raise RemoteError(f"{what} has no {file or 'such file'}", hint="Is it a model repository?") from error
    except (hub.LocalEntryNotFoundError, hub.HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        raise RemoteError(
            f"{what} could not be fetched: {first_line(error.__cause__ or error)}",
            hint="Check the connection and HF_ENDPOINT, and run again: complete files are not fetched twice.",
        ) from error
