"""Every family that transformers can build, in INT4 and NVFP4: its logits are those of weights decoded by numpy."""

from pathlib import Path

import pytest
import torch

from quantkit.choices import Scheme
from quantkit.conversion import Options, convert
from quantkit.naming import TensorName
from support.families import PUBLISHED, write_family
from support.reference import (
    assert_same,
    copy_readable,
    divide_experts,
    load_model,
    logits,
    quantize_inputs,
    quiet,
    write_plain,
)
from support.tiers import quick_if

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(0))
NAMES = (*PUBLISHED, "kimi-k2-thinking-bf16", "kimi-k2.5-bf16")
CASES = [
    (name, scheme)
    for name in NAMES
    for scheme in (Scheme.INT4, Scheme.NVFP4)
    if not (scheme is Scheme.INT4 and name.endswith("-int4"))  # is INT4 already
]


def is_quick(name: str, scheme: Scheme) -> bool:
    """Published families take turns; those that are published in INT4 become NVFP4."""
    return name in PUBLISHED and (name.endswith("-int4") or (PUBLISHED.index(name) % 2 == 0) == (scheme is Scheme.INT4))


@pytest.mark.parametrize(("name", "scheme"), quick_if(is_quick, CASES))
def test_a_family_gives_the_logits_of_its_weights(name: str, scheme: Scheme, tmp_path: Path) -> None:
    """As shipped, in BF16, bit for bit; nothing is missing, only MTP tensors and experts' global scales are left."""
    convert(write_family(tmp_path / "source", name), tmp_path / "converted", options=Options(scheme=scheme))
    folder = copy_readable(tmp_path / "converted", tmp_path / "output")

    with quiet():
        model, unexpected = load_model(folder, torch.bfloat16)
        reference, _ = load_model(write_plain(folder, tmp_path / "plain", torch.bfloat16), torch.bfloat16)
        divided = divide_experts(model, folder)
        quantized = quantize_inputs(reference, folder)
        actual, expected = logits(model, TOKENS), logits(reference, TOKENS)

    left = [name for name in unexpected if not TensorName.parse(name).is_mtp(2)]
    assert len(left) == divided
    assert all(".mlp.experts." in name and name.endswith(".weight_global_scale") for name in left)
    assert bool(divided) is (scheme is Scheme.NVFP4 and not name.startswith("llama"))
    assert bool(quantized) is ("-fp8_" in name)
    assert actual.std() > 0.1
    assert_same(actual, expected)
    weights = dict(model.named_parameters())
    for weight, values in reference.named_parameters():
        assert_same(weights[weight], values)
