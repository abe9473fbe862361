"""Of which sources what is recorded.

the trained checkpoints and every family as published    each built-in recipe, options, all commands on the default
every storage                                            the three schemes, `verify`
published models                                         what is told from a config alone
"""

import itertools
import json
import tempfile
from pathlib import Path

from quantkit.recipe import recipe_names
from record.recording import Recorder
from support.families import NAMES, PUBLISHED, write_family
from support.paths import FIXTURES, GLM_TINY

TRAINED = {"glm-tiny-fp8": GLM_TINY, "kimi-tiny-int4": FIXTURES / "kimi-tiny-int4"}
STORAGES = tuple(name for name in NAMES if name not in PUBLISHED)
MODELS = "published models"
NAMED = (*TRAINED, *PUBLISHED, *STORAGES, MODELS)

SCHEMES = (("--int4",), ("--nvfp4",), ("--nvfp4", "--format", "modelopt"), ("--bf16",))
OPTIONS = (
    ("--int4", "--rest", "bf16"),
    ("--nvfp4", "--rest", "bf16"),
    *(("--int4", "--mtp", mtp) for mtp in ("keep", "drop")),
    *(("--int4", "--scale", scale) for scale in ("signed", "minmax")),
    ("--nvfp4", "--scale", "minmax"),
    *(("--int4", "--group-size", size) for size in ("64", "128")),
)
WITH_OPTIONS = (*TRAINED, "glm-5.2-fp8_block", "glm-4.5-bf16", "kimi-k2.5-int4", "llama-bf16")


def record(name: str) -> list[str]:
    """The lines of a source."""
    if name == MODELS:
        return _models()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        source = TRAINED.get(name) or write_family(folder / "source", name)
        recorder = Recorder({folder: "FOLDER", source: "SOURCE"})
        recorder.lines.append("# source")
        recorder.note_folder(source)
        made = _conversions(recorder, name, source, folder)
        if name not in STORAGES:
            _commands(recorder, source, made, folder)
        if name in TRAINED:
            _runs(recorder, source, folder)
        return recorder.lines


def _conversions(recorder: Recorder, name: str, source: Path, folder: Path) -> Path:
    """Convert in every way; the folder of the first that is not refused."""
    ways = [*SCHEMES]
    if name not in STORAGES:
        ways += [("--recipe", recipe) for recipe in recipe_names()]
    if name in WITH_OPTIONS:
        ways += OPTIONS
    made = []
    for number, way in enumerate(ways):
        output = folder / f"output-{number}"
        if recorder.run("convert", source, *way, "-o", output).exit_code == 0:
            recorder.note_folder(output)
            made.append(output)
            if name not in STORAGES:
                recorder.run("verify", output, "--against", source)
    return made[0]


def _commands(recorder: Recorder, source: Path, made: Path, folder: Path) -> None:
    """Commands that look at a checkpoint, at the source and at what was made of it."""
    for checkpoint in (source, made):
        recorder.run("inspect", checkpoint)
        recorder.run("plan", checkpoint)
        recorder.run("engines", checkpoint)
    recorder.run("plan", source, "--int4", "--gpus", "8xH200", "--kv", "fp8")
    recorder.run("convert", source, "--dry-run")
    recorder.run("convert", source, "-o", made)
    recorder.run("convert", made, "--respell", "--dry-run")
    for recipe in recipe_names():
        recorder.run("recipes", "check", recipe, source)
    (folder / "scales.json").write_text(json.dumps(_scales(source)))
    for way in (("--dry-run",), ("-o", folder / "folded")):
        recorder.run("fold", source, "--scales", folder / "scales.json", *way)
    if (folder / "folded").exists():
        recorder.note_folder(folder / "folded")


def _scales(source: Path) -> dict[str, object]:
    """A file of KV scales for every layer of a model."""
    config = json.loads((source / "config.json").read_text())
    prefix = "language_model." if "text_config" in config else ""
    layers = config.get("text_config", config)["num_hidden_layers"]
    named = itertools.product(range(layers), ("k_scale", "v_scale"))
    scales = {f"{prefix}model.layers.{layer}.self_attn.{leaf}": 0.5 for layer, leaf in named}
    return {"schema_version": 1, "kind": "KvScaleFile", "scales": scales}


def _runs(recorder: Recorder, source: Path, folder: Path) -> None:
    """Commands that compute with a model, by what no processor changes; the gate's counts, one does."""
    prompt = ("As well as WSGI, Django also", "--max-new-tokens", "8", "--memory", "4MB")
    recorder.run("generate", source, *prompt, floats=False)
    recorder.run("generate", source, *prompt, "--kv", "fp8", "--kv-scale", "1.0", floats=False)
    text = ("--data", source / "heldout.txt", "--tokens", "256")
    recorder.run("calibrate", source, *text, "-o", folder / "calibrated", floats=False)


def _models() -> list[str]:
    """What is told of published models from their configs alone, and of recipes."""
    recorder = Recorder({})
    recorder.run("recipes", "list")
    for recipe in recipe_names():
        recorder.run("recipes", "show", recipe)
    recorder.run("inspect", "kimi-k2.6")
    recorder.run("plan", "glm-5.2", "--int4", "--kv", "fp8")
    recorder.run("convert", "glm-5.2", "--nvfp4", "--dry-run")
    recorder.run("plan", "./no-such-model")
    return recorder.lines
