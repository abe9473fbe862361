"""What transformers computes on the numbers of a checkpoint, decoded by `truth.py`: nothing of quantkit is in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.runnable import edit_config
from support.simulation import copy_readable, load_model, quiet
from support.truth import truth


def write_numbers(folder: Path, output: Path) -> Path:
    """The checkpoint in `folder` in float32, without quantization, for transformers."""
    copy_readable(folder, output)
    for path in output.glob("*.safetensors*"):
        path.unlink()
    tensors = {name: torch.from_numpy(values.astype("f4", order="C")) for name, values in truth(folder).items()}
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})

    def strip(config: dict[str, Any]) -> None:
        for part in (config, config.get("text_config", {})):
            part.pop("quantization_config", None)

    return edit_config(output, strip)


@contextmanager
def ties_to_the_first() -> Iterator[None]:
    """torch.topk leaves open which of equal values it gives; here it is the first.

    Indexers have many: relu makes a score exactly 0 where no head fires.
    """

    def topk(values: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        ordered, places = torch.sort(values, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((ordered.narrow(dim, 0, k), places.narrow(dim, 0, k)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", topk)
        patch.setattr(torch, "topk", topk)
        yield


def reference_model(numbers: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a folder that `write_numbers` made."""
    with quiet():
        return load_model(numbers, dtype)[0]


@torch.inference_mode()
def reference_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Float32 logits [..., T, vocab] of tokens [..., T]."""
    with ties_to_the_first():
        logits: torch.Tensor = model(tokens.view(-1, tokens.shape[-1])).logits.float()
    return logits.view(*tokens.shape, -1)
