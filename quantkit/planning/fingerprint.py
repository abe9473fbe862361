"""What tells one checkpoint from another: config, weight formats, files, and the meaning of its KV cache.

kv_space_id  two engines may exchange a KV cache only if both mean the same by it. What a cached number means depends on
             the weights that the model was published with, on scales folded into them, and on the kind of cache. So the
             id is the sha256 of these three: the FP8 release and an INT4 conversion of it share it. The dtype of the
             cache is not in it: a declared conversion from BF16 to FP8 keeps the meaning.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import KEY, MTP_KEY
from quantkit.checkpoint.digest import digest_of, hash_files, list_files
from quantkit.checkpoint.manifest import Manifest, Origin, read_manifest
from quantkit.checkpoint.source import CONFIG_FILE, Source, readable
from quantkit.checkpoint.writer import File
from quantkit.conversion.plan import Plan
from quantkit.engines import is_linear
from quantkit.families.attention import Attention
from quantkit.naming import TensorName
from quantkit.progress import Progress, silent
from quantkit.tables import role_name
from quantkit.weights.grouping import read_weights
from quantkit.weights.weight import Weight

_TOKENIZER = re.compile(
    r"(.*tokeni[sz]|vocab|merges|special_tokens|added_tokens|chat_template|.*\.tiktoken|.*\.model$)"
)


@dataclass(frozen=True)
class Fingerprint:
    """What is known of a checkpoint.

    name           folder, alias, Hub repository or config file
    config_sha256  as in `ServedModel`
    recipe         that made it; None for one as published
    formats        of the weights of each role
    files          that decide what the model says, by name; empty for a config alone
    recorded       the same as its quantkit.json says; empty without one
    origin         None for a config alone
    """

    name: str
    config_sha256: str
    recipe: dict[str, Any] | None
    formats: dict[str, str]
    mtp: bool
    kv_space_id: str | None
    files: dict[str, File] = field(default_factory=dict)
    recorded: dict[str, File] = field(default_factory=dict)
    origin: Origin | None = None

    @property
    def digest(self) -> str | None:
        """The checkpoint's digest; None without files."""
        return digest_of(self.files) if self.files else None

    @property
    def tokenizer(self) -> dict[str, str]:
        """The sha256 of each file that turns text into tokens and back."""
        return {name: file.sha256 for name, file in self.files.items() if _TOKENIZER.match(name)}


def fingerprint(
    source: Source,
    *,
    trust: bool = True,
    also: Sequence[Mapping[str, File]] = (),
    progress: Progress = silent,
) -> Fingerprint:
    """The fingerprint of an opened checkpoint, or of a config alone.

    trust     take a file's sha256 from quantkit.json or `also` if its size is the one there; else every byte is read
    progress  is given the number of bytes to read, and returns what is called with the bytes just read

    Raises SourceError for a file that cannot be read, a damaged quantkit.json and weights that are not understood.
    """
    formats = weight_formats(((weight, weight.label) for weight in read_weights(source)), source.num_hidden_layers)
    made = read_manifest(source.folder)
    known = made.files if made else {}
    files = _files(source.folder, (known, *also) if trust else (), progress) if source.folder else {}
    origin = _origin(source, made, files) if files else None
    return Fingerprint(
        source.name,
        config_digest(source.config),
        made.recipe if made else None,
        formats,
        _has_mtp(formats),
        kv_space_id(source, origin, made) if origin else None,
        files,
        _deciding(known),
        origin,
    )


def fingerprint_of_plan(plan: Plan, source: Fingerprint) -> Fingerprint:
    """The fingerprint that the conversion `plan` of a checkpoint with the fingerprint `source` will have."""
    formats = weight_formats(((step.weight, step.label) for step in plan.steps), plan.source.num_hidden_layers)
    return Fingerprint(
        plan.source.name,
        source.config_sha256,
        plan.recipe.as_dict(),
        formats,
        _has_mtp(formats),
        source.kv_space_id,
        origin=source.origin,
    )


def config_digest(config: Mapping[str, Any]) -> str:
    """The sha256 of a config without what a conversion changes in it, keys sorted."""
    left = {key: value for key, value in config.items() if key not in (KEY, MTP_KEY)}
    if isinstance(inner := left.get("text_config"), dict):
        left["text_config"] = {key: value for key, value in inner.items() if key not in (KEY, MTP_KEY)}
    return _sha256(left)


def kv_space_id(source: Source, origin: Origin, made: Manifest | None) -> str:
    """The id of what the KV cache of `source` means.

    made  its manifest, which says what scales were folded into the weights, and what others added as tensors
    """
    cache = Attention.of(source)
    kind = f"gqa {cache.kv_heads} x {cache.head_dim}"
    if cache.latent:
        kind = f"mla {cache.latent} + {cache.rope}" + (f", index {cache.index_dim}" if cache.indexers else "")
    space: dict[str, Any] = {"config": origin.config_sha256, "shards": origin.shards_sha256, "cache": kind}
    space["fold"] = made.fold.digest if made and made.fold else "none"
    return _sha256({**space, "scales": made.kv_scales} if made and made.kv_scales else space)


def weight_formats(labelled: Iterable[tuple[Weight, str]], num_hidden_layers: int) -> dict[str, str]:
    """The formats of the projections of each role, as `int4 g=32`; those of MTP layers apart."""
    found: dict[str, set[str]] = {}
    for weight, label in labelled:
        if is_linear(weight):
            role = role_name(str(weight.name.role), weight.name.is_mtp(num_hidden_layers))
            found.setdefault(role, set()).add(label)
    return {role: " + ".join(sorted(labels)) for role, labels in sorted(found.items())}


def _has_mtp(formats: Mapping[str, str]) -> bool:
    return any(role.endswith("(MTP)") for role in formats)


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _files(folder: Path, trusted: Sequence[Mapping[str, File]], progress: Progress) -> dict[str, File]:
    """The deciding files of `folder`; those that one of `trusted` has with the same size are not read."""
    paths = list_files(folder)
    with readable(folder):
        sizes = {name: path.stat().st_size for name, path in paths.items()}
    known = {
        name: files[name]
        for files in reversed(trusted)
        for name, nbytes in sizes.items()
        if name in files and files[name].nbytes == nbytes
    }
    unread = {name: path for name, path in paths.items() if name not in known}
    report = progress(sum(sizes[name] for name in unread))
    return _deciding(known | hash_files(unread, progress=report))


def _deciding(files: Mapping[str, File]) -> dict[str, File]:
    """Those of `files` that a checkpoint's digest depends on."""
    nothing = digest_of({})
    return {name: files[name] for name in sorted(files) if digest_of({name: files[name]}) != nothing}


def _origin(source: Source, made: Manifest | None, files: Mapping[str, File]) -> Origin:
    """What quantkit.json says the checkpoint was made from, before scales were folded in, else itself."""
    config, shards = files[CONFIG_FILE].sha256, {shard: files[shard].sha256 for shard in source.shards}
    if made:
        origin = (made.fold and made.fold.origin) or made.source.origin
        config, shards = origin.config_sha256, origin.shards_sha256
    layers, main = source.num_hidden_layers, set()
    for tensor in source.tensors.values():
        if not TensorName.parse(tensor.spec.name).is_mtp(layers):
            main.add(tensor.shard)
    only_mtp = set(source.shards) - main
    return Origin(config, {shard: sha256 for shard, sha256 in sorted(shards.items()) if shard not in only_mtp})
