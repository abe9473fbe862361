"""FP8 KV scales keep their promise: folded is the file bit for bit, hard caches come back, easy ones lose nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import quantkit
from kimi_tiny.variants import hard_variant
from quantkit import folding
from quantkit.checkpoint.source import open_source
from quantkit.errors import CheckFailed, UsageError
from quantkit.eval.gate import evaluation
from quantkit.eval.gate.backends import RUNTIME
from quantkit.eval.proofs import kv_folds
from quantkit.models.loading import load
from quantkit.planning.fingerprint import fingerprint
from quantkit.runtime.cache_options import CacheOptions
from quantkit.runtime.engine import Engine, EngineOptions
from quantkit.runtime.paged_cache import PagedCache, Segment
from quantkit.runtime.pages import FP8, PagePool, cache_spec
from quantkit.runtime.scales import uniform_scales
from support.paths import FIXTURES

KIMI = FIXTURES / "kimi-tiny-int4"
SIZES = 128, 256, 512  # window, tokens that are judged on, tokens that are calibrated on

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first hard variant of the trained Kimi."""
    return hard_variant(KIMI, tmp_path_factory.mktemp("kimi") / "hard", 0)


@pytest.fixture(scope="module")
def proof(hard: Path) -> kv_folds.Proof:
    """What is measured of the hard variant; what was made lies beside it."""
    return kv_folds.prove(hard, hard.parent, *SIZES)


@pytest.mark.exhaustive
def test_a_hard_cache_comes_back(proof: kv_folds.Proof) -> None:
    """At least 90 % of what scale 1.0 loses is recovered by two parts, and not by one scale, in both modes."""
    assert all(met for _, met in kv_folds.wanted(proof))
    for query in (False, True):
        one, embedded = proof.run(kv_folds.AT_ONE, query), proof.run(kv_folds.EMBEDDED, query)
        assert one.divergence > kv_folds.LOSS
        assert one.saturated > 1000
        for form in (kv_folds.SIDECAR, kv_folds.FOLDED):
            assert proof.recovered(proof.run(form, query)) >= 0.9
            assert proof.run(form, query).saturated == 0
        assert proof.recovered(embedded) < 0.9


@pytest.mark.exhaustive
def test_folded_is_the_file(proof: kv_folds.Proof) -> None:
    """Bit for bit, in float32 and BF16, with queries as they are and in FP8."""
    assert proof.equal == {f"{dtype} {mode}": True for dtype in ("float32", "bfloat16") for mode in ("K8", "K8+Q8")}
    for query in (False, True):
        sidecar, folded = (proof.run(form, query).report for form in (kv_folds.SIDECAR, kv_folds.FOLDED))
        assert sidecar.distribution
        assert folded.distribution
        assert replace(sidecar.distribution, candidate="") == replace(folded.distribution, candidate="")


@pytest.mark.exhaustive
def test_fp8_queries_are_measured_and_said(proof: kv_folds.Proof) -> None:
    """They change the numbers, and the report of the gate names them."""
    for form in (kv_folds.AT_ONE, kv_folds.FOLDED):
        without, rounded = (proof.run(form, query) for query in (False, True))
        assert without.divergence != rounded.divergence
        assert "query" not in without.report.pages["candidate"]
        assert rounded.report.pages["candidate"]["query"] == "fp8"
        assert "query" not in rounded.report.pages["baseline"]


@pytest.mark.exhaustive
def test_tables_say_it(
    proof: kv_folds.Proof, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every form in both modes, KL by position, and what is wanted; exit code 3 if something of it is not met."""
    proofs = iter((proof, replace(proof, tokens=(1024, 1024))))
    monkeypatch.setattr(kv_folds, "prove", lambda *given: next(proofs))
    monkeypatch.setattr("sys.argv", ["kv_folds", "hard", "--folder", str(Path.cwd() / "build")])
    kv_folds.main()
    tables = capsys.readouterr().out
    with pytest.raises(SystemExit) as leaving:
        kv_folds.main()

    for form in (kv_folds.AT_ONE, kv_folds.SIDECAR, kv_folds.FOLDED, kv_folds.EMBEDDED):
        for mode in ("K8", "K8+Q8"):
            assert f"| FP8, {form} | {mode} |" in tables
            assert f"| {form}, {mode} |" in tables
    assert "112 to 127" in tables
    assert "NOT MET" not in tables
    assert leaving.value.code == CheckFailed.exit_code
    assert "- NOT MET: twice the tokens in the same bytes (1,024, 1,024)" in capsys.readouterr().out


def test_nothing_to_do_changes_nothing(tmp_path: Path) -> None:
    """Where `calibrate` finds every layer well at scale 1.0, a fold is a copy: the same bits from FP8 pages."""
    options = kv_folds.CalibrationOptions(kv_folds.DataOptions(tokens=512, length=128))
    report = kv_folds.calibrate(KIMI, tmp_path / "scales", options)
    forms, missing = kv_folds._make_forms(KIMI, tmp_path)

    assert report.losing == ()
    assert {layer.verdict for layer in report.layers} == {"nothing to do"}
    assert missing == {}
    tokens = torch.arange(128).unsqueeze(0) * 7 % 2048
    expected, _ = kv_folds._logits(forms[kv_folds.AT_ONE], tokens)
    for form in (kv_folds.SIDECAR, kv_folds.FOLDED, kv_folds.EMBEDDED):
        assert torch.equal(kv_folds._logits(forms[form], tokens)[0], expected)


# --- queries in FP8


def attend(fp8_query: bool, queries: tuple[torch.Tensor, torch.Tensor], ends: tuple[int, ...]) -> torch.Tensor:
    """Attention of the first MLA layer of the fixture's shape over random rows, whose passes end at `ends`."""
    config = load(KIMI, device="meta").config
    mla = config.attention
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(9, 160, generator=generator)
    pool = PagePool(cache_spec(config, FP8, 4, uniform_scales(config.layers, 1.0)), 3)
    begin, out = 0, []
    for end in ends:
        cache, positions = (
            PagedCache(pool, [Segment((2, 0, 1), begin, end)], fp8_query=fp8_query),
            torch.arange(begin, end),
        )
        cache.append_latent(0, positions, rows[begin:end, : mla.kv_rank], rows[begin:end, mla.kv_rank :])
        out.append(cache.attend_latent(0, positions, *(query[begin:end] for query in queries), 0.1, None))
        begin = end
    return torch.cat(out)


@pytest.mark.parametrize("ends", [(9,), tuple(range(1, 10))], ids=["prefill", "decode"])
def test_queries_are_the_nearest_e4m3_numbers(ends: tuple[int, ...]) -> None:
    """Attention is that of rounded queries; those beyond 448 are clamped, and not NaN."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(9, 4, 128, generator=generator), torch.randn(9, 4, 32, generator=generator)
    queries[0][3, 2, 5] = 5000.0
    queries[1][4, 1, 0] = -449.0
    rounded = tuple(query.clamp(-448, 448).to(FP8).float() for query in queries)

    found = attend(True, queries, ends)

    assert found.isfinite().all()
    assert torch.equal(found, attend(False, rounded, ends))
    assert not torch.equal(found, attend(False, queries, ends))


def test_the_engine_rounds_queries_too(hard: Path) -> None:
    """What a request leaves in its pages is what a pass with rounded queries writes, and not what another one does."""
    decoder = load(hard, torch.float32)
    spec = cache_spec(decoder.config, FP8, 32, uniform_scales(decoder.config.layers, 1.0))
    prompt = torch.arange(5, 25)
    rows = []
    for query in (False, True):
        engine = Engine(decoder, PagePool(spec, 1), EngineOptions(fp8_query=query))
        engine.submit(prompt.tolist(), 1)
        engine.run()
        pool = PagePool(spec, 1)
        decoder.forward(prompt, torch.arange(20), PagedCache(pool, [Segment((0,), 0, 20)], fp8_query=query))
        by_engine, by_hand = (made.tensors[4, "latent"][0, :20].float() for made in (engine.pool, pool))
        assert torch.equal(by_engine, by_hand)
        rows.append(by_engine)
    assert not torch.equal(*rows)


def test_queries_are_rounded_for_fp8_pages_alone() -> None:
    """With BF16 pages it is an error that names the remedy, before anything runs."""
    options = evaluation.Options(text=KIMI / "heldout.txt", backend=RUNTIME, cache=CacheOptions(fp8_query=True))
    with pytest.raises(UsageError, match="candidate: queries are rounded to FP8 for an FP8 cache") as caught:
        evaluation.evaluate(KIMI, KIMI, options)
    assert caught.value.hint == "Add --kv fp8."


# --- one set of scales on every storage of a model


def fold_powers(folder: Path, output: Path, prefix: str, layers: int) -> str | None:
    """Fold powers that differ by layer; the id of what the cache holds."""
    scales: dict[str, float] = {}
    for layer in range(layers):
        parts = {"k": 1.0, "v": 1.0, "latent": 2.0 ** -(layer + 1), "rope": 2.0 ** (layer % 3 - 1)}
        scales |= {f"{prefix}model.layers.{layer}.self_attn.{part}_scale": scale for part, scale in parts.items()}
    folding.fold(folder, scales, output)
    return fingerprint(open_source(output)).kv_space_id


@pytest.mark.exhaustive
def test_every_storage_has_one_kv_space(glm_tiny: Path, glm_tiny_converted: dict[str, Path], tmp_path: Path) -> None:
    """FP8, INT4 and BF16 of the trained GLM, INT4 and BF16 of the trained Kimi: one id for each model."""
    quantkit.convert(KIMI, tmp_path / "kimi", "bf16")
    kimi = [KIMI, tmp_path / "kimi"]
    glm = [glm_tiny, glm_tiny_converted["glm-5.2-int4"], glm_tiny_converted["bf16"]]

    spaces = [
        {fold_powers(folder, tmp_path / f"{name} {place}", *shape) for place, folder in enumerate(folders)}
        for name, folders, shape in (("kimi", kimi, ("language_model.", 5)), ("glm", glm, ("", 4)))
    ]

    assert [len(space) for space in spaces] == [1, 1]
    assert spaces[0].isdisjoint({*spaces[1], None})
