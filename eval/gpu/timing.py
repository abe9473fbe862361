"""Times of launches on a GPU, and what that GPU does at best."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

DEVICE = "cuda"
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Limits:
    """What this GPU does at best: copying, in bytes read and written a second, and BF16 products."""

    copy_gb_s: float
    bf16_tflops: float


def captured(launch: Callable[[], object]) -> Callable[[], None]:
    """`launch` as a CUDA graph: what is timed is the GPU, not Python; and a launcher that waits for the GPU fails."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()  # whatever is done once is done
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def measure(launch: Callable[[], object], repeats: int, flush: torch.Tensor) -> list[float]:
    """Milliseconds of `repeats` launches by CUDA events, the L2 cache overwritten before each."""
    spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in spans:
        flush.zero_()
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in spans]


def measure_limits(flush: torch.Tensor, repeats: int) -> Limits:
    """Copy 2 GiB, and multiply 8192 x 8192 matrices."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copied = min(measure(lambda: target.copy_(source), repeats, flush))
    square = torch.randn(8192, 8192, device=DEVICE).bfloat16()
    multiplied = min(measure(lambda: square @ square, repeats, flush))
    return Limits(2 * source.numel() / copied / 1e6, 2 * 8192**3 / multiplied / 1e9)
