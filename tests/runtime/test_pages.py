"""Pages, tables and scales: what they hold, what they refuse, and what sampling depends on."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantkit.errors import CacheError, UsageError
from quantkit.families.config import DsaConfig, MlaConfig
from quantkit.models import PlainCache
from quantkit.runtime import Sampling, cache_spec, open_pool, uniform_scales, unscaled
from quantkit.runtime.allocator import Allocator
from quantkit.runtime.page_set import PageSet, export_pages
from quantkit.runtime.paged_cache import PagedCache, Segment
from quantkit.runtime.pages import FP8, PagePool
from quantkit.runtime.sampling import choose
from quantkit.runtime.scales import KvScaleFile, KvScales, LayerScales, read_scale_file, scales_by_layer
from quantkit.runtime.tables import BlockTable, prefix_hashes
from support.counting_model import CONFIG, make_pool

MLA = replace(CONFIG, layers=2, mtp_layers=1, attention=MlaConfig(4, 8, 32, 8, 64, 8, False))
GQA = replace(CONFIG, layers=2)
WRONG_SCALES = [0.0, -1.0, math.nan, math.inf]


def named(number: float = 0.5, *, layers: int = 2, letters: str = "kv") -> dict[str, float]:
    """Scales under SGLang's names."""
    return {
        f"model.layers.{layer}.self_attn.{letter}_proj.{letter}_scale": number
        for layer in range(layers)
        for letter in letters
    }


# --- allocator and tables


def test_generations_are_never_the_same() -> None:
    """A page gets a new generation, which no page ever had, when it comes into use and when its last user leaves."""
    allocator = Allocator(3)
    seen = list(allocator.generations)
    for _ in range(3):
        page = allocator.take()
        seen.append(allocator.generations[page])
        allocator.share(page)
        allocator.release(page)
        assert allocator.generations[page] == seen[-1]
        allocator.release(page)
        seen.append(allocator.generations[page])

    assert len(set(seen)) == len(seen) == 9


def test_cached_page_is_found_until_it_is_taken() -> None:
    """A page with a hash is found after its last user left, in a new generation; the oldest one goes first."""
    allocator = Allocator(2)
    pages = [allocator.take(), allocator.take()]
    for page, prefix in zip(pages, (b"a", b"b"), strict=True):
        allocator.publish(page, prefix)
        allocator.release(page)
    assert (allocator.available, allocator.cached) == (2, 2)
    assert allocator.match([b"a", b"b", b"c"]) == pages
    assert allocator.match([b"c", b"a"]) == []

    assert allocator.take() == pages[0]
    assert allocator.match([b"a"]) == []
    generation = allocator.generations[pages[1]]
    allocator.share(pages[1])
    assert allocator.generations[pages[1]] > generation
    with pytest.raises(IndexError):
        allocator.take()


def test_double_release_is_a_bug() -> None:
    """A page that nobody uses cannot be released."""
    allocator = Allocator(1)
    allocator.release(allocator.take())

    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(0)


def test_table_without_room_changes_nothing() -> None:
    """A table that cannot get all its pages gets none; released twice, it frees once."""
    pool = make_pool(3, 4)
    table = BlockTable(pool)
    assert not table.prepare(0, 13)
    assert table.pages == []
    assert table.prepare(0, 12)
    table.release()
    table.release()

    assert pool.allocator.available == 3


def test_prefix_hash_holds_all_before_it_and_the_scales() -> None:
    """A page's hash changes with any token before its end and with what the pages mean, and with nothing after."""
    specs = [
        cache_spec(MLA, FP8, 4, uniform_scales(2, scale), model) for scale, model in ((1, "a"), (0.5, "a"), (1, "b"))
    ]
    first = prefix_hashes(specs[0].digest, (1, 2, 3, 4, 5, 6, 7, 8, 9), 4)

    assert len(set(first)) == 2
    assert prefix_hashes(specs[0].digest, (1, 2, 3, 4, 5, 6, 7, 8, 10, 11), 4) == first
    assert prefix_hashes(specs[0].digest, (0, 2, 3, 4, 5, 6, 7, 8), 4)[1] != first[1]
    for other in specs[1:]:
        assert not set(prefix_hashes(other.digest, (1, 2, 3, 4, 5, 6, 7, 8), 4)) & set(first)


def test_tokens_beyond_the_pages_are_refused() -> None:
    """A request of exactly its pages' tokens works; one more, or a page that there is not, is an error with numbers."""
    pool = make_pool(8, 4)
    assert len(pool.slots((0, 7), 0, 8)) == 8

    with pytest.raises(CacheError, match="tokens 0 to 9 do not lie in 2 pages of 4"):
        PagedCache(pool, [Segment((0, 7), 8, 9)])
    with pytest.raises(CacheError, match=f"page {1 << 40} is not in a pool of 8"):
        PagedCache(pool, [Segment((0, 1 << 40), 4, 8)])


def test_rows_and_segments_must_agree() -> None:
    """A pass with another number of rows than its segments is refused before anything is written."""
    pool = make_pool(8, 4)
    cache = PagedCache(pool, [Segment((0, 1), 0, 5)])
    rows = torch.zeros(4, 1, 2)

    with pytest.raises(CacheError, match="4 rows, and its segments 5"):
        cache.append_heads(0, torch.arange(4), rows, rows)
    assert pool.tensors[0, "key"].isnan().all()


# --- pools


def test_page_bytes_are_those_of_the_tensors() -> None:
    """A pool takes as many whole pages as its memory holds, with all parts of all layers."""
    config = replace(MLA, dsa=DsaConfig(2, 16, 8, True, (True, False)))
    spec = cache_spec(config, torch.bfloat16, 16, unscaled(2))
    pool = open_pool(spec, 10 * spec.page_bytes + 5)

    assert spec.page_bytes == 16 * 2 * (96 + 16 + 96)
    assert (pool.num_pages, pool.num_tokens) == (10, 160)
    assert sum(tensor.nbytes for tensor in pool.tensors.values()) == 10 * spec.page_bytes
    assert sorted(pool.tensors) == [(0, "index"), (0, "latent"), (1, "latent")]


def test_pool_of_no_page_is_refused() -> None:
    """Memory for less than a page is refused with both sizes."""
    spec = cache_spec(MLA, torch.bfloat16, 16, unscaled(2))

    with pytest.raises(UsageError, match="100 bytes hold no page: one of 16 tokens has 6,144"):
        open_pool(spec, 100)


def test_other_specs_are_refused() -> None:
    """Other dtypes, empty pages, scales for other layers, and scales of pages that are not scaled are refused."""
    with pytest.raises(UsageError, match="pages cannot be torch"):
        cache_spec(MLA, torch.float16, 16, unscaled(2))
    with pytest.raises(UsageError, match="a page of 0 tokens"):
        cache_spec(MLA, FP8, 0, unscaled(2))
    with pytest.raises(CacheError, match="for 3 layers, and the model has 2"):
        cache_spec(MLA, FP8, 16, unscaled(3))
    with pytest.raises(CacheError, match=r"torch.bfloat16 are not scaled"):
        cache_spec(MLA, torch.bfloat16, 16, uniform_scales(2, 0.5))


@pytest.mark.parametrize("scale", [0.5, 0.3])
def test_mla_with_one_scale(scale: float) -> None:
    """In FP8 with one scale for the row, chunks and single rows attend as float32 does, within what FP8 rounds."""
    generator = torch.Generator().manual_seed(0)
    latent, key = (2 * torch.randn(20, width, generator=generator) for width in (32, 64))
    queries = torch.randn(20, 4, 32, generator=generator), torch.randn(20, 4, 64, generator=generator)
    plain, positions = PlainCache(), torch.arange(20)
    plain.append_latent(0, positions, latent, key)
    exact = plain.attend_latent(0, positions, *queries, 0.05, None)
    pool = PagePool(cache_spec(MLA, FP8, 4, uniform_scales(2, scale)), 5)
    parts = []
    for start, stop in ((0, 16), *((row, row + 1) for row in range(16, 20))):
        cache, rows = PagedCache(pool, [Segment((4, 2, 0, 3, 1), start, stop)]), slice(start, stop)
        cache.append_latent(0, positions[rows], latent[rows], key[rows])
        parts.append(cache.attend_latent(0, positions[rows], queries[0][rows], queries[1][rows], 0.05, None))

    error = (torch.cat(parts) - exact).norm() / exact.norm()
    assert 1e-3 < float(error) < 0.04
    assert pool.counts.tolist() == [0, 0, 0]


def test_gqa_with_two_scales() -> None:
    """In FP8 with different scales for keys and values, chunks and single rows attend as float32 does."""
    generator = torch.Generator().manual_seed(0)
    key, value, query = (torch.randn(12, 1, 2, generator=generator) for _ in range(3))
    plain, positions = PlainCache(), torch.arange(12)
    plain.append_heads(1, positions, key, value)
    exact = plain.attend_heads(1, positions, query, 1.0)
    scales = KvScales((LayerScales(1.0, 1.0), LayerScales(0.5, 0.03125)), "test")
    pool = PagePool(cache_spec(GQA, FP8, 4, scales), 3)
    parts = []
    for start, stop in ((0, 10), (10, 11), (11, 12)):
        cache, rows = PagedCache(pool, [Segment((2, 0, 1), start, stop)]), slice(start, stop)
        cache.append_heads(1, positions[rows], key[rows], value[rows])
        parts.append(cache.attend_heads(1, positions[rows], query[rows], 1.0))

    error = (torch.cat(parts) - exact).norm() / exact.norm()
    assert 1e-3 < float(error) < 0.0625


def test_values_beyond_fp8_are_clamped_and_counted() -> None:
    """A latent of 1000 at scale 1 is kept as 448, counted once, and never as NaN."""
    pool = PagePool(cache_spec(MLA, FP8, 4, uniform_scales(2, 1.0)), 1)
    latent = torch.zeros(1, 32)
    latent[0, 3] = 1000.0
    PagedCache(pool, [Segment((0,), 0, 1)]).append_latent(0, torch.tensor([0]), latent, torch.zeros(1, 64))

    assert float(pool.tensors[0, "latent"][0, 0, 3]) == 448.0
    assert pool.counts.tolist() == [1, 0, 0]


# --- scales


@pytest.mark.parametrize(
    "spelling",
    ["self_attn.{0}_proj.{0}_scale", "self_attn.{0}_scale", "self_attn.attn.{0}_scale", "self_attn.attn_mqa.{0}_scale"],
)
@pytest.mark.parametrize("prefix", ["model.", "language_model.model."])
def test_scales_are_found_by_layer(spelling: str, prefix: str) -> None:
    """Every spelling that publishers use gives the scale of its layer, in order."""
    scales = {f"{prefix}layers.{layer}.{spelling.format(letter)}": 0.5 + layer for layer in (1, 0) for letter in "kv"}

    assert [(one.key, one.value) for one in scales_by_layer(MLA, scales, "x").layers] == [(0.5, 0.5), (1.5, 1.5)]


def test_gqa_has_two_scales_and_mla_one() -> None:
    """Keys and values of GQA may have different scales; MLA's value scale may be left out, but not differ."""
    scales = named(0.5) | {"model.layers.1.self_attn.v_proj.v_scale": 0.25}
    assert scales_by_layer(GQA, scales, "x").layers[1].value == 0.25
    assert scales_by_layer(MLA, named(letters="k"), "x") == scales_by_layer(MLA, named(), "x")

    with pytest.raises(CacheError, match=r"k_scale is 0.5 and .*v_scale is 0.25, but MLA keeps one row for both"):
        scales_by_layer(MLA, scales, "x")


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({}, "x: layer 0 has no k_scale"),
        (named(layers=1), "x: layer 1 has no k_scale"),
        (named(letters="v"), "x: layer 0 has no k_scale"),
        (named(layers=4), r"layers.3.self_attn.k_proj.k_scale is the scale of no layer's cache"),
        (named() | {"model.k_scale": 1.0}, "model.k_scale is the scale of no layer's cache"),
        (named() | {"model.layers.0.self_attn.k_scale": 1.0}, r"k_scale is 0.5, and .*self_attn.k_scale is 1"),
        *(
            (named() | {"model.layers.1.self_attn.k_proj.k_scale": wrong}, f"k_scale is {wrong}")
            for wrong in WRONG_SCALES
        ),
    ],
)
def test_wrong_scales_are_refused(scales: dict[str, float], message: str) -> None:
    """A layer without its scale, a scale that would not be used, two for one place, and unsound ones are refused."""
    with pytest.raises(CacheError, match=message):
        scales_by_layer(MLA, scales, "x")


def test_gqa_without_value_scale_is_refused() -> None:
    """Keys' scales do not serve for values where values are kept apart."""
    with pytest.raises(CacheError, match="layer 0 has no v_scale"):
        scales_by_layer(GQA, named(letters="k"), "x")


def test_scales_of_mtp_layers_are_passed_over() -> None:
    """Layer 2 of a model of two layers and an MTP layer may have scales, which are not used."""
    assert scales_by_layer(MLA, named(layers=3), "x") == scales_by_layer(MLA, named(), "x")


@pytest.mark.parametrize("wrong", WRONG_SCALES)
def test_wrong_uniform_scale_is_refused(wrong: float) -> None:
    """Zero, negative, NaN and infinite scales are refused through the API as through files."""
    with pytest.raises(CacheError, match=f"is {wrong}, not a positive finite number"):
        uniform_scales(2, wrong)


def test_scale_file_comes_back(tmp_path: Path) -> None:
    """What is written as a file of scales is read as it was; anything else is refused by its name."""
    path = tmp_path / "scales.json"
    path.write_text(KvScaleFile(named(0.1)).to_json())
    assert read_scale_file(path) == named(0.1)

    for text in ("{", "{}", '{"schema_version": 1, "kind": "Manifest"}', "[]"):
        path.write_text(text)
        with pytest.raises(CacheError, match=r"scales.json: is no file of KV scales"):
            read_scale_file(path)


# --- page sets


def test_page_set_opens_in_an_equal_pool() -> None:
    """Pages come out of one pool and into another at other places, byte for byte."""
    spec = cache_spec(MLA, FP8, 4, uniform_scales(2, 0.5), "m")
    first, second = PagePool(spec, 6), PagePool(spec, 6)
    for tensor in first.tensors.values():
        tensor.view(torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    second.allocator.take()
    table = export_pages(first, (5, 0, 3), range(10)).open(second)

    assert table is not None
    assert table.pages == [1, 2, 3]
    for place, tensor in first.tensors.items():
        assert torch.equal(tensor[[5, 0, 3]].view(torch.uint8), second.tensors[place][1:4].view(torch.uint8))
    assert export_pages(first, (1,) * 3, range(10)).open(second) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, "dtype is torch.bfloat16, and the pool's torch.float32"),
        ({"dtype": FP8}, "dtype is torch.bfloat16, and the pool's torch.float8_e4m3fn"),
        ({"page_size": 8}, "page size is 4, and the pool's 8"),
        ({"model": "other"}, "model is m, and the pool's other"),
        ({"config": GQA}, r"layout is 0.latent 96, .*, and the pool's 0.key 1x2, "),
        (
            {"dtype": FP8, "first": FP8, "scale": 0.5},
            "digest of KV scales is [0-9a-f]{64}, and the pool's [0-9a-f]{64}",
        ),
    ],
)
def test_page_set_of_another_kind_is_refused(changes: dict[str, object], message: str) -> None:
    """Pages opened as another dtype, with other scales, sizes or weights, are refused with both values."""
    ours = cache_spec(MLA, changes.pop("first", torch.bfloat16), 4, unscaled(2), "m")  # type: ignore[arg-type]
    options = {"config": MLA, "dtype": torch.bfloat16, "page_size": 4, "scale": 1.0, "model": "m"} | changes
    options["scales"] = uniform_scales(2, options.pop("scale"))  # type: ignore[arg-type]
    pages = export_pages(PagePool(ours, 2), (0, 1), range(8))
    pool = PagePool(cache_spec(**options), 4)  # type: ignore[arg-type]

    with pytest.raises(CacheError, match=message):
        pages.open(pool)
    assert pool.allocator.available == 4


def test_unfinished_page_set_is_refused() -> None:
    """A writer that stopped after 3 of 5 pages leaves a set that neither seals nor opens."""
    pool = make_pool(8, 4)
    pages = PageSet(pool.spec, range(20))
    for number in range(3):
        pages.fill(number, pool, number)

    with pytest.raises(CacheError, match="page 3 of 5 was not filled"):
        pages.seal()
    with pytest.raises(CacheError, match="not complete: 3 of 5"):
        pages.open(pool)


# --- sampling


def test_greedy_takes_the_first_of_the_best() -> None:
    """At temperature 0 the most probable token is chosen, of equal ones the first."""
    assert choose(torch.tensor([0.0, 3.0, 3.0]), Sampling(), 0) == 1


def test_sampling_follows_the_distribution() -> None:
    """Tokens come as often as temperature and logits say, to four standard deviations."""
    logits, sampling = torch.tensor([0.0, 1.0, 2.0, -math.inf]), Sampling(temperature=2.0, seed=5)
    count = 4000
    drawn = torch.tensor([choose(logits, sampling, number) for number in range(count)]).bincount(minlength=4) / count
    wanted = torch.softmax(logits / 2.0, 0)

    assert drawn[3] == 0
    assert ((drawn - wanted).abs() <= 4 * (wanted * (1 - wanted) / count).sqrt()).all()


def test_top_p_keeps_the_fewest_that_suffice() -> None:
    """Of probabilities 0.5, 0.3 and 0.2, top-p 0.5 keeps one, 0.6 two, 1 all."""
    logits = torch.tensor([0.2, 0.5, 0.3]).double().log()
    for top_p, kept in ((0.49, {1}), (0.6, {1, 2}), (1.0, {0, 1, 2})):
        sampling = Sampling(temperature=1.0, top_p=top_p, seed=1)
        assert {choose(logits, sampling, number) for number in range(100)} == kept


def test_seed_decides() -> None:
    """Equal seeds give equal tokens, other seeds and later tokens other ones."""
    logits = torch.zeros(1000)
    first, again, other = ([choose(logits, Sampling(1.0, 1.0, seed), n) for n in range(5)] for seed in (1, 1, 2))

    assert first == again
    assert len({*first, *other}) == 10


@pytest.mark.parametrize(
    "values", [(-0.1, 1.0, 0), (math.nan, 1.0, 0), (math.inf, 1.0, 0), (1.0, 0.0, 0), (1.0, 1.1, 0), (1.0, 1.0, -1)]
)
def test_impossible_sampling_is_refused(values: tuple[float, float, int]) -> None:
    """Negative temperatures, probabilities beyond 0 to 1 and negative seeds are refused."""
    with pytest.raises(UsageError):
        Sampling(*values)
