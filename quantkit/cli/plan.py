"""`quantkit plan`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from quantkit.capacity.layouts import IndexCache, KvLayout
from quantkit.cli.options import Json, Revision
from quantkit.errors import UsageError
from quantkit.recipe import Mtp, Rest


class Explain(StrEnum):
    """What --explain can explain."""

    PUBLISHED = "published"


Model = Annotated[
    str | None,
    typer.Argument(help="A model alias (glm-5.2), a Hub id, a folder or a config.json.", show_default=False),
]
Int4 = Annotated[bool, typer.Option("--int4", help="Sizes after conversion by the model's built-in INT4 recipe.")]
RecipeName = Annotated[str | None, typer.Option("--recipe", help="Sizes after conversion by this recipe.")]
GroupSize = Annotated[int | None, typer.Option("--group-size", help="INT4 group size: 32, 64 or 128.")]
RestOption = Annotated[Rest | None, typer.Option("--rest", help="What the other weights are converted to.")]
MtpOption = Annotated[Mtp | None, typer.Option("--mtp", help="What a conversion makes of the MTP layers.")]
Gpus = Annotated[str, typer.Option("--gpus", help="Number and name of the GPUs.")]
GpuTable = Annotated[Path | None, typer.Option("--gpu-table", help="A YAML file with more GPUs.")]
Tp = Annotated[int | None, typer.Option("--tp", min=1, help="Ranks that share a copy of the model (all GPUs).")]
Ep = Annotated[bool, typer.Option("--ep", help="Whole experts on each rank.")]
DpAttention = Annotated[bool, typer.Option("--dp-attention", help="All of attention on each rank.")]
Speculate = Annotated[bool, typer.Option("--speculate", help="Load the MTP layers, for speculative decoding.")]
KvOption = Annotated[KvLayout, typer.Option("--kv", help="How the KV cache stores a token.")]
IndexOption = Annotated[
    IndexCache, typer.Option("--index-cache", help="Layers with an index cache: vLLM's, or SGLang's all.")
]
Context = Annotated[int, typer.Option("--context", min=1, help="Tokens of each request.")]
Utilization = Annotated[float, typer.Option("--utilization", help="Share of the memory that the engine takes.")]
Reserve = Annotated[float, typer.Option("--reserve-gib", help="GiB of that for activations and graphs, per GPU.")]
Price = Annotated[float | None, typer.Option("--price", help="Dollars for a GPU hour.")]
ExplainOption = Annotated[
    Explain | None, typer.Option("--explain", help="Instead: each published figure beside our own.")
]


def plan(
    model: Model = None,
    int4: Int4 = False,
    recipe: RecipeName = None,
    group_size: GroupSize = None,
    rest: RestOption = None,
    mtp: MtpOption = None,
    gpus: Gpus = "8xH200",
    gpu_table: GpuTable = None,
    tp: Tp = None,
    ep: Ep = False,
    dp_attention: DpAttention = False,
    speculate: Speculate = False,
    kv: KvOption = KvLayout.BF16,
    index_cache: IndexOption = IndexCache.INDEXERS,
    context: Context = 32768,
    utilization: Utilization = 0.9,
    reserve_gib: Reserve = 10.0,
    price: Price = None,
    explain: ExplainOption = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Say whether a model fits on GPUs, and how fast it can be at best; from its config alone.

    Examples:

    quantkit plan glm-5.2 --int4 --gpus 8xH200 --kv fp8_ds_mla

    quantkit plan kimi-k2.6 --gpus 16xH200 --tp 8 --kv fp8 --price 3.5

    quantkit plan --explain published
    """
    if model is None and explain is None:
        raise UsageError("which model?", hint="Give an alias, a Hub id, a folder or a config.json.")
    if int4 and recipe is not None:
        raise UsageError("--int4 and --recipe exclude each other")
    from quantkit import console, serving
    from quantkit.conversion import Options
    from quantkit.serving.published import published_figures

    if model is None or explain:
        console.show(published_figures(), as_json=as_json)
        return
    deployment = serving.Deployment(
        gpus=gpus,
        tp=tp,
        ep=ep,
        dp_attention=dp_attention,
        mtp=speculate,
        kv=kv,
        index_cache=index_cache,
        context=context,
        utilization=utilization,
        reserve_gib=reserve_gib,
        price=price,
        gpu_table=gpu_table,
    )
    options = Options(group_size=group_size, rest=rest, mtp=mtp)
    report = serving.plan_serving(
        model, deployment, convert=int4 or recipe is not None, recipe=recipe, options=options, revision=revision
    )
    console.show(report, as_json=as_json)
