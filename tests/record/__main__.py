"""`make record`: write the record anew, in WORKERS processes; of the sources named, or of all."""

import os
import sys
from concurrent.futures import ProcessPoolExecutor

from support.numba_cache import use_cache

if __name__ == "__main__":
    use_cache()  # before numba is imported
    from record.cases import NAMED, record
    from record.files import write

    chosen = sys.argv[1:] or NAMED
    with ProcessPoolExecutor(int(os.environ.get("WORKERS", "2"))) as pool:
        write(dict(zip(chosen, pool.map(record, chosen), strict=True)))
