"""The plan of both phases: formats weighed, pools with their checkpoints, and the engines' command lines."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.source import Source
from quantkit.choices import KvLayout
from quantkit.conversion import Options
from quantkit.conversion.choice import choose_recipe
from quantkit.conversion.plan import Plan, make_plan
from quantkit.errors import SourceError, UsageError
from quantkit.families.attention import Attention
from quantkit.families.locate import describe_model
from quantkit.planning.deployment import Candidate, DeploymentManifest, Pool, ServedModel
from quantkit.planning.fingerprint import Fingerprint, fingerprint, fingerprint_of_plan
from quantkit.planning.fit import Deployment, describe, report
from quantkit.planning.gpus import parse_gpus
from quantkit.planning.launch import Deployed, launches, stored_layout
from quantkit.planning.phase_report import PhasePlan
from quantkit.planning.report import CapacityReport
from quantkit.planning.roofline import Model
from quantkit.planning.weighing import PHASES, PREFILL, choose
from quantkit.progress import Progress, silent
from quantkit.recipe import Recipe, find_alias, load_recipe
from quantkit.version import VERSION

_NO_CHANGES = Options()


@dataclass(frozen=True)
class Target:
    """The GPUs and caches of both phases; one pool is planned on those of decode."""

    prefill: Deployment
    decode: Deployment


@dataclass(frozen=True)
class _Format:
    """A checkpoint that there is, on the Hub where `repo` says so, or that `prepare` would make of it in `folder`."""

    name: str
    source: Source
    model: Model
    repo: str | None
    revision: str | None
    plan: Plan | None = None
    prepare: str | None = None
    folder: str | None = None

    def fingerprint(self, progress: Progress) -> Fingerprint:
        known = fingerprint(self.source, progress=progress)
        return fingerprint_of_plan(self.plan, known) if self.plan else known


def plan_phases(
    model: str | Path,
    decode_model: str | Path | None = None,
    target: Target | None = None,
    *,
    convert: bool = False,
    recipe: str | Path | Recipe | None = None,
    options: Options = _NO_CHANGES,
    revision: str | None = None,
    progress: Progress = silent,
) -> PhasePlan:
    """Plan the phases of `model` (alias, folder, config file or Hub id) on the GPUs of `target`, 8 x H200 each.

    decode_model  a second checkpoint of the same model: then `model` serves prefill and this one decode
    convert       weigh `model` against its conversion by `recipe` (None is the INT4 recipe) with `options`
    progress      is given the bytes to hash of a folder without quantkit.json, and returns what is called with those
                  just read

    Raises UsageError where nothing fits, and SourceError for two checkpoints that do not go together.
    """
    target = target or Target(Deployment(), Deployment())
    if decode_model is not None and convert:
        raise UsageError("two checkpoints are given, and a conversion is asked for", hint="Give one of them.")
    formats = [_opened(model, revision)]
    if decode_model is not None:
        formats.append(_opened(decode_model, None))
    elif convert:
        formats = [replace(formats[0], name=f"{model} as published"), _converted(formats[0], recipe, options)]
    target, warnings = _stored(formats[0].source, target)
    candidates = tuple(_candidate(entry, target) for entry in formats)
    choice = choose(candidates)
    if decode_model is not None and choice.chosen != (0, 1):
        warnings.append(f"the pools are as given; the roofline says {choice.reasons[-1]}")
        choice = replace(choice, chosen=(0, 1), reasons=(*choice.reasons[:-1], "two pools, as given"))
    deployment = _deployment(formats, candidates, choice.chosen, target, progress)
    warnings += [text for entry in formats if entry.plan for text in entry.plan.warnings] + _misfits(candidates)
    return PhasePlan(candidates, choice.leads, choice.reasons, deployment, tuple(warnings))


def _opened(model: str | Path, revision: str | None) -> _Format:
    source = describe_model(model, revision)
    alias = find_alias(source.name)
    if source.folder or source.name.endswith(".json"):
        return _Format(source.name, source, describe(source), None, None)
    repo, revision = (alias.repo, revision or alias.revision) if alias else (source.name, revision)
    return _Format(source.name, source, describe(source), repo, revision)


def _converted(published: _Format, recipe: str | Path | Recipe | None, options: Options) -> _Format:
    chosen = load_recipe(recipe) if isinstance(recipe, str | Path) else recipe
    source = published.source
    plan = make_plan(source, choose_recipe(source, chosen, options))
    name = plan.recipe.name
    folder = name if name.startswith(source.name) else f"{Path(source.name).name}-{name}"
    options_said = {"dialect": "format"}
    changes = {options_said.get(key, key): str(value) for key, value in vars(options).items() if value is not None}
    asked = f"--{changes.pop('scheme', 'int4')}"
    flags = ["--recipe", recipe.name if isinstance(recipe, Recipe) else str(recipe)] if recipe else [asked]
    flags += [text for key, value in changes.items() for text in (f"--{key.replace('_', '-')}", value)]
    prepare = shlex.join(["quantkit", "convert", source.name, *flags, "-o", folder])
    specs = [spec for step in plan.steps for spec in step.outputs]
    made = describe(source, specs)
    return replace(published, name=f"{source.name} by {name}", model=made, plan=plan, prepare=prepare, folder=folder)


def _stored(source: Source, target: Target) -> tuple[Target, list[str]]:
    """`target` with the layouts that the engines store, and where these are others than asked for."""
    attention, warnings, deployments = Attention.of(source), [], []
    for deployment in (target.prefill, target.decode):
        gpu = parse_gpus(deployment.gpus, deployment.gpu_table)[1]
        layout = stored_layout(deployment.kv, attention, gpu.sm)
        if layout is not deployment.kv:
            warnings.append(f"on {gpu.name} the engines store the {deployment.kv} cache of this model as {layout}")
        deployments.append(replace(deployment, kv=layout))
    return Target(*deployments), list(dict.fromkeys(warnings))


def _candidate(entry: _Format, target: Target) -> Candidate:
    recipe = entry.plan.recipe.name if entry.plan else None
    prefill, decode = (
        report(entry.source, entry.model, deployment, recipe=recipe) for deployment in (target.prefill, target.decode)
    )
    return Candidate(entry.name, prefill, decode)


def _deployment(
    formats: Sequence[_Format],
    candidates: Sequence[Candidate],
    chosen: Sequence[int],
    target: Target,
    progress: Progress,
) -> DeploymentManifest:
    first = formats[0]
    known = [formats[index].fingerprint(progress) for index in chosen]
    _check_together(known)
    pools = []
    for phase, index, entry in zip(PHASES if len(chosen) > 1 else ("both",), chosen, known, strict=True):
        candidate, is_prefill = candidates[index], phase == PREFILL
        capacity, deployment = (candidate.prefill, target.prefill) if is_prefill else (candidate.decode, target.decode)
        pools.append(_pool(phase, formats[index], entry, capacity, deployment))
    name, model_type = first.source.name, first.source.model_type
    model = ServedModel(name, model_type, first.repo, first.revision, known[0].config_sha256, known[0].origin)
    deployed = Deployed(
        pools=tuple(pools),
        attention=Attention.of(first.source),
        served_name=Path(name).name,
        remote_code="auto_map" in first.source.config or model_type.startswith("kimi"),
        weights=not name.endswith(".json"),
    )
    return DeploymentManifest(VERSION, model, deployed.pools, launches(deployed))


def _check_together(known: Sequence[Fingerprint]) -> None:
    """Two pools must serve one model, and mean the same by a cache."""
    first, last = known[0], known[-1]
    if first.config_sha256 != last.config_sha256:
        raise SourceError(f"{first.name} and {last.name} are not one model: their configs differ")
    if first.kv_space_id and last.kv_space_id and first.kv_space_id != last.kv_space_id:
        raise SourceError(
            f"{first.name} and {last.name} do not mean the same by a KV cache: they come from other weights, or one of "
            "them has folded scales",
            hint="Give the release that the other one was converted from.",
        )


def _pool(phase: str, entry: _Format, known: Fingerprint, capacity: CapacityReport, deployment: Deployment) -> Pool:
    if deployment.mtp and not known.mtp:
        raise UsageError(f"--speculate: {entry.name} holds no MTP layers")
    kv = next(kv for kv in capacity.kv if kv.chosen)
    free = capacity.memory_bytes * capacity.utilization - capacity.reserve_bytes
    return Pool(
        phase=phase,
        checkpoint=entry.folder or entry.repo or entry.source.name,
        revision=None if entry.folder else entry.revision,
        prepare=entry.prepare,
        recipe=known.recipe,
        formats=known.formats,
        mtp=known.mtp,
        digest=known.digest,
        files=known.files,
        kv_space_id=known.kv_space_id,
        gpus=capacity.gpus,
        gpu=capacity.gpu,
        sm=parse_gpus(deployment.gpus, deployment.gpu_table)[1].sm,
        tp=capacity.tp,
        ep=capacity.ep,
        dp_attention=capacity.dp_attention,
        replicas=capacity.gpus // capacity.tp,
        speculate=capacity.mtp,
        kv_layout=str(KvLayout(kv.layout)),
        index_cache=kv.index_cache,
        kv_bytes_per_token=kv.bytes_per_token,
        kv_tokens=kv.tokens,
        context=capacity.context,
        requests=kv.requests,
        checkpoint_bytes=capacity.checkpoint_bytes,
        rank_bytes=capacity.rank_bytes,
        utilization=capacity.utilization,
        static_fraction=free / capacity.memory_bytes,
    )


def _misfits(candidates: Sequence[Candidate]) -> list[str]:
    """What does not fit, by format and phase."""
    reports = [(entry.name, phase, getattr(entry, phase)) for entry in candidates for phase in PHASES]
    return [f"{name}, {phase}: {text}" for name, phase, report in reports for text in report.warnings]
