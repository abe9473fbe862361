"""All shards of a plan: converted one after the other, while the one before is flushed and renamed.

The source shards are hashed in a thread of their own, close behind the pieces that are converted, so that each is read
from the disk once.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quantkit.checkpoint.writer import OutputFolder
from quantkit.conversion.file_hash import FileHash
from quantkit.conversion.journal import Entry, Journal
from quantkit.conversion.maker import Maker
from quantkit.conversion.plan import Plan, ShardJob
from quantkit.conversion.shards import ShardResult, convert_shard
from quantkit.errors import OutputError
from quantkit.progress import Advance


@dataclass(frozen=True)
class ShardRun:
    """The shards of `plan` on their way into `folder`; `warn` is told of what has to be made again."""

    plan: Plan
    folder: OutputFolder
    journal: Journal
    workers: int
    progress: Advance
    warn: Callable[[str], None] = lambda what: None

    def finished(self, trust_source: bool) -> tuple[Entry, ...]:
        """The shards that an interrupted run has finished and that are still what it wrote, by their hashes.

        Raises OutputError, naming the shard, if the source is no longer what they were made from.
        """
        entries = [entry for entry in self.journal.entries if self._is_there(entry)]
        before = {} if trust_source else {name: sha256 for each in entries for name, sha256 in each.sources.items()}
        with ThreadPoolExecutor(self.workers) as pool:
            made = [FileHash(self.folder.path / entry.shard, pool).finish() for entry in entries]
            sources = {shard: FileHash(self._source(shard), pool).finish() for shard in before}
            for shard, found in sources.items():
                if (now := found.result()) != before[shard]:
                    raise OutputError(
                        f"source shard {shard} has changed since it was converted: sha256 {before[shard]} before, "
                        f"{now} now",
                        hint="Start anew with --overwrite.",
                    )
            kept = tuple(entry for entry, found in zip(entries, made, strict=True) if found.result() == entry.sha256)
        done = {entry.shard for entry in kept}
        for entry in self.journal.entries:
            if entry.shard not in done:
                self.warn(f"{entry.shard} is not what the interrupted run wrote, or gone; it is made again")
        self.progress(sum(_source_bytes(job) for job in self.plan.jobs if job.shard in done))
        return kept

    def remaining(self, finished: Iterable[Entry]) -> Iterator[Entry]:
        """Convert all shards but the finished ones, and record each when it is whole under its final name."""
        done = {entry.shard for entry in finished}
        hashes: dict[str, FileHash] = {}
        pending: list[Future[Entry]] = []
        maker = Maker(self.plan.source)
        with (
            ThreadPoolExecutor(self.workers) as pool,
            ThreadPoolExecutor(1) as publisher,
            ThreadPoolExecutor(1) as hasher,
        ):
            for job in self.plan.jobs:
                if job.shard in done:
                    continue
                for shard in job.reads:
                    if shard not in hashes:
                        hashes[shard] = FileHash(self._source(shard), hasher)
                progress = partial(self._progress, hashes[job.shard])
                with self.folder.shard(job.shard, job.file_bytes) as file:
                    result = convert_shard(job, maker, file, pool, 2 * self.workers, progress)
                sources = {shard: hashes[shard].finish() for shard in job.reads}
                while pending:
                    yield pending.pop().result()
                pending.append(publisher.submit(self._publish, job, result, sources))
            while pending:
                yield pending.pop().result()

    def _progress(self, source_hash: FileHash, nbytes: int, end: int) -> None:
        source_hash.advance(end)
        self.progress(nbytes)

    def _publish(self, job: ShardJob, result: ShardResult, sources: dict[str, Future[str]]) -> Entry:
        self.folder.publish(job.shard)
        hashes = {shard: found.result() for shard, found in sources.items()}
        entry = Entry(job.shard, job.file_bytes, result.sha256, hashes, result.counts, result.rounded)
        self.journal.add(entry)
        return entry

    def _source(self, shard: str) -> Path:
        assert self.plan.source.folder is not None
        return self.plan.source.folder / shard

    def _is_there(self, entry: Entry) -> bool:
        path = self.folder.path / entry.shard
        return path.is_file() and not path.is_symlink() and path.stat().st_size == entry.nbytes


def _source_bytes(job: ShardJob) -> int:
    return sum(step.weight.nbytes for step in job.steps)
