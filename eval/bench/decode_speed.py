"""`quantkit bench decode`: tokens per second of two checkpoints of one model, by number of requests, in one process.

Decode with both weights over BF16 pages; BF16 and FP8 pages in the same bytes under the candidate's weights, up to
where the pool does not hold all requests; prefill with both weights. `decode_turns` says how the arms take turns.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path

import torch

from quantkit.conversion import convert
from quantkit.errors import NotComparable, OutputError, UsageError
from quantkit.eval.bench.decode_report import DecodeReport, KvFormats, WeightBytes
from quantkit.eval.bench.decode_turns import Arm, Compared, Turns, compare_decode, compare_prefill
from quantkit.eval.bench.random_model import shape_of_size, write_random
from quantkit.models import Decoder, load
from quantkit.runtime import cache_spec, uniform_scales, unscaled
from quantkit.runtime.engine import Model
from quantkit.runtime.pages import FP8, CacheSpec
from quantkit.weights.packed import Packed

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What is timed.

    requests        at the same time, one row each
    turns           what both arms do for each row
    prefill_tokens  of the prompt by which prefill is timed
    memory          bytes of the pool in which BF16 and FP8 pages are compared; by default it holds in FP8 as many
                    requests as the last row has, and in BF16 as many as the row before it, but not those of the last
    page_size       tokens of a page
    threads         of torch; by default those it has
    """

    requests: tuple[int, ...] = (1, 8, 16, 32, 64)
    turns: Turns = field(default_factory=Turns)
    prefill_tokens: int = 1024
    memory: int | None = None
    page_size: int = 16
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.requests or min(self.requests) < 1 or list(self.requests) != sorted(set(self.requests)):
            raise UsageError("the numbers of requests must rise, from 1 or more", hint="Write --requests 1,8,16,32,64.")


def bench_decode(
    candidate: Path, baseline: Path, options: Options | None = None, tell: Tell = lambda what: None
) -> DecodeReport:
    """Time the checkpoints in two folders, both loaded at once to compute in BF16.

    Raises SourceError for one that cannot be run, and NotComparable if they are not the same model.
    """
    options = options or Options()
    if options.threads:
        torch.set_num_threads(options.threads)
    tell(f"loading {baseline} and {candidate}")
    models = load(baseline), load(candidate)
    return measure(
        models, (weigh(models[0], baseline.resolve().name), weigh(models[1], candidate.resolve().name)), options, tell
    )


def measure(
    models: tuple[Model, Model], weights: tuple[WeightBytes, WeightBytes], options: Options, tell: Tell
) -> DecodeReport:
    """Time a baseline and a candidate, whose `weights` are weighed already."""
    _require_same_model(models, weights)
    specs = _specs(models[0], options.page_size)
    names = [one.label for one in weights]
    if names[0] == names[1]:
        names = ["baseline", "candidate"]
    arms = Arm(names[0], models[0], specs.bf16), Arm(names[1], models[1], specs.bf16)
    decode = []
    for requests in options.requests:
        pages = options.turns.pages_enough(specs.bf16, requests)
        decode.append(_decode_row(arms, (pages, pages), requests, options, tell))
    kv, found = _kv_formats(models[1], specs, options, tell)
    tell(f"prefill, {options.prefill_tokens} tokens")
    prefill = compare_prefill(arms, replace(options.turns, prompt_tokens=options.prefill_tokens))
    problems = [problem for part in (*decode, *found, prefill) for problem in part.problems]
    if kv.fp8_tokens != 2 * kv.bf16_tokens:
        problems.append(f"FP8 pages hold {kv.fp8_tokens:,} tokens, not twice BF16's {kv.bf16_tokens:,}")
    return DecodeReport(
        baseline=weights[0],
        candidate=weights[1],
        valid=not problems,
        problems=tuple(problems),
        bytes_ratio=weights[0].token_bytes / weights[1].token_bytes,
        decode=tuple(part.row for part in decode),
        kv=kv,
        prefill=prefill.row,
        settings=_settings(options),
    )


def _require_same_model(models: tuple[Model, Model], weights: tuple[WeightBytes, WeightBytes]) -> None:
    one, other = (vars(model.config) for model in models)
    if differing := [key for key in one if one[key] != other[key]]:
        raise NotComparable(
            f"{weights[0].name} and {weights[1].name} are not the same model: their configs differ in {differing[0]}",
            hint="Compare a checkpoint with one that was converted from it.",
        )


def weigh(model: Decoder, name: str) -> WeightBytes:
    """The bytes of a decoder's weights, in which format most of its numbers are, and what one token reads of them.

    That is everything once, but of stacked experts only the share that is chosen, and one row of the embedding.
    """
    numbers: dict[str, int] = {}
    for weight in _weights(model.layers):
        count = weight.codes.shape[0] if _is_stacked(weight) else 1
        numbers[weight.encoding.name] = numbers.get(weight.encoding.name, 0) + count * weight.shape[0] * weight.shape[1]
    moe = model.config.moe
    chosen = Fraction(moe.top_k, moe.experts) if moe else Fraction(1)
    parts = (model.layers, model.norm, model.head)
    read = sum(_nbytes(part, chosen) for part in parts) + model.embedding[0].nbytes
    tied = model.head.weight.codes.data_ptr() == model.embedding.data_ptr()
    whole = sum(_nbytes(part, Fraction(1)) for part in parts) + (0 if tied else model.embedding.nbytes)
    return WeightBytes(name, max(numbers, key=lambda key: numbers[key]), int(whole), int(read))


@contextmanager
def random_checkpoints(folder: Path | None, nbytes: int, *, keep: bool) -> Iterator[tuple[Path, Path]]:
    """A made-up GLM of about `nbytes` in FP8, and its conversion to INT4: the folders fp8 and int4 in `folder`.

    Without `keep` both are in a new folder inside `folder`, or where temporary files are, and are deleted in the end.
    """
    if keep and folder is None:
        raise UsageError("where are the made-up checkpoints to be kept?", hint="Give --folder FOLDER.")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as temporary:
        parent = folder if keep and folder else Path(temporary)
        source, converted = parent / "fp8", parent / "int4"
        if source.exists():
            raise OutputError(
                f"{source} is there already", hint=f"quantkit bench decode {converted} --baseline {source} uses it."
            )
        write_random(source, shape_of_size(nbytes).config)
        convert(source, converted)
        yield source, converted


@dataclass(frozen=True)
class _Specs:
    """Both kinds of pages of a model."""

    bf16: CacheSpec
    fp8: CacheSpec


def _specs(model: Model, page_size: int) -> _Specs:
    config = model.config
    return _Specs(
        cache_spec(config, torch.bfloat16, page_size, unscaled(config.layers)),
        cache_spec(config, FP8, page_size, uniform_scales(config.layers, 1.0)),
    )


def _decode_row(arms: tuple[Arm, Arm], pages: tuple[int, int], requests: int, options: Options, tell: Tell) -> Compared:
    """One row, told before and after: a whole run takes minutes."""
    what = f"decode, {arms[0].name} and {arms[1].name}, {requests} requests"
    tell(what)
    found = compare_decode(arms, pages, requests, options.turns)
    tell(f"{what}: {found.row.text()}")
    return found


def _kv_formats(model: Model, specs: _Specs, options: Options, tell: Tell) -> tuple[KvFormats, Sequence[Compared]]:
    """The comparison of BF16 and FP8 pages in a pool of whole BF16 pages."""
    count = options.memory // specs.bf16.page_bytes if options.memory else _pool_pages(specs, options)
    nbytes = count * specs.bf16.page_bytes
    pages = count, nbytes // specs.fp8.page_bytes
    arms = Arm("BF16 pages", model, specs.bf16), Arm("FP8 pages", model, specs.fp8)
    found = [_decode_row(arms, pages, requests, options, tell) for requests in options.requests]
    rows = tuple(part.row for part in found)
    tokens = [number * options.page_size for number in pages]
    return KvFormats(nbytes, tokens[0], tokens[1], rows), found


def _pool_pages(specs: _Specs, options: Options) -> int:
    """BF16 pages for all rows but the last, of which any one request fits; their bytes as FP8 pages hold all of it."""
    *before, most = options.requests
    turns = options.turns
    enough = max(
        turns.pages_enough(specs.bf16, before[-1]) if before else 1,
        -(-turns.pages_enough(specs.fp8, most) // 2),
        specs.bf16.pages_for(turns.most_tokens(most)),
    )
    return max(enough, (enough + turns.pages(specs.bf16, most, at_the_end=False)) // 2)


def _settings(options: Options) -> dict[str, int]:
    turns = options.turns
    return {
        "threads": torch.get_num_threads(),
        "prompt_tokens": turns.prompt_tokens,
        "new_tokens": turns.new_tokens,
        "rounds": turns.rounds,
        "prefill_tokens": options.prefill_tokens,
        "chunk_size": turns.engine.chunk_size,
        "page_size": options.page_size,
        "seed": turns.seed,
    }


def _is_stacked(weight: Packed) -> bool:
    return weight.codes.dim() == 3


def _weights(part: object) -> Iterator[Packed]:
    """The packed weights in a part of a model."""
    if isinstance(part, Packed):
        yield part
    elif isinstance(part, tuple):
        for entry in part:
            yield from _weights(entry)
    elif is_dataclass(part):
        for part_field in fields(part):
            yield from _weights(getattr(part, part_field.name))


def _nbytes(part: object, chosen: Fraction) -> Fraction | int:
    """Bytes of a part of a model, counting the share `chosen` of stacked experts."""
    if isinstance(part, Packed):
        return part.nbytes * (chosen if _is_stacked(part) else 1)
    if isinstance(part, torch.Tensor):
        return part.nbytes
    if isinstance(part, tuple):
        return sum(_nbytes(entry, chosen) for entry in part)
    if is_dataclass(part):
        return sum(_nbytes(getattr(part, part_field.name), chosen) for part_field in fields(part))
    return 0
