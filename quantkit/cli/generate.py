"""`quantkit generate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.choices import IntegrityLevel, KvDtype
from quantkit.cli.options import Json, KvScale, KvScales, PageSize, parse_bytes
from quantkit.errors import CheckFailed, RequestError, UsageError

if TYPE_CHECKING:
    from quantkit.runtime.generation import Apart

Checkpoint = Annotated[Path, typer.Argument(help="The folder of a checkpoint.", show_default=False)]
Prompts = Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="A text; several run as a batch.")]
File = Annotated[
    Path | None,
    typer.Option("--prompts", help='More of them: one a line; in a .jsonl file {"prompt": ...} or {"tokens": [...]}.'),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="At most so many tokens for each prompt.")]
KvOption = Annotated[KvDtype, typer.Option("--kv", help="What the pages of the cache hold.")]
Memory = Annotated[str, typer.Option("--memory", help="Bytes of all pages: 2GiB, 500MB.")]
ChunkSize = Annotated[int, typer.Option("--chunk-size", min=1, help="Tokens of a prompt that are computed together.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 takes the most probable token.")]
TopP = Annotated[float, typer.Option("--top-p", help="Sample from the most probable tokens that make up so much.")]
Seed = Annotated[int, typer.Option("--seed", help="Of every prompt's sampling.")]
Batched = Annotated[bool, typer.Option("--batched", help="Faster: prompts share passes, which changes last bits.")]
Integrity = Annotated[
    IntegrityLevel,
    typer.Option(
        "--integrity", help="What is checked of pages before a step reads them: whose they are, or each byte."
    ),
]
PrefillFrom = Annotated[
    Path | None,
    typer.Option("--prefill-from", help="Compute prompts with this checkpoint of the same model, in other processes."),
]
PrefillKv = Annotated[KvDtype, typer.Option("--prefill-kv", help="What the pages of the prefill workers hold.")]
PrefillWorkers = Annotated[int, typer.Option("--prefill-workers", min=1, help="Processes that compute prompts.")]
DecodeWorkers = Annotated[int, typer.Option("--decode-workers", min=1, help="Processes that generate.")]
Timeout = Annotated[
    float, typer.Option("--worker-timeout", min=1, help="Seconds after which a silent worker is ended.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Put prompts into the chat template.")]


def generate(
    checkpoint: Checkpoint,
    prompts: Prompts = None,
    prompt_file: File = None,
    max_new_tokens: MaxNewTokens = 128,
    kv: KvOption = KvDtype.BF16,
    kv_scale: KvScale = None,
    kv_scales: KvScales = None,
    memory: Memory = "2GiB",
    page_size: PageSize = 64,
    chunk_size: ChunkSize = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    batched: Batched = False,
    integrity: Integrity = IntegrityLevel.TAGS,
    prefill_from: PrefillFrom = None,
    prefill_kv: PrefillKv = KvDtype.BF16,
    prefill_workers: PrefillWorkers = 1,
    decode_workers: DecodeWorkers = 1,
    worker_timeout: Timeout = 300,
    chat: Chat = False,
    as_json: Json = False,
) -> None:
    """Go on from prompts with a checkpoint, on its weights as they are stored and a paged cache.

    Examples:

    quantkit generate ./GLM-5.2-INT4 "The capital of France is"

    quantkit generate ./GLM-5.2-INT4 --chat "Who are you?" --temperature 0.6

    quantkit generate ./GLM-5.2-INT4 "Paris is" --kv fp8 --kv-scale 1.0 --prefill-from ./GLM-5.2-FP8
    """
    nbytes = parse_bytes(memory)
    if not prompts and prompt_file is None:
        raise UsageError("there is no prompt", hint='quantkit generate CHECKPOINT "The capital of France is".')
    from quantkit import console
    from quantkit.runtime import generation
    from quantkit.runtime.engine import EngineOptions
    from quantkit.runtime.generation_report import Prompt
    from quantkit.runtime.sampling import Sampling

    apart = None
    if prefill_from is not None:
        apart = _apart(
            prefill_from,
            checkpoint,
            prefill_kv,
            prefill_workers=prefill_workers,
            decode_workers=decode_workers,
            timeout=worker_timeout,
        )
    asked = [Prompt(text) for text in prompts or ()]
    asked += generation.read_prompts(prompt_file) if prompt_file else []
    streamed = len(asked) == 1 and not as_json
    report = generation.generate(
        checkpoint,
        asked,
        max_new_tokens,
        cache=generation.CacheOptions(kv, scale=kv_scale, scale_file=kv_scales, memory=nbytes, page_size=page_size),
        sampling=Sampling(temperature, top_p, seed),
        engine=EngineOptions(chunk_size, batched, integrity=integrity),
        apart=apart,
        chat=chat,
        on_text=lambda number, text: typer.echo(text, nl=False) if streamed else None,
    )
    console.show(report, as_json=as_json, printed=streamed)
    if failed := [one.error for one in report.completions if one.error]:
        kind = CheckFailed if report.num_faults else RequestError
        raise kind(f"{len(failed)} of {len(report.completions)} prompts have no answer; the first: {failed[0]}")


def _apart(
    prefill: Path, decode: Path, kv: KvDtype, *, prefill_workers: int, decode_workers: int, timeout: float
) -> "Apart":
    """Who computes the prompts; what the two checkpoints are is found out here."""
    from quantkit import console
    from quantkit.checkpoint.source import open_source
    from quantkit.planning.fingerprint import fingerprint
    from quantkit.runtime.generation import Apart
    from quantkit.runtime.handoff.coordinator import CoordinatorOptions
    from quantkit.runtime.handoff.terms import Identity

    def identify(folder: Path) -> Identity:
        with console.progress("hashing") as start:
            found = fingerprint(open_source(folder), progress=start)
        return Identity(found.config_sha256, str(found.kv_space_id))

    workers = CoordinatorOptions(prefill_workers, decode_workers, timeout=timeout)
    return Apart(prefill, kv, identify(prefill), identify(decode), workers)
