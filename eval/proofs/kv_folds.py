"""`python -m quantkit.eval.proofs.kv_folds MODEL...`: what FP8 pages cost with each form of scales, in Markdown.

    scale 1.0  FP8 pages as they are without calibration
    sidecar    the file that `calibrate` wrote, with powers of two for both parts of MLA's row
    folded     these in the weights, by `fold`; pages at scale 1.0
    embedded   one k_scale for the whole row as tensors of the checkpoint, by `fold --embed`

Scales are chosen on Python's manual. The gate judges each form on the text of its suite quick, by the runtime, against
the same model on BF16 pages, in two modes: K8, and K8+Q8, where attention's queries are rounded to E4M3, too. A loss is
the KL divergence. Leaves with exit code 3 unless what is wanted is met: it stands below the tables, point by point.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import torch

from quantkit.calibration import CalibrationReport, DataOptions, calibrate
from quantkit.calibration import Options as CalibrationOptions
from quantkit.calibration.choosing import TOLERANCE
from quantkit.calibration.run import SCALES_FILE
from quantkit.choices import KvDtype
from quantkit.errors import CheckFailed, FoldError
from quantkit.eval.gate import evaluation
from quantkit.eval.gate.backends import RUNTIME
from quantkit.eval.gate.loading import load_tokenizer
from quantkit.eval.gate.paged_model import PagedModel
from quantkit.eval.gate.report import AccuracyReport, Verdict
from quantkit.families.config import MlaConfig, ModelConfig
from quantkit.folding import fold
from quantkit.folding.report import Way
from quantkit.models.loading import load
from quantkit.runtime.cache_options import CacheOptions, cache_scales
from quantkit.runtime.pages import FP8, cache_spec, open_pool
from quantkit.runtime.scales import uniform_scales, unscaled
from quantkit.tables import markdown_row

AT_ONE, SIDECAR, FOLDED, EMBEDDED = "scale 1.0", "sidecar", "folded", "embedded"
LOSS = 0.05  # nats per token at scale 1.0 that are more than E4M3's rounding, which costs less than 0.01
RECOVERED = 0.9  # of such a loss
_MODES = {False: "K8", True: "K8+Q8"}
_PAGE_TOKENS = 64
_POOL_PAGES = 16  # of BF16, in whose bytes tokens are counted


@dataclass(frozen=True)
class Form:
    """A checkpoint and what its FP8 pages are divided by."""

    name: str
    folder: Path
    cache: CacheOptions

    def with_query(self, fp8_query: bool) -> "Form":
        """The same in one of the two modes."""
        return replace(self, cache=replace(self.cache, fp8_query=fp8_query))


@dataclass(frozen=True)
class Run:
    """What a form did in a mode: the gate's report, and values clamped while `window` tokens were written."""

    form: str
    fp8_query: bool
    report: AccuracyReport
    saturated: int

    @property
    def divergence(self) -> float:
        """KL divergence from the model on BF16 pages, in nats per token."""
        assert self.report.distribution
        return self.report.distribution.kl_divergence


@dataclass(frozen=True)
class Proof:
    """All that was measured of a model.

    calibrated   what `calibrate` found
    runs         of each form in each mode
    missing      forms that the model cannot have, and why
    equal        for each pair of dtype and mode that was compared, whether folded and sidecar gave the same logits
    tokens       that fit into the same bytes of BF16 and of FP8 pages
    """

    model: str
    calibrated: CalibrationReport
    runs: tuple[Run, ...]
    missing: dict[str, str]
    equal: dict[str, bool]
    tokens: tuple[int, int]

    def run(self, form: str, fp8_query: bool) -> Run:
        """One of the runs."""
        return next(run for run in self.runs if (run.form, run.fp8_query) == (form, fp8_query))

    def recovered(self, run: Run) -> float:
        """The share of the loss at scale 1.0 that is not there."""
        return 1 - run.divergence / self.run(AT_ONE, run.fp8_query).divergence


def prove(model: Path, work: Path, window: int = 1024, tokens: int = 4096, calibration_tokens: int = 8192) -> Proof:
    """Calibrate, fold and judge the checkpoint in the folder `model`; what is made goes into the new folder `work`.

    window              tokens of a request, in calibration and judging
    tokens              of the text that is judged on
    calibration_tokens  of the text that scales are chosen on
    """
    options = CalibrationOptions(DataOptions(tokens=calibration_tokens, length=window))
    calibrated = calibrate(model, work / "scales", options)
    forms, missing = _make_forms(model, work)
    text = Path(str(resources.files("quantkit.eval") / "texts" / "django-docs.txt"))
    encoded = load_tokenizer(model)(text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)
    sample = torch.tensor([encoded["input_ids"][:window]])
    judging = evaluation.Options(text=text, window=window, max_tokens=tokens, backend=RUNTIME)
    runs = []
    for form in forms.values():
        for each in map(form.with_query, _MODES):
            report = evaluation.evaluate(each.folder, model, replace(judging, cache=each.cache))
            runs.append(Run(each.name, each.cache.fp8_query, report, _logits(each, sample)[1]))
    config = load(model, device="meta").config
    equal = dict(_compare(forms[FOLDED], forms[SIDECAR], sample, config))
    return Proof(model.name, calibrated, tuple(runs), missing, equal, _pool_tokens(config))


def _make_forms(model: Path, work: Path) -> tuple[dict[str, Form], dict[str, str]]:
    """Every form of the model's scales by name, and why one cannot be had."""
    scales, unscaled_pages = work / "scales" / SCALES_FILE, CacheOptions(KvDtype.FP8, 1.0)
    forms = [Form(AT_ONE, model, unscaled_pages), Form(SIDECAR, model, CacheOptions(KvDtype.FP8, scale_file=scales))]
    fold(model, scales, work / FOLDED)
    forms.append(Form(FOLDED, work / FOLDED, unscaled_pages))
    missing = {}
    try:
        fold(model, scales, work / EMBEDDED, way=Way.EMBED)
        forms.append(Form(EMBEDDED, work / EMBEDDED, CacheOptions(KvDtype.FP8)))
    except FoldError as error:
        missing[EMBEDDED] = str(error)
    return {form.name: form for form in forms}, missing


def _logits(form: Form, tokens: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, int]:
    """Logits [1, T, vocab] for tokens [1, T], and how many values that were written were clamped."""
    decoder = load(form.folder, dtype)
    spec = cache_spec(decoder.config, FP8, _PAGE_TOKENS, cache_scales(decoder, form.cache))
    model = PagedModel(decoder, spec, (), form.cache.fp8_query)
    logits: torch.Tensor = model(tokens).logits
    return logits, int(model.counts[0])


def _compare(one: Form, other: Form, tokens: torch.Tensor, config: ModelConfig) -> Iterator[tuple[str, bool]]:
    """Whether two forms give the same bits. GQA's queries take a scale when it is folded, and not from a file, so that
    they are only compared where they are not rounded."""
    modes = _MODES if isinstance(config.attention, MlaConfig) else (False,)
    for dtype in (torch.float32, torch.bfloat16):
        for query in modes:
            logits = (_logits(form.with_query(query), tokens, dtype)[0] for form in (one, other))
            yield f"{str(dtype).removeprefix('torch.')} {_MODES[query]}", torch.equal(*logits)


def _pool_tokens(config: ModelConfig) -> tuple[int, int]:
    plain = cache_spec(config, torch.bfloat16, _PAGE_TOKENS, unscaled(config.layers))
    small = cache_spec(config, FP8, _PAGE_TOKENS, uniform_scales(config.layers, 1.0))
    bf16, fp8 = (open_pool(spec, _POOL_PAGES * plain.page_bytes).num_tokens for spec in (plain, small))
    return bf16, fp8


def wanted(proof: Proof) -> Iterator[tuple[str, bool]]:
    """What is wanted of a model, in words with figures, and whether it is met."""
    same = ", ".join(what for what, equal in proof.equal.items() if equal)
    yield f"folded and sidecar give the same bits ({same or 'nowhere'})", all(proof.equal.values())
    edited, layers = len(proof.calibrated.losing), len(proof.calibrated.layers)
    helps = any(
        TOLERANCE * proof.run(FOLDED, query).divergence <= proof.run(AT_ONE, query).divergence for query in _MODES
    )
    yield f"calibrate edits only what gains by it ({edited} of {layers} layers)", helps or not edited
    for query, mode in _MODES.items():
        one, folded = proof.run(AT_ONE, query), proof.run(FOLDED, query)
        share, verdict = proof.recovered(folded), folded.report.verdict
        if one.divergence > LOSS:
            yield f"{mode}: folding recovers {share:.1%} of the loss, at least {RECOVERED:.0%}", share >= RECOVERED
        else:
            both = f"KL {folded.divergence:.5f} folded, {one.divergence:.5f} at scale 1.0"
            yield f"{mode}: nothing is lost, {both}", folded.divergence <= TOLERANCE * one.divergence
        yield f"{mode}: the gate says {verdict} folded, {one.report.verdict} at scale 1.0", verdict is not Verdict.FAIL
    bf16, fp8 = proof.tokens
    yield f"twice the tokens in the same bytes ({bf16:,}, {fp8:,})", fp8 == 2 * bf16


# --- tables


def write_tables(proofs: Iterable[Proof]) -> Iterator[str]:
    """Markdown: all runs, KL by position, what was chosen, and what is wanted."""
    proofs = list(proofs)
    yield _heading("model", "pages", "mode", "bits per byte", "KL", "top-1", "recovered", "clamped", "gate")
    for proof in proofs:
        yield from _rows(proof)
    first = proofs[0].runs[0].report.distribution
    assert first
    yield "\n" + _heading("KL at positions", "", *(f"{part.first} to {part.last}" for part in first.positions))
    for proof in proofs:
        for run in proof.runs:
            assert run.report.distribution
            parts = (f"{part.kl_divergence:.4f}" for part in run.report.distribution.positions)
            yield _row(proof.model, f"{run.form}, {_MODES[run.fp8_query]}", *parts)
    for proof in proofs:
        yield f"\n{proof.model}, {', '.join(_choices(proof.calibrated))}.\n\n"
        yield from (f"- {'met' if met else 'NOT MET'}: {what}\n" for what, met in wanted(proof))


def _rows(proof: Proof) -> Iterator[str]:
    reference = proof.runs[0].report.distribution
    assert reference
    yield _row(proof.model, "BF16", "", f"{reference.baseline_bits_per_byte:.4f}", *[""] * 5)
    for run in proof.runs:
        found = run.report.distribution
        assert found
        figures = f"{found.candidate_bits_per_byte:.4f}", f"{found.kl_divergence:.5f}", f"{found.top1_agreement:.1%}"
        recovered = "" if run.form == AT_ONE else f"{proof.recovered(run):.1%}"
        ending = recovered, f"{run.saturated:,}", str(run.report.verdict)
        yield _row("", f"FP8, {run.form}", _MODES[run.fp8_query], *figures, *ending)
    for form, why in proof.missing.items():
        yield _row("", f"FP8, {form}", "", f"not possible: {why}", *[""] * 5)


def _choices(report: CalibrationReport) -> Iterator[str]:
    """The layers of each verdict."""
    layers: dict[str, list[str]] = {}
    for layer in report.layers:
        layers.setdefault(layer.verdict, []).append(str(layer.layer))
    for verdict, numbers in layers.items():
        yield f"layers {' '.join(numbers)}: {verdict}" if len(layers) > 1 else f"all layers: {verdict}"


def _heading(*cells: str) -> str:
    return _row(*cells) + _row(*("---" for _ in cells))


def _row(*cells: str) -> str:
    return f"{markdown_row(*cells)}\n"


def main() -> None:
    """Print the tables; leave with exit code 3 for what is wanted and not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="folders of checkpoints")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a request (default 1024)")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text that is judged on (default 4096)")
    parser.add_argument("--calibration-tokens", type=int, default=8192, help="(default 8192)")
    parser.add_argument("--folder", type=Path, default=Path("build"), help="where to work (default build)")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    sizes = given.window, given.tokens, given.calibration_tokens
    with tempfile.TemporaryDirectory(prefix="kv-proof-", dir=given.folder) as work:
        proofs = [prove(model, Path(work) / model.name, *sizes) for model in given.models]
    sys.stdout.writelines(write_tables(proofs))
    if not all(met for proof in proofs for _, met in wanted(proof)):
        sys.exit(CheckFailed.exit_code)


if __name__ == "__main__":
    main()
