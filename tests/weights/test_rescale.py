"""Powers of two in stored weights: what the numbers become in every storage, which bytes change, what is refused."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.checkpoint.source import Source, open_source
from quantkit.errors import FoldError
from quantkit.weights.grouping import read_weights
from quantkit.weights.rescale import Patch, Powers, extent, multiplied
from quantkit.weights.rows import PIECE_BYTES, Reader
from quantkit.weights.weight import Weight
from support.checkpoints import FP8, fp8_codes, normal, write
from support.truth import truth

MODULE = "model.layers.0.self_attn.q_b_proj"
ROWS, COLUMNS = 160, 256
BY_ROW = [0] * 128 + [3] * 32
Tensors = dict[str, torch.Tensor]


def fp8(
    block: tuple[int, int] = (128, 128), rows: int = ROWS, codes: torch.Tensor | None = None, **scale: Any
) -> Tensors:
    """An FP8 weight in blocks, of codes that stay E4M3 numbers within a few powers of two."""
    grid = -(-rows // block[0]), -(-COLUMNS // block[1])
    scales = 1e-3 * (1 + torch.arange(grid[0] * grid[1], dtype=torch.float32).view(grid) / 7)
    codes = 2.0 ** (torch.arange(rows * COLUMNS) % 5).view(rows, COLUMNS) if codes is None else codes
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scales.to(scale.get("dtype", torch.float32))}


def channels() -> Tensors:
    return {"weight": fp8_codes(ROWS, COLUMNS), "weight_scale": (1 + torch.rand(ROWS, 1)).bfloat16()}


def tensor(inputs: bool = False) -> Tensors:
    static = {"input_scale": torch.tensor([0.02])} if inputs else {}
    return {"weight": fp8_codes(ROWS, COLUMNS), "weight_scale": torch.tensor([0.003]), **static}


def int4() -> Tensors:
    words = torch.randint(-(2**31), 2**31 - 1, (ROWS, COLUMNS // 8), dtype=torch.int32)
    shape = torch.tensor([ROWS, COLUMNS])
    return {"weight_packed": words, "weight_scale": normal(ROWS, COLUMNS // 32).abs() + 1e-3, "weight_shape": shape}


def nvfp4(*, modelopt: bool = False, scale: float = 32.0, inputs: bool = False) -> Tensors:
    """Block scales from 16 to 32, so that E4M3 holds them times a few powers of two."""
    codes = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    scales = (scale * (1 + torch.rand(ROWS, COLUMNS // 16)) / 2).to(torch.float8_e4m3fn)
    if modelopt:
        static = {"input_scale": torch.tensor(0.01)} if inputs else {}
        return {"weight": codes, "weight_scale": scales, "weight_scale_2": torch.tensor(0.001), **static}
    static = {"input_global_scale": torch.tensor([100.0])} if inputs else {}
    return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": torch.tensor([900.0]), **static}


def checkpoint(folder: Path, tensors: Tensors, module: str = MODULE, **config: Any) -> Source:
    named = {f"{module}.{leaf}": tensor for leaf, tensor in tensors.items()}
    return open_source(write(folder, named, quantization_config=FP8, **config))


def only(source: Source) -> Weight:
    (weight,) = read_weights(source)
    return weight


def put(source: Source, patches: Iterable[Patch]) -> dict[str, set[int]]:
    """Write the patches to the files, and say which bytes of each tensor they cover."""
    covered: dict[str, set[int]] = {}
    for patch in list(patches):
        assert source.folder is not None
        path = source.folder / patch.tensor.shard
        data, begin = bytearray(path.read_bytes()), patch.tensor.offset + patch.begin
        data[begin : begin + patch.data.nbytes] = patch.data.tobytes()
        path.write_bytes(data)
        places = covered.setdefault(patch.tensor.spec.name.rpartition(".")[2], set())
        assert places.isdisjoint(range(patch.begin, patch.begin + patch.data.nbytes))
        places.update(range(patch.begin, patch.begin + patch.data.nbytes))
    return covered


def check(source: Source, powers: Powers, fused: bool = False) -> dict[str, set[int]]:
    """The weight's numbers become what they were times the powers; the bytes that were written, by leaf."""
    assert source.folder is not None
    weight = only(source)
    before = next(iter(truth(source.folder).values()))
    covered = put(source, multiplied(Reader(source), weight, powers, fused))
    after = next(iter(truth(source.folder).values()))
    exponents = powers.full(0, len(before), before.reshape(len(before), -1).shape[1]).reshape(before.shape)
    assert np.array_equal(after, np.ldexp(before, exponents))
    told = extent(weight, powers, fused)
    written = sum(map(len, covered.values()))
    assert written == told.nbytes if not told.depends else written <= told.nbytes
    return covered


STORED = {
    "bf16": {"weight": normal(ROWS, COLUMNS)},
    "f32": {"weight": normal(ROWS, COLUMNS, dtype=torch.float32)},
    "f16": {"weight": (normal(ROWS, COLUMNS) + 2).half()},
    "fp8 blocks": fp8(),
    "fp8 blocks bf16": fp8(dtype=torch.bfloat16),
    "fp8 channels": channels(),
    "int4": int4(),
    "nvfp4": nvfp4(),
    "nvfp4 modelopt": nvfp4(modelopt=True),
}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize(
    "powers",
    [Powers.of([2]), Powers.of([-2]), Powers.of(BY_ROW), Powers.of(columns=[-1]), Powers.of(BY_ROW, [1])],
    ids=["up", "down", "rows", "columns", "both"],
)
def test_numbers_are_multiplied(name: str, powers: Powers, tmp_path: Path) -> None:
    """Exactly, whatever stores them: all rows alike, or rows from a block's border on."""
    check(checkpoint(tmp_path / "c", STORED[name]), powers)


@pytest.mark.parametrize(
    ("name", "powers", "leaves"),
    [
        ("bf16", Powers.of(BY_ROW), {"weight": range(128 * COLUMNS * 2, ROWS * COLUMNS * 2)}),
        ("fp8 blocks", Powers.of(BY_ROW), {"weight_scale_inv": range(8, 16)}),
        ("fp8 blocks", Powers.of(columns=[0] * 128 + [1] * 128), {"weight_scale_inv": [*range(4, 8), *range(12, 16)]}),
        ("fp8 channels", Powers.of(BY_ROW), {"weight_scale": range(256, 320)}),
        ("int4", Powers.of(BY_ROW), {"weight_scale": range(128 * 16, ROWS * 16)}),
        ("nvfp4", Powers.of([2]), {"weight_global_scale": range(4)}),
        ("nvfp4 modelopt", Powers.of([2]), {"weight_scale_2": range(4)}),
        ("nvfp4", Powers.of(), {}),
    ],
)
def test_only_bytes_that_must_change_are_written(
    name: str, powers: Powers, leaves: dict[str, Iterable[int]], tmp_path: Path
) -> None:
    """Rows of plain weights, scales of blocks, channels and groups, one global scale."""
    expected = {leaf: set(places) for leaf, places in leaves.items()}

    assert check(checkpoint(tmp_path / "c", STORED[name]), powers) == expected


def test_large_weights_are_read_in_pieces(tmp_path: Path) -> None:
    """Rows that change and are more than a piece come in several patches."""
    rows = 3 * PIECE_BYTES // (COLUMNS * 2) + 1
    weight = normal(rows, COLUMNS)
    source = checkpoint(tmp_path / "c", {"weight": weight})
    patches = list(multiplied(Reader(source), only(source), Powers.of([1])))

    assert [patch.data.nbytes for patch in patches] == [PIECE_BYTES] * 3 + [COLUMNS * 2]
    assert [patch.begin for patch in patches] == [0, PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES]
    expected = (2 * weight).view(torch.uint8).numpy().reshape(-1)
    assert np.array_equal(np.concatenate([patch.data for patch in patches]), expected)


def test_vectors_and_zeros(tmp_path: Path) -> None:
    """A norm's weight takes a power for each number; zero, and negative zero, stay as they are."""
    source = checkpoint(tmp_path / "c", {"weight": torch.tensor([1.5, 0.0, -0.0, -3.0]).bfloat16()})
    check(source, Powers.of([1, 5, -3, -2]))
    assert source.folder is not None

    after = next(iter(truth(source.folder).values()))
    assert after.tolist() == [3.0, 0.0, 0.0, -0.75]
    assert np.signbit(after).tolist() == [False, False, True, True]


@pytest.mark.parametrize("exponent", [2, -2])
def test_codes_take_what_a_shared_scale_cannot(exponent: int, tmp_path: Path) -> None:
    """A block whose rows take different powers keeps one scale, and its codes change, where E4M3 holds them all."""
    powers = Powers.of([0] * 100 + [exponent] * 60)
    covered = check(checkpoint(tmp_path / "c", fp8()), powers)

    assert set(covered) == {"weight", "weight_scale_inv"}
    assert covered["weight"] == set(range(128 * COLUMNS))
    check(checkpoint(tmp_path / "one", fp8((ROWS, COLUMNS)), vocab_size=1), powers)


def test_subnormal_codes_are_kept_or_refused(tmp_path: Path) -> None:
    """The smallest E4M3 number cannot be halved beside one that cannot be doubled; it can be beside smaller ones."""
    codes = torch.full((ROWS, COLUMNS), 2.0**-9)
    powers = Powers.of([0] * 100 + [-1] * 60)
    check(checkpoint(tmp_path / "small", fp8(codes=codes)), powers)

    codes[0, 0] = 448.0
    source = checkpoint(tmp_path / "c", fp8(codes=codes))
    with pytest.raises(FoldError, match=rf"{MODULE}.weight \(fp8 128x128\), row 0 on: .* E4M3 does not hold") as caught:
        list(multiplied(Reader(source), only(source), powers))
    assert "one number for the whole part" in str(caught.value.hint)


def test_fused_nvfp4_keeps_its_global_scale(tmp_path: Path) -> None:
    """Of weights that engines fuse the global scale must stay the same, so block scales change, or nothing does."""
    assert set(check(checkpoint(tmp_path / "c", nvfp4()), Powers.of([2]), fused=True)) == {"weight_scale"}

    source = checkpoint(tmp_path / "large", nvfp4(scale=400.0))
    with pytest.raises(FoldError, match=r"weight_scale \(nvfp4\)"):
        list(multiplied(Reader(source), only(source), Powers.of([2]), fused=True))
    check(source, Powers.of([2]))


@pytest.mark.parametrize(
    ("tensors", "leaf", "factor"),
    [
        (tensor(inputs=True), "input_scale", 0.25),
        (nvfp4(modelopt=True, inputs=True), "input_scale", 0.25),
        (nvfp4(inputs=True), "input_global_scale", 4.0),
    ],
)
def test_static_scales_of_activations_go_along(tensors: Tensors, leaf: str, factor: float, tmp_path: Path) -> None:
    """Columns times 4 mean that the input is a quarter: a multiplier's scale, too, and a divisor's is four times."""
    source = checkpoint(tmp_path / "c", tensors)
    stored = source.tensors[f"{MODULE}.{leaf}"]

    def number() -> float:
        return float(Reader(source).tensor_bytes(stored, 0, 4).view(np.float32)[0])

    before = number()
    check(source, Powers.of(columns=[2]))
    assert number() == before * factor
    put(source, multiplied(Reader(source), only(source), Powers.of([2])))
    assert number() == before * factor


def with_number(tensors: Tensors, leaf: str, value: float) -> Tensors:
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed[leaf].reshape(-1)[-1] = value
    return changed


@pytest.mark.parametrize(
    ("tensors", "exponent", "words"),
    [
        (with_number(STORED["bf16"], "weight", 3e38), 1, r"weight holds 3.\d*e\+38 at \[159, 255\]; times 2\^1"),
        (with_number(STORED["bf16"], "weight", 2e-38), -1, r"weight holds 2.\d*e-38 .* of BF16"),
        (with_number(STORED["f32"], "weight", 2e-38), -1, r"weight holds 2e-38 .* of F32"),
        (with_number(STORED["f16"], "weight", 40000.0), 1, r"weight holds 40000 .* of F16"),
        (with_number(STORED["f16"], "weight", 1e-4), -1, r"weight holds 0.0001.* of F16"),
        (with_number(STORED["f16"], "weight", float("nan")), -1, r"weight holds nan"),
        (with_number(STORED["fp8 blocks"], "weight_scale_inv", 2.0**119), 1, r"weight_scale_inv holds 6.64614e\+35"),
        (with_number(STORED["fp8 blocks"], "weight_scale_inv", 2.0**-126), -1, r"weight_scale_inv holds 1.17549e-38"),
        (with_number(STORED["int4"], "weight_scale", 2.0**-126), -1, r"weight_scale holds 1.17549e-38"),
    ],
)
def test_overflow_and_underflow_are_refused(tensors: Tensors, exponent: int, words: str, tmp_path: Path) -> None:
    """A number that would become infinite or subnormal is named with its tensor and place; one that stays is not."""
    source = checkpoint(tmp_path / "c", tensors)
    with pytest.raises(FoldError, match=words):
        list(multiplied(Reader(source), only(source), Powers.of([exponent])))

    list(multiplied(Reader(source), only(source), Powers.of([exponent] * 127 + [0] * 33)))


@pytest.mark.parametrize("name", ["int4", "nvfp4", "nvfp4 modelopt"])
def test_columns_of_a_group_take_one_power(name: str, tmp_path: Path) -> None:
    """Groups of a row have one scale: powers may change at a group's border, and not within."""
    by_group = Powers.of(columns=[0] * 32 + [1] * (COLUMNS - 32))
    check(checkpoint(tmp_path / "c", STORED[name]), by_group)

    source = checkpoint(tmp_path / "within", STORED[name])
    with pytest.raises(FoldError, match=rf"{MODULE}.weight\w* \(.*\) has one scale for (32|16) columns"):
        list(multiplied(Reader(source), only(source), Powers.of(columns=[0] * 31 + [1] * (COLUMNS - 31))))


def test_one_scale_of_activations_takes_one_power(tmp_path: Path) -> None:
    """A static scale of all channels of the input cannot follow columns that take different powers."""
    source = checkpoint(tmp_path / "c", nvfp4(inputs=True))
    with pytest.raises(FoldError, match="input_global_scale is one scale for all channels"):
        list(multiplied(Reader(source), only(source), Powers.of(columns=[0] * 32 + [1] * (COLUMNS - 32))))
