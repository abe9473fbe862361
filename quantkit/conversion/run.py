"""All shards of a plan: converted one after the other, while the one before is flushed and renamed.

The source shards are hashed in a thread of their own, close behind the pieces that are converted, so that each is read
from the disk once.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from quantkit.checkpoint.writer import OutputFolder
from quantkit.conversion.journal import Entry, Journal
from quantkit.conversion.maker import Maker
from quantkit.conversion.shards import ShardResult, convert_shard
from quantkit.conversion.source_hash import SourceHash
from quantkit.errors import OutputError
from quantkit.plan import Plan, ShardJob


@dataclass(frozen=True)
class ShardRun:
    """The shards of `plan` on their way into `folder`."""

    plan: Plan
    folder: OutputFolder
    journal: Journal
    workers: int
    progress: Callable[[int], None]

    def finished(self, trust_source: bool) -> tuple[Entry, ...]:
        """The shards that an interrupted run has finished; one whose file is gone or has another size is not counted.

        Raises OutputError, naming the shard, if the source is no longer what they were made from.
        """
        entries = [entry for entry in self.journal.entries if self._is_there(entry)]
        before = {shard: sha256 for entry in entries for shard, sha256 in entry.sources.items()}
        if not trust_source:
            with ThreadPoolExecutor(self.workers) as pool:
                hashes = {shard: SourceHash(self.plan.source, shard, pool).finish() for shard in before}
                for shard, found in hashes.items():
                    if (now := found.result()) != before[shard]:
                        raise OutputError(
                            f"source shard {shard} has changed since it was converted: sha256 {before[shard]} before, "
                            f"{now} now",
                            hint="Start anew with --overwrite.",
                        )
        done = {entry.shard for entry in entries}
        self.progress(sum(_source_bytes(job) for job in self.plan.jobs if job.shard in done))
        return tuple(entries)

    def remaining(self) -> Iterator[Entry]:
        """Convert all other shards, and record each when it is whole under its final name."""
        done = {entry.shard for entry in self.journal.entries if self._is_there(entry)}
        hashes: dict[str, SourceHash] = {}
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
                        hashes[shard] = SourceHash(self.plan.source, shard, hasher)
                progress = partial(self._progress, hashes[job.shard])
                with self.folder.shard(job.shard, job.file_bytes) as file:
                    result = convert_shard(job, maker, file, pool, 2 * self.workers, progress)
                sources = {shard: hashes[shard].finish() for shard in job.reads}
                while pending:
                    yield pending.pop().result()
                pending.append(publisher.submit(self._publish, job, result, sources))
            while pending:
                yield pending.pop().result()

    def _progress(self, source_hash: SourceHash, nbytes: int, end: int) -> None:
        source_hash.advance(end)
        self.progress(nbytes)

    def _publish(self, job: ShardJob, result: ShardResult, sources: dict[str, Future[str]]) -> Entry:
        self.folder.publish(job.shard)
        hashes = {shard: found.result() for shard, found in sources.items()}
        entry = Entry(job.shard, job.file_bytes, result.sha256, hashes, result.counts, result.rounded)
        self.journal.add(entry)
        return entry

    def _is_there(self, entry: Entry) -> bool:
        path = self.folder.path / entry.shard
        return path.is_file() and path.stat().st_size == entry.nbytes


def _source_bytes(job: ShardJob) -> int:
    return sum(step.weight.nbytes for step in job.steps)
