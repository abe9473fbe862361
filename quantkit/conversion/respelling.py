"""`convert --respell`: a checkpoint of an earlier version, with the config that this version would write.

No tensor changes, so what is decoded is the same. The digest of the checkpoint does change with config.json; the
manifest keeps what the file was before (`respelled`), from which the digest before can be told: a result of the
accuracy gate that is about that digest speaks for the respelled checkpoint, too.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import splice
from quantkit.checkpoint.digest import list_files
from quantkit.checkpoint.journal import RESPELL, Opening
from quantkit.checkpoint.lock import lock
from quantkit.checkpoint.manifest import Manifest, read_manifest
from quantkit.checkpoint.occupancy import is_idle
from quantkit.checkpoint.output import Output
from quantkit.checkpoint.source import CONFIG_FILE, Source, open_source
from quantkit.checkpoint.writer import MANIFEST_FILE, check_apart, file_of, write_whole
from quantkit.choices import Dialect, EngineName
from quantkit.conversion.engine_check import check_engines
from quantkit.conversion.plan import describe_weights
from quantkit.engines.rules import Facts
from quantkit.errors import PlanError
from quantkit.weights.grouping import read_weights
from quantkit.weights.weight import Weight


@dataclass(frozen=True)
class _Respelling:
    """The two files that change."""

    manifest: Manifest
    config_text: str


def respell(folder: str | Path, output: str | Path | None = None, *, overwrite: bool = False) -> Manifest:
    """Describe the checkpoint of quantkit in `folder` as this version does, and return its new manifest.

    output     the folder to make, of hard links to all other files of `folder`; None changes `folder` itself
    overwrite  replace an output of quantkit that is already there

    Raises PlanError where there is nothing to respell, for a folder that quantkit did not write or whose config.json
    was changed since, and for what an engine could not load all the same; OutputError as conversions do, and where
    hard links cannot be.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise PlanError(f"{folder}: no such folder", hint="Give the folder of a checkpoint that quantkit wrote.")
    if output is None:
        with lock(folder, RESPELL.name):
            made = _respelling(folder)
            write_whole(folder / CONFIG_FILE, made.config_text.encode())
            write_whole(folder / MANIFEST_FILE, made.manifest.to_json().encode())
            return made.manifest
    target = Output(Path(output), RESPELL, overwrite=overwrite)
    check_apart(folder, target.path)
    target.check()
    with target.held():
        made = _respelling(folder)
        files = {name: path for name, path in list_files(folder).items() if name not in (CONFIG_FILE, MANIFEST_FILE)}
        written = target.begin(0, Opening(RESPELL, frozenset({*files, CONFIG_FILE, MANIFEST_FILE})))
        for name, path in files.items():
            written.link(path, name)
        written.seal(made.manifest.to_json(), made.config_text)
    return made.manifest


def preview(folder: str | Path) -> Manifest:
    """The manifest that `respell` would write; it raises what `respell` would."""
    return _respelling(Path(folder)).manifest


def _respelling(folder: Path) -> _Respelling:
    source = open_source(folder)
    manifest = read_manifest(folder)
    if manifest is None or not is_idle(folder):
        raise PlanError(
            f"{folder} is no finished checkpoint of quantkit", hint="Convert its source; that writes the new spelling."
        )
    weights = read_weights(source)
    quantization = _describe(source, weights)
    text = splice(source.config_text, quantization)
    before, now, after = manifest.files.get(CONFIG_FILE), file_of(source.config_text.encode()), file_of(text.encode())
    if before is None or now not in (before, after):
        raise PlanError(
            f"{folder / CONFIG_FILE} is not as quantkit wrote it", hint="Put back the file of the conversion."
        )
    if before == after:
        raise PlanError(f"{folder} is described as this version does it: there is nothing to respell", hint="Serve it.")
    targets = frozenset(manifest.recipe.get("engines", EngineName))
    warnings = check_engines(Facts.of(replace(source, config_text=text), weights, targets=targets))
    return _Respelling(
        replace(
            manifest,
            quantization_config=quantization,
            files=manifest.files | {CONFIG_FILE: after},
            warnings=tuple(dict.fromkeys((*manifest.warnings, *warnings))),
            respelled=(*manifest.respelled, before),
        ),
        text,
    )


def _describe(source: Source, weights: tuple[Weight, ...]) -> dict[str, Any]:
    if source.quantization_config.get("quant_method") != Dialect.COMPRESSED_TENSORS:
        raise PlanError(f"{source.name} is no compressed-tensors checkpoint: it has one spelling", hint="Serve it.")
    formats = ((weight, weight.encoding.format(weight)) for weight in weights)
    return describe_weights(formats, source.num_hidden_layers, Dialect.COMPRESSED_TENSORS)
