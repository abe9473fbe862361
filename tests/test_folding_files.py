"""Where a fold goes: copies, clones, the checkpoint itself behind a journal, patches, embedded scales; the command."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import config_of
from families import write_family
from model_reference import write_runnable
from safetensors.torch import load_file, save_file
from truth import truth
from typer.testing import CliRunner

from quantkit import folding
from quantkit.checkpoint.source import open_source
from quantkit.cli import app
from quantkit.errors import CheckFailed, FoldError, OutputError, QuantkitError, SourceError, UsageError
from quantkit.folding import copying, in_place, shards
from quantkit.folding.patching import PATCH_FILE, FoldPatch
from quantkit.folding.report import FoldReport, Way
from quantkit.models import load
from quantkit.report import Manifest
from quantkit.runtime.scales import KvScaleFile, Numbers, scales_by_layer
from quantkit.serving.fingerprint import fingerprint
from quantkit.verification import verify

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "glm-5.2-fp8_block"


def scales(layers: int = 2, prefix: str = "", **numbers: Numbers) -> dict[str, Numbers]:
    given: dict[str, Numbers] = {"k_scale": 2.0, "v_scale": 2.0, "latent_scale": 4.0, "rope_scale": 0.5, **numbers}
    return {
        f"{prefix}model.layers.{layer}.self_attn.{name}": number
        for layer in range(layers)
        for name, number in given.items()
    }


def common(layers: int = 2, prefix: str = "") -> dict[str, Numbers]:
    """One number for each layer, other than 1, and no parts."""
    return {
        f"{prefix}model.layers.{layer}.self_attn.{letter}_scale": 0.3 + layer
        for layer in range(layers)
        for letter in "kv"
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FP8 checkpoint; not to be changed."""
    return write_runnable(tmp_path_factory.mktemp("source") / "fp8", NAME)


@pytest.fixture(scope="module")
def folded(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folded copy; not to be changed."""
    folder = tmp_path_factory.mktemp("folded") / "folded"
    folding.fold(source, scales(), folder)
    return folder


@pytest.fixture
def own(source: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be changed."""
    return shutil.copytree(source, tmp_path / "own")


def content(folder: Path) -> dict[str, str]:
    """The sha256 of every file, hidden ones left out, but of the manifest what it says without its names."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.is_file() and path.name != "quantkit.json"
    }


def manifest(folder: Path) -> Manifest:
    return Manifest.from_json((folder / "quantkit.json").read_text())


# --- a copy


def test_a_copy_holds_every_file(source: Path, folded: Path) -> None:
    """Config, index, tokenizer and the like are the source's bytes; of shards only folded ones differ."""
    before, after = content(source), content(folded)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} <= {path.name for path in source.glob("model-*")}

    made = manifest(folded)
    assert made.files.keys() == after.keys()
    assert all(made.files[name].sha256 == sha256 for name, sha256 in after.items())
    shards_before = {path.name: before[path.name] for path in source.glob("model-*")}
    assert made.source["shards_sha256"] == shards_before
    assert made.fold is not None
    assert made.fold["origin"]["shards_sha256"] == shards_before


def test_a_cloned_copy_is_the_same(source: Path, folded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system shares blocks, shards are cloned, and only patches are written."""
    written: list[int] = []

    def clone(path: Path, target: int) -> None:
        os.write(target, path.read_bytes())

    def write_patches(file: int, patches: Any) -> None:
        written.extend(patch.data.nbytes for patch in patches)
        write(file, patches)

    write = shards.write_patches
    monkeypatch.setattr(shards, "clone", clone)
    monkeypatch.setattr(shards, "write_patches", write_patches)
    report = folding.fold(source, scales(), tmp_path / "cloned")

    assert content(tmp_path / "cloned") == content(folded)
    assert sum(written) == report.edited_bytes == 2 * 280


def test_no_room_is_found_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without clones the disk must hold all shards."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(OutputError, match="its disk has"):
        folding.fold(source, scales(), tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing_that_loads(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file; the folder has no config, and --overwrite begins anew."""

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("quantkit.checkpoint.writer.ShardFile.finish", fail)
        with pytest.raises(OutputError, match="No space left") as caught:
            folding.fold(source, scales(), tmp_path / "out")
    assert "Free some space" in str(caught.value.hint)
    with pytest.raises(SourceError, match=r"config.json is missing"):
        open_source(tmp_path / "out")
    with pytest.raises(OutputError, match="holds an interrupted run") as again:
        folding.fold(source, scales(), tmp_path / "out")
    assert "--overwrite" in str(again.value.hint)

    folding.fold(source, scales(), tmp_path / "out", overwrite=True)
    assert verify(tmp_path / "out", source).passed


def test_the_output_may_not_overlap(source: Path, folded: Path) -> None:
    """Neither the source itself nor a folder in it; another checkpoint is not written over."""
    for output in (source, source / "out"):
        with pytest.raises(OutputError, match="overlap"):
            folding.fold(source, scales(), output)
    with pytest.raises(OutputError, match="exists and is not empty"):
        folding.fold(source, scales(), folded)


def test_other_bits_after_a_fold_are_found(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof runs what was written: were one number not multiplied, the copy would not be sealed."""
    original = folding.plan.FoldPlan.patches

    def forgetful(plan: Any, shard: str) -> Any:
        return [patch for patch in original(plan, shard) if "q_b_proj" not in patch.tensor.spec.name]

    monkeypatch.setattr(folding.plan.FoldPlan, "patches", forgetful)
    with pytest.raises(CheckFailed, match=r"attention of layer 0 in torch.bfloat16: other bits after the fold"):
        folding.fold(source, scales(), tmp_path / "out")

    assert not (tmp_path / "out" / "config.json").exists()


# --- in place


def fold_own(folder: Path) -> FoldReport:
    return folding.fold(folder, scales(), way=Way.IN_PLACE)


def test_in_place_is_the_copy_and_is_taken_back(own: Path, source: Path, folded: Path) -> None:
    """The same bytes and manifest as a copy's; --undo brings back every byte, and a second fold is refused between."""
    report = fold_own(own)
    assert content(own) == content(folded)
    made, copied = manifest(own), manifest(folded)
    assert (made.files, made.fold, made.groups) == (copied.files, copied.fold, copied.groups)
    assert ".quantkit-fold" in report.notes[0]
    assert verify(own, source).passed
    with pytest.raises(FoldError, match="these KV scales folded in already"):
        fold_own(own)

    assert "was taken back" in folding.undo(own).notes[0]
    assert content(own) == content(source)
    assert sorted(path.name for path in own.iterdir()) == sorted(path.name for path in source.iterdir())
    with pytest.raises(UsageError, match="no fold to take back"):
        folding.undo(own)
    fold_own(own)
    assert content(own) == content(folded)


def test_undo_brings_back_a_manifest(source: Path, tmp_path: Path) -> None:
    """Of a converted checkpoint the manifest before the fold comes back, too."""
    import quantkit

    quantkit.convert(source, tmp_path / "int4")
    before, text = content(tmp_path / "int4"), (tmp_path / "int4" / "quantkit.json").read_text()
    fold_own(tmp_path / "int4")
    assert manifest(tmp_path / "int4").recipe["name"] == "glm-5.2-int4"
    assert content(tmp_path / "int4") != before

    folding.undo(tmp_path / "int4")
    assert content(tmp_path / "int4") == before
    assert (tmp_path / "int4" / "quantkit.json").read_text() == text


class Crash(BaseException):
    """The process is killed: nothing catches it."""


@contextmanager
def crash_at(number: int) -> Iterator[list[int]]:
    """Kill the process at the given step on the disk; the first piece of patches is written by half."""
    seen = [0]

    def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **keywords: Any) -> Any:
            seen[0] += 1
            if seen[0] == number:
                if name == "write_patches":
                    file, (patch,) = arguments
                    os.pwrite(file, patch.data.tobytes()[: patch.data.nbytes // 2], patch.begin)
                raise Crash
            return real(*arguments, **keywords)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write_patches", "sync", "_write", "_move", "_finish", "_remove"):
            patch.setattr(in_place, name, dying(name, getattr(in_place, name)))
        for module, name in ((os, "rename"), (shutil, "rmtree")):
            patch.setattr(module, name, dying(name, getattr(module, name)))
        yield seen


def is_whole(folder: Path, states: list[dict[str, str]]) -> bool:
    """What loads is one of these states."""
    return not (folder / "config.json").exists() or content(folder) in states


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proof: it writes nothing, and is what takes the time."""
    monkeypatch.setattr(folding, "_prover", lambda plan, way: lambda changed: "not proved")


@pytest.mark.usefixtures("unproved")
def test_a_fold_may_be_killed_at_any_step(source: Path, folded: Path, tmp_path: Path) -> None:
    """Wherever it was killed: what loads is whole; the next fold, or --undo, gives the bytes of an undisturbed one."""
    states, number, steps = [content(source), content(folded)], 1, 2
    while number <= steps:
        own = shutil.copytree(source, tmp_path / f"{number}")
        with crash_at(number) as seen:
            try:
                fold_own(own)
                steps = seen[0]
            except Crash:
                steps = number + 1
        assert is_whole(own, states), number
        if (own / ".quantkit" / "config.json").exists():
            with pytest.raises(SourceError, match=r"config.json is missing") as caught:
                open_source(own)
            assert "--undo" in str(caught.value.hint)
        again = shutil.copytree(own, tmp_path / f"{number}-undone")
        with suppress(FoldError):  # folded in already
            fold_own(own)
        assert content(own) == states[1], number
        try:
            folding.undo(again)
        except UsageError:
            assert number < 4  # before the journal
        assert content(again) == states[0], number
        assert not list(again.glob(".quantkit*"))
        number += 1

    assert number > 20


@pytest.mark.usefixtures("unproved")
def test_an_undo_may_be_killed_at_any_step(source: Path, folded: Path, tmp_path: Path) -> None:
    """Likewise: the next --undo goes on with it."""
    states, number, steps = [content(source), content(folded)], 1, 2
    base = shutil.copytree(source, tmp_path / "base")
    fold_own(base)
    while number <= steps:
        own = shutil.copytree(base, tmp_path / f"{number}")
        with crash_at(number) as seen:
            try:
                folding.undo(own)
                steps = seen[0]
            except Crash:
                steps = number + 1
        assert is_whole(own, states), number
        with suppress(UsageError):  # nothing left to take back
            folding.undo(own)
        assert content(own) == states[0], number
        assert not list(own.glob(".quantkit*"))
        number += 1

    assert number > 10


def test_a_full_disk_in_place_is_put_back(own: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle of the edits, or a proof that fails, leaves the checkpoint as it was."""
    real, calls = in_place.write_patches, []

    def fail_once(file: int, patches: Any) -> None:
        calls.append(patches)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, patches)

    with monkeypatch.context() as patch:
        patch.setattr(in_place, "write_patches", fail_once)
        with pytest.raises(OutputError, match="No space left"):
            fold_own(own)
    assert content(own) == content(source)

    def disprove(plan: Any, before: Any, after: Any) -> str:
        raise CheckFailed("other bits")

    monkeypatch.setattr(folding, "compare", disprove)
    with pytest.raises(CheckFailed, match="other bits"):
        fold_own(own)
    assert content(own) == content(source)
    assert not list(own.glob(".quantkit*"))


def test_weights_that_changed_after_a_fold_are_not_undone(own: Path) -> None:
    """Old bytes under new ones would be a mixture."""
    fold_own(own)
    name = "model.layers.0.self_attn.kv_a_layernorm.weight"
    path = own / open_source(own).tensors[name].shard
    tensors = load_file(path)
    tensors[name] += 1
    save_file(tensors, path)
    before = content(own)

    with pytest.raises(OutputError, match="not those that the fold wrote"):
        folding.undo(own)
    assert content(own) == before


@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_linked_shards_are_not_edited(own: Path, tmp_path: Path, link: str) -> None:
    """Shards that another folder shares, as in the Hub's cache, are refused by name."""
    shard = min(own.glob("model-*.safetensors"))
    shard.rename(tmp_path / "blob")
    if link == "hard":
        os.link(tmp_path / "blob", shard)
    else:
        shard.symlink_to(tmp_path / "blob")
    with pytest.raises(OutputError, match=f"{shard.name} is a link") as caught:
        fold_own(own)
    assert "-o OUT" in str(caught.value.hint)


def test_another_run_in_the_folder_is_left_alone(own: Path) -> None:
    """The work folder of another command is not taken for an interrupted fold."""
    (own / ".quantkit").mkdir()
    (own / ".quantkit" / "journal.jsonl").write_text("{}\n")
    with pytest.raises(OutputError, match="interrupted run of another command"):
        fold_own(own)

    assert (own / ".quantkit" / "journal.jsonl").exists()


# --- a patch


def test_a_patch_holds_the_edited_tensors_alone(source: Path, folded: Path, tmp_path: Path) -> None:
    """Whole, under their names, with what they are a patch of; laid over the checkpoint they are the folded one."""
    report = folding.fold(source, scales(), tmp_path / "patch", way=Way.PATCH)
    assert sorted(path.name for path in (tmp_path / "patch").iterdir()) == [PATCH_FILE, "quantkit.json"]
    assert "the same bits" in report.proof

    tensors = load_file(tmp_path / "patch" / PATCH_FILE)
    both = [
        {name: place for path in folder.glob("model-*") for name, place in load_file(path).items()}
        for folder in (source, folded)
    ]
    changed = {
        name for name in both[0] if not torch.equal(both[0][name].view(torch.uint8), both[1][name].view(torch.uint8))
    }
    assert tensors.keys() == changed
    assert all(torch.equal(tensors[name].view(torch.uint8), both[1][name].view(torch.uint8)) for name in changed)
    patch = FoldPatch.from_json((tmp_path / "patch" / "quantkit.json").read_text())
    assert patch.tensors.keys() == changed
    assert patch.fold["digest"] == report.digest
    for name, place in patch.tensors.items():
        assert place.shard == open_source(source).tensors[name].shard
        for sha256, stored in zip((place.before, place.after), both, strict=True):
            assert sha256 == hashlib.sha256(stored[name].view(torch.uint8).numpy().tobytes()).hexdigest()


# --- embedded


def test_embedded_scales_are_tensors_that_engines_look_for(source: Path, tmp_path: Path) -> None:
    """One pair for each layer under SGLang's names, F32 [1], and a config that says so; the weights are the source's.

    Our runtime and `verify` take them, and the cache means something else.
    """
    report = folding.fold(source, common(), tmp_path / "out", way=Way.EMBED)
    opened = open_source(tmp_path / "out")
    added = opened.tensors.keys() - open_source(source).tensors.keys()
    assert added == {
        f"model.layers.{layer}.self_attn.{letter}_proj.{letter}_scale" for layer in range(2) for letter in "kv"
    }
    assert {(opened.tensors[name].spec.dtype, opened.tensors[name].spec.shape) for name in added} == {("F32", (1,))}
    quantization = config_of(tmp_path / "out")["quantization_config"]
    assert quantization["kv_cache_scheme"]["strategy"] == "tensor"
    assert {**quantization, "kv_cache_scheme": None} == {
        **config_of(source)["quantization_config"],
        "kv_cache_scheme": None,
    }
    decoder = load(tmp_path / "out")
    found = scales_by_layer(decoder.config, decoder.kv_scales, "the checkpoint")
    assert [round(layer.key, 6) for layer in found.layers] == [0.3, 1.3]
    assert any("trtllm_mla" in warning and "triton" in warning for warning in report.warnings)
    assert any("vLLM" in warning for warning in report.warnings)
    assert verify(tmp_path / "out", source).passed
    ids = {fingerprint(open_source(folder)).kv_space_id for folder in (source, tmp_path / "out")}
    assert len(ids) == 2
    with pytest.raises(FoldError, match="has embedded KV scales"):
        folding.fold(tmp_path / "out", scales(), tmp_path / "both")


@pytest.mark.parametrize("change", ["value", "missing", "scheme"])
def test_verify_compares_embedded_scales(source: Path, tmp_path: Path, change: str) -> None:
    """Another number, one that is gone, or a config that does not name them."""
    folding.fold(source, common(), tmp_path / "out", way=Way.EMBED)
    path = tmp_path / "out" / "model-kv-scales.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    if change == "value":
        tensors[name] *= 2
    elif change == "missing":
        del tensors[name]
        index = tmp_path / "out" / "model.safetensors.index.json"
        weight_map = json.loads(index.read_text())
        del weight_map["weight_map"][name]
        index.write_text(json.dumps(weight_map))
    else:
        config = config_of(tmp_path / "out")
        config["quantization_config"]["kv_cache_scheme"] = None
        (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    save_file(tensors, path)

    words = {
        "value": f"{name} is 0.6; quantkit.json says 0.3",
        "missing": f"{name} is missing",
        "scheme": "kv_cache_scheme",
    }
    found = {check.name: check.examples for check in verify(tmp_path / "out", source).checks}
    assert any(words[change] in text for text in found["kv scales"])


def test_kimi_gets_its_prefix(tmp_path: Path) -> None:
    """Names under `language_model.`, and the scheme where Kimi's config keeps its quantization."""
    folder = write_runnable(tmp_path / "c", "kimi-k2.5-int4")
    folding.fold(folder, common(prefix="language_model."), tmp_path / "out", way=Way.EMBED)

    names = open_source(tmp_path / "out").tensors.keys() - open_source(folder).tensors.keys()
    assert min(names) == "language_model.model.layers.0.self_attn.k_proj.k_scale"
    text = config_of(tmp_path / "out")["text_config"]
    assert text["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    assert text | {"quantization_config": None} == config_of(folder)["text_config"] | {"quantization_config": None}
    assert verify(tmp_path / "out", folder).passed


def test_one_file_becomes_two_and_an_index(source: Path, tmp_path: Path) -> None:
    """A loader that prefers model.safetensors to an index must not miss the scales."""
    single = tmp_path / "single"
    single.mkdir()
    tensors = {name: tensor for path in source.glob("model-*") for name, tensor in load_file(path).items()}
    save_file(tensors, single / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(source / "config.json", single)
    folding.fold(single, common(), tmp_path / "out", way=Way.EMBED)

    assert open_source(tmp_path / "out").shards == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert verify(tmp_path / "out", single).passed


def test_embedding_needs_a_quantization_config(tmp_path: Path) -> None:
    """Engines do not look for scales in a plain checkpoint; nor are scales written twice."""
    folder = write_runnable(tmp_path / "plain", "glm-5.2-bf16")
    with pytest.raises(FoldError, match="has no quantization_config") as caught:
        folding.fold(folder, common(), tmp_path / "out", way=Way.EMBED)
    assert "leave --embed out" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_modelopt_says_it_in_its_own_file_too(tmp_path: Path) -> None:
    """`hf_quant_config.json` is what ModelOpt's readers look at first."""
    folder = write_family(tmp_path / "c", "llama-modelopt_fp8")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": null}}')
    report = folding.fold(folder, common(), tmp_path / "out", way=Way.EMBED)

    told = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert told["quantization"] == {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    assert report.warnings


# --- the command


def invoke(*arguments: str | Path) -> tuple[int, Any, str]:
    """Exit code, the JSON on stdout if there is any, and the error."""
    result = CliRunner().invoke(app, ["fold", *map(str, arguments), "--json"])
    code = result.exception.exit_code if isinstance(result.exception, QuantkitError) else result.exit_code
    return code, json.loads(result.stdout) if result.stdout.startswith("{") else None, str(result.exception)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scales.json"
    path.write_text(KvScaleFile(scales()).to_json())
    return path


@pytest.mark.usefixtures("no_garbage")
def test_kimi_from_its_config_alone(tmp_path: Path) -> None:
    """0.31 % of Kimi K2.6's bytes, without a weight: the rows of 64 heads and of kv_a, all of kv_b and the norm."""
    path = tmp_path / "scales.json"
    path.write_text(KvScaleFile(scales(61, "language_model.")).to_json())
    code, told, _ = invoke("kimi-k2.6", "--scales", path, "--dry-run")

    layer = 2 * (512 + 64 * 7168 + 64 * 64 * 1536 + 64 * 256 * 512)
    assert (code, told["edited_bytes"], told["total_bytes"]) == (0, 61 * layer, 595_148_192_736)
    assert 0.0030 < told["edited_bytes"] / told["total_bytes"] < 0.0032
    assert told["proof"] == "none: nothing was written"


def test_a_dry_run_says_what_a_run_does(source: Path, file: Path) -> None:
    """Of a folder that is there, its weights are tried, and nothing is written."""
    before = content(source)
    code, told, _ = invoke(source, "--scales", file, "--dry-run")

    assert (code, told["edited_bytes"], told["output"]) == (0, 2 * 280, None)
    assert content(source) == before


def test_the_command_folds_each_way(own: Path, source: Path, folded: Path, file: Path, tmp_path: Path) -> None:
    """A copy, a patch, in place and back."""
    code, told, _ = invoke(source, "--scales", file, "-o", tmp_path / "copy")
    assert (code, told["way"], told["output"]) == (0, "copy", str(tmp_path / "copy"))
    assert content(tmp_path / "copy") == content(folded)
    assert invoke(source, "--scales", file, "--patch-only", tmp_path / "patch")[0] == 0
    assert invoke(own, "--scales", file, "--in-place")[0] == 0
    assert content(own) == content(folded)
    assert invoke(own, "--undo")[0] == 0
    assert content(own) == content(source)
    assert invoke(source, "--scales", file, "--embed", "-o", tmp_path / "embedded")[0] == 0
    assert truth(tmp_path / "embedded").keys() > truth(source).keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "where to"),
        (["--in-place", "--dry-run"], "where to"),
        (["-o", "x", "--patch-only", "y"], "where to"),
        (["--in-place", "--embed"], "--embed writes a copy"),
        (["--undo"], "--undo takes no --scales"),
    ],
)
def test_options_that_contradict_each_other(source: Path, file: Path, arguments: list[str], words: str) -> None:
    """Exit code 2, with what to give instead."""
    code, _, error = invoke(source, "--scales", file, *arguments)

    assert (code, words in error) == (2, True)


def test_scales_are_asked_for(source: Path, tmp_path: Path) -> None:
    """Without a file there is nothing to fold, and a file that is none is an error."""
    assert invoke(source, "--in-place")[0] == 2
    (tmp_path / "none.json").write_text("{}")
    code, _, error = invoke(source, "--scales", tmp_path / "none.json", "--dry-run")
    assert (code, "is no file of KV scales" in error) == (1, True)


@pytest.mark.parametrize("wrong", ["0.0", "-1.0", "NaN", "Infinity"])
def test_unsound_scales_are_refused_by_the_command(source: Path, file: Path, wrong: str) -> None:
    """In the file, as JSON has them."""
    file.write_text(file.read_text().replace(": 4.0", f": {wrong}", 1))
    code, _, error = invoke(source, "--scales", file, "--dry-run")

    assert (code, "latent_scale is" in error) == (1, True)


def test_tables_say_what_was_done(source: Path, file: Path, tmp_path: Path) -> None:
    """Layers with their scales and weights, the share of the bytes, the proof."""
    result = CliRunner().invoke(app, ["fold", str(source), "--scales", str(file), "-o", str(tmp_path / "out")])

    assert result.exit_code == 0
    for words in ("latent 4, rope 0.5", "kv_a_proj_with_mqa, q_b_proj", "the same bits in BF16", "MTP layer 2"):
        assert words in " ".join(result.stdout.split())


def test_copying_is_done_with_the_source_untouched(source: Path, folded: Path) -> None:
    """No way but --in-place writes into the checkpoint."""
    assert not list(source.glob(".quantkit*"))
    assert not (source / "quantkit.json").exists()
    assert copying.GATE_FILE not in manifest(folded).files
