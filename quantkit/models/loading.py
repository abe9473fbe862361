"""From a checkpoint's folder to a decoder, with every tensor in its place."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.source import Source, open_source
from quantkit.errors import SourceError, UsageError
from quantkit.families.config import GqaConfig, ModelConfig, read_config
from quantkit.models.decoder import Decoder, Layer
from quantkit.models.gqa import take_gqa
from quantkit.models.linear import Linear
from quantkit.models.mla import take_mla
from quantkit.models.moe import take_mlp, take_moe
from quantkit.models.norm import RmsNorm
from quantkit.models.weight_loader import WeightLoader
from quantkit.naming import Role, TensorName
from quantkit.weights.packed import DTYPES, Packed

_KV_SCALES = ("k_scale", "v_scale")


def load(folder: str | Path, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> Decoder:
    """Load the checkpoint in `folder`, in any storage that quantkit reads, to compute in `dtype` (bfloat16 or float32).

    Weights stay as they are stored, so the decoder takes as much memory as the checkpoint has bytes, a vision tower's
    apart; norms and biases become `dtype`, the router's bias float32, and MLA's kv_b_proj is decoded to `dtype`. The
    MTP layer is read and not run. Raises SourceError, naming keys or tensors, for a model type or a config that cannot
    be run, and for tensors that are missing, misshapen or without a place in the model.
    """
    source = open_source(Path(folder))
    config = _check(source, dtype)
    return _build(WeightLoader(source, dtype, torch.device(device)), config)


@dataclass(frozen=True)
class LayerReader:
    """A checkpoint whose layers are read one at a time, so that memory holds one of them.

    parts  the tensors of each layer, None for those of no layer
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    parts: Mapping[int | None, Source]

    def layer(self, number: int) -> Layer:
        """Layer `number`, as `load` makes it; the reader keeps nothing of it."""
        loader = WeightLoader(self.parts[number], self.dtype, self.device)
        return _layer(loader, f"{self.config.prefix}model.layers.{number}", number, self.config)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The embeddings [T, hidden] of `tokens` int64 [T], of which only the rows needed are read, on the CPU."""
        source = self.parts[None]
        stored = source.tensors[f"{self.config.prefix}model.embed_tokens.weight"]
        used = torch.tensor(sorted(set(tokens.tolist())))
        rows = torch.empty(len(used), self.config.hidden, dtype=DTYPES[stored.spec.dtype])
        for row, token in zip(rows.view(torch.uint8).numpy(), used.tolist(), strict=True):
            source.read_into(stored, token * row.nbytes, row.data)
        return rows[torch.searchsorted(used, tokens)].to(self.dtype)


def open_layers(source: Source, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> LayerReader:
    """A reader of the layers of `source`, checked as `load` checks a checkpoint, with the same errors."""
    config = _check(source, dtype)
    parts: dict[int | None, dict[str, StoredTensor]] = {}
    for text, tensor in source.tensors.items():
        name = TensorName.parse(text)
        parts.setdefault(None if name.role is Role.VISION else name.layer, {})[text] = tensor
    return LayerReader(
        config, dtype, torch.device(device), {layer: replace(source, tensors=part) for layer, part in parts.items()}
    )


def _check(source: Source, dtype: torch.dtype) -> ModelConfig:
    """The config of a checkpoint whose tensors all have their place in a model that computes in `dtype`."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise UsageError(f"a model cannot be run in {dtype}", hint="Give torch.bfloat16 or torch.float32.")
    config = read_config(source)
    check = WeightLoader(source, dtype, torch.device("meta"))
    _build(check, config)
    check.check()
    return config


def _build(loader: WeightLoader, config: ModelConfig) -> Decoder:
    prefix, matrix = config.prefix, (config.vocab, config.hidden)
    embedding = loader.embedding(f"{prefix}model.embed_tokens.weight", matrix)
    layers = tuple(_layer(loader, f"{prefix}model.layers.{layer}", layer, config) for layer in range(config.layers))
    norm = RmsNorm(loader.vector(f"{prefix}model.norm.weight", config.hidden), config.eps)
    head = _head(loader, f"{prefix}lm_head.weight", embedding, config)
    kv_scales = {name: loader.number(name) for name in list(loader.left) if name.endswith(_KV_SCALES)}
    mtp = _mtp(loader, config)
    return Decoder(
        config=config,
        dtype=loader.dtype,
        device=loader.device,
        embedding=embedding.codes,
        layers=layers,
        norm=norm,
        head=Linear(head),
        mtp=mtp,
        kv_scales=kv_scales,
        passed=_pass(loader),
        source=loader.source,
    )


def _layer(loader: WeightLoader, prefix: str, layer: int, config: ModelConfig) -> Layer:
    take_attention = take_gqa if isinstance(config.attention, GqaConfig) else take_mla
    sparse = config.moe is not None and config.moe.sparse[layer]
    return Layer(
        attention_norm=RmsNorm(loader.vector(f"{prefix}.input_layernorm.weight", config.hidden), config.eps),
        attention=take_attention(loader, f"{prefix}.self_attn", layer, config),
        mlp_norm=RmsNorm(loader.vector(f"{prefix}.post_attention_layernorm.weight", config.hidden), config.eps),
        mlp=take_moe(loader, f"{prefix}.mlp", config)
        if sparse
        else take_mlp(loader, f"{prefix}.mlp", config.intermediate, config),
    )


def _head(loader: WeightLoader, name: str, embedding: Packed, config: ModelConfig) -> Packed:
    """The output layer; a tied one may be stored all the same, but not with other numbers."""
    if config.tied and name not in loader.left:
        return embedding
    head = loader.matrix(name, (config.vocab, config.hidden))
    if not config.tied or loader.device.type == "meta":
        return head
    if head.codes.dtype != embedding.codes.dtype or not torch.equal(head.codes, embedding.codes):
        raise SourceError(
            f"{loader.source.name}: the config ties the embedding to the output layer, but {name} is another",
            hint="Set tie_word_embeddings to false in config.json, or remove the tensor.",
        )
    return embedding


def _mtp(loader: WeightLoader, config: ModelConfig) -> dict[str, Packed | torch.Tensor]:
    end = config.layers + config.mtp_layers
    names = [name for name, weight in loader.left.items() if weight.name.is_mtp(config.layers)]
    return {name: loader.whole(name) for name in names if (loader.left[name].name.layer or 0) < end}


def _pass(loader: WeightLoader) -> tuple[str, ...]:
    """The tensors that are known and not needed; a vision tower's leave the loader."""
    vision = [name for name, weight in loader.left.items() if weight.name.role is Role.VISION]
    for name in vision:
        del loader.left[name]
    return (*vision, *loader.static)
