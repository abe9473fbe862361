"""`make record`: write the record anew, in WORKERS processes."""

import os
import sys
from concurrent.futures import ProcessPoolExecutor

from record.cases import NAMED, record
from record.files import write

if __name__ == "__main__":
    chosen = sys.argv[1:] or NAMED
    with ProcessPoolExecutor(int(os.environ.get("WORKERS", "2"))) as pool:
        for name, lines in zip(chosen, pool.map(record, chosen), strict=True):
            write(name, lines)
