"""The Hugging Face Hub, and the only user of huggingface_hub; `HF_ENDPOINT`, `HF_TOKEN` and `HF_HOME` work as there."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.errors import RemoteError


def download(repo: str, revision: str | None = None) -> Path:
    """Fetch a repository into the Hub cache and return its snapshot folder, whose name is the commit."""
    from huggingface_hub import snapshot_download

    with _explained(repo, revision):
        return Path(snapshot_download(repo, revision=revision))


def download_file(repo: str, file: str, revision: str | None = None) -> Path:
    """Fetch one file of a repository into the Hub cache; its folder's name is the commit."""
    from huggingface_hub import hf_hub_download

    with _explained(repo, revision):
        return Path(hf_hub_download(repo, file, revision=revision))


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    import httpx
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = repo if revision is None else f"{repo} at {revision}"
    try:
        yield
    except GatedRepoError as error:
        raise RemoteError(f"{what} is gated", hint="Accept its terms on the Hub and set HF_TOKEN.") from error
    except RepositoryNotFoundError as error:
        hint = "Check the spelling; for a private repository set HF_TOKEN; a local folder must exist."
        raise RemoteError(f"there is no repository {repo} on the Hub, or it is private", hint=hint) from error
    except RevisionNotFoundError as error:
        raise RemoteError(f"{repo} has no revision {revision}") from error
    except HFValidationError as error:
        raise RemoteError(f"{repo!r} is neither a folder nor a Hub repository id", hint=str(error)) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise RemoteError(
            f"{what} could not be fetched: {error}", hint="Run again: files that are complete are not fetched twice."
        ) from error
