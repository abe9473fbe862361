"""What goes along with the weights: tokenizer, chat template, generation and processor configs, custom code, licence.

All files of the source's folder are copied but weights in any format, what describes the old ones, and the model card.
"""

from collections.abc import Iterator
from pathlib import Path

from quantkit.checkpoint.config import MODELOPT_FILE
from quantkit.checkpoint.digest import GATE_FILE
from quantkit.checkpoint.source import CONFIG_FILE, Source
from quantkit.checkpoint.writer import MANIFEST_FILE

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack"})
_ABOUT_OLD_WEIGHTS = frozenset(
    {CONFIG_FILE, MANIFEST_FILE, GATE_FILE, MODELOPT_FILE, "quantize_config.json", "README.md"}
)


def side_files(source: Source) -> Iterator[tuple[str, Path]]:
    """The files to copy, by the name relative to the folder; links are followed, hidden files and folders left out."""
    if source.folder is None:
        return
    for path in sorted(source.folder.iterdir()):
        about_weights = path.name in _ABOUT_OLD_WEIGHTS or path.name.endswith(".index.json")
        if (
            path.is_file()
            and not path.name.startswith(".")
            and path.suffix not in _WEIGHT_SUFFIXES
            and not about_weights
        ):
            yield path.name, path
