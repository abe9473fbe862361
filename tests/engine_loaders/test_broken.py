"""Checkpoints that break a rule, or seem to: the rule book says of each what vLLM and SGLang make of it."""

from collections import Counter

import pytest

from engine_loaders.broken import VARIANTS, Checkpoint
from engine_loaders.outputs import JOBS, Loaded, Outputs
from engine_loaders.running import Engines
from engine_loaders.verdicts import Verdict, disagreements, happened

_GLM = "glm-5.2-fp8_block"
_COMPLETENESS = "whether anything is missing is what `quantkit verify` asks, not the rules"
_SURPLUS = "no rule knows all tensors of an architecture: this one is left out, and no engine says so"
_HARMLESS = "left out, as no layer of the model uses it: served rightly"
EXCEPTIONS = {
    (f"{_GLM} int4: an expert is missing", "vLLM"): _COMPLETENESS,
    (f"{_GLM} int4: an expert is missing", "SGLang"): _COMPLETENESS,
    (f"{_GLM} int4: a norm is missing", "vLLM"): _COMPLETENESS,
    (f"{_GLM} int4: a norm is missing", "SGLang"): _COMPLETENESS,
    ("llama-bf16 int4: a bias is stored", "vLLM"): _SURPLUS,
    ("llama-bf16 int4: a bias is stored", "SGLang"): _SURPLUS,
    (f"{_GLM} int4: indexer where none is", "SGLang"): _HARMLESS,
}


@pytest.fixture(scope="module")
def broken(engines: Engines, outputs: Outputs, tmp_path_factory: pytest.TempPathFactory) -> Loaded[str]:
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
    return Loaded.of(engines, folders)


@pytest.mark.parametrize("engine", JOBS)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_rule_book_agrees(broken: Loaded[str], name: str, engine: str) -> None:
    """`quantkit engines` says of a variant what happens, or the exception stands in the table."""
    found = list(disagreements(name, broken.folders[name], [broken.asked(name, engine)]))

    assert bool(found) == ((name, engine) in EXCEPTIONS), "\n".join(map(str, found))


def test_exceptions_are_of_variants() -> None:
    """No exception outlives its variant, and each has a reason."""
    assert {name for name, _ in EXCEPTIONS} <= set(VARIANTS)
    assert all(EXCEPTIONS.values())


def test_variants_are_good_and_bad(broken: Loaded[str]) -> None:
    """There are at least forty, and each engine takes some and refuses some."""
    assert len(VARIANTS) >= 40
    for engine in JOBS:
        fates = Counter(happened(broken.reports[engine], broken.jobs(name, engine))[0] for name in VARIANTS)
        assert fates[Verdict.LOADS] >= 10
        assert fates[Verdict.BROKEN] >= 20


@pytest.mark.parametrize("engine", JOBS)
def test_what_is_left_over_is_named(broken: Loaded[str], engine: str) -> None:
    """A parameter that no tensor fills is unwritten, and a tensor that no parameter holds is not taken."""
    missing, surplus = (
        broken.reports[engine][broken.jobs(name, engine)[0]]
        for name in ("glm-5.2-fp8_block int4: a norm is missing", "llama-bf16 int4: a bias is stored")
    )

    assert missing.unwritten == ["model.layers.1.input_layernorm.weight: 128 of 128 numbers"]
    assert surplus.not_taken == ["model.layers.0.mlp.down_proj.bias"]
    assert (missing.not_taken, surplus.unwritten, surplus.wrong) == ([], [], [])
