"""The gate through quantkit's own runtime: transformers' numbers, packed weights, pages of any kind, faults seen."""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.choices import KvDtype
from quantkit.errors import CacheError, RequestError, SourceError, UsageError
from quantkit.eval.gate import accuracy, loading, paged_model
from quantkit.eval.gate.evaluation import Options, evaluate
from quantkit.eval.gate.loading import Loaded
from quantkit.eval.gate.markdown import gate_table
from quantkit.eval.gate.observed import observe
from quantkit.eval.gate.paged_model import PagedModel
from quantkit.eval.gate.report import AccuracyReport, Verdict
from quantkit.eval.gate.runs import Fault, TaskRun
from quantkit.eval.gate.task_specs import TaskSpec
from quantkit.models import load as load_decoder
from quantkit.runtime.cache_options import CacheOptions
from quantkit.runtime.paged_cache import PagedCache, Segment
from quantkit.runtime.pages import PagePool, cache_spec
from quantkit.runtime.scales import KvScaleFile, uniform_scales, unscaled
from quantkit.runtime.tokenizer import stop_tokens

TaskMaker = Callable[..., TaskSpec]
FP8 = CacheOptions(KvDtype.FP8, 1.0)

pytestmark = pytest.mark.usefixtures("harness", "one_thread")


def paged(folder: Path, dtype: torch.dtype = torch.float32) -> PagedModel:
    """A checkpoint over pages of a dtype, FP8 ones at scale 1."""
    decoder = load_decoder(folder, torch.float32)
    layers = decoder.config.layers
    scales = uniform_scales(layers, 1.0) if dtype is torch.float8_e4m3fn else unscaled(layers)
    return PagedModel(decoder, cache_spec(decoder.config, dtype, 16, scales), stop_tokens(folder))


@pytest.fixture(scope="module")
def paged_llama(llama_folder: Path, llama: Loaded) -> Loaded:
    """The random Llama over float32 pages; not to be changed."""
    return Loaded(paged(llama_folder), llama.tokenizer)


@pytest.fixture
def judge(glm_tiny: Path) -> Callable[..., AccuracyReport]:
    """The gate's report through the runtime, on 128 tokens of held-out text and such options."""

    def run(candidate: Path, baseline: Path, history: Path | None = None, **options: Any) -> AccuracyReport:
        on_text = {"text": glm_tiny / "heldout.txt", "window": 64, "max_tokens": 128}
        return evaluate(candidate, baseline, Options(**(on_text | options), backend="runtime"), history=history)

    return run


def run_task(spec: TaskSpec, loaded: Loaded, folder: Path) -> TaskRun:
    """Load the task and run it."""
    tasks = accuracy.load_tasks([spec])
    settings = [accuracy.run_settings(tasks[0], folder, loaded.tokenizer)]
    return accuracy.run_tasks(tasks, loaded, settings, seed=0)[0]


# --- the model over pages


def test_logits_are_those_of_transformers(
    llama: Loaded, llama_folder: Path, glm_tiny_converted: dict[str, Path]
) -> None:
    """On weights that both read, and pages that round nothing, logits differ by at most 1e-4 of the largest."""
    tokens = torch.arange(96).view(2, 48) * 5 % 512

    for model, folder in (
        (llama.model, llama_folder),
        (loading.load(glm_tiny_converted["bf16"]).model, glm_tiny_converted["bf16"]),
    ):
        with torch.inference_mode():
            expected, found = model(tokens).logits, paged(folder)(tokens).logits
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_scoring_sees_what_decoding_sees(llama_folder: Path, dtype: torch.dtype) -> None:
    """A window that is scored in one pass has the logits of the same tokens one by one over the same pages."""
    model = paged(llama_folder, dtype)
    tokens = torch.arange(40) * 7 % 512
    pool = PagePool(model._spec, 3)
    steps = []
    for place in range(40):
        cache, given = PagedCache(pool, [Segment((2, 0, 1), place, place + 1)]), torch.tensor([place])
        steps.append(model._decoder.logits(model._decoder.forward(tokens[place : place + 1], given, cache)))
    one_by_one = torch.cat(steps)

    found = model(tokens.unsqueeze(0)).logits[0]

    assert (found - one_by_one).abs().max() <= 1e-3 * found.abs().max()
    rounding = (paged(llama_folder)(tokens.unsqueeze(0)).logits[0] - found).abs().max()
    assert rounding > 5 * (found - one_by_one).abs().max()  # so that pages that are not read would show


def test_company_and_chunks_change_nothing(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, glm_tiny_converted: dict[str, Path]
) -> None:
    """Requests of several lengths that share passes, and long ones in chunks, get the logits that they get alone."""
    model = paged(glm_tiny_converted["glm-5.2-int4"])
    requests = [
        [(number * 31 + place * 3) % 512 for place in range(length)] for number, length in enumerate((9, 40, 1))
    ]
    alone = [next(model.last_logits([tokens], [len(tokens)])) for tokens in requests]
    together = list(model.last_logits(requests, [4, 40, 1]))
    monkeypatch.setattr(paged_model, "_PASS_TOKENS", 20)
    monkeypatch.setattr(paged_model, "_CHUNK_TOKENS", 7)
    chunked = list(model.last_logits(requests, [4, 40, 1]))

    for expected, *others in zip(alone, together, chunked, strict=True):
        for found in others:
            assert (found - expected[-len(found) :]).abs().max() <= 1e-4 * expected.abs().max()


# --- the harness over it


def ask(loaded: Loaded, kind: str, *arguments: Any) -> Any:
    """What the harness's model answers to such requests."""
    from lm_eval.api.instance import Instance

    model, _ = observe(loaded)
    requests = [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]
    return getattr(model, kind)(requests, disable_tqdm=True)


def test_likelihoods_are_those_of_transformers(llama: Loaded, paged_llama: Loaded) -> None:
    """Of continuations, equal contexts, ones that are cut, and none; and of whole texts longer than the model."""
    asked = [("The cat", " sat"), ("The cat", " sat on"), ("", "Nothing"), ("word " * 200, "more"), ("The cat", " sat")]
    texts = [("word and another " * 80,), ("short",)]

    for kind, requests in (("loglikelihood", asked), ("loglikelihood_rolling", texts)):
        expected, found = (torch.tensor(ask(loaded, kind, *requests)) for loaded in (llama, paged_llama))
        assert torch.allclose(found, expected, rtol=1e-4)


def test_answers_are_those_of_transformers(llama: Loaded, paged_llama: Loaded) -> None:
    """Greedy answers are the same, cut at stop sequences, at tokens that end them, and at the cap."""
    prompts = [f"Question {number}:" for number in range(6)] + ["word " * 200]
    free = ask(llama, "generate_until", *((text, {"until": [], "max_gen_toks": 12}) for text in prompts))
    stop = free[0].strip()[2:5]
    asked = [(text, {"until": [stop], "max_gen_toks": 12}) for text in prompts]

    expected, found = (ask(loaded, "generate_until", *asked) for loaded in (llama, paged_llama))

    assert found == expected
    assert found[0] != free[0]


def test_task_items_are_those_of_transformers(
    llama: Loaded, paged_llama: Loaded, llama_folder: Path, make_task: TaskMaker
) -> None:
    """A task of the harness has the same prompts, documents, scores and faults by both backends."""
    for generates in (False, True):
        runs = [run_task(make_task(items=6, generates=generates), each, llama_folder) for each in (llama, paged_llama)]
        assert runs[0].items == runs[1].items


@pytest.mark.parametrize("generates", [False, True])
def test_prompts_that_are_cut_are_seen(
    paged_llama: Loaded, llama_folder: Path, make_task: TaskMaker, generates: bool
) -> None:
    """Prompts over the model's 128 tokens are faults, whether answers are scored or generated."""
    text = "{% if question == 'Question 1' %}" + "word " * 200 + "{% endif %}{{question}}:"

    found = run_task(make_task(items=3, doc_to_text=text, generates=generates), paged_llama, llama_folder)

    assert [Fault.PROMPT_CUT in item.faults for item in found.items] == [False, True, False]


def test_answers_over_the_cap_are_seen(paged_llama: Loaded, llama_folder: Path, make_task: TaskMaker) -> None:
    """A random model, which does not know how to end, is cut by a cap of two tokens; one that says nothing is empty."""
    task = make_task(generates=True, items=4, generation_kwargs={"until": ["\n"], "max_gen_toks": 2})
    assert Fault.ANSWER_CUT in run_task(task, paged_llama, llama_folder).items[0].faults

    first = [ask(paged_llama, "generate_until", ("Question 0:", {"until": [], "max_gen_toks": 1}))[0]]
    task = make_task(generates=True, items=1, generation_kwargs={"until": first, "max_gen_toks": 2})
    assert run_task(task, paged_llama, llama_folder).items[0].faults == (Fault.EMPTY,)


def test_logits_that_are_no_numbers_are_seen(llama_folder: Path, llama: Loaded, make_task: TaskMaker) -> None:
    """With a NaN in the weights likelihoods are faults, and there is nothing to generate."""
    broken = Loaded(paged(llama_folder), llama.tokenizer)
    broken.model._decoder.norm.weight[0] = torch.nan

    assert {item.faults for item in run_task(make_task(), broken, llama_folder).items} == {(Fault.NOT_A_NUMBER,)}
    with pytest.raises(RequestError, match="are not numbers"):
        run_task(make_task(generates=True), broken, llama_folder)


def test_sampling_is_seeded_or_refused(paged_llama: Loaded, llama_folder: Path, make_task: TaskMaker) -> None:
    """Temperature and top-p are known, and drawn by the run's seed; what is not known is named."""
    sampled = {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    greedy, first, again = (
        run_task(make_task(generates=True, items=3, generation_kwargs=each), paged_llama, llama_folder).items
        for each in ({"until": ["\n"], "max_gen_toks": 8}, sampled, sampled)
    )
    assert first == again
    assert len(greedy) == len(first)

    unknown = {"until": ["\n"], "max_gen_toks": 8, "num_beams": 3}
    task = make_task(generates=True, items=1, generation_kwargs=unknown)
    with pytest.raises(UsageError, match="num_beams, which the runtime does not know"):
        run_task(task, paged_llama, llama_folder)


# --- the gate


def test_packed_weights_are_judged(glm_tiny: Path, glm_tiny_converted: dict[str, Path]) -> None:
    """INT4 against the FP8 blocks that it was made of, which transformers misreads: the suite quick, with verdict."""
    options = Options("quick", limit=4, window=64, max_tokens=256, backend="runtime", cache=FP8)

    report = evaluate(glm_tiny_converted["glm-5.2-int4"], glm_tiny, options)

    assert report.verdict in (Verdict.PASS, Verdict.CANNOT_DECIDE), report.reasons
    assert [task.task for task in report.tasks] == ["next token", "quantkit_continuation"]
    assert report.distribution is not None
    assert 0.002 < report.distribution.kl_divergence < 0.03
    assert report.settings["backend"] == "runtime"
    assert report.pages["baseline"] == {"kv": "bf16"}
    assert (report.pages["candidate"]["kv"], report.pages["candidate"]["scales"][0]) == ("fp8", "1")
    assert AccuracyReport.from_json(report.to_json()) == report
    text = gate_table(report)
    for words in (*report.pages["candidate"].values(), "baseline: kv `bf16`", "quantkit's paged runtime in float32"):
        assert words in text


def test_pages_alone_can_be_judged(judge: Callable[..., AccuracyReport], glm_tiny_converted: dict[str, Path]) -> None:
    """A checkpoint against itself shows what its pages cost: nothing where they are the same, more with a bad scale."""
    folder = glm_tiny_converted["glm-5.2-int4"]
    found = [
        judge(folder, folder, **options).distribution
        for options in ({}, {"cache": FP8, "baseline_cache": FP8}, {"cache": FP8}, {"cache": replace(FP8, scale=64.0)})
    ]
    costs = [each.kl_divergence for each in found if each]

    assert costs[:2] == [0, 0]
    assert 0.001 < costs[2] < costs[3]


def test_what_transformers_misreads_is_judged(
    judge: Callable[..., AccuracyReport], glm_tiny: Path, glm_tiny_converted: dict[str, Path]
) -> None:
    """ModelOpt's NVFP4, which transformers would read without its scales, is judged like any other."""
    found = judge(glm_tiny_converted["glm-5.2-nvfp4-modelopt"], glm_tiny).distribution

    assert found is not None
    assert 0.0005 < found.kl_divergence < 0.03


def test_values_beyond_fp8_are_told(
    judge: Callable[..., AccuracyReport], llama_folder: Path, make_task: TaskMaker, tmp_path: Path
) -> None:
    """A scale that is far too small clamps values, which is said of each arm and kept in the history."""
    small = replace(FP8, scale=2.0**-14)
    first, again = (
        judge(llama_folder, llama_folder, tmp_path / "history", tasks=(make_task(),), cache=small) for _ in range(2)
    )

    clamped = [warning for warning in first.warnings if "beyond what FP8 holds" in warning]
    assert [warning.partition(": ")[0] for warning in clamped] == [
        f"candidate, {first.distribution.text}",
        "candidate, tasks",
    ]
    assert again.warnings == first.warnings


@pytest.mark.parametrize(("arm", "option"), [("candidate", "--kv-scale 1.0"), ("baseline", "--baseline-kv-scale 1.0")])
def test_missing_scales_are_an_error(
    judge: Callable[..., AccuracyReport], glm_tiny: Path, monkeypatch: pytest.MonkeyPatch, arm: str, option: str
) -> None:
    """FP8 pages without scales are refused before anything is run, with the option of the arm that lacks them."""
    monkeypatch.setattr(PagedModel, "__init__", lambda *_: pytest.fail("a model is needed"))
    options = {"cache" if arm == "candidate" else "baseline_cache": CacheOptions(KvDtype.FP8)}

    with pytest.raises(CacheError, match=f"{arm}: .*has no k_scale") as caught:
        judge(glm_tiny, glm_tiny, **options)

    assert option in str(caught.value.hint)


@pytest.mark.exhaustive
def test_scales_come_from_a_file(judge: Callable[..., AccuracyReport], glm_tiny: Path, tmp_path: Path) -> None:
    """A file of scales is used and named, and other numbers have another digest."""
    reports = []
    for scale in (1.0, 2.0):
        scales = {f"model.layers.{layer}.self_attn.{key}_scale": scale for layer in range(4) for key in "kv"}
        (tmp_path / "scales.json").write_text(KvScaleFile(scales).to_json())
        reports.append(judge(glm_tiny, glm_tiny, cache=CacheOptions(KvDtype.FP8, scale_file=tmp_path / "scales.json")))

    pages = [report.pages["candidate"] for report in reports]
    assert [each["scales"] for each in pages] == [str(tmp_path / "scales.json")] * 2
    assert pages[0]["scales_digest"] != pages[1]["scales_digest"]
    assert reports[0].distribution != reports[1].distribution


def test_history_tells_pages_apart(
    judge: Callable[..., AccuracyReport],
    llama_folder: Path,
    make_task: TaskMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs on other pages, with other scales and by the other backend are run; on the same ones they are known."""
    runs: Counter[str] = Counter()
    real = accuracy.run_tasks

    def count(tasks: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        runs["runs"] += 1
        return real(tasks, *args, **kwargs)

    monkeypatch.setattr(accuracy, "run_tasks", count)
    made = []
    for cache in (CacheOptions(), FP8, FP8, replace(FP8, scale=4.0), CacheOptions()):
        judge(llama_folder, llama_folder, tmp_path / "history", text=None, tasks=(make_task(),), cache=cache)
        made.append(runs["runs"])
    evaluate(llama_folder, llama_folder, Options(tasks=(make_task(),)), history=tmp_path / "history")

    assert made == [1, 2, 2, 3, 3]
    assert runs["runs"] == 4


def test_missing_tokenizer_is_an_error(
    judge: Callable[..., AccuracyReport], llama_folder: Path, tmp_path: Path
) -> None:
    """A checkpoint without a tokenizer is refused before anything is run."""
    other = shutil.copytree(llama_folder, tmp_path / "other")
    for path in other.glob("tokenizer*"):
        path.unlink()

    with pytest.raises(SourceError, match=f"{other}, its tokenizer"):
        judge(other, llama_folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "vllm"}, "there is no backend 'vllm'"),
        ({"cache": FP8}, "transformers keeps no pages"),
        ({"baseline_cache": FP8}, "transformers keeps no pages"),
    ],
    ids=str,
)
def test_backends_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    """An unknown backend, and pages for the one that has none, are refused at once."""
    with pytest.raises(UsageError, match=words):
        Options("quick", **options)


def test_scales_of_bf16_pages_are_refused(judge: Callable[..., AccuracyReport], llama_folder: Path) -> None:
    """Scales without FP8 pages would do nothing, and the error names the option of the arm."""
    with pytest.raises(UsageError, match="baseline: KV scales are for an FP8 cache") as caught:
        judge(llama_folder, llama_folder, baseline_cache=CacheOptions(scale=1.0))

    assert "--baseline-kv fp8" in str(caught.value.hint)
