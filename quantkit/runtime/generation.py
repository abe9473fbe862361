"""`quantkit generate`: text from a checkpoint, all prompts as one batch through the engine."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from quantkit.choices import KvDtype
from quantkit.errors import RequestError, UsageError
from quantkit.models.loading import load
from quantkit.runtime.cache_options import CacheOptions as CacheOptions
from quantkit.runtime.cache_options import cache_scales as cache_scales
from quantkit.runtime.cache_options import open_cache
from quantkit.runtime.engine import Engine, EngineOptions
from quantkit.runtime.generation_report import Generated, GenerationReport, Prompt
from quantkit.runtime.handoff.coordinator import Coordinator, CoordinatorOptions
from quantkit.runtime.handoff.counters import HandoffReport
from quantkit.runtime.handoff.terms import Identity
from quantkit.runtime.handoff.worker import Role, WorkerSettings
from quantkit.runtime.integrity.counters import IntegrityReport
from quantkit.runtime.pages import CacheSpec
from quantkit.runtime.requests import Completion, Event
from quantkit.runtime.sampling import GREEDY, Sampling
from quantkit.runtime.tokenizer import TextStream, Tokenizer, stop_tokens

OnText = Callable[[int, str], None]


@dataclass(frozen=True)
class Apart:
    """Prompts are computed in processes of their own, with another checkpoint of the same model.

    checkpoint        its folder
    kv                what its pages hold
    prefill, decode   what that checkpoint is, and the one that generates
    """

    checkpoint: Path
    kv: KvDtype
    prefill: Identity
    decode: Identity
    workers: CoordinatorOptions


class _Server(Protocol):
    """What an engine and a coordinator have in common."""

    def submit(self, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, stop: Iterable[int]) -> int: ...

    def run(self, on_event: Callable[[Event], None]) -> None: ...

    def take(self, number: int) -> Completion: ...


@dataclass(frozen=True)
class _Kept:
    """How the cache was kept, and what was counted."""

    spec: CacheSpec
    num_pages: int
    has_scales: bool
    saturated: int
    nan: int
    counters: dict[str, int]
    integrity: IntegrityReport | None = None
    handoff: HandoffReport | None = None


def generate(
    checkpoint: str | Path,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    cache: CacheOptions | None = None,
    sampling: Sampling = GREEDY,
    engine: EngineOptions | None = None,
    apart: Apart | None = None,
    chat: bool = False,
    on_text: OnText = lambda number, text: None,
) -> GenerationReport:
    """Go on from `prompts` with the checkpoint in a folder.

    apart    who computes the prompts, if not this process
    chat     put texts into the checkpoint's chat template, as a user's message
    on_text  is told each piece of text when it comes, with the prompt's number

    Raises SourceError for a checkpoint that cannot be run, CacheError for missing or unsound KV scales, UsageError for
    options that do not go together, HandoffError for two checkpoints that do not. A prompt that can never fit is
    reported as refused, and the others go on.
    """
    folder, cache, engine = Path(checkpoint), cache or CacheOptions(), engine or EngineOptions()
    tokenizer = Tokenizer(folder) if any(prompt.text is not None for prompt in prompts) else None
    opened = _open_workers(folder, cache, engine, apart) if apart else _open_engine(folder, cache, engine)
    with opened as (server, kept):
        asked = [_submit(server, prompt, tokenizer, max_new_tokens, sampling, folder, chat) for prompt in prompts]
        streams = {one.number: TextStream(tokenizer) for one in asked if tokenizer and one.prompt.text is not None}
        places = {one.number: place for place, one in enumerate(asked)}

        def tell(event: Event) -> None:
            if event.token is not None and event.request in streams:
                on_text(places[event.request], streams[event.request].push(event.token, last=event.finish is not None))

        server.run(tell)
        completions = tuple(_generated(server, one, tokenizer) for one in asked)
        return _report(str(checkpoint), cache, kept(), completions)


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
    server: _Server,
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
        return _Asked(prompt, tokens, server.submit(tokens, max_new_tokens, sampling, stop_tokens(folder)), None)
    except RequestError as error:
        return _Asked(prompt, tokens, None, error)


def _generated(server: _Server, asked: _Asked, tokenizer: Tokenizer | None) -> Generated:
    if asked.number is None:
        return Generated(asked.prompt, len(asked.tokens), None, (), "refused", str(asked.error))
    done = server.take(asked.number)
    text = None
    if asked.prompt.text is not None:
        assert tokenizer is not None
        text = tokenizer.decode(done.tokens)
    error = str(done.error) if done.error else None
    return Generated(asked.prompt, len(asked.tokens), text, done.tokens, done.finish, error)


@contextmanager
def _open_engine(
    folder: Path, cache: CacheOptions, options: EngineOptions
) -> Iterator[tuple[_Server, Callable[[], _Kept]]]:
    """An engine in this process, and what says how its cache was kept."""
    decoder = load(folder)
    pool = open_cache(decoder, cache, str(folder.resolve()))
    engine = Engine(decoder, pool, options)

    def kept() -> _Kept:
        saturated, nan, _ = pool.counts.tolist()
        checked = engine.tracker.report if engine.tracker else None
        return _Kept(
            spec=pool.spec,
            num_pages=pool.num_pages,
            has_scales=bool(decoder.kv_scales),
            saturated=saturated,
            nan=nan,
            counters=asdict(engine.counters),
            integrity=checked,
        )

    yield engine, kept


@contextmanager
def _open_workers(
    folder: Path, cache: CacheOptions, options: EngineOptions, apart: Apart
) -> Iterator[tuple[_Server, Callable[[], _Kept]]]:
    """Workers of both kinds; scales are for FP8 pages, whoever has them."""
    theirs = replace(cache, kv=apart.kv)
    if apart.kv is not KvDtype.FP8:
        theirs = replace(theirs, scale=None, scale_file=None)
    prefill = WorkerSettings(Role.PREFILL, apart.checkpoint, apart.prefill, theirs, options)
    decode = WorkerSettings(Role.DECODE, folder, apart.decode, cache, options)
    with Coordinator(prefill, decode, apart.workers) as coordinator:

        def kept() -> _Kept:
            done, ready = coordinator.report(), coordinator.decode
            return _Kept(
                spec=ready.spec,
                num_pages=ready.num_pages,
                has_scales=ready.has_scales,
                saturated=done.saturated,
                nan=done.nan,
                counters={},
                handoff=done,
            )

        yield coordinator, kept


def _report(checkpoint: str, cache: CacheOptions, kept: _Kept, completions: tuple[Generated, ...]) -> GenerationReport:
    scaled = cache.kv is KvDtype.FP8
    warnings = []
    if kept.saturated:
        warnings.append(f"{kept.saturated:,} values were beyond what FP8 holds with these KV scales, and were clamped")
    if kept.nan:
        warnings.append(f"{kept.nan:,} values written to the KV cache are not numbers")
    if kept.has_scales and not scaled:
        warnings.append("the checkpoint's KV scales are not used: BF16 pages need none")
    return GenerationReport(
        checkpoint=checkpoint,
        kv=cache.kv,
        page_size=cache.page_size,
        pages=kept.num_pages,
        pool_tokens=kept.num_pages * cache.page_size,
        kv_scale_source=kept.spec.scales.source,
        kv_scales=kept.spec.scales.layers if scaled else (),
        saturated=kept.saturated,
        nan=kept.nan,
        completions=completions,
        counters=kept.counters,
        warnings=tuple(warnings),
        integrity=kept.integrity,
        handoff=kept.handoff,
    )
