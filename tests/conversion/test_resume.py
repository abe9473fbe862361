"""A conversion survives kill -9 at any moment: going on gives the bytes of an uninterrupted run, or is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.choices import Mtp, ScaleMethod
from quantkit.conversion import Options
from quantkit.errors import OutputError, QuantkitError
from support.checkpoints import FP8, digests, fp8_codes, write


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Six FP8 weights in six shards, each of which has the scale of the one before it."""
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(6)]
    shards = (
        {names[layer]: fp8_codes(128, 128, seed=layer), f"{names[layer - 1]}_scale_inv": torch.tensor([[0.5 + layer]])}
        for layer in range(6)
    )
    return write(tmp_path / "source", *shards, num_hidden_layers=6, quantization_config=FP8)


@pytest.fixture
def whole(source: Path, tmp_path: Path) -> dict[str, str]:
    """The digests of the files of an uninterrupted conversion."""
    quantkit.convert(source, tmp_path / "whole")
    return digests(tmp_path / "whole")


def interrupt(
    source: Path, output: Path, shards: int, monkeypatch: pytest.MonkeyPatch, *, resume: bool = False
) -> None:
    """Run a conversion that breaks off when `shards` shards are finished, as a kill would: nothing is cleaned up."""

    class Killed(BaseException):
        pass

    from quantkit.conversion.journal import Journal

    add, count = Journal.add, 0

    def add_and_break(self: Journal, entry: object) -> None:
        nonlocal count
        if count == shards:
            raise Killed
        add(self, entry)  # type: ignore[arg-type]
        count += 1

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", add_and_break)
        with pytest.raises(Killed):
            quantkit.convert(source, output, resume=resume)


@pytest.mark.parametrize("shards", [0, 1, 4, 5])
def test_resumed_run_equals_an_uninterrupted_one(
    source: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    """After any number of finished shards, --resume gives the same files, manifest included, and leaves no others."""
    interrupt(source, tmp_path / "out", shards, monkeypatch)
    assert not (tmp_path / "out" / "config.json").exists()

    quantkit.convert(source, tmp_path / "out", resume=True)

    assert digests(tmp_path / "out") == whole


def test_finished_shards_are_not_converted_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run writes only what is missing."""
    interrupt(source, tmp_path / "out", 4, monkeypatch)
    lines = (tmp_path / "out" / ".quantkit" / "journal.jsonl").read_text().splitlines()
    done = [json.loads(line)["shard"] for line in lines[1:]]
    before = {shard: (tmp_path / "out" / shard).stat().st_mtime_ns for shard in done}

    quantkit.convert(source, tmp_path / "out", resume=True)

    assert len(done) == 4
    assert {shard: (tmp_path / "out" / shard).stat().st_mtime_ns for shard in done} == before


@pytest.mark.exhaustive
def test_kill_at_random_moments(source: Path, whole: dict[str, str], tmp_path: Path) -> None:
    """A process killed again and again never leaves a partial file under a final name, and ends with the same bytes."""
    command = [sys.executable, "-m", "quantkit.cli", "convert", source, "-o", tmp_path / "out", "--resume", "--json"]
    delay, kills = 0.5, 0
    while True:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            _, stderr = child.communicate(timeout=delay)
            break
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)
            child.communicate()
            kills += 1
            delay += 0.05 if delay < 1.5 else 1.0
        for path in (tmp_path / "out").glob("*.safetensors"):
            load_file(path)

    assert child.returncode == 0, stderr
    assert kills > 3
    assert digests(tmp_path / "out") == whole


def test_interrupted_run_needs_a_decision(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --resume or --overwrite an interrupted run is left alone, and the error says what may be done."""
    interrupt(source, tmp_path / "out", 2, monkeypatch)
    before = digests(tmp_path / "out")

    with pytest.raises(OutputError, match="interrupted run") as caught:
        quantkit.convert(source, tmp_path / "out")

    assert "--resume" in str(caught.value.hint)
    assert digests(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (Options(group_size=64), "group_size: 32 before, 64 now"),
        (Options(scale=ScaleMethod.SIGNED), "scale: search before, signed now"),
        (Options(mtp=Mtp.KEEP), "mtp: quantize before, keep now"),
    ],
)
def test_changed_recipe_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Options, field: str
) -> None:
    """Two recipes never mix in one checkpoint: the field that differs is named."""
    interrupt(source, tmp_path / "out", 2, monkeypatch)

    with pytest.raises(OutputError, match=field):
        quantkit.convert(source, tmp_path / "out", options=options, resume=True)


def change_a_byte(path: Path) -> None:
    """Change the last byte of a file, its size and times kept."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_changed_source_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single changed byte in a shard that has been used, with size and times kept, is found and the shard named."""
    interrupt(source, tmp_path / "out", 2, monkeypatch)
    change_a_byte(source / "model-00001-of-00006.safetensors")

    with pytest.raises(OutputError, match=r"model-00001-of-00006\.safetensors has changed"):
        quantkit.convert(source, tmp_path / "out", resume=True)
    quantkit.convert(source, tmp_path / "out", resume=True, trust_source=True)


def test_changed_source_config_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another config.json is another source."""
    interrupt(source, tmp_path / "out", 2, monkeypatch)
    config = source / "config.json"
    config.write_text(config.read_text().replace("{", "{ ", 1))

    with pytest.raises(OutputError, match="source config"):
        quantkit.convert(source, tmp_path / "out", resume=True)


@pytest.mark.parametrize("torn", [b'{"shard": "model-0', b"\x00\x00\x00", b'{"shard"\n', b"[]\n"])
def test_torn_journal_line_is_left_out(
    source: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    """What a power failure leaves at the journal's end does not stop a resumed run, and the next line is whole."""
    interrupt(source, tmp_path / "out", 2, monkeypatch)
    with (tmp_path / "out" / ".quantkit" / "journal.jsonl").open("ab") as journal:
        journal.write(torn)

    quantkit.convert(source, tmp_path / "out", resume=True)

    assert digests(tmp_path / "out") == whole


def zero_the_tail(path: Path) -> None:
    """Lose the end of a file, as a disk does whose cache was not flushed; its size stays."""
    size = path.stat().st_size
    os.truncate(path, size - 100)
    os.truncate(path, size)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100), change_a_byte, zero_the_tail])
def test_lost_output_is_made_again(
    source: Path,
    whole: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
) -> None:
    """A finished shard that is gone or not what the run wrote is named and converted again, with the same bytes."""
    interrupt(source, tmp_path / "out", 3, monkeypatch)
    damage(tmp_path / "out" / "model-00002-of-00006.safetensors")
    warnings: list[str] = []

    quantkit.convert(source, tmp_path / "out", resume=True, trust_source=True, warn=warnings.append)

    assert digests(tmp_path / "out") == whole
    assert len(warnings) == 1
    assert warnings[0].startswith("model-00002-of-00006.safetensors is not what the interrupted run wrote")


def spoil(entry: dict[str, Any], **changes: object) -> dict[str, Any]:
    return {**entry, **changes}


SPOILED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another sha256": lambda entry: spoil(entry, sha256="0" * 64),
    "sha256 in capitals": lambda entry: spoil(entry, sha256=entry["sha256"].upper()),
    "a short sha256": lambda entry: spoil(entry, sha256=entry["sha256"][:-1]),
    "no sha256": lambda entry: spoil(entry, sha256=None),
    "size as text": lambda entry: spoil(entry, nbytes=str(entry["nbytes"])),
    "another size": lambda entry: spoil(entry, nbytes=entry["nbytes"] + 1),
    "another shard": lambda entry: spoil(entry, shard="../toy/model-00002-of-00006.safetensors"),
    "sources as a list": lambda entry: spoil(entry, sources=list(entry["sources"])),
    "no sources": lambda entry: spoil(entry, sources={}),
    "a source without a sha256": lambda entry: spoil(entry, sources=dict.fromkeys(entry["sources"], "")),
    "counts of text": lambda entry: spoil(entry, counts={"clamped": "many"}),
    "a field too many": lambda entry: spoil(entry, more=1),
    "a field too few": lambda entry: {name: value for name, value in entry.items() if name != "sources"},
}


@pytest.mark.parametrize("change", SPOILED.values(), ids=SPOILED)
def test_journal_line_that_does_not_fit_ends_the_journal(
    source: Path,
    whole: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """What a line claims is believed only if it can be true; shards from there on are made again."""
    interrupt(source, tmp_path / "out", 4, monkeypatch)
    path = tmp_path / "out" / ".quantkit" / "journal.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = json.dumps(change(json.loads(lines[2])))
    path.write_text("\n".join(lines) + "\n")

    quantkit.convert(source, tmp_path / "out", resume=True)

    assert digests(tmp_path / "out") == whole


def test_shard_that_was_made_again_counts_once(
    source: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is interrupted again after it made a damaged shard anew goes on from the new one."""
    interrupt(source, tmp_path / "out", 3, monkeypatch)
    change_a_byte(tmp_path / "out" / "model-00001-of-00006.safetensors")
    interrupt(source, tmp_path / "out", 1, monkeypatch, resume=True)
    warnings: list[str] = []

    quantkit.convert(source, tmp_path / "out", resume=True, warn=warnings.append)

    assert digests(tmp_path / "out") == whole
    assert warnings == []


def test_side_file_more_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that has got another file is not what the run began with."""
    interrupt(source, tmp_path / "out", 2, monkeypatch)
    (source / "tokenizer.model").write_bytes(b"new")

    with pytest.raises(OutputError, match=r"differs in files: tokenizer\.model now alone"):
        quantkit.convert(source, tmp_path / "out", resume=True)


def test_journal_without_a_first_line_starts_anew(source: Path, whole: dict[str, str], tmp_path: Path) -> None:
    """A run that was killed before it wrote anything is begun again by --resume."""
    (tmp_path / "out" / ".quantkit").mkdir(parents=True)
    (tmp_path / "out" / ".quantkit" / "journal.jsonl").write_bytes(b'{"version"')

    quantkit.convert(source, tmp_path / "out", resume=True)

    assert digests(tmp_path / "out") == whole


def test_resume_of_nothing_is_a_new_run(source: Path, whole: dict[str, str], tmp_path: Path) -> None:
    """--resume may always be given: where there is nothing yet, the run begins."""
    quantkit.convert(source, tmp_path / "out", resume=True)

    assert digests(tmp_path / "out") == whole


def test_resume_of_a_finished_run_does_nothing(source: Path, tmp_path: Path) -> None:
    """Where the same run has ended, --resume returns its manifest and writes nothing."""
    manifest = quantkit.convert(source, tmp_path / "out")
    before = digests(tmp_path / "out")

    again = quantkit.convert(source, tmp_path / "out", resume=True)

    assert again.to_json() == manifest.to_json()
    assert digests(tmp_path / "out") == before


def test_resume_leaves_other_folders_alone(source: Path, toy_int4: Path, tmp_path: Path) -> None:
    """Another finished conversion and a folder that is not quantkit's are neither gone on with nor touched."""
    shutil.copytree(toy_int4, tmp_path / "finished")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("the only copy")

    for folder in (tmp_path / "finished", tmp_path / "foreign"):
        before = digests(folder)
        with pytest.raises(QuantkitError):
            quantkit.convert(source, folder, resume=True)
        assert digests(folder) == before


def test_resumed_run_reports_progress_to_the_end(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress counts the finished shards too, so that it ends at the total."""
    interrupt(source, tmp_path / "out", 3, monkeypatch)
    done: list[int] = []
    totals: list[int] = []

    def start(total: int) -> Callable[[int], None]:
        totals.append(total)
        return done.append

    quantkit.convert(source, tmp_path / "out", resume=True, progress=start)

    assert totals == [quantkit.inspect(source).total_bytes]
    assert sum(done) == totals[0]
