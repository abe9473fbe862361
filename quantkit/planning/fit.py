"""Will a model fit on these GPUs, and how fast can it be at best; from its config alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.source import Source
from quantkit.choices import IndexCache, KvLayout
from quantkit.conversion import Options
from quantkit.conversion.choice import choose_recipe
from quantkit.conversion.plan import make_plan
from quantkit.errors import SourceError, UsageError
from quantkit.families.attention import Attention
from quantkit.families.locate import describe_model
from quantkit.naming import Role
from quantkit.planning.gpus import Gpu, parse_gpus
from quantkit.planning.report import CapacityReport, DecodeRate, KvSize, PrefillRate, RoleSize
from quantkit.planning.resident import Parallelism, is_whole, loaded, parts, rank_bytes
from quantkit.planning.roofline import Model, Serving, price_per_million
from quantkit.recipe import Recipe, load_recipe

GIB = 1 << 30
_BATCHES = (1, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Deployment:
    """How a model is to be served.

    gpus         as in `8xH200`; gpu_table is a YAML file with more GPUs
    tp           ranks that share a copy of the model; None is all GPUs
    ep           expert parallelism over these ranks
    dp_attention each rank has all of attention, and requests of its own
    mtp          the MTP layers are loaded, for speculative decoding
    kv           layout of the KV cache; index_cache says which layers keep an index cache
    context      tokens of each request
    utilization  share of the GPU's memory that the engine takes
    reserve_gib  of that for activations, graphs and the engine: two published deployments on 8 x H200 left 9.6 GiB
                 (Kimi K2.6) and 11 (GLM-5.3-FP8 in vLLM 0.28) between weights and KV cache
    price        dollars for a GPU hour
    """

    gpus: str = "8xH200"
    tp: int | None = None
    ep: bool = False
    dp_attention: bool = False
    mtp: bool = False
    kv: KvLayout = KvLayout.BF16
    index_cache: IndexCache = IndexCache.INDEXERS
    context: int = 32768
    utilization: float = 0.9
    reserve_gib: float = 10.0
    price: float | None = None
    gpu_table: Path | None = None

    def __post_init__(self) -> None:
        if self.context < 1:
            raise UsageError(f"--context is {self.context}; a request has at least one token")
        if not 0 < self.utilization <= 1:
            raise UsageError(f"--utilization is {self.utilization:g}; it is a share of the memory, at most 1")
        if self.reserve_gib < 0:
            raise UsageError(f"--reserve-gib is {self.reserve_gib:g}; it cannot be negative")
        if self.price is not None and self.price <= 0:
            raise UsageError(f"--price is {self.price:g}; it must be more than 0 dollars")


_EIGHT_H200, _NO_CHANGES = Deployment(), Options()


def plan_serving(
    model: str | Path,
    deployment: Deployment = _EIGHT_H200,
    *,
    convert: bool = False,
    recipe: str | Path | Recipe | None = None,
    options: Options = _NO_CHANGES,
    revision: str | None = None,
) -> CapacityReport:
    """What `model` (alias, folder, config file or Hub id) needs on the GPUs of `deployment`.

    convert  sizes after a conversion by `recipe` (name, YAML file or Recipe; None is the INT4 recipe for the model)
             with `options`

    Raises SourceError for a model whose tensors cannot be told from its config, naming what is missing.
    """
    if not convert and (recipe is not None or options != _NO_CHANGES):
        raise UsageError("these options change a conversion, and none is asked for", hint="Give --int4 or --recipe.")
    chosen = load_recipe(recipe) if isinstance(recipe, str | Path) else recipe
    source = describe_model(model, revision)
    if not convert:
        return report(source, describe(source), deployment)
    plan = make_plan(source, choose_recipe(source, chosen, options))
    specs = [spec for step in plan.steps for spec in step.outputs]
    planned = report(source, describe(source, specs), deployment, recipe=plan.recipe.name)
    return replace(planned, warnings=(*planned.warnings, *plan.warnings))


def report(source: Source, model: Model, deployment: Deployment, *, recipe: str | None = None) -> CapacityReport:
    """The same for a model that has been described; `source` gives its name and config."""
    count, gpu = parse_gpus(deployment.gpus, deployment.gpu_table)
    parallelism = Parallelism(count, deployment.tp or count, deployment.ep, deployment.dp_attention)
    roles = tuple(_roles(model, parallelism, deployment))
    resident = sum(role.rank_bytes for role in roles)
    usable = int(gpu.memory_bytes * deployment.utilization)
    reserve = int(deployment.reserve_gib * GIB)
    cached = Attention.of(source, mtp=deployment.mtp)
    kv = tuple(_kv(cached, usable - reserve - resident, parallelism, deployment))
    chosen = next(entry for entry in kv if entry.chosen)
    serving = Serving(model, parallelism, gpu, deployment.kv)
    result = CapacityReport(
        model=source.name,
        model_type=source.model_type,
        recipe=recipe,
        parameters=sum(part.parameters for part in model.parts if not part.mtp),
        active_parameters=round(sum(part.parameters * model.active_share(part) for part in model.parts)),
        gpus=count,
        gpu=gpu.name,
        tp=parallelism.tp,
        ep=parallelism.ep,
        dp_attention=parallelism.dp_attention,
        mtp=deployment.mtp,
        roles=roles,
        checkpoint_bytes=sum(part.nbytes for part in model.parts),
        num_tensors=sum(part.tensors for part in model.parts),
        rank_bytes=resident,
        rank_whole_bytes=sum(role.rank_bytes for role in roles if role.whole),
        memory_bytes=gpu.memory_bytes,
        utilization=deployment.utilization,
        reserve_bytes=reserve,
        pool_bytes=usable - reserve - resident,
        context=deployment.context,
        kv=kv,
        decode=tuple(_decode(serving, deployment, chosen.requests // parallelism.replicas)),
        prefill=_prefill(serving, deployment),
    )
    return replace(result, warnings=tuple(_warnings(result, gpu)))


def describe(source: Source, specs: Iterable[TensorSpec] | None = None) -> Model:
    """The model that `specs` hold (None is all tensors of `source`), with the sizes of the config of `source`."""
    if specs is None:
        specs = (tensor.spec for tensor in source.tensors.values())
    held = parts(specs, source.num_hidden_layers)
    if not any(part.role is Role.ROUTED_EXPERT for part in held):
        return Model(held, Attention.of(source), experts=1, experts_per_token=1)
    config = source.text_config
    if missing := [key for key in ("n_routed_experts", "num_experts_per_tok") if not config.get(key)]:
        raise SourceError(f"{source.name}: its config has no {', '.join(missing)}, which the experts read need")
    return Model(held, Attention.of(source), config["n_routed_experts"], config["num_experts_per_tok"])


def _roles(model: Model, parallelism: Parallelism, deployment: Deployment) -> Iterator[RoleSize]:
    """All parts, the main layers' and the largest first."""
    held = set(loaded(model.parts, mtp=deployment.mtp))
    for part in sorted(model.parts, key=lambda part: (part.mtp, -part.nbytes)):
        size = rank_bytes(part, parallelism, model.experts) if part in held else 0
        whole = is_whole(part, parallelism)
        yield RoleSize(str(part.role), part.mtp, part.format, part.nbytes, size, part in held, whole)


def _kv(attention: Attention, pool: int, parallelism: Parallelism, deployment: Deployment) -> Iterator[KvSize]:
    """All layouts that the model can have, the chosen one among them."""
    pools = parallelism.replicas * (parallelism.tp if parallelism.dp_attention else 1)
    ranks = 1 if parallelism.dp_attention else parallelism.tp
    attention.layer_bytes(deployment.kv)  # refuses a layout that the model cannot have
    for layout in KvLayout:
        if layout is KvLayout.FP8_DS_MLA and not attention.latent:
            continue
        for index_cache in IndexCache if attention.indexers else (IndexCache.INDEXERS,):
            size = attention.bytes_per_token(layout, index_cache, ranks=ranks)
            tokens = max(pool, 0) // size
            chosen = layout is deployment.kv and (not attention.indexers or index_cache is deployment.index_cache)
            label = str(index_cache) if attention.indexers else ""
            yield KvSize(str(layout), label, size, tokens * pools, tokens // deployment.context * pools, chosen)


def _decode(serving: Serving, deployment: Deployment, most: int) -> Iterator[DecodeRate]:
    """For the usual numbers of requests that fit in a replica, and for the largest that does."""
    model, parallelism = serving.model, serving.parallelism
    for batch in sorted({*(batch for batch in _BATCHES if batch < most), most} - {0}):
        step = serving.decode_step(batch, deployment.context)
        rate = batch * parallelism.replicas / step.seconds
        yield DecodeRate(
            batch,
            model.experts_touched(batch),
            round(model.weight_bytes(batch)),
            round(serving.rank_weight_bytes(batch)),
            round(serving.rank_kv_bytes(batch, deployment.context)),
            step.seconds * 1e3,
            step.bound,
            rate,
            deployment.price and price_per_million(deployment.price, parallelism.gpus, rate),
        )


def _prefill(serving: Serving, deployment: Deployment) -> PrefillRate:
    step = serving.prefill_step(deployment.context)
    rate = deployment.context * serving.parallelism.replicas / step.seconds
    dollars = deployment.price and price_per_million(deployment.price, serving.parallelism.gpus, rate)
    return PrefillRate(deployment.context, step.seconds * 1e3, step.bound, rate, dollars)


def _warnings(result: CapacityReport, gpu: Gpu) -> Iterator[str]:
    needed = result.rank_bytes + result.reserve_bytes
    if result.pool_bytes <= 0:
        yield (
            f"it does not fit: {needed / GIB:.2f} GiB of weights and reserve on each rank, and {gpu.name} gives "
            f"{result.memory_bytes * result.utilization / GIB:.2f}; more ranks (--tp), smaller weights (--int4)"
        )
    elif not result.decode:
        yield f"no request of {result.context:,} tokens fits; a smaller --context or --kv might"
