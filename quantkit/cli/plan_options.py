"""The options of `quantkit plan`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from quantkit.choices import IndexCache, KvLayout


class Explain(StrEnum):
    """What --explain can explain."""

    PUBLISHED = "published"


Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="A model alias (glm-5.2), a Hub id, a folder or a config.json; two for --phases, any number for --check.",
        show_default=False,
    ),
]
Int4 = Annotated[bool, typer.Option("--int4", help="Sizes after conversion by the model's built-in INT4 recipe.")]
Nvfp4 = Annotated[bool, typer.Option("--nvfp4", help="Sizes after conversion by the model's built-in NVFP4 recipe.")]
Gpus = Annotated[str, typer.Option("--gpus", help="Number and name of the GPUs.")]
GpuTable = Annotated[Path | None, typer.Option("--gpu-table", help="A YAML file with more GPUs.")]
Tp = Annotated[int | None, typer.Option("--tp", min=1, help="Ranks that share a copy of the model (all GPUs).")]
Ep = Annotated[bool, typer.Option("--ep", help="Whole experts on each rank.")]
DpAttention = Annotated[bool, typer.Option("--dp-attention", help="All of attention on each rank.")]
Speculate = Annotated[bool, typer.Option("--speculate", help="Load the MTP layers, for speculative decoding.")]
KvOption = Annotated[KvLayout, typer.Option("--kv", help="How the KV cache stores a token.")]
IndexOption = Annotated[
    IndexCache, typer.Option("--index-cache", help="Layers with an index cache: vLLM's, or SGLang's all.")
]
Context = Annotated[int, typer.Option("--context", min=1, help="Tokens of each request.")]
Utilization = Annotated[float, typer.Option("--utilization", help="Share of the memory that the engine takes.")]
Reserve = Annotated[float, typer.Option("--reserve-gib", help="GiB of that for activations and graphs, per GPU.")]
Price = Annotated[float | None, typer.Option("--price", help="Dollars for a GPU hour.")]
ExplainOption = Annotated[
    Explain | None, typer.Option("--explain", help="Instead: each published figure beside our own.")
]
Phases = Annotated[
    bool,
    typer.Option(
        "--phases",
        help="Which format serves prefill and which decode: MODEL or its conversion, or of two MODELs the first "
        "prefill and the second decode; with the engines' launch lines.",
    ),
]
PrefillGpus = Annotated[str | None, typer.Option("--prefill-gpus", help="GPUs of the prefill pool, if not --gpus.")]
PrefillKv = Annotated[KvLayout | None, typer.Option("--prefill-kv", help="The cache of the prefill pool, if not --kv.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write the deployment manifest of --phases.")]
Check = Annotated[
    Path | None, typer.Option("--check", help="Instead: say whether the folders MODEL... are those of this manifest.")
]
Quick = Annotated[bool, typer.Option("--quick", help="With --check: believe quantkit.json if a file's size is right.")]
