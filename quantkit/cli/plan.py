"""`quantkit plan`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.choices import IndexCache, KvLayout, Scheme
from quantkit.cli import plan_options as option
from quantkit.cli.options import DialectOption, GroupSize, Json, MtpOption, RecipeName, RestOption, Revision
from quantkit.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from quantkit.planning.fit import Deployment


def plan(
    models: option.Models = None,
    int4: option.Int4 = False,
    nvfp4: option.Nvfp4 = False,
    dialect: DialectOption = None,
    recipe: RecipeName = None,
    group_size: GroupSize = None,
    rest: RestOption = None,
    mtp: MtpOption = None,
    gpus: option.Gpus = "8xH200",
    gpu_table: option.GpuTable = None,
    tp: option.Tp = None,
    ep: option.Ep = False,
    dp_attention: option.DpAttention = False,
    speculate: option.Speculate = False,
    kv: option.KvOption = KvLayout.BF16,
    index_cache: option.IndexOption = IndexCache.INDEXERS,
    context: option.Context = 32768,
    utilization: option.Utilization = 0.9,
    reserve_gib: option.Reserve = 10.0,
    price: option.Price = None,
    phases: option.Phases = False,
    prefill_gpus: option.PrefillGpus = None,
    prefill_kv: option.PrefillKv = None,
    output: option.Output = None,
    check: option.Check = None,
    quick: option.Quick = False,
    explain: option.ExplainOption = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Say whether a model fits on GPUs, and how fast it can be at best; from its config alone.

    With --phases: which weight format serves which phase. With --check: are these its checkpoints (exit code 3 if not).

    Examples:

    quantkit plan glm-5.2 --int4 --gpus 8xH200 --kv fp8_ds_mla

    quantkit plan kimi-k2.6 --gpus 16xH200 --tp 8 --kv fp8 --price 3.5

    quantkit plan glm-5.2 --int4 --kv fp8 --phases -o deployment.json

    quantkit plan --check deployment.json ./GLM-5.2-FP8 ./GLM-5.2-INT4

    quantkit plan --explain published
    """
    names = models or []
    if check is not None:
        return _check(check, names, quick, as_json)
    if quick or (not phases and (prefill_gpus or prefill_kv or output)):
        raise UsageError("--prefill-gpus, --prefill-kv and -o belong to --phases, --quick to --check")
    if sum((int4, nvfp4, recipe is not None)) > 1:
        raise UsageError("--int4, --nvfp4 and --recipe exclude each other")
    _check_number(names, 2 if phases else 1, needed=explain is None)
    from quantkit import console
    from quantkit.conversion import Options
    from quantkit.planning import fit

    if explain is not None:
        return _explain(as_json)
    deployment = fit.Deployment(
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
    scheme = Scheme.NVFP4 if nvfp4 else None
    options = Options(group_size=group_size, rest=rest, mtp=mtp, dialect=dialect, scheme=scheme)
    asked: dict[str, Any] = {"convert": int4 or nvfp4 or recipe is not None, "recipe": recipe, "options": options}
    if phases:
        prefill = replace(deployment, gpus=prefill_gpus or gpus, kv=prefill_kv or kv)
        asked |= {"revision": revision}
        return _phases(names, prefill=prefill, decode=deployment, asked=asked, output=output, as_json=as_json)
    return console.show(fit.plan_serving(names[0], deployment, **asked, revision=revision), as_json=as_json)


def _check_number(names: list[str], most: int, *, needed: bool) -> None:
    if needed and not names:
        raise UsageError("which model?", hint="Give an alias, a Hub id, a folder or a config.json.")
    if len(names) > most:
        raise UsageError(f"{len(names)} models are too many", hint="--phases takes two, --check any number.")


def _explain(as_json: bool) -> None:
    from quantkit import console
    from quantkit.planning.published import published_figures

    console.show(published_figures(), as_json=as_json)


def _phases(
    names: list[str],
    *,
    prefill: "Deployment",
    decode: "Deployment",
    asked: dict[str, Any],
    output: Path | None,
    as_json: bool,
) -> None:
    from quantkit import console
    from quantkit.checkpoint.writer import write_whole
    from quantkit.planning.phases import Target, plan_phases

    second = names[1] if len(names) > 1 else None
    with console.progress("hashing") as start:
        planned = plan_phases(names[0], second, Target(prefill, decode), **asked, progress=start)
    if output is not None:
        write_whole(output, planned.deployment.to_json().encode())
    console.show(planned, as_json=as_json)


def _check(manifest: Path, names: list[str], quick: bool, as_json: bool) -> None:
    from quantkit import console
    from quantkit.planning.drift import check_drift

    with console.progress("hashing") as start:
        result = check_drift(manifest, names, quick=quick, progress=start)
    console.show(result, as_json=as_json)
    if not result.passed:
        raise CheckFailed(f"{manifest}: not these checkpoints (differences: {len(result.drifts)})")
