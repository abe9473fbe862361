"""What goes along with the weights: tokenizer, chat template, generation and processor configs, custom code, licence.

All files of the source's folder are copied but weights in any format, what describes the old ones, and the model card.
"""

from pathlib import Path, PurePosixPath

from quantkit.checkpoint.config import MODELOPT_FILE
from quantkit.checkpoint.digest import GATE_FILE, list_files
from quantkit.checkpoint.source import CONFIG_FILE, Source
from quantkit.checkpoint.writer import MANIFEST_FILE

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack"})
_ABOUT_OLD_WEIGHTS = frozenset(
    {CONFIG_FILE, MANIFEST_FILE, GATE_FILE, MODELOPT_FILE, "quantize_config.json", "README.md"}
)


def side_files(source: Source) -> dict[str, Path]:
    """The files to copy, by name; links are followed, hidden files and all folders left out."""
    if source.folder is None:
        return {}
    return {name: path for name, path in list_files(source.folder).items() if not _is_about_weights(name)}


def _is_about_weights(name: str) -> bool:
    path = PurePosixPath(name)
    elsewhere = len(path.parts) > 1 or name in _ABOUT_OLD_WEIGHTS
    return elsewhere or path.suffix in _WEIGHT_SUFFIXES or name.endswith(".index.json")
