"""llm-compressor and AutoRound on the work of `quantkit convert`: experts to symmetric INT4, or to NVFP4, by rounding.

    python -m quantkit.eval.bench.peers NAME SOURCE OUTPUT   one conversion, its output flushed to the disk
    python -m quantkit.eval.bench.peers NAME                 only loads the peer and prints its version

Each is called as its documentation says, with no work but what it needs for a checkpoint that says what it holds:

    llm-compressor        decodes all FP8 weights, for an FP8 weight left alone would stand in no config; routed experts
                          become INT4
    llm-compressor-nvfp4  the same; routed and shared experts become NVFP4 with BF16 activations
    auto-round            leaves the rest in FP8, as quantkit does; routed experts become INT4

Both are optional (`pip install --group peers`), so they are imported here only, and only in functions.
"""

import argparse
import json
import os
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.source import INDEX_FILE, open_source
from quantkit.weights.encodings import NVFP4
from quantkit.weights.grouping import read_weights
from quantkit.weights.rows import Reader

GROUP_SIZE = 32
# and the modules that they are imported as
PEERS = {"llm-compressor": "llmcompressor", "auto-round": "auto_round", "llm-compressor-nvfp4": "llmcompressor"}
_EXPERTS = r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"
_SHARED_EXPERTS = r"re:.*\.shared_experts\.(gate|up|down)_proj$"
_OTHER_FP8 = (
    _SHARED_EXPERTS,
    r"re:.*\.self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)$",
    r"re:.*\.indexer\.(wq_b|wk)$",
)


def installed(peer: str) -> bool:
    """Whether `peer`, a key of `PEERS`, can be imported."""
    return find_spec(PEERS[peer]) is not None


def convert(peer: str, source: Path, output: Path) -> None:
    """Convert the checkpoint in `source` with `peer`, a key of `PEERS`, and flush every file of `output`."""
    if peer == "auto-round":
        library = import_module(PEERS[peer])
        compressor = library.AutoRound(
            model=str(source),
            scheme="W4A16",
            group_size=GROUP_SIZE,
            model_free=True,
            ignore_layers="self_attn,shared_experts",
        )
        compressor.quantize_and_save(str(output), format="auto_round")
    else:
        converters = import_module("compressed_tensors.entrypoints.convert")
        import_module(PEERS[peer]).model_free_ptq(
            model_stub=str(source),
            save_directory=str(output),
            scheme=_nvfp4() if peer.endswith("nvfp4") else _scheme("memoryless_minmax", GROUP_SIZE, [_EXPERTS]),
            converter=converters.FP8BlockDequantizer(targets=[_EXPERTS, *_OTHER_FP8]),
            device="cpu",
        )
    for path in output.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def count_4bit_weights(folder: Path) -> int:
    """The number of packed weights that the index of a peer's or of quantkit's output names."""
    names = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    return sum(name.endswith((".weight_packed", ".qweight")) for name in names)


def largest_partner_ratio(folder: Path) -> float:
    """The largest ratio between the global scales of NVFP4 weights that engines load under one, in a checkpoint."""
    source = open_source(folder)
    reader, scales = Reader(source), dict[str, list[float]]()
    for weight in read_weights(source):
        if weight.encoding is NVFP4:
            scales.setdefault(weight.name.fused_projection or weight.module, []).append(
                NVFP4.multiplier(reader, weight)
            )
    return max((max(found) / min(found) for found in scales.values()), default=1.0)


def decode_after_llm_compressor(weight: torch.Tensor, group_size: int, observer: str) -> torch.Tensor:
    """Quantize `weight` [N, K] as `model_free_ptq` does with `observer`; returns codes times scales in float64 [N, K].

    Scales have the dtype of `weight`, and codes are computed in it.
    """
    lifecycle = import_module("llmcompressor.entrypoints.model_free.lifecycle")
    forward = import_module("compressed_tensors.quantization.lifecycle.forward")
    scheme = _scheme(observer, group_size, ["Linear"])
    module = lifecycle.initialize_quantized_linear(weight, scheme, "cpu")
    lifecycle.calibrate_weight(module)
    scale: torch.Tensor = module.weight_scale
    codes: torch.Tensor = forward.quantize(module.weight, scale, None, scheme.weights, dtype=torch.int8)
    return codes.double() * scale.double().repeat_interleave(group_size, dim=1)


def _scheme(observer: str, group_size: int, targets: list[str]) -> Any:
    quantization = import_module("compressed_tensors.quantization")
    arguments = quantization.QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=group_size, observer=observer
    )
    return quantization.QuantizationScheme(targets=targets, weights=arguments)


def _nvfp4() -> Any:
    quantization = import_module("compressed_tensors.quantization")
    weights = quantization.preset_name_to_scheme("NVFP4A16", []).weights
    return quantization.QuantizationScheme(targets=[_EXPERTS, _SHARED_EXPERTS], weights=weights)


def main() -> None:
    """Run one conversion, or load the peer and print its version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("output", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.source is None or arguments.output is None:
        import_module(PEERS[arguments.name])
        sys.stdout.write(metadata.version(PEERS[arguments.name]) + "\n")
    else:
        convert(arguments.name, arguments.source, arguments.output)


if __name__ == "__main__":
    main()
