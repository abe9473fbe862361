"""What the Hub sends is compared with what the Hub says: sha256 of large files, git's hash of small ones; once."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import contents
from support.hub.pulling import REPO, SHARD, assert_refused, fetched, run_at
from support.program import Completed

FILES = ("config.json", "model.safetensors.index.json", "tokenizer.json", SHARD)


def blobs(home: Path) -> dict[str, bytes]:
    """The files of the cache by their names there."""
    return {path.name: path.read_bytes() for path in (home / "hub").rglob("blobs/*") if path.is_file()}


def record(home: Path) -> list[Any]:
    """What was found right: path, size and time of each file."""
    return [json.loads(line) for line in (home / "quantkit" / "verified.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("file", FILES)
def test_flipped_bit_is_refused_and_fetched_anew(
    run_on_hub: Callable[..., Completed], toy_hub: Any, toy: Path, toy_int4: Path, tmp_path: Path, file: str
) -> None:
    """A body with one bit flipped, of the right size, is refused by name with both hashes, whatever the file is.

    It is out of the cache, so that the next run fetches it, and it alone, again.
    """
    toy_hub.flip(f"/{file}")
    first = run_on_hub("convert", REPO, "-o", tmp_path / "output")

    assert_refused(first, REPO, file)
    assert not (tmp_path / "output").exists()
    digits = 64 if file == SHARD else 40
    said = first.stderr.split("not the Hub's: ")[1].split()
    hashes = [word for word in said if len(word) == digits and set(word) <= set("0123456789abcdef")]
    assert len(set(hashes)) == 2
    assert hashes[1] not in blobs(tmp_path / "home")

    begun = len(toy_hub.requests)
    second = run_on_hub("convert", REPO, "-o", tmp_path / "output")

    assert second.returncode == 0, second.stderr
    assert fetched(toy_hub.requests[begun:]) == [file]
    assert contents(tmp_path / "output") == contents(toy_int4)


def test_config_alone_is_compared(run_on_hub: Callable[..., Completed], toy_hub: Any) -> None:
    """What is told from a config alone is told from the Hub's."""
    toy_hub.flip("/config.json")

    assert_refused(run_on_hub("inspect", REPO), REPO, "config.json")
    assert run_on_hub("inspect", REPO).returncode == 0


def test_nothing_is_read_twice(run_on_hub: Callable[..., Completed], toy_hub: Any, toy: Path, tmp_path: Path) -> None:
    """What was compared once is known by path, size and time; a file that was changed since is compared again."""
    home = tmp_path / "home"
    assert run_on_hub("convert", REPO, "-o", tmp_path / "one").returncode == 0
    known = record(home)
    assert len(known) == len(blobs(home)) == len(list(toy.iterdir()))
    assert run_on_hub("convert", REPO, "-o", tmp_path / "two").returncode == 0
    assert record(home) == known

    blob = max((home / "hub").rglob("blobs/*"), key=lambda path: path.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)

    assert_refused(run_on_hub("convert", REPO, "-o", tmp_path / "three"), REPO, ".safetensors")
    assert run_on_hub("convert", REPO, "-o", tmp_path / "three").returncode == 0


def test_cache_of_another_program_is_compared_without_the_hub(
    run_on_hub: Callable[..., Completed], toy_hub: Any, dead_endpoint: str, tmp_path: Path
) -> None:
    """While the Hub is down, files are compared with the hashes that are their names in the cache."""
    home = tmp_path / "home"
    assert run_on_hub("convert", REPO, "-o", tmp_path / "one").returncode == 0
    shutil.rmtree(home / "quantkit")
    blob = min((home / "hub").rglob("blobs/*"), key=lambda path: path.stat().st_size)
    blob.write_bytes(blob.read_bytes()[::-1])

    assert_refused(run_at("convert", REPO, "-o", tmp_path / "two", endpoint=dead_endpoint, home=home), REPO)
    assert len(record(home)) == len(blobs(home))


def unlink_from_blobs(home: Path) -> None:
    """Make the cache one of a file system without links: files in the snapshot itself."""
    for link in (home / "hub").rglob("snapshots/*/*"):
        blob = link.resolve()
        link.unlink()
        blob.rename(link)


def test_cache_without_links_is_compared_with_what_the_hub_lists(
    run_on_hub: Callable[..., Completed], toy_hub: Any, dead_endpoint: str, toy_int4: Path, tmp_path: Path
) -> None:
    """Where no name is a hash the Hub is asked for them; while it is down nothing is called right."""
    home = tmp_path / "home"
    assert run_on_hub("convert", REPO, "-o", tmp_path / "one").returncode == 0
    shutil.rmtree(home / "quantkit")
    unlink_from_blobs(home)
    result = run_at("convert", REPO, "-o", tmp_path / "two", endpoint=dead_endpoint, home=home)
    assert_refused(result, REPO, "no hash to check")

    assert run_on_hub("convert", REPO, "-o", tmp_path / "two").returncode == 0
    assert any("/paths-info/" in request.path for request in toy_hub.requests)
    assert contents(tmp_path / "two") == contents(toy_int4)

    (shard,) = (home / "hub").rglob(f"snapshots/*/{SHARD}")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert_refused(run_on_hub("convert", REPO, "-o", tmp_path / "three"), REPO, SHARD)
    assert not shard.exists()
