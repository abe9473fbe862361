"""Of which sources what is recorded.

the trained checkpoints and every family as published    each built-in recipe, all commands; of some also options
every storage                                            the default schemes, and commands that read them
published models                                         what is told from a config alone, and refused command lines
"""

import functools
import itertools
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from quantkit.families import locate
from quantkit.recipe import recipe_names
from record.recording import Recorder
from support.families import NAMES, PUBLISHED, write_family
from support.paths import CONFIGS, FIXTURES, GLM_TINY

TRAINED = {"glm-tiny-fp8": GLM_TINY, "kimi-tiny-int4": FIXTURES / "kimi-tiny-int4"}
STORAGES = tuple(name for name in NAMES if name not in PUBLISHED)
MODELS = "published models"
NAMED = (*TRAINED, *PUBLISHED, *STORAGES, MODELS)

Way = tuple[str, ...]  # options of a conversion
SCHEMES: tuple[Way, ...] = (("--int4",), ("--nvfp4",), ("--bf16",))
OPTIONS: tuple[Way, ...] = (
    ("--nvfp4", "--format", "modelopt"),
    *((scheme, "--rest", rest) for scheme in ("--int4", "--nvfp4") for rest in ("fp8", "bf16")),
    *(("--int4", "--mtp", mtp) for mtp in ("quantize", "keep", "drop")),
    *(("--nvfp4", "--mtp", mtp) for mtp in ("keep", "drop")),
    *((scheme, "--scale", scale) for scheme in ("--int4", "--nvfp4") for scale in ("signed", "minmax")),
    *(("--int4", "--group-size", size) for size in ("64", "128")),
)
WITH_OPTIONS = (*TRAINED, "glm-5.2-fp8_block", "glm-4.5-bf16", "kimi-k2.5-int4", "llama-bf16")
IN_FULL = (*TRAINED, "llama-bf16", MODELS)  # reports by their keys; of the others by one digest


class Record(NamedTuple):
    """The lines of a source, and the quantization_configs that they give the digests of."""

    lines: list[str]
    configs: Mapping[str, Sequence[str]]


def record(name: str) -> Record:
    """Make the record of a source."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        recorder = Recorder({folder: "FOLDER", GLM_TINY: "SOURCE"}, brief=name not in IN_FULL)
        if name == MODELS:
            _note_models(recorder, folder)
        else:
            _note_source(recorder, name, folder)
        return Record(recorder.lines(), recorder.configs)


def _note_source(recorder: Recorder, name: str, folder: Path) -> None:
    source = TRAINED.get(name) or write_family(folder / "source", name)
    recorder.names[source] = "SOURCE"
    recorder.begin("# source")
    recorder.note_folder(source)
    made = _note_conversions(recorder, name, source, folder)
    for checkpoint in (source, next(iter(made.values()))):
        for command in ("inspect", "plan", "engines"):
            recorder.run(command, checkpoint)
    recorder.run("verify", source)
    recorder.run("convert", source, "--dry-run")
    if name not in STORAGES:
        _note_checks(recorder, source, made)
        _note_fold(recorder, source, folder)
    if name in TRAINED:
        _note_runs(recorder, source, made, folder)
    if name not in STORAGES:
        _note_refusals(recorder, source, next(iter(made.values())), folder)


def _note_conversions(recorder: Recorder, name: str, source: Path, folder: Path) -> dict[Way, Path]:
    """Convert in every way; the folders of those that are not refused."""
    ways = [*SCHEMES]
    if name not in STORAGES:
        ways += [("--recipe", recipe) for recipe in recipe_names()]
    if name in WITH_OPTIONS:
        ways += OPTIONS
    made = {}
    for number, way in enumerate(ways):
        output = folder / f"{number:03}"
        recorder.names[output] = "OUTPUT"
        if recorder.run("convert", source, *way, "-o", output).exit_code == 0:
            recorder.note_folder(output, source)
            if not recorder.repeats():
                recorder.run("verify", output, "--against", source)
            made[way] = output
    return made


def _note_checks(recorder: Recorder, source: Path, made: Mapping[Way, Path]) -> None:
    """Commands that look at what is to be made, and at what serves it."""
    recorder.run("plan", source, "--int4", "--gpus", "8xH200", "--kv", "fp8")
    recorder.run("engines", next(iter(made.values())), "--tp", "2")
    for recipe in recipe_names():
        if ("--recipe", recipe) in made or not recorder.brief:
            recorder.run("recipes", "check", recipe, source)


def _note_fold(recorder: Recorder, source: Path, folder: Path) -> None:
    """Scales of every layer, tried and folded."""
    scales, folded = folder / "scales.json", folder / "folded"
    scales.write_text(json.dumps(_scales(source)))
    recorder.run("fold", source, "--scales", scales, "--dry-run")
    if recorder.run("fold", source, "--scales", scales, "-o", folded).exit_code == 0:
        recorder.note_folder(folded, source)


def _scales(source: Path) -> dict[str, object]:
    """A file of KV scales for every layer of a model."""
    config = json.loads((source / "config.json").read_text())
    prefix = "language_model." if "text_config" in config else ""
    layers = config.get("text_config", config)["num_hidden_layers"]
    named = itertools.product(range(layers), ("k_scale", "v_scale"))
    scales = {f"{prefix}model.layers.{layer}.self_attn.{leaf}": 0.5 for layer, leaf in named}
    return {"schema_version": 1, "kind": "KvScaleFile", "scales": scales}


def _note_runs(recorder: Recorder, source: Path, made: Mapping[Way, Path], folder: Path) -> None:
    """Commands that compute with a model, by what no processor changes."""
    prompt = ("As well as WSGI, Django also", "--max-new-tokens", "8", "--memory", "4MB")
    recorder.run("generate", source, *prompt, without=(float,))
    recorder.run("generate", source, *prompt, "--kv", "fp8", "--kv-scale", "1.0", without=(float,))
    text, calibrated = source / "heldout.txt", folder / "calibrated"
    recorder.run("calibrate", source, "--data", text, "--tokens", "256", "-o", calibrated, without=(float,))
    recorder.note_json(calibrated / "kv_scales.json", (float,))
    plain = made["--bf16",]
    recorder.names[plain] = "BF16"
    compared = (made["--nvfp4",], "--baseline", plain, "--backend", "runtime", "--text", text, "--max-tokens", "512")
    recorder.run("eval", *compared, "--no-history", without=(int, float))


def _note_refusals(recorder: Recorder, source: Path, made: Path, folder: Path) -> None:
    """What is not done with an output that is there, and with one that is damaged then."""
    recorder.run("convert", source, "-o", made)
    recorder.run("convert", made, "--int4", "-o", folder / "again")
    recorder.run("convert", made, "--respell", "--dry-run")
    shard = max(made.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-2] + b"\xff\xff")
    recorder.run("verify", made)
    recorder.run("convert", source, "-o", made, "--resume")


def _note_models(recorder: Recorder, folder: Path) -> None:
    """What is told of published models from their configs alone, of recipes, and of command lines that are none."""
    recorder.run("recipes", "list")
    for recipe in recipe_names():
        recorder.run("recipes", "show", recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locate, "inventory", functools.cache(locate.inventory))  # of 100,000 tensors, for all commands
        for command, model in itertools.product(("inspect", "plan"), ("glm-5.2", "kimi-k2.6")):
            recorder.run(command, model)
        recorder.run("engines", "glm-5.2")
        recorder.run("plan", "glm-5.2", "--int4", "--kv", "fp8")
    unknown = folder / "glm-5.3-flash"
    unknown.mkdir()
    shutil.copyfile(CONFIGS / "glm-5.3-flash.json", unknown / "config.json")
    recorder.run("plan", unknown)
    recorder.run("plan", folder / "no-such-model")
    recorder.run("recipes", "show", "no-such-recipe")
    recorder.run("convert", GLM_TINY, "--int4")
    recorder.run("convert", GLM_TINY, "--int4", "--nvfp4", "--dry-run")
    recorder.run("convert", GLM_TINY, "--int4", "--group-size", "48", "--dry-run")
