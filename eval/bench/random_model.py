"""Made-up FP8 checkpoints: real shapes, random numbers; conversion and decoding are timed on them, without a download.

Weights are normal with a variance of 1 / columns, drawn from 256 quantiles and stored in E4M3 with a random scale for
each block; norms are ones. So activations stay near 1, layer after layer, and tokens choose different experts.
"""

import itertools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantkit.checkpoint.header import StoredTensor, TensorSpec, lay_out
from quantkit.checkpoint.source import CONFIG_FILE, INDEX_FILE
from quantkit.families.inventory import inventory
from quantkit.recipe import find_alias

_DEVIATION = 100.0  # of the values in E4M3, whose largest is 448
_QUANTILES = [NormalDist(0, _DEVIATION).inv_cdf((step + 0.5) / 256) for step in range(256)]
_CODES = torch.tensor(_QUANTILES).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """A GLM-5.2 in miniature: one dense layer, then `sparse_layers` with experts; the same layers have an indexer.

    By default experts are as wide as GLM-5.2's, all else is smaller: few large layers, so that products and not calls
    take the time, as there. Experts have two thirds of the bytes that a token reads.
    """

    hidden: int = 4096
    intermediate: int = 4096
    sparse_layers: int = 2
    experts: int = 24
    expert_intermediate: int = 2048
    heads: int = 16
    q_rank: int = 512
    kv_rank: int = 256
    index_heads: int = 8
    index_topk: int = 512
    vocab: int = 2048

    @property
    def config(self) -> dict[str, Any]:
        """The config of such a model, in FP8 blocks: GLM-5.2's own with other sizes."""
        alias = find_alias("glm-5.2")
        assert alias is not None
        config: dict[str, Any] = json.loads(alias.config_text)
        layers = 1 + self.sparse_layers
        return config | {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": layers,
            "num_nextn_predict_layers": 0,
            "first_k_dense_replace": 1,
            "mlp_layer_types": ["dense", *["sparse"] * self.sparse_layers],
            "n_routed_experts": self.experts,
            "moe_intermediate_size": self.expert_intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "index_n_heads": self.index_heads,
            "index_topk": self.index_topk,
            "indexer_types": ["shared" if max(layer - 2, 0) % 4 else "full" for layer in range(layers)],
            "vocab_size": self.vocab,
        }


def shape_of_size(nbytes: int) -> Shape:
    """The default shape with as few sparse layers, but one at least, as give `nbytes` or more in FP8."""
    shapes = (Shape(sparse_layers=layers) for layers in itertools.count(1))
    return next(shape for shape in shapes if inventory("random", json.dumps(shape.config)).nbytes >= nbytes)


def write_random(folder: Path, config: dict[str, Any]) -> int:
    """Write a checkpoint of `config` with random numbers into `folder`, a shard for each layer; returns its bytes."""
    source = inventory("random", json.dumps(config))
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    weight_map = {name: tensor.shard for name, tensor in source.tensors.items()}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": source.nbytes}, "weight_map": weight_map}))
    for number, shard in enumerate(source.shards):
        tensors = [tensor for tensor in source.tensors.values() if tensor.shard == shard]
        _write_shard(folder / shard, tensors, np.random.default_rng(number), config["hidden_size"])
    return source.nbytes


def _write_shard(path: Path, tensors: list[StoredTensor], generator: np.random.Generator, hidden: int) -> None:
    header, places = lay_out([tensor.spec for tensor in tensors], path.name)
    columns = {place.spec.name: place.spec.shape[-1] for place in places}
    with path.open("wb") as file:
        file.write(header)
        for spec in (place.spec for place in places):
            if spec.dtype == "F8_E4M3":
                data = np.take(_CODES, generator.integers(0, 256, math.prod(spec.shape), np.uint8))
            else:
                width = columns.get(spec.name.removesuffix("_scale_inv"), hidden)
                data = _floats(spec, width, generator)
            file.write(data.data)
        os.fsync(file.fileno())


def _floats(spec: TensorSpec, columns: int, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor that is not quantized, or of a weight's scales; `columns` are that weight's."""
    if spec.name.endswith("_scale_inv"):
        values = generator.uniform(0.5, 1.5, spec.shape) / (_DEVIATION * columns**0.5)
    elif len(spec.shape) == 2:
        values = generator.standard_normal(spec.shape, np.float32) / spec.shape[1] ** 0.5
    else:
        values = np.full(spec.shape, float(spec.name.endswith("norm.weight")))
    return torch.from_numpy(values).to(_DTYPES[spec.dtype]).flatten().view(torch.uint8).numpy()
