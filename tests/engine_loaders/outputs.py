"""What quantkit writes of every family, in every way of its command line. Runs in the project's interpreter."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from typer.testing import CliRunner

from engine_loaders.jobs import Job
from engine_loaders.running import Engines, Reports
from quantkit.cli import app
from support.families import PUBLISHED, write_family

INT4, NVFP4, MODELOPT, BF16 = ["--int4"], ["--nvfp4"], ["--nvfp4", "--format", "modelopt"], ["--bf16"]
SOURCE = "source"  # as it is, for comparison
WAYS = {
    "int4": INT4,
    "int4-signed": [*INT4, "--scale", "signed"],
    "int4-bf16": [*INT4, "--rest", "bf16"],
    "nvfp4": NVFP4,
    "modelopt": MODELOPT,
    "bf16": BF16,
    "int4-g64": [*INT4, "--group-size", "64"],
    "int4-g128": [*INT4, "--group-size", "128"],
    "nvfp4-bf16": [*NVFP4, "--rest", "bf16"],
    "mtp-quantize": [*INT4, "--mtp", "quantize"],
    "mtp-keep": [*INT4, "--mtp", "keep"],
    "mtp-drop": [*INT4, "--mtp", "drop"],
    "nvfp4-mtp-keep": [*NVFP4, "--mtp", "keep"],
    "modelopt-mtp-keep": [*MODELOPT, "--mtp", "keep", "--rest", "bf16"],
}
_EVERYWHERE = ("int4", "int4-signed", "int4-bf16", "nvfp4", "modelopt", "bf16")
_MORE = {  # ways that need one family of a kind
    "glm-5.2-fp8_block": ("int4-g64", "int4-g128", "nvfp4-bf16", "mtp-quantize", "mtp-keep", "mtp-drop"),
    "glm-4.5-bf16": ("int4-g64", "int4-g128", "mtp-quantize", "mtp-keep", "mtp-drop"),
    "deepseek-v3-fp8_block": ("mtp-quantize", "mtp-keep", "mtp-drop"),
    "llama-bf16": ("int4-g64", "int4-g128"),
}
_DSA = ("GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM")

# Sizes that eight ranks share in whole blocks of 128, and heads in whole numbers.
_WIDE: dict[str, Any] = {"intermediate_size": 1024, "moe_intermediate_size": 1024, "num_attention_heads": 16}
_WIDE |= {"n_routed_experts": 8}
_WIDE_MLA = _WIDE | {"num_key_value_heads": 16, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
_WIDE_GQA = _WIDE | {"num_key_value_heads": 8, "head_dim": 64}
_NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 288}
_NARROW_GQA = _WIDE_GQA | {"intermediate_size": 512, "moe_intermediate_size": 512}


@dataclass(frozen=True)
class Toy:
    """A source: a checkpoint of `families.py` with other numbers, and the ways to convert it."""

    checkpoint: str
    ways: tuple[str, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)


TOYS = {name: Toy(name, (SOURCE, *_EVERYWHERE, *_MORE.get(name, ()))) for name in PUBLISHED}
UNUSUAL = {  # storages of sources in which no model is published
    "glm-5.2-fused3d": Toy("glm-5.2-fused3d", (SOURCE, "int4")),
    "glm-5.2-fp8_block_u8": Toy("glm-5.2-fp8_block_u8", (SOURCE, "int4")),
}
MANY_EXPERTS = {  # as many as are published: 256 are what SGLang fuses one shared expert with, and 384 are not
    "glm-5.2-256": Toy(
        "glm-5.2-fp8_block", ("int4", "nvfp4", "modelopt", "mtp-keep", "nvfp4-mtp-keep"), {"n_routed_experts": 256}
    ),
    "kimi-k2-384": Toy("kimi-k2-instruct-fp8_block", ("int4", "nvfp4"), {"n_routed_experts": 384}),
}
_SHARED_OUT = ("int4", "int4-g64", "int4-g128", "int4-bf16", "nvfp4", "bf16")
WIDE = {  # what eight ranks can share
    "glm-5.2-wide": Toy("glm-5.2-fp8_block", (*_SHARED_OUT, "modelopt"), _WIDE_MLA | {"qk_head_dim": 64}),
    "deepseek-v3-wide": Toy("deepseek-v3-fp8_block", (*_SHARED_OUT, "modelopt"), _WIDE_MLA),
    "kimi-k2-thinking-wide": Toy("kimi-k2-thinking-int4", (SOURCE, "nvfp4", "modelopt", "bf16"), _WIDE_MLA),
    "glm-4.5-wide": Toy("glm-4.5-bf16", _SHARED_OUT, _WIDE_GQA | {"num_key_value_heads": 4}),  # fewer than ranks
    "llama-wide": Toy("llama-bf16", (*_SHARED_OUT, "modelopt"), _WIDE_GQA),
}
NARROW = {  # what some numbers of ranks cannot share: groups of 128, blocks, heads, experts
    "glm-4.5-narrow": Toy("glm-4.5-bf16", ("int4-g64", "int4-g128"), _NARROW_GQA),
    "llama-narrow": Toy("llama-bf16", ("int4", "int4-g128", "bf16"), _NARROW_GQA),
    "llama-9-heads": Toy("llama-bf16", ("int4", "bf16"), _NINE_HEADS),
    "deepseek-v3-4-experts": Toy("deepseek-v3-fp8_block", ("bf16",), _WIDE_MLA | {"n_routed_experts": 4}),
    "glm-5.2-fp8_block": Toy("glm-5.2-fp8_block", (SOURCE, "int4", "int4-bf16", "nvfp4", "bf16")),
    "kimi-k2-instruct-fp8_block": Toy("kimi-k2-instruct-fp8_block", ("int4", "int4-bf16", "nvfp4", "bf16")),
}
_SOURCES = {**TOYS, **UNUSUAL, **MANY_EXPERTS, **NARROW, **WIDE}


class Outputs:
    """Checkpoints that are written once, when they are asked for, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refused: dict[str, str] = {}

    def source(self, toy: str) -> Path:
        """The folder of a source."""
        folder = self.folder / "sources" / toy
        if not folder.exists():
            write_family(folder, _SOURCES[toy].checkpoint, changes=_SOURCES[toy].changes)
        return folder

    def output(self, toy: str, way: str) -> Path | None:
        """The folder of what quantkit makes of a source in one of the `WAYS`; None where it refuses."""
        if way == SOURCE:
            return self.source(toy)
        name = f"{toy}--{way}"
        folder = self.folder / "outputs" / name
        if name not in self.refused and not folder.exists():
            result = CliRunner().invoke(app, ["convert", str(self.source(toy)), *WAYS[way], "-o", str(folder)])
            if result.exit_code:
                self.refused[name] = str(result.exception)
        return None if name in self.refused else folder


def cases(toys: Mapping[str, Toy]) -> list[tuple[str, str]]:
    """Every toy with each of its ways."""
    return [(name, way) for name, toy in toys.items() for way in toy.ways]


def vllm_jobs(folder: Path, ranks: int = 1, rank: int = 0) -> Iterator[Job]:
    """All models that vLLM builds of a checkpoint: main and draft, and those that it takes on CUDA."""
    config = json.loads((folder / "config.json").read_text())
    cuda = (False, True) if (config.get("architectures") or [""])[0] in _DSA else (False,)
    for on_cuda, mtp in itertools.product(cuda, _mtp(config)):
        yield Job(str(folder), mtp=mtp, cuda=on_cuda, ranks=ranks, rank=rank)


def sglang_jobs(folder: Path, ranks: int = 1, rank: int = 0) -> Iterator[Job]:
    """All models that SGLang builds of a checkpoint: main and draft, on one rank with shared experts fused and not."""
    config = json.loads((folder / "config.json").read_text())
    shares = config.get("text_config", config).get("n_shared_experts") and ranks == 1
    fusion = (True, False) if shares else (True,)
    for fuses, mtp in itertools.product(fusion, _mtp(config)):
        yield Job(str(folder), mtp=mtp, fusion=fuses, ranks=ranks, rank=rank)


def _mtp(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether there is a draft model beside the main one."""
    return (False, True) if config.get("text_config", config).get("num_nextn_predict_layers") else (False,)


JOBS: dict[str, Callable[[Path, int, int], Iterator[Job]]] = {"vLLM": vllm_jobs, "SGLang": sglang_jobs}
Key = TypeVar("Key")


@dataclass(frozen=True)
class Loaded(Generic[Key]):
    """Checkpoints, and what the engines made of them: of all models of each, on the first and the last of the ranks."""

    folders: Mapping[Key, Path]
    reports: Mapping[str, Reports]

    @classmethod
    def of(cls, engines: Engines, folders: Mapping[Key, Path], ranks: Iterable[int] = (1,)) -> "Loaded[Key]":
        """Every checkpoint in both engines, for each number of ranks."""
        asked = cls(folders, {})
        jobs = {
            engine: [job for key in folders for number in ranks for job in asked.jobs(key, engine, number)]
            for engine in JOBS
        }
        return cls(folders, engines.load(jobs))

    def jobs(self, key: Key, engine: str, ranks: int = 1) -> list[Job]:
        """The models that an engine builds of a checkpoint."""
        ends = dict.fromkeys((0, ranks - 1))
        return [job for rank in ends for job in JOBS[engine](self.folders[key], ranks, rank)]

    def asked(self, key: Key, engine: str, ranks: int = 1) -> tuple[str, Reports, list[Job]]:
        """What `disagreements` takes of an engine."""
        return engine, self.reports[engine], self.jobs(key, engine, ranks)
