"""What is to be sent, in which order, and what the Hub has already."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from quantkit import remote
from quantkit.checkpoint.source import CONFIG_FILE, INDEX_FILE
from quantkit.publishing.card import CARD_FILE
from quantkit.remote import Commit, PublishReport, RemoteFile, Repository, Upload

_STAGES = ("weights", "side files", "card", "index and config")
_BATCH_FILES = 25
_BATCH_BYTES = 100 * 10**9


@dataclass(frozen=True)
class Target:
    """Where to publish.

    private    None takes an existing repository as it is; a new one becomes public
    revision   the branch; None is the main one
    create_pr  into a pull request, whose number the Hub gives
    """

    repo: str
    private: bool | None = None
    revision: str | None = None
    create_pr: bool = False


@dataclass(frozen=True)
class Publication:
    """What a preflight has found fit to be published.

    repository  as it is now; None if it is to be made
    listed      what it holds
    uploads     all files, the card included
    """

    target: Target
    repository: Repository | None
    listed: dict[str, RemoteFile]
    uploads: tuple[Upload, ...]
    card: str
    warnings: tuple[str, ...] = ()

    @property
    def private(self) -> bool:
        """The visibility that the repository has or gets."""
        return self.repository.private if self.repository else bool(self.target.private)

    @property
    def revision(self) -> str:
        """The branch."""
        return self.target.revision or "main"

    @cached_property
    def missing(self) -> tuple[Upload, ...]:
        """The files to send: those that the Hub does not have as they are here, or that are withdrawn meanwhile."""
        changed = self._changed
        return tuple(upload for upload in self.uploads if upload in changed or upload.name in self.withdrawn)

    @cached_property
    def withdrawn(self) -> frozenset[str]:
        """Index and config of a repository whose weights change: with the old ones, the new weights must not load."""
        if not any(_stage(upload) == "weights" for upload in self._changed):
            return frozenset()
        return frozenset({CONFIG_FILE, INDEX_FILE} & self.listed.keys())

    @cached_property
    def _changed(self) -> tuple[Upload, ...]:
        return tuple(
            upload
            for upload in self.uploads
            if upload.name not in self.listed or not upload.is_at(self.listed[upload.name])
        )

    @property
    def batches(self) -> Iterator[tuple[str, list[Upload]]]:
        """What to commit, in order: what it is called, and the files."""
        ordered = sorted(self.missing, key=lambda upload: (_STAGES.index(_stage(upload)), upload.name))
        for stage, group in groupby(ordered, _stage):
            batch: list[Upload] = []
            for upload in group:
                full = (
                    len(batch) == _BATCH_FILES or sum(u.file.nbytes for u in batch) + upload.file.nbytes > _BATCH_BYTES
                )
                if batch and full:
                    yield stage, batch
                    batch = []
                batch.append(upload)
            yield stage, batch

    def report(self, commit: Commit | None = None) -> PublishReport:
        """What has been published, `commit` being the last, or, without one, what would be."""
        return PublishReport(
            repo=self.target.repo,
            private=self.private,
            revision=(commit and commit.revision) or self.revision,
            url=(commit and commit.pull_request) or remote.address(self.target.repo),
            commit=commit.oid if commit else None,
            files={upload.name: upload.file for upload in self.uploads},
            uploaded=len(self.missing),
            uploaded_bytes=sum(upload.file.nbytes for upload in self.missing),
            already_there=len(self.uploads) - len(self.missing),
            card=self.card,
            warnings=self.warnings,
        )


def _stage(upload: Upload) -> str:
    if upload.name in (CONFIG_FILE, INDEX_FILE):
        return "index and config"
    if upload.name == CARD_FILE:
        return "card"
    return "weights" if upload.name.endswith(".safetensors") else "side files"
