"""vLLM's own loader on a CPU. Runs in the engines' interpreter, as `Engines` starts it.

What runs is vLLM's: config classes, the choice of the model class, model classes, quantization configs and schemes,
`create_weights`, weight loaders, `load_weights`. Replaced are only the choice of kernels, which vLLM makes while it
builds a module and which a CPU has not, and the backend of sparse attention. Among N ranks, one is simulated: the
group of tensor parallelism says that it is this one, and nothing is sent while weights are loaded.
"""

import importlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_ENABLE_V1_MULTIPROCESSING="0")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")  # read when vLLM is imported

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment, parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from engine_loaders.comparing import Held, compare, held_by, held_by_experts, stored_vision
from engine_loaders.jobs import Job, Report, serve
from engine_loaders.sentinel import fill

_LAYERS = "vllm.model_executor.layers"
_COMPRESSED = f"{_LAYERS}.quantization.compressed_tensors"
_SCHEMES = [
    f"{_COMPRESSED}.schemes.compressed_tensors_{name}" for name in ("w4a4_nvfp4", "w8a8_fp8", "w8a16_fp8", "wNa16")
]
_LINEAR = (*_SCHEMES, f"{_LAYERS}.quantization.modelopt", f"{_LAYERS}.quantization.fp8")
_EXPERTS = f"{_COMPRESSED}.compressed_tensors_moe.compressed_tensors_moe"
_NVIDIA = "vllm.models.deepseek_v32.nvidia"
_LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 512}


class NoKernel:
    """Stands for a kernel that this machine has not: a module can be built and loaded, and computes nothing."""

    def __init__(self, config: Any = None, *args: Any, **kwargs: Any) -> None:
        self.config = config

    def input_quant_key(self) -> None:
        """No input is quantized."""


def replace_kernels() -> None:
    """Give the choice of each kernel a stand-in; a module that does not make one is passed over."""
    for module in map(importlib.import_module, _LINEAR):
        for name in ("init_nvfp4_linear_kernel", "init_fp8_linear_kernel", "init_wfp8_a16_linear_kernel"):
            _replace(module, name, lambda *args, **kwargs: NoKernel())
        _replace(module, "choose_mp_linear_kernel", lambda config, **kwargs: NoKernel)
    _replace_experts("wna16", "int_wna16.WNA16MoEBackend.TRITON", f"{_EXPERTS}_wna16")
    _replace_experts(
        "nvfp4", "nvfp4.NvFp4MoeBackend.MARLIN", f"{_EXPERTS}_w4a4_nvfp4", f"{_LAYERS}.quantization.modelopt"
    )
    _replace_experts("fp8", "fp8.Fp8MoeBackend.TRITON", f"{_EXPERTS}_w8a8_fp8", f"{_LAYERS}.quantization.fp8")


def _replace_experts(kind: str, backend: str, *users: str) -> None:
    """Let the modules `users` find the `backend` chosen for experts of a kind, with no kernel to it."""
    oracle, backends, name = backend.split(".")
    chosen = getattr(importlib.import_module(f"{_LAYERS}.fused_moe.oracle.{oracle}"), backends)[name]
    for module in map(importlib.import_module, users):
        _replace(module, f"select_{kind}_moe_backend", lambda *args, **kwargs: (chosen, None))


def _replace(module: Any, name: str, value: Callable[..., Any]) -> None:
    if hasattr(module, name):
        setattr(module, name, value)


def replace_sparse_attention() -> None:
    """Let the CPU's dense MLA stand for the sparse backend that it has not; the parameters are the same."""
    choose = CpuPlatform.get_attn_backend_cls.__func__

    def dense(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> Any:
        backend = AttentionBackendEnum.CPU_MLA if attn_selector_config.use_mla else selected_backend
        return choose(cls, backend, attn_selector_config._replace(use_sparse=False), num_heads)

    CpuPlatform.get_attn_backend_cls = classmethod(dense)


def _config(job: Job) -> VllmConfig:
    draft = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}} if job.mtp else {}
    arguments: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": True, "skip_tokenizer_init": True}
    ranks = {"tensor_parallel_size": job.ranks, "distributed_executor_backend": "mp"} if job.ranks > 1 else {}
    return EngineArgs(model=job.checkpoint, **arguments, **_LIMITS, **draft, **ranks).create_engine_config()


def _take_rank(job: Job) -> None:
    """Make this process the job's rank in the group of tensor parallelism."""
    if not parallel_state.model_parallel_is_initialized():
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
    group = parallel_state.get_tp_group()
    group.world_size, group.rank_in_group = job.ranks, job.rank


def _model_class(job: Job) -> dict[str, Any]:
    if not job.cuda:
        return {}
    module, name = ("mtp", "DeepseekV32MTP") if job.mtp else ("model", "DeepseekV32ForCausalLM")
    return {"model_class": getattr(importlib.import_module(f"{_NVIDIA}.{module}"), name)}


def load(job: Job, report: Report) -> None:
    """Build the job's model, load its checkpoint, and compare."""
    config = _config(job)
    own = config.speculative_config.draft_model_config if job.mtp else config.model_config
    with set_current_vllm_config(config):
        _take_rank(job)
        with set_default_torch_dtype(own.dtype), torch.device("cpu"):
            model = initialize_model(config, model_config=own, **_model_class(job))
        report.model = type(model).__name__
        fill(model)
        loader = get_model_loader(config.load_config)
        loader._init_ep_weight_filter(own)
        model.load_weights(loader.get_all_weights(own, model))
        compare(report, job, model, _held(model))


def _held(model: torch.nn.Module) -> Iterator[Held]:
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = {leaf: p for leaf, p in module.named_parameters(recurse=False) if id(p) not in seen}
        seen.update(map(id, own.values()))
        stored = _stored_name(name)
        block = tuple(getattr(module, "weight_block_size", None) or (128, 128))
        if any(leaf.startswith("w13_") for leaf in own):
            yield from held_by_experts(name, own, stored, block)
        elif own:
            yield from held_by(name, own, stored, block)


def _stored_name(name: str) -> str:
    """What the files call the module `name`."""
    return re.sub(r"\.(mtp_block|mla_attn)\b", "", stored_vision(name)).replace(".experts.routed_experts", ".experts")


if __name__ == "__main__":
    replace_kernels()
    replace_sparse_attention()
    serve(load)
