"""The table of GPUs: memory, bandwidth and dense FLOP/s, from `gpus.yaml` and from a file of the user."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any

import yaml

from quantkit.errors import UsageError

_COUNT = re.compile(r"(?:([1-9]\d*)x)?(.+)")
_OPTIONAL = ("fp8_tflops", "fp4_tflops", "sm")
_WHOLE = ("memory_mib", "sm")
_HINT = "Write NAME: {memory_mib: ..., bandwidth_gb_s: ..., bf16_tflops: ...}."


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    memory_mib      MiB (2^20 bytes) that a process can use
    bandwidth_gb_s  of the memory, in 10^9 bytes per second
    *_tflops        dense, in 10^12 operations per second; None where it has no such unit
    sm              NVIDIA's generation: 80 Ampere, 90 Hopper, 100 Blackwell; None where it is not said
    """

    name: str
    memory_mib: int
    bandwidth_gb_s: float
    bf16_tflops: float
    fp8_tflops: float | None = None
    fp4_tflops: float | None = None
    sm: int | None = None

    @property
    def memory_bytes(self) -> int:
        """The memory that a process can use, in bytes."""
        return self.memory_mib << 20

    def flops(self, weight_format: str) -> float:
        """FLOP/s of a product with weights of a format, as Hopper and Blackwell kernels run it.

        FP8 weights meet FP8 activations and NVFP4 weights FP4 ones where there are units for them; INT4 weights are
        decoded (Marlin), and what has no unit runs in BF16.
        """
        tflops = {"fp8": self.fp8_tflops, "nvfp4": self.fp4_tflops}.get(weight_format) or self.bf16_tflops
        return tflops * 1e12


def parse_gpus(text: str, table: Path | None = None) -> tuple[int, Gpu]:
    """How many of which GPU `8xH200` means; `table` is a YAML file that adds GPUs to the built-in ones."""
    gpus = load_gpus(table)
    match = _COUNT.fullmatch(text)
    by_name = {name.casefold(): gpu for name, gpu in gpus.items()}
    if match is None or match[2].casefold() not in by_name:
        raise UsageError(
            f"--gpus {text}: no such GPU",
            hint=f"Give a number and a name, as in 8xH200. Known: {', '.join(gpus)}; --gpu-table adds others.",
        )
    return int(match[1] or 1), by_name[match[2].casefold()]


def load_gpus(table: Path | None = None) -> dict[str, Gpu]:
    """The built-in GPUs and those of the file `table`, by name."""
    text = resources.files("quantkit.planning").joinpath("gpus.yaml").read_text(encoding="utf-8")
    gpus = _parse("gpus.yaml", text)
    if table is not None:
        try:
            gpus |= _parse(str(table), table.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{table}: cannot be read: {error}", hint="Give a UTF-8 YAML file.") from error
    return gpus


def _parse(file: str, text: str) -> dict[str, Gpu]:
    try:
        entries = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{file}: not valid YAML: {error}", hint=_HINT) from error
    if not isinstance(entries, Mapping):
        raise UsageError(f"{file}: not a mapping of names to GPUs", hint=_HINT)
    return {str(name): _gpu(file, str(name), entry) for name, entry in entries.items()}


def _gpu(file: str, name: str, entry: Any) -> Gpu:
    known = [field.name for field in fields(Gpu) if field.name != "name"]
    if not isinstance(entry, Mapping):
        raise UsageError(f"{file}: {name} is not a mapping", hint=f"It has {', '.join(known)}.")
    if wrong := [str(key) for key in entry if key not in known]:
        raise UsageError(f"{file}: {name} has the unknown key {wrong[0]}", hint=f"It has {', '.join(known)}.")
    if missing := [key for key in known if key not in entry and key not in _OPTIONAL]:
        raise UsageError(f"{file}: {name} has no {', '.join(missing)}")
    for key, value in entry.items():
        kinds = (int,) if key in _WHOLE else (int, float)
        if type(value) not in kinds or not 0 < value < inf:
            raise UsageError(f"{file}: {key} of {name} is {value!r}, not a positive number")
    return Gpu(name, **entry)
