"""`quantkit generate`: text in and out, the cache's options, batches with prompts that cannot be served."""

import json
import shutil
from pathlib import Path

import pytest
import transformers

from quantkit.errors import SourceError
from quantkit.runtime.generation import GenerationReport
from quantkit.runtime.scales import KvScaleFile
from quantkit.runtime.tokenizer import TextStream, Tokenizer, stop_tokens
from support.generating import PROMPT, report_of
from support.program import Runner

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = (PROMPT, "", " leading space", "naïve café 你好 🙂", "a\n\n    b\tc", "<|user|>")


def test_one_prompt_is_streamed(run_generate: Runner) -> None:
    """stdout is the text and a line's end; how the cache was kept is on stderr."""
    texts = report_of(run_generate(PROMPT, "--json"))["completions"]
    code, out, err = run_generate(PROMPT)

    assert code == 0
    assert out == texts[0]["text"] + "\n"
    assert "cache: bf16" in err


def test_batch_is_each_prompt_alone(run_generate: Runner, tmp_path: Path) -> None:
    """Prompts of the command line and of a file, texts and tokens, are answered in order as if alone."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Django is"}\n\n{"tokens": [305, 266, 207]}\n')
    result = run_generate(PROMPT, "--prompts", file, "--json")
    report = report_of(result)
    assert GenerationReport.from_json(result[1]).to_json() == result[1]
    alone = report_of(run_generate("Django is", "--json"))

    assert report["kind"] == "GenerationReport"
    assert [one["prompt_tokens"] for one in report["completions"]][2] == 3
    assert report["completions"][1] == alone["completions"][0]
    assert report["completions"][2]["text"] is None
    assert len(report["completions"][2]["tokens"]) == 6
    code, out, _ = run_generate(PROMPT, "--prompts", file)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("---")] == [f"--- {n}: length" for n in (1, 2, 3)]


def test_lines_of_a_text_file_are_prompts(run_generate: Runner, tmp_path: Path) -> None:
    """Of a file that is not .jsonl each line is a prompt as it stands."""
    file = tmp_path / "prompts.txt"
    file.write_text('{"prompt": 1}\nDjango is\n')

    prompts = [one["prompt"]["text"] for one in report_of(run_generate("--prompts", file, "--json"))["completions"]]
    assert prompts == ['{"prompt": 1}', "Django is"]


def test_fp8_scales_are_said_and_shown(run_generate: Runner, tmp_path: Path) -> None:
    """An FP8 cache needs scales, by number or file; those used are printed for each layer."""
    code, out, err = run_generate(PROMPT, "--kv", "fp8")
    assert (code, out) == (1, "")
    assert "layer 0 has no k_scale" in err
    assert "--kv-scale 1.0" in err

    file = tmp_path / "scales.json"
    names = {f"model.layers.{layer}.self_attn.k_proj.k_scale": 0.25 * (layer + 1) for layer in range(4)}
    file.write_text(KvScaleFile(names).to_json())
    code, _, err = run_generate(PROMPT, "--kv", "fp8", "--kv-scales", file)
    assert code == 0
    assert f"KV scales from {file}" in err
    assert [f"layer {layer}: k {0.25 * (layer + 1):g}, v {0.25 * (layer + 1):g}" in err for layer in range(4)] == [
        True
    ] * 4

    plain, scaled = (report_of(run_generate(PROMPT, *kv, "--json")) for kv in ((), ("--kv", "fp8", "--kv-scale", "1")))
    assert scaled["pool_tokens"] // 64 in (plain["pool_tokens"] // 64 * 2, plain["pool_tokens"] // 64 * 2 + 1)
    assert scaled["kv_scales"] == [{"key": 1.0, "value": 1.0, "latent": [], "rope": []}] * 4
    assert plain["kv_scales"] == []


def test_saturation_is_a_warning(run_generate: Runner) -> None:
    """A scale that is too small clamps values, and that is said."""
    code, _, err = run_generate(PROMPT, "--kv", "fp8", "--kv-scale", "0.001")

    assert code == 0
    assert "were clamped" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "there is no prompt"),
        ((PROMPT, "--kv-scale", "1.0"), 2, "KV scales are for an FP8 cache"),
        ((PROMPT, "--kv", "fp8", "--kv-scale", "0"), 1, "is 0.0, not a positive finite number"),
        ((PROMPT, "--kv", "fp8", "--kv-scale", "nan"), 1, "is nan, not a positive finite number"),
        ((PROMPT, "--kv", "fp8", "--kv-scale", "1", "--kv-scales", "x"), 2, "given twice"),
        ((PROMPT, "--kv", "fp8", "--kv-scales", "nowhere.json"), 1, "nowhere.json: is no file of KV scales"),
        (("--prompts", "nowhere.txt"), 2, "nowhere.txt: cannot be read"),
        ((PROMPT, "--temperature", "-1"), 2, "temperature -1.0 is not a number from 0 on"),
        (("",), 1, "a prompt of one token or more"),
    ],
)
def test_what_cannot_be_done_is_said(run_generate: Runner, arguments: tuple[str, ...], code: int, message: str) -> None:
    """Options that do not go together and files that are not there are known errors."""
    left, out, err = run_generate(*arguments)

    assert left == code
    assert out.strip() == ""
    assert message in err.replace("\n", " ")


def test_scales_in_checkpoint_and_option_are_refused(run_generate: Runner, tmp_path: Path, glm_tiny: Path) -> None:
    """A checkpoint's own scales are used by an FP8 cache, named where they are not, and contradict an option."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "scaled"
    shutil.copytree(glm_tiny, folder)
    scales = {f"model.layers.{layer}.self_attn.k_proj.k_scale": torch.tensor(0.5) for layer in range(4)}
    save_file(scales, folder / "scales.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(scales, "scales.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    report = report_of(run_generate(PROMPT, "--kv", "fp8", "--json", checkpoint=folder))
    assert report["kv_scales"] == [{"key": 0.5, "value": 0.5, "latent": [], "rope": []}] * 4
    assert report["kv_scale_source"] == "the checkpoint"
    assert "the checkpoint's KV scales are not used" in run_generate(PROMPT, checkpoint=folder)[2]
    code, _, err = run_generate(PROMPT, "--kv", "fp8", "--kv-scale", "1.0", checkpoint=folder)
    assert code == 2
    assert "given twice" in err


def test_prompt_that_never_fits_leaves_the_others(run_generate: Runner) -> None:
    """The others are answered; the exit code is 1 and the sizes are on stderr."""
    code, out, err = run_generate(PROMPT, "word " * 3000, "--page-size", "16")

    assert code == 1
    assert "--- 1: length" in out
    assert "--- 2: refused" in out
    assert "1 of 2 prompts have no answer" in err
    assert "are more than the model's 2,048" in err


def test_sampling_is_seeded(run_generate: Runner) -> None:
    """A seed gives its text again, alone or in a batch; another one another text."""
    hot = (PROMPT, "--temperature", "2", "--json")
    first, again, other = (
        report_of(run_generate(*hot, *more))["completions"][0]["tokens"]
        for more in (
            ("--seed", "1"),
            ("Django is", "--seed", "1"),
            ("--seed", "2"),
        )
    )

    assert first == again != other


def test_chat_template_begins_the_answer(run_generate: Runner, glm_tiny: Path) -> None:
    """--chat gives the model the tokens of transformers' template."""
    reference = transformers.AutoTokenizer.from_pretrained(glm_tiny)
    wanted = reference.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=True
    )["input_ids"]

    assert Tokenizer(glm_tiny).encode_chat(PROMPT) == wanted
    assert report_of(run_generate(PROMPT, "--chat", "--json"))["completions"][0]["prompt_tokens"] == len(wanted)


def test_tokens_are_those_of_transformers(glm_tiny: Path) -> None:
    """Text becomes the tokens, and tokens the text, that transformers makes of them."""
    ours, reference = Tokenizer(glm_tiny), transformers.AutoTokenizer.from_pretrained(glm_tiny)

    for text in TEXTS:
        assert ours.encode(text) == reference(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == reference.decode(
            reference(text)["input_ids"], skip_special_tokens=True
        )


def test_stream_holds_back_half_characters(glm_tiny: Path) -> None:
    """Pieces make up the text, and none ends within a character."""
    tokenizer = Tokenizer(glm_tiny)
    text = "naïve 你好 🙂 end"
    tokens = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    pieces = [stream.push(token, last=number == len(tokens) - 1) for number, token in enumerate(tokens)]

    assert "".join(pieces) == tokenizer.decode(tokens)
    assert "" in pieces
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_stop_tokens_come_from_either_config(glm_tiny: Path, tmp_path: Path) -> None:
    """generation_config.json decides, then config.json or its text_config; without any there are none."""
    assert stop_tokens(glm_tiny) == (0, 4, 6)
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 7}}')
    assert stop_tokens(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 8}')
    assert stop_tokens(tmp_path) == (8,)
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    assert stop_tokens(tmp_path) == ()


def test_missing_tokenizer_or_template(glm_tiny: Path, tmp_path: Path) -> None:
    """Text needs a tokenizer, and the error says what does not; a chat needs a template; a broken one is named."""
    with pytest.raises(SourceError, match=r"tokenizer.json is missing") as raised:
        Tokenizer(tmp_path)
    assert raised.value.hint is not None
    assert '{"tokens": [...]}' in raised.value.hint
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SourceError, match="is no tokenizer"):
        Tokenizer(tmp_path)

    shutil.copy(glm_tiny / "tokenizer.json", tmp_path)
    with pytest.raises(SourceError, match="there is no chat template"):
        Tokenizer(tmp_path).encode_chat("x")
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(SourceError, match="cannot be filled: no system role"):
        Tokenizer(tmp_path).encode_chat("x")
