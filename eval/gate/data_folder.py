"""Where quantkit keeps what it needs again: benchmark data and the history of results."""

import os
from pathlib import Path


def data_folder() -> Path:
    """$QUANTKIT_DATA, else quantkit in $XDG_DATA_HOME, else ~/.local/share/quantkit; it need not exist.

    As the XDG Base Directory Specification 0.8 says, $XDG_DATA_HOME counts only if it is absolute.
    """
    if chosen := os.environ.get("QUANTKIT_DATA"):
        return Path(chosen)
    shared = Path(os.environ.get("XDG_DATA_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".local" / "share") / "quantkit"
