"""`verify`: is a checkpoint whole, does its config describe it, and what did it lose against its source?

findings     collecting problems by check
soundness    the checkpoint alone: manifest, index, config, values
fidelity     against its source: every weight accounted for, and its error
comparisons  two forms of one weight, by their encodings
folded       weights that KV scales were folded into, and scales that are stored
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.source import Source, open_source
from quantkit.choices import Mtp
from quantkit.engines.check import is_signed, targets_of
from quantkit.errors import SourceError
from quantkit.families.locate import open_model
from quantkit.progress import Progress, silent
from quantkit.verification.fidelity import Compared, Made, compare_weights, pool_by_role
from quantkit.verification.findings import Findings
from quantkit.verification.folded import KvScaling, check_scaling, multiplied_by
from quantkit.verification.report import TensorError, Verification
from quantkit.verification.soundness import (
    check_config,
    check_global_scales,
    check_index,
    check_manifest,
    check_values,
    made_from_fp8,
)
from quantkit.weights.grouping import read_weights
from quantkit.weights.weight import Weight

_WORST = 10


def verify(
    checkpoint: str | Path,
    against: str | Path | None = None,
    *,
    revision: str | None = None,
    workers: int = 2,
    progress: Progress = silent,
) -> Verification:
    """Verify the checkpoint in the folder `checkpoint`, and compare it with its source `against` if that is given.

    revision  of `against`, if that is a Hub repository
    progress  is given the number of bytes to read, and returns what is called with the bytes just read

    Raises a QuantkitError only when there is nothing to verify or the source cannot be read; what is wrong with the
    checkpoint itself is in the result.
    """
    start = time.monotonic()
    folder, findings = Path(checkpoint), Findings()
    if not folder.is_dir():
        raise SourceError(f"{folder}: no such folder", hint="Give the folder of a converted checkpoint.")
    source = None if against is None else open_model(against, revision)
    compared: tuple[Compared, ...] = ()
    with ThreadPoolExecutor(workers) as pool:
        made = check_manifest(folder, pool, findings)
        if opened := _open(folder, findings):
            weights, scaling = _weights(opened, findings), KvScaling.of(made)
            report = progress(opened.nbytes + (source.nbytes if source else 0))
            check_index(opened, findings)
            check_config(opened, weights, targets_of(made), findings)
            check_values(opened, weights, is_signed(made), pool, findings, report)
            check_global_scales(opened, weights, findings)
            check_scaling(opened, weights, scaling, findings)
            if source:
                theirs = KvScaling.of(read_manifest(source.folder))
                powers = multiplied_by(scaling, theirs, opened, findings)
                without_mtp = made is not None and made.recipe.get("mtp") == Mtp.DROP
                how = Made(without_mtp, made_from_fp8(made), powers, scaling.embedded)
                compared = compare_weights(opened, weights, source, how, pool, findings, report)
    errors = [error for error in (entry.error() for entry in compared) if error]
    return Verification(
        checkpoint=str(checkpoint),
        against=None if against is None else str(against),
        passed=findings.passed,
        checks=findings.checks(),
        errors=pool_by_role(compared),
        worst=tuple(sorted(errors, key=_badness)[:_WORST]),
        seconds=round(time.monotonic() - start, 3),
    )


def _badness(error: TensorError) -> tuple[float, str]:
    return -error.relative_rms, error.name


def _open(folder: Path, findings: Findings) -> Source | None:
    """The checkpoint, if its headers are sound and its config says which of them are of MTP layers."""
    try:
        opened = open_source(folder)
        opened.num_hidden_layers  # noqa: B018 - which every check asks for
    except SourceError as error:
        findings.problem("headers", str(error))
        return None
    findings.done("headers", f"{len(opened.tensors):,} tensors in {len(opened.shards)} shards")
    for warning in opened.warnings:
        findings.problem("headers", warning)
    return opened


def _weights(checkpoint: Source, findings: Findings) -> tuple[Weight, ...]:
    """The checkpoint's weights; none if a tensor lacks its sibling."""
    try:
        return read_weights(checkpoint)
    except SourceError as error:
        findings.problem("headers", str(error))
        return ()
