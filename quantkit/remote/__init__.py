"""The Hugging Face Hub, and the only user of huggingface_hub; `HF_ENDPOINT`, `HF_TOKEN` and `HF_HOME` work as there.

downloading  repositories and files into the Hub's cache
hashes       whether they are what the Hub says
uploading    what a repository is and holds, and commits to it
client       manners of the client that both share
"""

from quantkit.remote.downloading import download, download_file
from quantkit.remote.uploading import (
    Commit,
    PublishReport,
    RemoteFile,
    Repository,
    Upload,
    address,
    check_card,
    commit,
    create_branch,
    create_repository,
    find_repository,
    identify,
    list_files,
)

__all__ = [
    "Commit",
    "PublishReport",
    "RemoteFile",
    "Repository",
    "Upload",
    "address",
    "check_card",
    "commit",
    "create_branch",
    "create_repository",
    "download",
    "download_file",
    "find_repository",
    "identify",
    "list_files",
]
