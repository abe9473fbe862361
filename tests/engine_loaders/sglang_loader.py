"""SGLang's own loader on a CPU. Runs in the engines' interpreter, as `Engines` starts it.

What runs is SGLang's: server arguments, config and model classes, quantization configs and schemes, `create_weights`,
weight loaders, `load_weights`. Replaced are packages that a CPU has not (`sglang_stubs`) and questions about the
device, which are answered as a Hopper GPU would. Among N ranks, one is simulated: the groups of tensor parallelism say
that it is this one, and nothing is sent while weights are loaded.
"""

import copy
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from engine_loaders.sglang_stubs import Anything

# isort: split
import sglang.srt.layers.attention.dsa.dsa_indexer as dsa_indexer
import sglang.srt.layers.quantization.modelopt_quant as modelopt_quant
import sglang.srt.layers.rotary_embedding.factory as rotary_factory
import sglang.srt.layers.rotary_embedding.rope_variant as rotary_variants
import sglang.srt.model_loader.loader as model_loader
import sglang.srt.models.deepseek_common.deepseek_weight_loader as deepseek_weight_loader
import sglang.srt.models.deepseek_v2 as deepseek_v2
import sglang.srt.models.glm4_moe as glm4_moe
import sglang.srt.models.glm4_moe_lite as glm4_moe_lite
import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs

from engine_loaders.comparing import Held, compare, files_of, held_by, held_by_experts, stored_vision
from engine_loaders.decoding import Decoded, Parameters, numbers
from engine_loaders.jobs import Job, Report, serve
from engine_loaders.sentinel import fill

_OF_DRAFT = re.compile(r"^model\.(?:decoder\b|(?=(?:eh_proj|enorm|hnorm|shared_head)\b))\.?")
_HOPPER = (9, 0)
_MULTIPROCESSORS = 132
_GROUPS = ("world", "tp", "pp", "moe_ep", "moe_dp", "moe_tp", "attn_tp", "attn_cp", "shared_experts_tp")
_SHARING = frozenset({"tp", "attn_tp", "moe_tp", "shared_experts_tp"})  # those of tensor parallelism


def answer_as_hopper() -> None:
    """Answer questions about the device as a Hopper GPU would; streams are nothing, and rotary embeddings torch's."""
    for module in (deepseek_v2, glm4_moe, glm4_moe_lite, dsa_indexer, deepseek_weight_loader):
        if hasattr(module, "_is_cuda"):
            module._is_cuda = True
    dsa_indexer.resolve_num_sms = lambda *args, **kwargs: _MULTIPROCESSORS
    modelopt_quant.is_cuda = lambda: True
    modelopt_quant.get_device_capability = lambda *args: _HOPPER
    rotary_variants.get_device = lambda *args, **kwargs: "cpu"
    rotary_factory.get_rope_cpu = _rope
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = lambda *args, **kwargs: Anything()


def _rope(
    head_size: int,
    rotary: int,
    positions: int,
    base: Any,
    neox: bool,
    scaling: Any = None,
    dtype: Any = None,
    *rest: Any,
) -> Any:
    return rotary_factory.get_rope(head_size, rotary, positions, base, neox, scaling, dtype)


def _arguments(job: Job) -> ServerArgs:
    flags: dict[str, Any] = {} if job.fusion else {"disable_shared_experts_fusion": True}
    common: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "disable_cuda_graph": True}
    return ServerArgs(model_path=job.checkpoint, tp_size=job.ranks, **common, **flags)


@lru_cache
def _groups() -> dict[str, Any]:
    """The groups of this process, which is alone in each; those of tensor parallelism are one object of their own."""
    where = f"file://{tempfile.mktemp()}"
    parallel_state.init_distributed_environment(1, 0, where, 0, backend="gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    groups = {name: getattr(parallel_state, f"_{name.upper()}") for name in _GROUPS}
    sharing = copy.copy(groups["tp"])
    return {name: sharing if name in _SHARING else group for name, group in groups.items() if group is not None}


def _take_rank(arguments: ServerArgs, job: Job) -> None:
    """Publish the arguments for the job's rank, and make this process that rank in the groups of tensor parallelism."""
    parallel = get_parallel()
    if not parallel_state.model_parallel_is_initialized():
        publish(_arguments(replace(job, ranks=1)), role="scheduler", ranks=SpawnRanks(world_rank=0))
    groups = _groups()
    parallel.clear_stamp()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=job.rank))
    groups["tp"].world_size, groups["tp"].rank_in_group = job.ranks, job.rank
    for name, group in groups.items():
        setattr(parallel_state, f"_{name.upper()}", group)
    parallel.override_permanently(**{f"{name}_group": group for name, group in groups.items()})
    initialize_dp_attention(arguments)


def load(job: Job, report: Report) -> None:
    """Build the job's model, load its checkpoint, and compare."""
    arguments = _arguments(job)
    _take_rank(arguments, job)
    config = ModelConfig.from_server_args(arguments, **({"is_draft_model": True} if job.mtp else {}))
    load_config = LoadConfig()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cpu"):
            quantization = model_loader._get_quantization_config(config, load_config)
            model = model_loader._initialize_model(config, load_config, quantization)
    finally:
        torch.set_default_dtype(torch.float32)
    report.model = type(model).__name__
    fill(model)
    model.load_weights(model_loader.DefaultModelLoader(load_config)._get_all_weights(config, model))
    compare(report, job, model, _held(model, job))


def _held(model: torch.nn.Module, job: Job) -> Iterator[Held]:
    files = files_of(job)
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = {leaf: p for leaf, p in module.named_parameters(recurse=False) if id(p) not in seen}
        seen.update(map(id, own.values()))
        stored = _OF_DRAFT.sub(f"model.layers.{files.layers}.", name) if job.mtp else stored_vision(name)
        if any(leaf.startswith("w13_") for leaf in own):
            shared = stored.replace(".experts", ".shared_experts")
            routed = files.config["n_routed_experts"]
            yield from held_by_experts(name, _straight(own), stored, (128, 128), shared, routed)
        elif own:
            yield from held_by(name, own, stored, (128, 128))
        if getattr(module, "w_kc", None) is not None:
            yield _absorbed(name, module, f"{stored}.kv_b_proj.weight")


def _straight(own: Parameters) -> Parameters:
    """The parameters of experts with the columns last: SGLang keeps INT4 ones transposed."""
    if own["w13_weight_packed" if "w13_weight_packed" in own else "w13_weight"].dtype != torch.int32:
        return own
    return {leaf: p.transpose(1, 2) if p.dim() == 3 else p for leaf, p in own.items()}


def _absorbed(name: str, module: Any, stored: str) -> Held:
    """kv_b_proj as attention multiplies by it: taken apart by heads into w_kc and w_vc; FP8 has one scale for all."""
    parts = torch.cat([module.w_kc, module.w_vc.transpose(1, 2)], dim=1)  # [heads, nope + v, rank]
    weight = numbers(parts).reshape(-1, parts.shape[-1])
    if parts.dtype == torch.float8_e4m3fn:
        return Held(f"{name}.w_kc", Decoded("absorbed", weight * float(module.w_scale)), (stored,), tolerance=0.1)
    return Held(f"{name}.w_kc", Decoded("plain", weight), (stored,), parts.dtype, tolerance=0.01)


if __name__ == "__main__":
    answer_as_hopper()
    serve(load)
