"""Every family in every storage becomes INT4, NVFP4 or BF16, checked by a plain numpy reader that shares no code."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit.choices import Dialect, Rest, Scheme
from quantkit.conversion import Options, convert
from quantkit.errors import PlanError
from quantkit.naming import TensorName
from support.families import DIAGONAL, FAMILIES, NAMES, PUBLISHED, STORED
from support.runnable import Checkpoint
from support.tiers import quick_if
from support.truth import E2M1, Array, numbers, read_tensors, truth

MODELOPT = Options(scheme=Scheme.NVFP4, dialect=Dialect.MODELOPT)
TARGETS = {"int4": Options(scheme=Scheme.INT4), "nvfp4": Options(scheme=Scheme.NVFP4), "modelopt": MODELOPT}
CODES = {"int4": np.arange(-8.0, 8.0), "nvfp4": E2M1, "modelopt": E2M1}
BF16_UNIT = 2.0**-8 * (1 + 2.0**-15)  # half a unit in the last place, after a product in float32


def refusal(name: str, target: str) -> str | None:
    """What a conversion that cannot be is refused with."""
    storage = name.rpartition("-")[2]
    if storage.startswith("nvfp4"):
        if target == "int4":
            return "rounded twice"
        dense = name.startswith("llama")
        if storage == "nvfp4_modelopt" and (target == "nvfp4" or dense):
            return "would mix"  # W4A4, and what was BF16 without activation scales
        if storage == "nvfp4_modelopt_w4a16" and target == "nvfp4" and not dense:
            return "SGLang joins its global scale"  # q_a and kv_a stay NVFP4
        same = ("modelopt" in storage) == (target == "modelopt")
        return "already converted" if same and (dense or target == "nvfp4") else None
    if storage == "int4_all" and target == "nvfp4" and not name.startswith("llama"):
        return "would mix"  # attention stays INT4
    if storage == "int4_all" and target == "int4" and not name.startswith("llama"):
        return "SGLang joins its weight_shape"
    return "already converted" if _is_native(name) and target == "int4" else None


def options(name: str, target: str) -> Options:
    """Those of a target, with a BF16 rest where SGLang could not load the indexer in FP8 without blocks."""
    family, _, storage = name.rpartition("-")
    blockless = storage.startswith(("fp8_channel", "fp8_tensor", "autofp8", "modelopt_fp8"))
    return replace(TARGETS[target], rest=Rest.BF16) if blockless and family == "glm-5.2" else TARGETS[target]


def _is_native(name: str) -> bool:
    family, _, storage = name.rpartition("-")
    return storage == "int4" or (storage == "int4_all" and family.startswith("llama"))


def quantized(folder: Path) -> dict[str, tuple[str, Array]]:
    """Of each 4-bit weight the format, and the distance between two codes of each number's group."""
    stored = read_tensors(folder)
    found = {}
    for name, (dtype, data) in stored.items():
        module, _, leaf = name.rpartition(".")
        if leaf not in ("weight", "weight_packed") or dtype not in ("I32", "U8"):
            continue
        step = numbers(*stored[f"{module}.weight_scale"])
        if f"{module}.weight_global_scale" in stored:
            step = step / numbers(*stored[f"{module}.weight_global_scale"])
        elif f"{module}.weight_scale_2" in stored:
            step = step * numbers(*stored[f"{module}.weight_scale_2"])
        columns = data.shape[1] * (8 if dtype == "I32" else 2)
        found[f"{module}.weight"] = ("int4" if dtype == "I32" else "nvfp4", step.repeat(columns // step.shape[1], 1))
    return found


def assert_nearest(name: str, before: Array, after: Array, codes: Array, step: Array) -> None:
    """No code is nearer to a number than its own."""
    grid = np.unique(codes)  # in order, and -0 is 0
    ratio = np.divide(before, step, out=np.zeros_like(before), where=step != 0)
    nearest = grid[np.searchsorted((grid[1:] + grid[:-1]) / 2, ratio)]
    worse = np.abs(before - after) - np.abs(before - nearest * step) > 1e-9 * np.abs(before)
    assert not worse.any(), f"{name}: {worse.sum()} codes are not the nearest"


def is_quick(name: str, target: str) -> bool:
    """The published checkpoints and all storages of one family take turns."""
    return name in DIAGONAL and NAMES.index(name) % 3 == list(TARGETS).index(target)


@pytest.mark.parametrize(("name", "target"), quick_if(is_quick, itertools.product(NAMES, TARGETS)))
def test_a_family_becomes_four_bits(checkpoint: Checkpoint, tmp_path: Path, name: str, target: str) -> None:
    """Codes are nearest ones, other weights are kept or rounded to BF16, none is lost, `verify` agrees."""
    source, output = checkpoint(name), tmp_path / "output"
    if words := refusal(name, target):
        with pytest.raises(PlanError, match=words):
            convert(source, output, options=options(name, target))
        assert not output.exists()
        return
    convert(source, output, options=options(name, target))

    before, after = truth(source), truth(output)
    assert before.keys() == after.keys()
    was, now = quantized(source), quantized(output)
    assert now, "nothing is quantized"
    for weight, values in before.items():
        made = weight in now and (weight not in was or now[weight][0] != was[weight][0])
        if made:
            assert_nearest(weight, values, after[weight], CODES[target], now[weight][1])
        elif weight in now:
            np.testing.assert_allclose(after[weight], values, rtol=2**-23)  # a global scale that is no power of two
        else:
            assert (np.abs(after[weight] - values) <= np.abs(values) * BF16_UNIT).all(), weight
    report = quantkit.verify(output, source)
    assert report.passed, [check for check in report.checks if check.problems]


@pytest.mark.parametrize("name", quick_if(PUBLISHED.__contains__, NAMES))
def test_a_family_is_decoded(checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """Every storage decodes to BF16: numbers that BF16 holds are kept, others rounded to the nearest."""
    source, output = checkpoint(name), tmp_path / "output"
    convert(source, output, "bf16")

    before, after = truth(source), truth(output)
    assert before.keys() == after.keys()
    for weight, values in before.items():
        assert (np.abs(after[weight] - values) <= np.abs(values) * BF16_UNIT).all(), weight
    assert "U8" not in {dtype for dtype, _ in read_tensors(output).values()}
    assert quantkit.verify(output, source).passed


@pytest.mark.parametrize("name", quick_if(PUBLISHED.__contains__, STORED))
def test_the_output_does_not_depend_on_the_number_of_workers(checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """One worker and three write the same bytes, global scales of partners in other shards included."""
    if refusal(name, "nvfp4"):
        return
    for workers in (1, 3):
        convert(checkpoint(name), tmp_path / str(workers), options=options(name, "nvfp4"), workers=workers)

    for path in (tmp_path / "1").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "3" / path.name).read_bytes()


SHARING = [f"{family}-bf16" for family in FAMILIES] + ["glm-5.2-fp8_block", "kimi-k2.5-int4"]


@pytest.mark.parametrize(
    ("name", "target"),
    quick_if(
        lambda name, target: target == "nvfp4" and name in PUBLISHED, itertools.product(SHARING, ["nvfp4", "modelopt"])
    ),
)
def test_fused_partners_share_one_global_scale(checkpoint: Checkpoint, tmp_path: Path, name: str, target: str) -> None:
    """It is a power of two, the same for all parts of a fused projection, and not the same for all projections."""
    convert(checkpoint(name), tmp_path / "output", options=options(name, target))

    scales: dict[str, set[float]] = {}
    for tensor, (_, data) in read_tensors(tmp_path / "output").items():
        if tensor.endswith(("weight_global_scale", "weight_scale_2")):
            parsed = TensorName.parse(tensor)
            scales.setdefault(parsed.fused_projection or parsed.module, set()).add(float(data.reshape(())))
    assert all(len(found) == 1 for found in scales.values())
    assert all(np.frexp(next(iter(found)))[0] == 0.5 for found in scales.values())
