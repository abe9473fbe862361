"""The checks that need the checkpoint alone: manifest, index, config, values."""

import hashlib
import re
from collections.abc import Iterable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit import ops
from quantkit.checkpoint.config import KEY
from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.manifest import Manifest, read_manifest
from quantkit.checkpoint.occupancy import is_idle
from quantkit.checkpoint.source import SINGLE_FILE, Source, read_header, read_index
from quantkit.checkpoint.writer import MANIFEST_FILE, WORK_FOLDER, File
from quantkit.engines import is_linear
from quantkit.engines.check import unequal_globals
from quantkit.engines.rules import Facts, Module, Status, judge
from quantkit.engines.rules.describing import RULE_OF_NAMES, config_problem
from quantkit.errors import EngineError, QuantkitError, SourceError
from quantkit.progress import Advance
from quantkit.verification.findings import Findings
from quantkit.weights.encodings import NVFP4, is_main
from quantkit.weights.rows import Reader, byte_ranges, shape_in
from quantkit.weights.weight import Weight

# dtype -> the integer to view it as, and the bits that are all set in a NaN or an infinity
_EXPONENTS: dict[str, tuple[Any, int]] = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
}


def made_from_fp8(made: Manifest | None) -> bool:
    """Whether a manifest says that 4-bit weights were made from FP8 ones."""
    groups = made.groups if made else ()
    return any(is_main(group.format) and group.source_format.startswith("fp8") for group in groups)


def check_manifest(folder: Path, pool: Executor, findings: Findings) -> Manifest | None:
    """Every file of quantkit.json is there with its size and sha256, and no weights are there that it does not name.

    Returns the manifest, if there is a sound one.
    """
    if not is_idle(folder):
        what = "a run was interrupted or is at work; give its command again with --resume, or undo its fold"
        findings.problem("manifest", f"{WORK_FOLDER} is there: {what}")
    try:
        made = read_manifest(folder)
    except SourceError as error:
        findings.problem("manifest", str(error))
        return None
    if made is None:
        findings.skip("manifest", f"no {MANIFEST_FILE}: not made by quantkit")
        return None
    findings.done("manifest", f"{len(made.files)} files, sizes and sha256")
    for stray in {path.name for path in folder.glob("*.safetensors")} - made.files.keys():
        findings.problem("manifest", f"{stray} is in the folder and not in {MANIFEST_FILE}")
    for problem in pool.map(lambda item: _check_file(folder, *item), made.files.items()):
        if problem:
            findings.problem("manifest", problem)
    return made


def _check_file(folder: Path, name: str, said: File) -> str | None:
    try:
        size = (folder / name).stat().st_size
        if size != said.nbytes:
            return f"{name} has {size:,} bytes; {MANIFEST_FILE} says {said.nbytes:,}"
        with (folder / name).open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == said.sha256
        return None if same else f"{name} has another sha256 than {MANIFEST_FILE} says"
    except OSError as error:
        return f"{name}: {error.strerror}"


def check_index(checkpoint: Source, findings: Findings) -> None:
    """The index names every tensor of every shard in the folder once, and its total_size is the sum of their bytes."""
    folder = checkpoint.folder
    assert folder is not None
    index = read_index(folder, checkpoint.name)
    if index is None:
        return findings.skip("index", f"a single {SINGLE_FILE}")
    findings.done("index", f"{len(index.weight_map):,} entries, the union of the shards' headers")
    seen: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name in _names_in(path, findings):
            if name in seen:
                findings.problem("index", f"{name} is in {seen[name]} and in {path.name}")
            elif index.weight_map.get(name) != path.name:
                findings.problem("index", f"{name} is in {path.name}; the index says {index.weight_map.get(name)}")
            seen[name] = path.name
    if index.total_size != checkpoint.nbytes:
        findings.problem("index", f"total_size is {index.total_size}; the tensors have {checkpoint.nbytes} bytes")
    return None


def _names_in(path: Path, findings: Findings) -> list[str]:
    """The tensors of a file, which may be one that the index does not name, and anything."""
    try:
        return [tensor.spec.name for tensor in read_header(path)]
    except SourceError as error:
        findings.problem("index", str(error))
        return []


def check_config(checkpoint: Source, weights: Iterable[Weight], targets: frozenset[str], findings: Findings) -> None:
    """config.json alone predicts, for each engine, the tensors of every module; a 4-bit checkpoint breaks no rule of
    the engines `targets`, which its recipe names."""
    facts = Facts.of(checkpoint, weights, targets=targets)
    modules = [module for module in facts.modules if is_linear(module)]
    if facts.quantization is None:
        findings.done("config", f"no {KEY}: every one of {len(modules):,} modules is plain")
        for module in modules:
            if module.format:
                findings.problem("config", f"{module.name.module} is {module.label}, and config.json has no {KEY}")
        return None
    nvfp4 = any(module.encoding is NVFP4 for module in modules)
    if facts.method != "compressed-tensors" and not (facts.method == "modelopt" and nvfp4):
        return findings.skip("config", "not a compressed-tensors checkpoint, and not ModelOpt's NVFP4")
    try:
        _check_names(facts, modules, findings)
        if facts.four_bits:
            _check_engines(facts, findings)
    except EngineError as error:
        findings.problem("config", str(error))
    except (KeyError, TypeError, AttributeError, ValueError, re.error) as error:
        findings.problem("config", f"{KEY} is malformed: {error!r}")
    return None


def _check_names(facts: Facts, modules: Iterable[Module], findings: Findings) -> None:
    modules = list(modules)
    for engine, matcher in facts.matchers.items():
        for module in modules:
            if problem := config_problem(matcher, module.name, module.leaves, module.format):
                findings.problem("config", f"{engine}: {module.name.module} {problem}")
    findings.done("config", f"{len(modules):,} modules by the rules of {', '.join(facts.matchers)}")


def _check_engines(facts: Facts, findings: Findings) -> None:
    judgements = list(judge(facts, without={RULE_OF_NAMES}))
    findings.done("engines", f"{sum(judgement.status is not Status.NOT_APPLICABLE for judgement in judgements)} rules")
    for judgement in judgements:
        if judgement.status is Status.BROKEN:
            findings.problem("engines", f"{judgement.engine}: {judgement.text}. {judgement.rule.fix}")


def check_global_scales(checkpoint: Source, weights: Iterable[Weight], findings: Findings) -> None:
    """NVFP4 weights that engines fuse share one global scale: of two, the engines would take one for both."""
    weights = [weight for weight in weights if weight.encoding is NVFP4 and weight.name.fused_projection]
    try:
        unequal = unequal_globals(checkpoint, weights)
    except QuantkitError as error:
        return findings.problem("global scales", str(error))
    if weights:
        fused = {weight.name.fused_projection for weight in weights}
        findings.done("global scales", f"one for the parts of each of {len(fused):,} fused projections")
    for projection, values in unequal.items():
        findings.problem("global scales", f"{projection} would have one of these: {values}")
    return None


def check_values(
    checkpoint: Source,
    weights: Iterable[Weight],
    signed: bool,
    pool: Executor,
    findings: Findings,
    progress: Advance,
) -> None:
    """No stored number is NaN or infinite, no scale is zero or subnormal, or negative unless `signed`, and each
    weight_shape is true."""
    findings.done("values", "no NaN, no infinity, sound scales")
    weights = sorted(weights, key=lambda weight: (weight.data.shard, weight.data.offset))
    work = partial(_check_weight, Reader(checkpoint), findings, signed)
    for weight in pool.map(work, weights):
        progress(weight.nbytes)


def _check_weight(reader: Reader, findings: Findings, signed: bool, weight: Weight) -> Weight:
    try:
        for tensor in weight.tensors:
            for begin, end in byte_ranges(tensor.spec.nbytes):
                problem = _value_problem(tensor, weight, signed, reader.tensor_bytes(tensor, begin, end))
                if problem:
                    findings.problem("values", f"{tensor.spec.name} {problem}")
                    break
        if found := weight.encoding.check_rows(reader, weight):
            findings.problem("values", f"{weight.name} {found}")
    except QuantkitError as error:
        findings.problem("values", str(error))
    return weight


def _value_problem(tensor: StoredTensor, weight: Weight, signed: bool, data: npt.NDArray[np.uint8]) -> str | None:
    dtype = tensor.spec.dtype
    if tensor is weight.packed_shape:
        shape = shape_in(dtype, data)
        return None if shape == weight.shape else f"is {list(shape)}, but the weight is {list(weight.shape)}"
    if dtype == "F8_E4M3":
        if tensor is weight.scale and (data & 0x80).any():
            return "holds a negative scale"
        return "holds a NaN" if ops.first_nan(data) is not None else None
    if dtype not in _EXPONENTS:
        return None
    integer, exponent = _EXPONENTS[dtype]
    bits = data.view(integer)
    if ((bits & exponent) == exponent).any():
        return "holds a NaN or an infinity"
    if tensor is weight.scale:
        smallest, sign = exponent & -exponent, 1 << (bits.dtype.itemsize * 8 - 1)
        if ((bits & (sign - 1)) < smallest).any():
            return "holds a scale that is zero or subnormal"
        if (bits & sign).any() and not (signed and weight.encoding.negative_scales):
            return "holds a negative scale, of which the manifest says nothing"
    return None
