"""Where numba keeps compiled loops: a folder for each state of the kernels.

numba compiles a loop anew when its own file has changed, but not when another loop has that it calls. `make setup` runs
this file, which uses every loop once, so that no test waits for a compiler.
"""

import hashlib
import os
import tempfile
from pathlib import Path

from support.paths import GLM_TINY, ROOT


def use_cache() -> None:
    """Let numba, which must not have been imported, and the processes to come use the folder of these kernels."""
    sources = b"".join(path.read_bytes() for path in sorted((ROOT / "kernels").rglob("*.py")))
    os.environ["NUMBA_CACHE_DIR"] = str(ROOT / "build" / "numba" / hashlib.sha256(sources).hexdigest()[:16])


def warm() -> None:
    """Convert and verify the trained checkpoint in every way, floats too, and run what comes of it."""
    import torch

    import quantkit
    from quantkit.models import PlainCache, load

    with tempfile.TemporaryDirectory() as place:
        plain = Path(place) / "bf16"
        quantkit.convert(GLM_TINY, plain, "bf16")
        for source in (GLM_TINY, plain):
            for recipe in ("glm-5.2-int4", "glm-5.2-nvfp4"):
                output = Path(place) / f"{source.name}-{recipe}"
                quantkit.convert(source, output, recipe)
                quantkit.verify(output, source)
        for folder in Path(place).iterdir():
            for dtype in (torch.bfloat16, torch.float32):
                load(folder, dtype).forward(torch.arange(9), torch.arange(9), PlainCache())


if __name__ == "__main__":
    use_cache()
    warm()
