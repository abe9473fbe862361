"""`quantkit generate`: text from a checkpoint, all prompts as one batch through the engine."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from quantkit.capacity.layouts import KvDtype
from quantkit.errors import RequestError, UsageError
from quantkit.models.decoder import Decoder
from quantkit.models.loading import load
from quantkit.report import Report
from quantkit.runtime.engine import Engine, EngineOptions
from quantkit.runtime.pages import FP8, PagePool, cache_spec, open_pool
from quantkit.runtime.requests import Counters, Event
from quantkit.runtime.sampling import GREEDY, Sampling
from quantkit.runtime.scales import KvScales, LayerScales, read_scale_file, scales_by_layer, uniform_scales, unscaled
from quantkit.runtime.tokenizer import TextStream, Tokenizer, stop_tokens

OnText = Callable[[int, str], None]


@dataclass(frozen=True)
class CacheOptions:
    """The pool.

    scale       of all layers of an FP8 cache
    scale_file  the file of an FP8 cache's scales
    memory      bytes of all pages
    page_size   tokens of a page
    """

    kv: KvDtype = KvDtype.BF16
    scale: float | None = None
    scale_file: Path | None = None
    memory: int = 2 << 30
    page_size: int = 64


@dataclass(frozen=True)
class Prompt:
    """A text, or tokens where there is none."""

    text: str | None = None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Generated:
    """What came of a prompt.

    text    None where the prompt was given as tokens
    finish  stop, length, failed, or refused: it could never fit
    """

    prompt: Prompt
    prompt_tokens: int
    text: str | None
    tokens: tuple[int, ...]
    finish: str
    error: str | None


@dataclass(frozen=True)
class GenerationReport(Report):
    """What a checkpoint said, and how its cache was kept.

    pool_tokens       that fit into the pages
    kv_scale_source   where the scales of an FP8 cache are from
    kv_scales         the scales used, one entry for each layer of an FP8 cache
    saturated, nan    values written to the cache that were beyond E4M3's range, and that were no numbers
    counters          what the engine did
    """

    checkpoint: str
    kv: str
    page_size: int
    pages: int
    pool_tokens: int
    kv_scale_source: str
    kv_scales: tuple[LayerScales, ...]
    saturated: int
    nan: int
    completions: tuple[Generated, ...]
    counters: dict[str, int]
    warnings: tuple[str, ...]


def generate(
    checkpoint: str | Path,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    cache: CacheOptions | None = None,
    sampling: Sampling = GREEDY,
    engine: EngineOptions | None = None,
    chat: bool = False,
    on_text: OnText = lambda number, text: None,
) -> GenerationReport:
    """Go on from `prompts` with the checkpoint in a folder.

    chat     put texts into the checkpoint's chat template, as a user's message
    on_text  is told each piece of text when it comes, with the prompt's number

    Raises SourceError for a checkpoint that cannot be run, CacheError for missing or unsound KV scales, UsageError for
    options that do not go together. A prompt that can never fit is reported as refused, and the others go on.
    """
    folder, cache = Path(checkpoint), cache or CacheOptions()
    tokenizer = Tokenizer(folder) if any(prompt.text is not None for prompt in prompts) else None
    decoder = load(folder)
    scales = cache_scales(decoder, cache)
    dtype = FP8 if cache.kv is KvDtype.FP8 else torch.bfloat16
    pool = open_pool(cache_spec(decoder.config, dtype, cache.page_size, scales, str(folder.resolve())), cache.memory)
    runner = Engine(decoder, pool, engine)
    asked = [_submit(runner, prompt, tokenizer, max_new_tokens, sampling, folder, chat) for prompt in prompts]
    streams = {one.number: TextStream(tokenizer) for one in asked if tokenizer and one.prompt.text is not None}
    places = {one.number: place for place, one in enumerate(asked)}

    def tell(event: Event) -> None:
        if event.token is not None and event.request in streams:
            on_text(places[event.request], streams[event.request].push(event.token, last=event.finish is not None))

    runner.run(tell)
    completions = tuple(_generated(runner, one, tokenizer) for one in asked)
    return _report(str(checkpoint), cache, pool, completions, runner.counters, bool(decoder.kv_scales))


def cache_scales(decoder: Decoder, options: CacheOptions) -> KvScales:
    """The scales of a cache: of the checkpoint, a file, or one number; exactly one of them. BF16 pages have none."""
    layers = decoder.config.layers
    given = [option for option in (options.scale, options.scale_file) if option is not None]
    if options.kv is not KvDtype.FP8:
        if given:
            raise UsageError("KV scales are for an FP8 cache", hint="Add --kv fp8.")
        return unscaled(layers)
    if len(given) + bool(decoder.kv_scales) > 1:
        raise UsageError(
            "the KV scales are given twice: by the checkpoint, --kv-scale or --kv-scales",
            hint="Give them once; a checkpoint's are always used.",
        )
    if options.scale is not None:
        return uniform_scales(layers, options.scale)
    if options.scale_file:
        return scales_by_layer(decoder.config, read_scale_file(options.scale_file), str(options.scale_file))
    return scales_by_layer(decoder.config, decoder.kv_scales, "the checkpoint")


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts in a file: a text on each line, or of a .jsonl file {"prompt": "..."} or {"tokens": [...]}."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    if path.suffix != ".jsonl":
        return [Prompt(line) for line in lines]
    return [_parse(line, f"{path}: line {number}") for number, line in enumerate(lines, start=1)]


def _parse(line: str, where: str) -> Prompt:
    try:
        content = json.loads(line)
        if "tokens" in content:
            return Prompt(tokens=tuple(map(int, content["tokens"])))
        return Prompt(str(content["prompt"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{where} is neither a prompt nor tokens: {error}") from error


@dataclass(frozen=True)
class _Asked:
    """A prompt with its tokens, and its number in the engine or why it was refused."""

    prompt: Prompt
    tokens: tuple[int, ...]
    number: int | None
    error: RequestError | None


def _submit(
    engine: Engine,
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    max_new_tokens: int,
    sampling: Sampling,
    folder: Path,
    chat: bool,
) -> _Asked:
    tokens = prompt.tokens
    if prompt.text is not None:
        assert tokenizer is not None
        tokens = tuple((tokenizer.encode_chat if chat else tokenizer.encode)(prompt.text))
    try:
        return _Asked(prompt, tokens, engine.submit(tokens, max_new_tokens, sampling, stop_tokens(folder)), None)
    except RequestError as error:
        return _Asked(prompt, tokens, None, error)


def _generated(engine: Engine, asked: _Asked, tokenizer: Tokenizer | None) -> Generated:
    if asked.number is None:
        return Generated(asked.prompt, len(asked.tokens), None, (), "refused", str(asked.error))
    done = engine.take(asked.number)
    text = None
    if asked.prompt.text is not None:
        assert tokenizer is not None
        text = tokenizer.decode(done.tokens)
    error = str(done.error) if done.error else None
    return Generated(asked.prompt, len(asked.tokens), text, done.tokens, done.finish, error)


def _report(
    checkpoint: str,
    cache: CacheOptions,
    pool: PagePool,
    completions: tuple[Generated, ...],
    counters: Counters,
    has_scales: bool,
) -> GenerationReport:
    saturated, nan, _ = pool.counts.tolist()
    scaled = cache.kv is KvDtype.FP8
    warnings = []
    if saturated:
        warnings.append(f"{saturated:,} values were beyond what FP8 holds with these KV scales, and were clamped")
    if nan:
        warnings.append(f"{nan:,} values written to the KV cache are not numbers")
    if has_scales and not scaled:
        warnings.append("the checkpoint's KV scales are not used: BF16 pages need none")
    return GenerationReport(
        checkpoint=checkpoint,
        kv=cache.kv,
        page_size=cache.page_size,
        pages=pool.num_pages,
        pool_tokens=pool.num_tokens,
        kv_scale_source=pool.spec.scales.source,
        kv_scales=pool.spec.scales.layers if scaled else (),
        saturated=saturated,
        nan=nan,
        completions=completions,
        counters=asdict(counters),
        warnings=tuple(warnings),
    )
