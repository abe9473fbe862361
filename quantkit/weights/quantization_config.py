"""`quantization_config` for any assignment of formats to modules, such that the config alone tells every engine.

A module's pattern is its name below the layer, wide enough for the names of the fused modules of vLLM (`gate_up_proj`,
`fused_qkv_a_proj`) and SGLang (`fused_qkv_a_proj_with_mqa`). One format for all modules of a pattern needs no layer
number; else the layers that differ are listed, and `decoder` with the MTP layer, which SGLang runs under
`model.decoder`. Engines test `ignore` first, then targets by name in the order of the groups, then the class `Linear`:

    ignore     every plain matrix
    exceptions layers of another format than most of their pattern
    main       the 4-bit format, as the class `Linear`, or by name where that word is a group of its own
    others     by name
    class      `Linear` alone, where others have FP8 blocks; no module is left for it

SGLang looks under the word `Linear` for two things, whatever is stored: the block size of every FP8 weight that it
merges (gate_up_proj, qkv_proj), and whether INT4 keeps it from fusing shared experts with routed ones. Beside NVFP4,
which is fused or the same, the class is that of the FP8 blocks; beside INT4 it says both: INT4, in these blocks.
(srt/layers/linear.py: weight_loader_v2; compressed_tensors.py: weight_block_size; deepseek_common/utils.py:
is_wint4afp8_or_wint4a16_config.)

transformers takes the scheme of all experts from the first target that contains "experts", which is why the main group
names them and other patterns say `exp\\w+`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from quantkit.choices import Dialect
from quantkit.errors import PlanError
from quantkit.naming import Role, TensorName
from quantkit.version import VERSION
from quantkit.weights.encodings import Format
from quantkit.weights.weight import Strategy

KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
_EXPERTS, _EXPERTS_OF_LAYERS = r"mlp\.experts\..*", r"mlp\.exp\w+\.\d+\.(gate|up|down)_proj$"
_MAYBE_TIED = ("lm_head$", r"shared_head\.head$", "embed_tokens$")  # engines build them where none is stored, too
_LINEAR = "Linear"
_VISION = r"(vision_tower|visual|mm_projector)\..*"
_FUSED = {  # the parts of a fused projection, and its names in vLLM and SGLang
    "gate_up_proj": "(gate|up|gate_up)_proj",
    "fused_qkv_a_proj": "(q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj|fused_qkv_a_proj_with_mqa)",
    "qkv_proj": "(q|k|v|qkv)_proj",
}


Modules = Iterable[tuple[TensorName, Format | None]]


def describe(modules: Modules, num_hidden_layers: int, dialect: Dialect, *, kv_scales: bool = False) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint with these matrices (None: a plain one), one of them 4-bit at least.

    kv_scales  whether scales of an FP8 KV cache are stored, which engines look for only if the config says so

    Raises PlanError for two 4-bit formats, of which engines take one.
    """
    table = _Table(modules, num_hidden_layers)
    kv_cache_scheme = KV_CACHE_SCHEME if kv_scales else None
    if dialect is Dialect.MODELOPT:
        return _modelopt(table, kv_cache_scheme)
    main = table.main
    groups = _Groups(table, main)
    return {
        "quant_method": "compressed-tensors",
        "format": main.encoding.described(main)["format"],
        "quantization_status": "compressed",
        "kv_cache_scheme": kv_cache_scheme,
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups.all())},
        "ignore": groups.ignore,
    }


class _Table:
    """The formats by pattern, and the layers of each."""

    def __init__(self, modules: Modules, num_hidden_layers: int) -> None:
        self.num_hidden_layers = num_hidden_layers
        self.layers: dict[str, dict[Format | None, set[int]]] = {}
        counts: Counter[Format] = Counter()
        for name, form in modules:
            layer = -1 if name.layer is None or name.role is Role.VISION else name.layer
            self.layers.setdefault(_pattern(name), {}).setdefault(form, set()).add(layer)
            if form is not None and form.encoding.is_main:
                counts[form] += 1
        for pattern in _MAYBE_TIED:
            self.layers.setdefault(pattern, {None: {-1}})
        self.layers = {  # in an order that does not depend on the source's
            pattern: dict(sorted(by_format.items(), key=lambda item: min(item[1])))
            for pattern, by_format in sorted(self.layers.items())
        }
        if len(counts) != 1:
            kinds = " and ".join(sorted(f"{form}" for form in counts))
            raise PlanError(
                f"the result would mix {kinds}, of which engines take one",
                hint="Give all quantizing rules one scheme and one group size; to respell NVFP4, give --format alone.",
            )
        self.main = next(iter(counts))

    @property
    def mtp(self) -> list[int]:
        """The multi-token-prediction layers."""
        numbers = {layer for by_format in self.layers.values() for layers in by_format.values() for layer in layers}
        return sorted(layer for layer in numbers if layer >= self.num_hidden_layers)

    def usual(self, pattern: str) -> Format | None:
        """The format of most layers."""
        by_format = self.layers.get(pattern, {None: set()})
        return max(by_format, key=lambda form: len(by_format[form]))

    def layered(self, pattern: str, layers: set[int]) -> str:
        """`pattern` in these layers only."""
        numbers = "|".join(map(str, sorted(layers)))
        decoder = "|decoder" if max(layers) >= self.num_hidden_layers else ""
        body = _EXPERTS_OF_LAYERS if pattern == _EXPERTS else pattern
        return rf"re:.*(layers\.({numbers}){decoder})\.{body}"


class _Groups:
    """The groups and the ignored patterns of a compressed-tensors config."""

    def __init__(self, table: _Table, main: Format) -> None:
        self.table, self.main = table, main
        self.ignore: list[str] = []
        self.exceptions: dict[Format, list[str]] = {}
        self.others: dict[Format, list[str]] = {}
        for pattern, by_format in table.layers.items():
            for form, layers in by_format.items():
                self._add(pattern, form, layers, usual=form == table.usual(pattern), alone=len(by_format) == 1)

    def _add(self, pattern: str, form: Format | None, layers: set[int], *, usual: bool, alone: bool) -> None:
        if form is None:
            self.ignore.append(f"re:.*{pattern}" if alone else self.table.layered(pattern, layers))
        elif not usual:
            self.exceptions.setdefault(form, []).append(self.table.layered(pattern, layers))
        elif form != self.main:
            self.others.setdefault(form, []).append(f"re:.*{pattern}")

    def all(self) -> Iterator[dict[str, Any]]:
        """The groups in the order in which engines shall test them."""
        blocks = next((form for form in (*self.others, *self.exceptions) if form.strategy == Strategy.BLOCK), None)
        for form, patterns in self.exceptions.items():
            yield _group(form, patterns)
        yield _group(self.main, self._named() if blocks else [_LINEAR, *self._experts()])
        for form, patterns in self.others.items():
            yield _group(form, patterns)
        if blocks:
            yield _group(self.main.encoding.class_format(blocks), [_LINEAR])

    def _named(self) -> list[str]:
        """All modules of the main format, by name; no head, which by its class none would be."""
        main = (pattern for pattern in self.table.layers if self.table.usual(pattern) == self.main)
        return [f"re:.*{pattern}" for pattern in main if pattern not in _MAYBE_TIED]

    def _experts(self) -> list[str]:
        """The experts by name, where other groups could be taken for theirs."""
        named = (self.others or self.exceptions) and self.table.usual(_EXPERTS) == self.main
        return [f"re:.*{_EXPERTS}"] if named else []


def _group(form: Format, targets: list[str]) -> dict[str, Any]:
    said = form.encoding.described(form)
    return {
        "targets": targets,
        "input_activations": said["input_activations"],
        "output_activations": None,
        "format": said["format"],
        "weights": said["weights"],
    }


def _modelopt(table: _Table, kv_cache_scheme: dict[str, Any] | None) -> dict[str, Any]:
    """ModelOpt's: everything is NVFP4 but what `ignore` names, as globs."""
    ignore: list[str] = []
    for pattern, by_format in table.layers.items():
        if None in by_format:
            layers = None if len(by_format) == 1 else sorted(by_format[None])
            ignore.extend(_globs(pattern, layers))
    ignore.extend(f"*.layers.{layer}.head" for layer in table.mtp)  # vLLM's name of its shared_head.head
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4" if table.main.activations else "W4A16_NVFP4",
        "group_size": 16,
        "kv_cache_scheme": kv_cache_scheme,
        "ignore": ignore,
    }


def modelopt_file(quantization_config: dict[str, Any]) -> dict[str, Any]:
    """The content of ModelOpt's own file, which says the same as `quantization_config`."""
    return {
        "producer": {"name": "quantkit", "version": VERSION},
        "quantization": {
            "quant_algo": quantization_config["quant_algo"],
            "kv_cache_quant_algo": "FP8" if quantization_config["kv_cache_scheme"] else None,
            "group_size": quantization_config["group_size"],
            "exclude_modules": quantization_config["ignore"],
        },
    }


def _globs(pattern: str, layers: list[int] | None) -> Iterable[str]:
    """The shell patterns of a regex of ours, which holds alternatives in brackets, `\\w+`, `\\d+` and `.*` only."""
    head, bracket, rest = pattern.partition("(")
    inner, _, tail = rest.partition(")")
    for option in inner.split("|") if bracket else [""]:
        text = f"{head}{option}{tail}".removesuffix("$").replace(r"\..*", "*")  # the module itself, too
        text = text.replace(r"shared_exp\w+", "shared_experts")  # SGLang fuses them unless it finds this word
        name = re.sub(r"\\(.)", r"\1", re.sub(r"\\[wd]\+", "*", text))
        if layers is not None:
            yield from (f"*.layers.{layer}.{name}" for layer in layers)
        else:
            yield f"*{name}" if "." in name else name


def _pattern(name: TensorName) -> str:
    """The regex of the modules that `name` is one of, below their layer, for the end of a whole regex."""
    if name.role is Role.VISION:
        return _VISION
    if name.role is Role.ROUTED_EXPERT:
        return _EXPERTS
    local = re.sub(r"^.*?layers\.\d+\.", "", name.module) if name.layer is not None else name.module.split(".")[-1]
    parent, _, last = local.rpartition(".")
    fused = (name.fused_projection or "").rpartition(".")[2]
    parent = re.sub(r"\d+", r"\\d+", re.escape(parent)).replace("shared_experts", r"shared_exp\w+")
    return (rf"{parent}\." if parent else "") + _FUSED.get(fused, re.escape(last)) + "$"
