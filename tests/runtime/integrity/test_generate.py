"""`quantkit generate --integrity`: the same text at every level, and what was checked in the report."""

import json
import sys
from pathlib import Path

import pytest

from quantkit.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")


def test_levels_say_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], glm_tiny: Path
) -> None:
    """Off, tags (the default) and content give one text; off reports no check, the others one for each step."""
    reports = []
    for level in (["--integrity", "off"], [], ["--integrity", "content"]):
        options = ["--memory", "4MB", "--page-size", "4", "--max-new-tokens", "6", "--json", *level]
        monkeypatch.setattr(
            sys, "argv", ["quantkit", "generate", str(glm_tiny), "As well as WSGI, Django also", *options]
        )
        with pytest.raises(SystemExit) as leaving:
            main()
        assert leaving.value.code == 0
        reports.append(json.loads(capsys.readouterr().out))

    assert len({report["completions"][0]["text"] for report in reports}) == 1
    assert [report["integrity"] and report["integrity"]["level"] for report in reports] == [None, "tags", "content"]
    for report in reports[1:]:
        assert report["integrity"]["steps"] == report["counters"]["steps"]
        assert not any(report["integrity"]["faults"].values())
