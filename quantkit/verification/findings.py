"""Problems, collected by check; safe to use from threads."""

import threading

from quantkit.verification.report import Check

_EXAMPLES = 5


class Findings:
    """What each check found, in the order in which the checks were begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: dict[str, str] = {}
        self._problems: dict[str, list[str]] = {}
        self._skipped: set[str] = set()

    def done(self, check: str, note: str) -> None:
        """The check was made; `note` says what it covered."""
        with self._lock:
            self._notes[check] = note

    def skip(self, check: str, why: str) -> None:
        """The check could not be made."""
        self.done(check, why)
        self._skipped.add(check)

    def problem(self, check: str, text: str) -> None:
        """The check found something wrong."""
        with self._lock:
            self._notes.setdefault(check, "")
            self._problems.setdefault(check, []).append(text)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong so far."""
        return not self._problems

    def checks(self) -> tuple[Check, ...]:
        """All checks, with the first few problems of each."""
        return tuple(self._check(name, note) for name, note in self._notes.items())

    def _check(self, name: str, note: str) -> Check:
        problems = sorted(self._problems.get(name, []))
        skipped = name in self._skipped and not problems
        return Check(name, None if skipped else len(problems), tuple(problems[:_EXAMPLES]), note)
