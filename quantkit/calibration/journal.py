"""The journal of an open calibration: what it is bound to, then one line for each layer that is finished.

A layer's line is written when the disk has the hidden states after it; those before it are deleted later.
"""

import json
import os
from pathlib import Path
from typing import Any

from quantkit.calibration.report import LayerCalibration
from quantkit.checkpoint.journal import append_line, differences, read_lines
from quantkit.errors import OutputError

_FILE = "calibration.jsonl"


class Journal:
    """The journal in `folder`, whose `layers` were finished before.

    Raises OutputError, naming the first difference, if the run in `folder` is another one.
    """

    def __init__(self, folder: Path, binding: dict[str, Any], resume: bool) -> None:
        self.folder, self._path = folder, folder / _FILE
        lines, whole = read_lines(self._path) if resume else ([], 0)
        if lines and (difference := next(differences(lines[0], json.loads(json.dumps(binding))), None)):
            raise OutputError(
                f"{folder.parent}: the run that was interrupted differs in {difference}",
                hint="Go on with the same options, data and checkpoint, or start anew with --overwrite.",
            )
        self.layers = tuple(LayerCalibration.from_json(json.dumps(line)) for line in lines[1:])
        kept = {self._path.name, f"hidden-{len(self.layers)}.bin"} if lines else set()
        for file in folder.iterdir():
            if file.name not in kept and not (lines and file.name.startswith("choices-")):
                file.unlink()
        if not lines:
            append_line(self._path, binding)
        else:
            os.truncate(self._path, whole)

    def add(self, layer: LayerCalibration) -> None:
        """Record a finished layer."""
        append_line(self._path, json.loads(layer.to_json()))
