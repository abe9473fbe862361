"""The engines' command lines for a deployment, and the pairs of pools that an engine refuses.

Read in vLLM 0.33.0 (`vllm/`) and SGLang 0.5.23 (`sglang/srt/`), with vllm-router 0.1.17 and sglang-router 0.3.2:

    KV layout        sparse attention stores FP8 as fp8_ds_mla on Hopper (`model_executor/layers/attention/
                     mla_attention.py`, `platforms/cuda.py`; `mem_cache/kv_cache_configurator.py`), plain on Blackwell;
                     SGLang has one name, fp8_e4m3, for both (`arg_groups/overrides.py`)
    different caches vLLM hashes the cache dtype into its handshake and asserts equal block lengths (`distributed/
                     kv_transfer/kv_connector/v1/nixl/metadata.py`, `base_worker.py`); SGLang compares the dtypes' names
                     and page sizes, not the rows (`disaggregation/common/conn.py`)
    different weights  SGLang compares nothing of them; vLLM's hash holds the model's path, so that two folders are
                     refused unless `enforce_handshake_compat` is off (`nixl/metadata.py`)
    different TP     one must divide the other: asserted in vLLM (`kv_connector/utils.py`, tp_ratio), rounded down in
                     SGLang (`disaggregation/common/conn.py`, _resolve_rank_mapping). MLA caches are whole on every rank
    MTP              both pools load it, or none: the draft's cache is sent, too (`nixl/metadata.py`,
                     `config/speculative.py`; `disaggregation/prefill.py`)
    shared experts   SGLang fuses them with the routed ones unless told not to, also where these have another format
                     (`models/deepseek_common/utils.py`)
"""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.choices import KvLayout
from quantkit.errors import UsageError
from quantkit.families.attention import Attention
from quantkit.planning.deployment import Launch, Pool

VLLM, SGLANG = "vLLM 0.33.0", "SGLang 0.5.23"
_PORT, _ROUTER_PORT, _BOOTSTRAP_PORT = 8000, 8080, 8998
_HOPPER, _BLACKWELL = 90, 100
_ONE_HOST = 8  # GPUs
_HANDSHAKE = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py"
_BOOTSTRAP = "sglang/srt/disaggregation/common/conn.py"
_VLLM_KV = {KvLayout.BF16: "bfloat16", KvLayout.FP8: "fp8", KvLayout.FP8_DS_MLA: "fp8_ds_mla"}
_SGLANG_KV = {KvLayout.BF16: "bfloat16", KvLayout.FP8: "fp8_e4m3", KvLayout.FP8_DS_MLA: "fp8_e4m3"}


@dataclass(frozen=True)
class Deployed:
    """What the command lines need beside the pools.

    served_name  that clients call the model by
    remote_code  whether the engines need the code in its repository: Kimi's tokenizer is such
    weights      whether there are any: not if the model was given as a config alone
    """

    pools: tuple[Pool, ...]
    attention: Attention
    served_name: str
    remote_code: bool
    weights: bool = True


def stored_layout(layout: KvLayout, attention: Attention, sm: int | None) -> KvLayout:
    """How the engines store a cache of the dtype of `layout`: sparse attention on Hopper has one FP8 layout only."""
    if layout is KvLayout.FP8_DS_MLA and not attention.indexers:
        raise UsageError("--kv fp8_ds_mla is stored for sparse attention only", hint="Give --kv fp8.")
    if layout is KvLayout.FP8 and attention.indexers and sm == _HOPPER:
        return KvLayout.FP8_DS_MLA
    return layout


def launches(deployed: Deployed) -> tuple[Launch, ...]:
    """The command lines of each engine, or its refusal."""
    return tuple(
        Launch(engine, *refused) if (refused := refusal(deployed)) else make(deployed)
        for engine, refusal, make in ((VLLM, _vllm_refusal, _vllm), (SGLANG, _sglang_refusal, _sglang))
    )


def _refusal(deployed: Deployed) -> tuple[str, str | None] | None:
    """Why neither engine gets lines."""
    if not deployed.weights:
        return "no line: a config has no weights to serve; plan a folder, an alias or a Hub repository", None
    sms = {pool.sm for pool in deployed.pools}
    if not sms <= {_HOPPER, _BLACKWELL}:
        return "no line: those for Hopper and Blackwell are known, and the table of GPUs must give their sm", None
    if any(pool.tp > _ONE_HOST for pool in deployed.pools):
        return f"no line: more than {_ONE_HOST} ranks need the flags for several hosts, which depend on these", None
    if len(sms) > 1:
        return "no line: the attention backends of the two generations of GPU pair their own pages only", None
    return None


def _vllm_refusal(deployed: Deployed) -> tuple[str, str | None] | None:
    if common := _refusal(deployed):
        return common
    if len(deployed.pools) == 1:
        return None
    prefill, decode = deployed.pools
    if prefill.kv_layout != decode.kv_layout:
        return (
            f"needs a patch: prefill fills a {prefill.kv_layout} cache and decode reads {decode.kv_layout}; the NIXL "
            "handshake refuses another cache dtype and another block length",
            _HANDSHAKE,
        )
    ours, theirs = _attention_ranks(prefill), _attention_ranks(decode)
    if max(ours, theirs) % min(ours, theirs):
        reason = f"needs a patch: attention over {ours} and over {theirs} ranks; one must divide the other"
        return reason, "vllm/distributed/kv_transfer/kv_connector/utils.py"
    if not deployed.attention.latent and ours > theirs and ours > deployed.attention.kv_heads:
        reason = f"needs a patch: {ours} prefill ranks repeat {deployed.attention.kv_heads} KV heads for {theirs} ranks"
        return reason, _HANDSHAKE
    return None


def _sglang_refusal(deployed: Deployed) -> tuple[str, str | None] | None:
    if common := _refusal(deployed):
        return common
    if any(pool.sm == _BLACKWELL and pool.kv_layout == KvLayout.FP8_DS_MLA for pool in deployed.pools):
        reason = "no line: on Blackwell its FP8 cache of sparse attention is plain"
        return f"{reason}; --kv fp8", "sglang/srt/arg_groups/overrides.py"
    if len(deployed.pools) == 1:
        return None
    prefill, decode = deployed.pools
    if prefill.kv_layout != decode.kv_layout:
        reason = (
            f"needs a patch: prefill fills a {prefill.kv_layout} cache and decode reads {decode.kv_layout}; the "
            "bootstrap refuses another kv_cache_dtype, and copies rows as they are"
        )
        return reason, _BOOTSTRAP
    ours, theirs = _attention_ranks(prefill), _attention_ranks(decode)
    if max(ours, theirs) % min(ours, theirs):
        return f"needs a patch: attention over {ours} and over {theirs} ranks; one must divide the other", _BOOTSTRAP
    return None


def _attention_ranks(pool: Pool) -> int:
    """The tensor-parallel ranks that attention, and so a cache of KV heads, is shared out to."""
    return 1 if pool.dp_attention else pool.tp


def _vllm(deployed: Deployed) -> Launch:
    pools = deployed.pools
    two_folders = len({pool.checkpoint for pool in pools}) > 1
    commands = {pool.phase: _vllm_server(deployed, pool, two_folders) for pool in pools}
    notes = list(_notes(pools))
    if two_folders:
        notes.append(
            "the handshake's hash holds the model's path, so two checkpoints need enforce_handshake_compat off; "
            "`quantkit plan --check` compares them instead. With both under one path the check can stay on"
        )
    if len(pools) > 1:
        commands["router"] = _router("vllm-router --vllm-pd-disaggregation", pools, "")
    return Launch(VLLM, None, None, commands, tuple(notes))


def _vllm_server(deployed: Deployed, pool: Pool, two_folders: bool) -> str:
    flags: list[str | int | float] = ["--served-model-name", deployed.served_name]
    flags += ["--tensor-parallel-size", _attention_ranks(pool)]
    if pool.dp_attention:
        flags += ["--data-parallel-size", pool.tp]
    if pool.ep:
        flags += ["--enable-expert-parallel"]
    flags += ["--kv-cache-dtype", _VLLM_KV[KvLayout(pool.kv_layout)], "--max-model-len", pool.context]
    flags += ["--gpu-memory-utilization", pool.utilization]
    if pool.speculate:
        flags += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1})]
    if pool.phase != "both":
        role = "kv_producer" if pool.phase == "prefill" else "kv_consumer"
        transfer = {"kv_connector": "NixlConnector", "kv_role": role}
        relaxed = {"kv_connector_extra_config": {"enforce_handshake_compat": False}} if two_folders else {}
        flags += ["--kv-transfer-config", json.dumps(transfer | relaxed)]
    line = _line(["vllm", "serve", pool.checkpoint], deployed, pool, flags)
    return line if pool.phase == "both" else f"VLLM_NIXL_SIDE_CHANNEL_HOST={_host(pool)} {line}"


def _sglang(deployed: Deployed) -> Launch:
    pools = deployed.pools
    commands = {pool.phase: _sglang_server(deployed, pool) for pool in pools}
    if len(pools) > 1:
        router = "python -m sglang_router.launch_router --pd-disaggregation"
        commands["router"] = _router(router, pools, f" {_BOOTSTRAP_PORT}")
    return Launch(SGLANG, None, None, commands, tuple(_notes(pools)))


def _sglang_server(deployed: Deployed, pool: Pool) -> str:
    flags: list[str | int | float] = ["--served-model-name", deployed.served_name, "--tp-size", pool.tp]
    if pool.dp_attention:
        flags += ["--attn-dp-size", pool.tp]
    if pool.ep:
        flags += ["--ep-size", pool.tp]
    flags += ["--kv-cache-dtype", _SGLANG_KV[KvLayout(pool.kv_layout)], "--context-length", pool.context]
    flags += ["--mem-fraction-static", math.floor(pool.static_fraction * 1000) / 1000]
    if pool.formats.get("shared_expert") not in (None, pool.formats.get("routed_expert")):
        flags += ["--disable-shared-experts-fusion"]
    if pool.speculate:
        flags += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", 1]
        flags += ["--speculative-eagle-topk", 1, "--speculative-num-draft-tokens", 2]
    if pool.phase != "both":
        flags += ["--disaggregation-mode", pool.phase, "--disaggregation-transfer-backend", "mooncake"]
    if pool.phase == "prefill":
        flags += ["--disaggregation-bootstrap-port", _BOOTSTRAP_PORT]
    return _line(["python", "-m", "sglang.launch_server", "--model-path", pool.checkpoint], deployed, pool, flags)


def _line(command: Sequence[str], deployed: Deployed, pool: Pool, flags: Sequence[str | int | float]) -> str:
    """A server's command line, with what both engines spell alike."""
    shared: list[str | int | float] = ["--host", "0.0.0.0", "--port", _PORT]
    if pool.revision:
        shared += ["--revision", pool.revision]
    if deployed.remote_code:
        shared += ["--trust-remote-code"]
    return shlex.join(map(str, [*command, *flags, *shared]))


def _router(command: str, pools: Sequence[Pool], bootstrap: str) -> str:
    servers = [
        f"--{pool.phase} http://{_host(pool)}:{_PORT}{bootstrap if pool.phase == 'prefill' else ''}" for pool in pools
    ]
    return f"{command} {' '.join(servers)} --host 0.0.0.0 --port {_ROUTER_PORT}"


def _host(pool: Pool) -> str:
    return f"${pool.phase.upper()}_HOST"


def _notes(pools: Sequence[Pool]) -> list[str]:
    notes = [f"{pool.phase}: first `{pool.prepare}`" for pool in pools if pool.prepare]
    notes += [
        f"{pool.phase}: start {pool.replicas} of these, each with {pool.tp} GPUs and a host name of its own, and name "
        "all of them to the router"
        for pool in pools
        if pool.replicas > 1
    ]
    if len(pools) > 1:
        notes.append("set PREFILL_HOST and DECODE_HOST to the hosts' addresses")
    return notes
