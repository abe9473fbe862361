"""Everything that can go wrong with an upload, looked for before a byte is sent; all that is wrong is told at once."""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from quantkit import remote
from quantkit.checkpoint.digest import GATE_FILE, digest_of, earlier_digests, hash_files, list_files
from quantkit.checkpoint.manifest import Manifest, read_manifest
from quantkit.checkpoint.source import CONFIG_FILE
from quantkit.checkpoint.writer import MANIFEST_FILE, File, file_of
from quantkit.errors import CheckFailed, QuantkitError, SourceError, UsageError
from quantkit.eval.gate.report import AccuracyReport, Verdict
from quantkit.progress import Progress, silent
from quantkit.publishing.card import CARD_FILE, Card, Facts, make_card, parse_card
from quantkit.publishing.publication import Publication, Target
from quantkit.recipe import find_alias
from quantkit.remote import RemoteFile, Repository, Upload
from quantkit.verification import verify
from quantkit.verification.report import Verification

LARGEST_FILE = 50 * 10**9  # bytes: the Hub takes no larger file
Result = TypeVar("Result")


def preflight(
    folder: Path,
    target: Target,
    *,
    against: str | None = None,
    gate: Path | None = None,
    no_gate: bool = False,
    workers: int = 2,
    progress: Progress = silent,
) -> Publication:
    """Check all that publishing the checkpoint in `folder` needs, and make its card. Nothing is sent but questions.

    against   the source, to verify every weight and to put the errors into the card
    gate      the accuracy gate's result, if it is not `quantkit-gate.json` in the folder
    no_gate   publish without one; the card says so
    progress  is given a number of bytes to read, and returns what is called with the bytes just read

    Raises CheckFailed with all problems and their remedies.
    """
    _check_call(folder, target, gate, no_gate)
    problems: list[QuantkitError] = []
    attempt = partial(_attempt, problems)
    paths = _paths(folder, gate, no_gate)
    welcome = attempt(remote.identify) is not None
    found = attempt(lambda: _examine(target)) if welcome else None
    if found:
        attempt(lambda: _check_visibility(target, found[0]))
        attempt(lambda: _check_stale(target, found[1], paths))
    files: dict[str, File] | None = None
    verification = None
    if attempt(lambda: _check_sizes(paths)):  # a file that is too large is not read: it has to be made again anyway
        verification = attempt(lambda: _verify(folder, against, workers, progress))
        files = attempt(lambda: _hash(paths, workers, progress))
    report = None if no_gate else attempt(lambda: _read_gate(folder, paths, files))
    facts = attempt(lambda: _facts(folder, target, files or {}, verification, report, against))
    card = make_card(facts) if facts else ""
    if facts:
        attempt(lambda: remote.check_card(card, ask=welcome))
    if problems or found is None or facts is None:
        raise _refusal(folder, target, problems)
    data = card.encode()
    uploads = [Upload(name, paths[name], file) for name, file in facts.files.items()]
    uploads.append(Upload(CARD_FILE, data, file_of(data)))
    return Publication(target, *found, tuple(uploads), card, _warnings(folder, facts))


def _check_call(folder: Path, target: Target, gate: Path | None, no_gate: bool) -> None:
    if gate is not None and no_gate:
        raise UsageError("--gate and --no-gate exclude each other")
    if gate is not None and not gate.is_file():
        raise UsageError(f"{gate}: no such file", hint="Give the JSON of the accuracy gate's result.")
    if target.repo.count("/") != 1:
        raise UsageError(f"{target.repo} is no repository id", hint="Write owner/name.")
    if not folder.is_dir():
        raise SourceError(f"{folder}: no such folder", hint="Give the folder of a converted checkpoint.")


def _attempt(problems: list[QuantkitError], check: Callable[[], Result]) -> Result | None:
    """What `check` returns; its error is kept with the other problems, and then it is None."""
    try:
        return check()
    except QuantkitError as error:
        problems.append(error)
        return None


def _refusal(folder: Path, target: Target, problems: list[QuantkitError]) -> CheckFailed:
    lines = "".join(f"\n  {error}{f' ({error.hint})' if error.hint else ''}" for error in problems)
    count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
    return CheckFailed(f"{folder} is not fit for {target.repo}, {count}:{lines}", hint="Nothing was sent.")


# --- the folder


def _paths(folder: Path, gate: Path | None, no_gate: bool) -> dict[str, Path]:
    """The files to publish by name, but for the card, which is made."""
    paths = {name: path for name, path in list_files(folder).items() if name != CARD_FILE}
    if gate is not None:
        paths[GATE_FILE] = gate
    if no_gate:
        paths.pop(GATE_FILE, None)
    return paths


def _manifest_of(folder: Path) -> Manifest:
    if manifest := read_manifest(folder):
        return manifest
    raise SourceError(f"{folder} has no {MANIFEST_FILE}", hint="Only what quantkit has converted is published.")


def _check_sizes(paths: Mapping[str, Path]) -> bool:
    sizes = {name: path.stat().st_size for name, path in paths.items() if path.exists()}
    large = [f"{name} has {size:,} bytes" for name, size in sizes.items() if size > LARGEST_FILE]
    if large:
        hint = "Start from a checkpoint in smaller shards: a converted one has as many."
        raise CheckFailed(f"{', '.join(large)}; the Hub takes {LARGEST_FILE:,} at most", hint=hint)
    return True


def _verify(folder: Path, against: str | None, workers: int, progress: Progress) -> Verification:
    result = verify(folder, against, workers=workers, progress=progress)
    if not result.passed:
        failed = [check for check in result.checks if check.problems]
        found = "; ".join(f"{check.name}: {check.examples[0]} ({check.problems:,} in all)" for check in failed)
        raise CheckFailed(f"verify found something wrong: {found}", hint="Convert again.")
    return result


def _hash(paths: Mapping[str, Path], workers: int, progress: Progress) -> dict[str, File]:
    total = sum(path.stat().st_size for path in paths.values() if path.exists())
    return hash_files(paths, workers=workers, progress=progress(total))


def _read_gate(folder: Path, paths: Mapping[str, Path], files: Mapping[str, File] | None) -> AccuracyReport:
    """The gate's result, which must have passed and be about these bytes, or these tensors under an earlier config."""
    if GATE_FILE not in paths:
        hint = f"Put it into the folder as {GATE_FILE}, give --gate FILE, or publish with --no-gate."
        raise CheckFailed("there is no result of the accuracy gate", hint=hint)
    path = paths[GATE_FILE]
    try:
        report = AccuracyReport.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckFailed(f"{path} is no result of the accuracy gate: {error}", hint="Run the gate again.") from error
    faults = [] if report.verdict is Verdict.PASS else [f"its verdict is {report.verdict!s}"]
    if files is not None and report.candidate_digest not in _digests(folder, files):
        faults.append("it is about other weights")
    if faults:
        hint = "Run the gate on this folder, or publish with --no-gate."
        raise CheckFailed(f"{path} does not speak for this checkpoint: {', and '.join(faults)}", hint=hint)
    return report


def _digests(folder: Path, files: Mapping[str, File]) -> frozenset[str]:
    """Under which the gate may know the checkpoint."""
    manifest = read_manifest(folder)
    return earlier_digests(files, manifest.respelled if manifest else ()) | {digest_of(files)}


# --- the Hub


def _examine(target: Target) -> tuple[Repository | None, dict[str, RemoteFile]]:
    """The repository as it is, and what it holds."""
    repository = remote.find_repository(target.repo, target.revision)
    if target.create_pr and not (repository and repository.has_revision):
        missing = f"revision {target.revision}" if repository else "repository"
        raise CheckFailed(f"there is no {missing} of {target.repo} to open a pull request for", hint="Leave --pr out.")
    return repository, remote.list_files(target.repo, repository.commit) if repository else {}


def _check_visibility(target: Target, repository: Repository | None) -> None:
    if repository and target.private not in (None, repository.private):
        is_now, asked = ("private", "public") if repository.private else ("public", "private")
        hint = "Change it on the Hub, or publish to another repository."
        raise CheckFailed(f"{target.repo} is {is_now} and should be {asked}", hint=hint)


def _check_stale(target: Target, listed: Mapping[str, RemoteFile], paths: Mapping[str, Path]) -> None:
    stale = sorted(name for name in listed.keys() - paths.keys() if name.endswith(".safetensors"))
    if stale:
        hint = "Remove them on the Hub, or publish to another repository."
        raise CheckFailed(f"{target.repo} holds weights of another checkpoint: {', '.join(stale)}", hint=hint)


# --- the card


def _facts(
    folder: Path,
    target: Target,
    files: Mapping[str, File],
    verification: Verification | None,
    gate: AccuracyReport | None,
    against: str | None,
) -> Facts:
    manifest = _manifest_of(folder)
    source_repo = _source_repo(manifest, against)
    source_card = _source_card(manifest, source_repo, against)
    branch = None if target.create_pr or (target.revision or "").startswith("refs/pr/") else target.revision
    return Facts(
        target.repo,
        manifest,
        files,
        branch,
        verification,
        gate,
        source_repo,
        source_card,
        _own_card(folder / CARD_FILE),
    )


def _own_card(path: Path) -> Card:
    try:
        return parse_card(path.read_text(encoding="utf-8"), str(path)) if path.exists() else Card()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} cannot be read as UTF-8 text: {error}", hint="Fix it or take it out.") from error


def _source_repo(manifest: Manifest, against: str | None) -> str | None:
    """The Hub id of what was converted: what it was fetched from, else what it was compared with."""
    name = manifest.source.name if manifest.source.revision else against
    if name is None or (Path(name).is_dir() and not manifest.source.revision):
        return None
    alias = find_alias(name)
    return alias.repo if alias else str(name)


def _source_card(manifest: Manifest, repo: str | None, against: str | None) -> Card:
    """The card of what was converted, if it is to be had; a folder must hold the config that was converted."""
    try:
        if repo:
            path = remote.download_file(repo, CARD_FILE, manifest.source.revision)
            return parse_card(path.read_text(encoding="utf-8"), repo)
        for folder in map(Path, filter(None, (against, manifest.source.name))):
            config = (folder / CONFIG_FILE).read_bytes()
            if hashlib.sha256(config).hexdigest() == manifest.source.config_sha256:
                return parse_card((folder / CARD_FILE).read_text(encoding="utf-8"), str(folder))
    except (QuantkitError, OSError, UnicodeDecodeError):
        pass  # without it the card says less, of which `_warnings` tells what matters
    return Card()


def _warnings(folder: Path, facts: Facts) -> tuple[str, ...]:
    warnings = []
    if not (facts.own_card.metadata.get("license") or facts.source_card.metadata.get("license")):
        warnings.append(f"no licence is known; write `license: ...` into the metadata of {folder / CARD_FILE}")
    known = facts.manifest.files.keys() | {MANIFEST_FILE, GATE_FILE}
    strays = [name for name in facts.files if name not in known]
    if strays:
        warnings.append(f"not of the conversion, and published all the same: {', '.join(strays)}")
    return tuple(warnings)
