"""Checkpoints that break a rule, or seem to: the rule book says of each what vLLM and SGLang make of it."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines.broken import VARIANTS, Checkpoint
from engines.jobs import Job
from engines.outputs import Outputs, sglang_jobs, vllm_jobs
from engines.running import Reports, load_all
from engines.verdicts import Verdict, disagreements, happened

ENGINES = {"vLLM": vllm_jobs, "SGLang": sglang_jobs}
_GLM = "glm-5.2-fp8_block"
_COMPLETENESS = "whether anything is missing is what `quantkit verify` asks, not the rules"
_SURPLUS = "no rule knows all tensors of an architecture: this one is left out, and no engine says so"
_HARMLESS = "left out, as no layer of the model uses it: served rightly"
_FALSE_ALARM = "vLLM finds the class by the model_type; of models whose class it does not find, it takes another"
_DRAFT_SCALES = "no rule yet: KV scales in the MTP layer stop the draft model of GLM-4.x (glm4_moe_mtp.py)"
EXCEPTIONS = {
    (f"{_GLM} int4: an expert is missing", "vLLM"): _COMPLETENESS,
    (f"{_GLM} int4: an expert is missing", "SGLang"): _COMPLETENESS,
    (f"{_GLM} int4: a norm is missing", "vLLM"): _COMPLETENESS,
    (f"{_GLM} int4: a norm is missing", "SGLang"): _COMPLETENESS,
    ("llama-bf16 int4: a bias is stored", "vLLM"): _SURPLUS,
    ("llama-bf16 int4: a bias is stored", "SGLang"): _SURPLUS,
    ("llama-bf16 int4: no architecture", "vLLM"): _FALSE_ALARM,
    (f"{_GLM} int4: indexer where none is", "SGLang"): _HARMLESS,
    ("glm-4.5-bf16 int4: scales of the cache", "vLLM"): _DRAFT_SCALES,
}


@dataclass(frozen=True)
class Broken:
    """All variants, and what the engines made of them."""

    folders: dict[str, Path]
    reports: dict[str, Reports]

    def jobs(self, name: str, engine: str) -> list[Job]:
        """The models that an engine builds of a variant."""
        return list(ENGINES[engine](self.folders[name]))


@pytest.fixture(scope="module")
def broken(outputs: Outputs, tmp_path_factory: pytest.TempPathFactory) -> Broken:
    """Every variant in both engines."""
    place = tmp_path_factory.mktemp("broken")
    folders = {}
    for number, (name, variant) in enumerate(VARIANTS.items()):
        source = outputs.output(variant.toy, variant.way)
        assert source is not None
        checkpoint = Checkpoint.read(source)
        for change in variant.changes:
            change(checkpoint)
        folders[name] = checkpoint.write(place / str(number))
    jobs = {engine: [job for folder in folders.values() for job in make(folder)] for engine, make in ENGINES.items()}
    return Broken(folders, load_all(jobs))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_rule_book_agrees(broken: Broken, name: str, engine: str) -> None:
    """`quantkit engines` says of a variant what happens, or the exception stands in the table."""
    asked = [(engine, broken.reports[engine], broken.jobs(name, engine))]
    found = list(disagreements(name, broken.folders[name], asked))

    assert bool(found) == ((name, engine) in EXCEPTIONS), "\n".join(map(str, found))


def test_exceptions_are_of_variants() -> None:
    """No exception outlives its variant, and each has a reason."""
    assert {name for name, _ in EXCEPTIONS} <= set(VARIANTS)
    assert all(EXCEPTIONS.values())


def test_variants_are_good_and_bad(broken: Broken) -> None:
    """There are at least forty, and each engine takes some and refuses some."""
    assert len(VARIANTS) >= 40
    for engine in ENGINES:
        fates = Counter(happened(broken.reports[engine], broken.jobs(name, engine))[0] for name in VARIANTS)
        assert fates[Verdict.LOADS] >= 10
        assert fates[Verdict.BROKEN] >= 20


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_left_over_is_named(broken: Broken, engine: str) -> None:
    """A parameter that no tensor fills is unwritten, and a tensor that no parameter holds is not taken."""
    missing, surplus = (
        broken.reports[engine][broken.jobs(name, engine)[0]]
        for name in ("glm-5.2-fp8_block int4: a norm is missing", "llama-bf16 int4: a bias is stored")
    )

    assert missing.unwritten == ["model.layers.1.input_layernorm.weight: 128 of 128 numbers"]
    assert surplus.not_taken == ["model.layers.0.mlp.down_proj.bias"]
    assert (missing.not_taken, surplus.unwritten, surplus.wrong) == ([], [], [])
