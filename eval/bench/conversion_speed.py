"""`make bench`: how fast a conversion is, as a ratio to reading its input and writing as many bytes as its output.

All arms run in one run on the same made-up shards with GLM-5.2's shapes, start with cold caches (`posix_fadvise`) and
end when the bytes are on the disk (`fsync`). A conversion is timed as a whole process, its start-up included. Our arms
take turns with reading and writing, in the order A B B A, and the best time of each counts. With `--peers` (`make bench
PEERS=1`) llm-compressor and AutoRound convert the same input, too (`peers.py`): once each, loaded once before. Of two
that do the same work the faster one counts.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.choices import ScaleMethod
from quantkit.conversion import preview
from quantkit.eval.bench import peers
from quantkit.eval.bench.random_model import write_random
from quantkit.recipe import find_alias
from quantkit.weights.encodings import is_main

_PIECE_BYTES = 16 << 20
_EXPERTS_IN_A_LAYER = 24  # so that a shard, which holds a layer, has about 1 GB


@dataclass(frozen=True)
class _Arm:
    """A kind of conversion: its recipe and options, and the peers that do the same work."""

    recipe: str
    options: tuple[str, ...]
    peers: tuple[str, ...] = ()


_NVFP4_SCALES = (ScaleMethod.MINMAX, ScaleMethod.SEARCH)
_ARMS = (
    *(_Arm("glm-5.2-int4", ("--int4", "--scale", scale), ("llm-compressor", "auto-round")) for scale in ScaleMethod),
    *(_Arm("glm-5.2-nvfp4", ("--nvfp4", "--scale", scale), ("llm-compressor-nvfp4",)) for scale in _NVFP4_SCALES),
    _Arm("bf16", ("--bf16",)),
)
_COLUMNS = (
    "arm",
    "seconds",
    "CPU seconds",
    "MB/s of input",
    "x read + write",
    "x faster than peer",
    "peak memory MB",
)
# A small process of its own, because Linux counts the peak memory of whoever starts a process as that process's, too.
_MEASURE = """
import os, sys, time
start = time.monotonic()
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)])
_, status, usage = os.wait4(child, 0)
print([time.monotonic() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, status])
"""


@dataclass(frozen=True, order=True)
class Timing:
    """One arm: seconds of the whole process, seconds of all its threads, and peak resident memory in bytes.

    0 is not measured.
    """

    seconds: float
    cpu_seconds: float = 0.0
    peak_bytes: int = 0


def make_source(folder: Path, size: int) -> int:
    """Write a GLM-5.2 FP8 checkpoint of about `size` bytes with random numbers into `folder`; returns its exact size.

    Expert matrices have their real shapes, 2048 x 6144 and 6144 x 2048; layers, experts and vocabulary are few.
    """
    alias = find_alias("glm-5.2")
    assert alias is not None
    config = json.loads(alias.config_text)
    expert_bytes = 3 * config["moe_intermediate_size"] * config["hidden_size"]
    layers = max(round(size / (_EXPERTS_IN_A_LAYER + 5) / expert_bytes), 1)  # attention and shared expert: about 5
    config |= {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 0,
        "n_routed_experts": min(_EXPERTS_IN_A_LAYER, max(size // layers // expert_bytes - 5, 1)),
        "vocab_size": 1024,
        "indexer_types": ["full"] * layers,
    }
    return write_random(folder, config)


def time_process(source: Path, output: Path, command: Sequence[str]) -> Timing:
    """Time `python -m` `command`, a process that turns `source` into `output`.

    Raises RuntimeError with the end of what it said if it fails. Of several processes the largest one's memory counts.
    """
    drop_caches(source)
    log = output.with_suffix(".log")
    with log.open("wb") as file:
        measure = [sys.executable, "-S", "-c", _MEASURE, sys.executable, "-m", *command]
        result = subprocess.run(measure, stdout=subprocess.PIPE, stderr=file, check=True)
    *timing, status = json.loads(result.stdout)
    if status:
        raise RuntimeError(f"{' '.join(command)} failed:\n{log.read_text(errors='replace')[-2000:]}")
    return Timing(*timing)


def time_conversion(source: Path, output: Path, options: Sequence[str]) -> Timing:
    """Time `quantkit convert`; its output is deleted."""
    command = ["quantkit.cli", "convert", str(source), "-o", str(output), "--json", *options]
    timing = time_process(source, output, command)
    shutil.rmtree(output)
    return timing


def time_peer(peer: str, source: Path, output: Path) -> Timing:
    """Time `peer`, a key of `peers.PEERS`, on the same work; its output is deleted.

    Raises RuntimeError if it left experts as they were.
    """
    timing = time_process(source, output, ["quantkit.eval.bench.peers", peer, str(source), str(output)])
    recipe = next(arm.recipe for arm in _ARMS if peer in arm.peers)
    planned = preview(source, recipe).groups
    done = peers.count_4bit_weights(output)
    wanted = sum(group.weights for group in planned if is_main(group.format))
    if done != wanted:
        raise RuntimeError(f"{peer} made {done} of {wanted} experts 4-bit")
    if (ratio := peers.largest_partner_ratio(output)) > 1:
        sys.stderr.write(f"{peer}: global scales that engines load as one differ by up to {ratio:.2f} times\n")
    shutil.rmtree(output)
    return timing


def time_reading_and_writing(source: Path, output: Path, out_bytes: int) -> Timing:
    """Time reading all shards of `source` and writing `out_bytes`, piece by piece, one after the other."""
    drop_caches(source)
    shards = sorted(source.glob("*.safetensors"))
    ratio = out_bytes / sum(path.stat().st_size for path in shards)
    start = time.monotonic()
    written = 0
    with output.open("wb", buffering=0) as out:
        for piece in _pieces(shards):
            count = min(round(len(piece) * ratio), out_bytes - written)
            for begin in range(0, count, len(piece)):
                written += out.write(piece[: min(len(piece), count - begin)])
        os.fsync(out.fileno())
    seconds = time.monotonic() - start
    output.unlink()
    return Timing(seconds)


def _pieces(paths: list[Path]) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_PIECE_BYTES))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                yield buffer[:count]


def drop_caches(folder: Path) -> None:
    """Take the files of `folder` out of the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Run all arms and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=4.0, help="size of the made-up checkpoint (default 4)")
    parser.add_argument("--folder", type=Path, default=Path("build"), help="where to work (default build)")
    parser.add_argument("--peers", action="store_true", help="time llm-compressor and AutoRound, too: minutes")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="bench-", dir=arguments.folder))
    try:
        nbytes = make_source(work / "source", round(arguments.size_gb * 1e9))
        sys.stdout.write(
            f"{nbytes:,} bytes of FP8 input, load average {os.getloadavg()[0]:.2f} before the first arm\n\n"
        )
        sys.stdout.write(f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}\n")
        found = _run_peers(work, nbytes) if arguments.peers else {}
        for arm in _ARMS:
            peer = min((found[name] for name in arm.peers if name in found), default=None)
            _run_arm(work, nbytes, arm, peer)
    finally:
        shutil.rmtree(work)


def _run_peers(work: Path, nbytes: int) -> dict[str, Timing]:
    """Time each peer that can be loaded, once."""
    timings = {}
    for peer in peers.PEERS:
        probe = subprocess.run(
            [sys.executable, "-m", "quantkit.eval.bench.peers", peer], capture_output=True, text=True
        )
        if probe.returncode:
            sys.stderr.write(f"{peer} is skipped: {probe.stderr.strip().splitlines()[-1]}\n")
            continue
        timings[peer] = time_peer(peer, work / "source", work / "output")
        _print_row(f"{peer} {probe.stdout.split()[-1]}", timings[peer], nbytes)
    return timings


def _run_arm(work: Path, nbytes: int, arm: _Arm, peer: Timing | None) -> None:
    """Time one kind of conversion and reading and writing as much, taking turns."""
    out_bytes = preview(work / "source", arm.recipe).file_bytes
    limits, timings = [], []
    for turn in "ABBA":
        if turn == "A":
            limits.append(time_reading_and_writing(work / "source", work / "copy", out_bytes))
        else:
            timings.append(time_conversion(work / "source", work / "output", arm.options))
    _print_row(f"read + write {out_bytes / 1e9:.2f} GB", min(limits), nbytes)
    _print_row(f"convert {' '.join(arm.options)}", min(timings), nbytes, min(limits), peer)


def _print_row(name: str, timing: Timing, nbytes: int, limit: Timing | None = None, peer: Timing | None = None) -> None:
    cells = (
        name,
        f"{timing.seconds:.2f}",
        f"{timing.cpu_seconds:.1f}" if timing.cpu_seconds else "",
        f"{nbytes / timing.seconds / 1e6:.0f}",
        f"{timing.seconds / limit.seconds:.2f}" if limit else "",
        f"{peer.seconds / timing.seconds:.1f}" if peer else "",
        f"{timing.peak_bytes / 1e6:.0f}" if timing.peak_bytes else "",
    )
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
