"""`push`: a checkpoint and its card onto the Hub.

preflight    everything that can be refused is refused before a byte is sent: all problems at once
publication  what is to be sent, in which order, and what the Hub has already
card         the model card: README.md, made from what was measured

    weights, in batches   side files   card   index and config

Each batch is a commit. A repository without its config does not load, so a half upload never looks finished; an update
that changes weights takes index and config out with its first commit.
"""

from dataclasses import replace

from quantkit import remote
from quantkit.errors import CheckFailed, RemoteError
from quantkit.publishing.preflight import preflight
from quantkit.publishing.publication import Publication, Target
from quantkit.remote import Commit, PublishReport, Upload

__all__ = ["Publication", "Target", "preflight", "publish"]


def publish(publication: Publication) -> PublishReport:
    """Send what `preflight` found fit and the Hub does not have, and compare the Hub with it file by file.

    Raises RemoteError, saying what is already there, when the Hub refuses or stays busy: another preflight and publish
    go on from there. Raises CheckFailed, naming each file, if the Hub does not hold in the end what it should.
    """
    target, commit, sent = publication.target, None, list[Upload]()
    _open_repository(publication)
    for title, batch in publication.batches:
        try:
            made = remote.commit(
                target.repo,
                batch,
                f"Upload {title}",
                revision=commit.revision if commit else target.revision,
                create_pr=target.create_pr and commit is None,
                delete=publication.withdrawn if commit is None else (),
            )
        except RemoteError as error:
            raise RemoteError(f"{error}\n{_already_there(publication, sent, commit)}", hint=error.hint) from error
        commit = replace(made, pull_request=commit.pull_request) if commit else made
        sent += batch
    if commit is None:  # all was there
        assert publication.repository is not None
        commit = Commit(publication.repository.commit, target.revision, None)
    _compare(publication, commit)
    return publication.report(commit)


def _open_repository(publication: Publication) -> None:
    """Make the repository and the branch if they are not there; somebody may have made another one meanwhile."""
    target = publication.target
    if publication.repository is None:
        remote.create_repository(target.repo, private=publication.private)
        made = remote.find_repository(target.repo, None)
        if made is None or made.private != publication.private:
            wanted = "private" if publication.private else "public"
            raise RemoteError(f"{target.repo} did not become {wanted}", hint="Nothing was sent. Look at it on the Hub.")
    if target.revision and not (publication.repository and publication.repository.has_revision):
        remote.create_branch(target.repo, target.revision)


def _already_there(publication: Publication, sent: list[Upload], commit: Commit | None) -> str:
    """What an upload that stopped has left, and how to go on with it."""
    there = [upload for upload in publication.uploads if upload in sent or upload not in publication.missing]
    where = f"{publication.target.repo} at {(commit and commit.revision) or publication.revision}"
    nbytes, total = sum(upload.file.nbytes for upload in there), len(publication.uploads)
    names = f": {', '.join(upload.name for upload in there)}" if there else ""
    text = f"already in {where}: {len(there)} of {total} files, {nbytes:,} bytes{names}"
    if commit and commit.pull_request:
        text += f"\nto go on with this pull request, give --revision {commit.revision} instead of --pr"
    return text


def _compare(publication: Publication, commit: Commit) -> None:
    """Raise CheckFailed unless the Hub lists every file with the size and the hash that it has here."""
    repo = publication.target.repo
    listed = remote.list_files(repo, commit.oid)
    problems = []
    for upload in publication.uploads:
        there = listed.get(upload.name)
        if there is None:
            problems.append(f"{upload.name} is missing")
        elif there.nbytes != upload.file.nbytes:
            problems.append(f"{upload.name} has {there.nbytes:,} bytes; here it has {upload.file.nbytes:,}")
        elif not upload.is_at(there):
            problems.append(f"{upload.name} has other bytes")
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        hint = "Run again: what differs is sent again."
        raise CheckFailed(f"{repo} at {commit.oid} is not what was to be sent:{lines}", hint=hint)
