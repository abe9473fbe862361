"""The core seconds of a run, those of the processes that tests start included: a budget that a busy machine keeps.

The last line of a run is their sum over all workers; `--core-seconds N` lists the N dearest files and tests before it.
"""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

SPENT = pytest.StashKey[float]()


def _spent() -> float:
    """Core seconds of this process and of the children that it waited for."""
    return sum(os.times()[:4])


class CoreSeconds:
    """Sums up the tests, and the processes that ran them."""

    def __init__(self, listed: int) -> None:
        self.listed = listed
        self.tests: Counter[str] = Counter()
        self.workers = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Note what passed since the last report: set-up, call and tear-down have one each."""
        report: Any = yield
        before, item.session.stash[SPENT] = item.session.stash.get(SPENT, _spent()), _spent()
        report.core_seconds = item.session.stash[SPENT] - before
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add up the three reports of a test, wherever it ran."""
        self.tests[report.nodeid] += report.core_seconds

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add a worker that has ended."""
        self.workers += getattr(node, "workeroutput", {}).get("core_seconds", 0.0)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Begin to count."""
        session.stash[SPENT] = _spent()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Collecting is nobody's."""
        session.stash[SPENT] = _spent()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tell xdist's controller, if this is a worker."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["core_seconds"] = _spent()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the sum."""
        files: Counter[str] = Counter()
        for test, seconds in self.tests.items():
            files[test.partition("::")[0]] += seconds
        for spent in (files, self.tests):
            for name, seconds in spent.most_common(self.listed):
                terminalreporter.write_line(f"{seconds:8.2f} {name}")
        total = self.workers + sum(os.times()[: 2 if self.workers else 4])  # xdist's workers are children, too
        tests = sum(self.tests.values())
        terminalreporter.write_line(f"core seconds: {total:.0f}, of which {tests:.0f} in the tests themselves")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--core-seconds", type=int, default=0, metavar="N", help="list the N files and the N tests that took most"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Count."""
    config.pluginmanager.register(CoreSeconds(config.getoption("--core-seconds")), "core-seconds")
