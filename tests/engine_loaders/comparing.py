"""Holds what a loaded model has against what the files say. Runs in the engines' interpreter.

An engine's module holds one weight of the files or several, joined row by row. Among N ranks, each has its part of
every one of them:

    by rows      q_b_proj, kv_b_proj, q_proj, k_proj, v_proj, gate_proj, up_proj; embeddings and heads
    by columns   o_proj, down_proj
    whole        everything else; a key or value head is on several ranks where there are fewer heads than ranks
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_loaders.decoding import Block, Decoded, Parameters, decode, numbers
from engine_loaders.jobs import Job, Report
from engine_loaders.sentinel import count_unwritten, has_default
from support.truth import Array, truth

_BY_ROWS = frozenset({"q_b_proj", "kv_b_proj", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_BY_ROWS |= {"embed_tokens", "lm_head"}
_BY_COLUMNS = frozenset({"o_proj", "down_proj"})
_BY_HEADS = frozenset({"k_proj", "v_proj"})
_FUSED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "wk_weights_proj": ("wk", "weights_proj"),
}
_VISION = {"qkv_proj": "wqkv", "proj": "wo"}
_OF_WEIGHT = re.compile(
    r"(w13_|w2_)?(weight(_packed|_scale|_scale_inv|_scale_2|_global_scale|_shape)?|.*input_scale.*)"
)
_OF_INPUT = re.compile(r"[._]input_(global_)?scale$")
_SHARED_BY_DRAFT = re.compile(r"(lm_head|shared_head\.head|embed_tokens)\.weight$")  # the target's are put there


@dataclass(frozen=True)
class Held:
    """What a module of an engine holds.

    where      its name in the engine
    decoded    its numbers, and the form in which it has them
    names      the weights of the files that it is joined of
    dtype      what plain numbers of the files are rounded to
    tolerance  the relative error that is none
    """

    where: str
    decoded: Decoded
    names: tuple[str, ...]
    dtype: torch.dtype | None = None
    tolerance: float = 1e-6


class Files:
    """What the files of a checkpoint say."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.config: dict[str, Any] = config.get("text_config", config)
        self.layers = int(self.config["num_hidden_layers"])
        self.weight_only = _is_weight_only(config.get("quantization_config") or self.config.get("quantization_config"))
        self.weights: dict[str, Array] = {}
        self.undecodable = ""
        try:
            self.weights = truth(folder)
        except (KeyError, AssertionError) as error:
            self.undecodable = f"the files cannot be decoded: {error!r}"

    def is_mtp(self, name: str) -> bool:
        """Whether the tensor called `name` belongs to a multi-token-prediction layer."""
        number = re.search(r"\blayers\.(\d+)\.", name)
        return number is not None and int(number[1]) >= self.layers

    def part(self, name: str, job: Job) -> Array:
        """What the job's rank has of the weight called `name`."""
        weight = np.atleast_1d(self.weights[name])
        projection = name.rpartition(".")[0].rpartition(".")[2]
        ranks, rank = job.ranks, job.rank
        if projection in _BY_HEADS and (heads := self.config.get("num_key_value_heads")) and heads < ranks:
            ranks, rank = heads, rank * heads // ranks
        axis = 0 if projection in _BY_ROWS else 1 if projection in _BY_COLUMNS else None
        return weight if axis is None else np.split(weight, ranks, axis)[rank]


def _is_weight_only(quantization: dict[str, Any] | None) -> bool:
    """Whether 4-bit modules leave their inputs as they are, so that nothing reads a scale of them."""
    if quantization is None or quantization["quant_method"] == "modelopt":
        return quantization is None or str(quantization.get("quant_algo")).startswith("W4A16")
    groups = quantization.get("config_groups", {}).values()
    return all(group.get("input_activations") is None for group in groups if group["weights"]["num_bits"] == 4)


def files_of(job: Job) -> Files:
    """The files that a job's model is compared with."""
    return _read(Path(job.against or job.checkpoint))


@lru_cache(maxsize=1)
def _read(folder: Path) -> Files:
    """Files are read once for jobs that follow each other."""
    return Files(folder)


def compare(report: Report, job: Job, model: torch.nn.Module, held: Iterable[Held]) -> None:
    """Fill in the report: every module against the files, and what is left over on either side."""
    files = files_of(job)
    if files.undecodable:
        report.wrong.append(files.undecodable)
    report.unwritten = list(_unwritten(model, files, job))
    met = set()
    for entry in held:
        met.update(entry.names)
        report.modules += 1
        report.numbers += entry.decoded.weight.size
        report.forms[entry.decoded.form] = report.forms.get(entry.decoded.form, 0) + 1
        fault = _difference(entry, files, job)
        if fault and not (job.mtp and _SHARED_BY_DRAFT.search(f"{entry.where}.weight")):
            report.wrong.append(f"{entry.where} ({entry.decoded.form}): {fault}")
    left = (name for name in files.weights if name not in met and files.is_mtp(name) == job.mtp)
    spared = (name for name in left if not has_default(name) and not (job.mtp and _SHARED_BY_DRAFT.search(name)))
    report.not_taken = sorted(spared)


def _unwritten(model: torch.nn.Module, files: Files, job: Job) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        spared = has_default(name) or (job.mtp and _SHARED_BY_DRAFT.search(name))
        spared = spared or (files.weight_only and _OF_INPUT.search(name))  # made for nothing, and read by no kernel
        if not spared and (count := count_unwritten(parameter)):
            yield f"{name}: {count:,} of {parameter.numel():,} numbers"


def _difference(entry: Held, files: Files, job: Job) -> str | None:
    missing = [name for name in entry.names if name not in files.weights]
    if missing:
        return f"no {', '.join(missing)} in the files"
    want = np.concatenate([files.part(name, job) for name in entry.names])
    if entry.dtype is not None and entry.decoded.form == "plain":
        want = torch.from_numpy(want).to(entry.dtype).double().numpy()
    got = entry.decoded.weight
    if got.shape != want.shape:
        return f"is {got.shape}, and {want.shape} in the files"
    different = ~np.isclose(got, want, rtol=entry.tolerance, atol=entry.tolerance * float(np.abs(want).max()) * 1e-3)
    if not different.any():
        return None
    first = tuple(int(index) for index in np.argwhere(different)[0])
    return f"{different.sum():,} of {got.size:,} numbers, first {first}: {got[first]:.6g} for {want[first]:.6g}"


# --- the modules of a model, whatever engine it is


def stored_vision(name: str) -> str:
    """What the files of Kimi K2.5 call a module of its vision tower or projector, which both engines rename."""
    name = re.sub(r"\bmm_projector\.linear_([12])", lambda found: f"mm_projector.proj.{2 * int(found[1]) - 2}", name)
    return re.sub(
        r"(?<=^vision_tower\.)(.*)\.attn\.(qkv_proj|proj)", lambda found: f"{found[1]}.{_VISION[found[2]]}", name
    )


def held_by(name: str, own: Parameters, stored: str, block: Block) -> Iterator[Held]:
    """What the module `name` with its `own` parameters holds; `stored` is what the files call it."""
    parent, dot, last = stored.rpartition(".")
    modules = tuple(f"{parent}{dot}{part}" for part in _FUSED.get(last, (last,)))
    if "weight" in own or "weight_packed" in own:
        dtype = own["weight"].dtype if "weight" in own else None
        yield Held(name, decode(own, block), tuple(f"{module}.weight" for module in modules), dtype)
    for leaf, parameter in own.items():
        if not _OF_WEIGHT.fullmatch(leaf) and not has_default(f".{leaf}"):
            names = tuple(f"{module}.{leaf}" for module in modules)
            yield Held(f"{name}.{leaf}", Decoded("plain", numbers(parameter)), names, parameter.dtype)


def held_by_experts(
    name: str, own: Parameters, stored: str, block: Block, shared: str | None = None, routed: int | None = None
) -> Iterator[Held]:
    """What the fused experts `name` hold; those from number `routed` on are the `shared` one's."""
    first, second = decode(own, block, "w13_"), decode(own, block, "w2_")
    dtype = own["w13_weight"].dtype if first.form == "plain" else None
    inner = first.weight.shape[1] // 2
    for number in range(len(first.weight)):
        fused = shared is not None and routed is not None and number >= routed
        module = shared if fused else f"{stored}.{number}"
        parts = {
            "gate": (first.form, first.weight[number, :inner]),
            "up": (first.form, first.weight[number, inner:]),
            "down": (second.form, second.weight[number]),
        }
        for part, (form, weight) in parts.items():
            yield Held(f"{name}[{number}].{part}", Decoded(form, weight), (f"{module}.{part}_proj.weight",), dtype)
