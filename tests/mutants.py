"""Are the tests a proof? Defects are put in, one by one, and `make test` has to find each: `make mutants`.

    python tests/mutants.py [NAME...]

Each defect changes one place of a copy of the working tree. First the tests of its room run, then all that `make test`
runs; the first test that fails has found it. Exit code 1 if a defect is not found, or its place is not there any more.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from support.paths import ROOT


class Mutant(NamedTuple):
    """A defect: in `file`, `old` becomes `new`; `tests` is where it should be found."""

    file: str
    old: str
    new: str
    tests: str


MUTANTS = {
    "swapped nibble": Mutant(
        "kernels/convert/int4_groups.py",
        "bits = (bits | bits >> np.uint64(4)) & np.uint64(0x00FF00FF00FF00FF)",
        "bits = (bits << np.uint64(4) | bits >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)",
        "tests/kernels/convert/test_fp8_and_int4.py",
    ),
    "scale off by one group": Mutant(
        "kernels/convert/float_to_int4.py",
        "out_scale[row, group] = bits",
        "out_scale[row, group - 1] = bits",
        "tests/kernels/convert/test_fp8_and_int4.py",
    ),
    "truncation for rounding": Mutant(
        "kernels/convert/float_to_int4.py",
        "code = np.rint(np.float64(source[position]) / step)",
        "code = np.trunc(np.float64(source[position]) / step)",
        "tests/kernels/convert/test_fp8_and_int4.py",
    ),
    "missing fsync": Mutant(
        "quantkit/checkpoint/writer.py", "        os.fsync(file)", "        pass", "tests/checkpoint"
    ),
    "skipped page check": Mutant(
        "quantkit/runtime/integrity/steps.py",
        "tags = self.tags.check([one.request.number for one in passes], table.pages, table.counts)",
        "tags = None",
        "tests/runtime/integrity",
    ),
    "engine rule inverted": Mutant(
        "quantkit/engines/rules/storing.py",
        'return None if module.label == "f32" else',
        'return None if module.label != "f32" else',
        "tests/engines",
    ),
    "manifest not hashed": Mutant(
        "quantkit/verification/soundness.py",
        'same = hashlib.file_digest(file, "sha256").hexdigest() == said.sha256',
        "same = True",
        "tests/verification",
    ),
    "bound on the wrong side": Mutant(
        "quantkit/eval/gate/paired.py",
        "return NormalDist().cdf(score(items, lost, gained, -drop))",
        "return NormalDist().cdf(-score(items, lost, gained, -drop))",
        "tests/eval/gate/test_compare.py",
    ),
    "resumed shard not checked": Mutant(
        "quantkit/conversion/run.py",
        "if found.result() == entry.sha256)",
        "if found.result())",
        "tests/conversion/test_resume.py",
    ),
    "KV scale as its reciprocal": Mutant(
        "quantkit/runtime/scales.py",
        "return LayerScales(key[1], value[1])",
        "return LayerScales(1 / key[1], 1 / value[1])",
        "tests/runtime/test_pages.py",
    ),
    "MTP layer dropped": Mutant(
        "quantkit/conversion/steps.py",
        "if not (recipe.mtp is Mtp.DROP and weight.name.is_mtp(num_hidden_layers)):",
        "if not weight.name.is_mtp(num_hidden_layers):",
        "tests/conversion/test_conversion.py",
    ),
    "header length unchecked": Mutant(
        "quantkit/checkpoint/header.py", " or 8 + length > file_size:", ":", "tests/checkpoint/test_header_damage.py"
    ),
}


def finder(mutant: Mutant) -> str:
    """The test that finds a defect, or "" if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _copy(tree)
        path = tree / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return ""
        path.write_text(text.replace(mutant.old, mutant.new))
        return _first_failure(tree, mutant.tests) or _first_failure(tree, "tests")


def _copy(tree: Path) -> None:
    """The files that git knows of, as they are, links included, and the loops that are compiled for these kernels."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in names.split("\0")[:-1]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    if (compiled := ROOT / "build" / "numba").exists():
        shutil.copytree(compiled, tree / "build" / "numba")


def _first_failure(tree: Path, tests: str) -> str:
    """The first test below a path that `make test` finds to fail; an error that is not a test's ends the program."""
    options = f"--exitfirst --quiet -p no:cacheprovider {tests}"
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTEST_ADDOPTS": options}
    ready = ROOT / ".venv" / ".ready"
    command = ["make", "test", f"BIN={Path(sys.executable).parent}", f"READY={ready}", f"--assume-old={ready}"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=False, text=True)
    failed = [line.removeprefix("FAILED ") for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode and not failed:
        sys.exit(done.stdout[-4000:] + done.stderr[-4000:])
    return failed[0] if failed else ""


def main() -> int:
    """Try the defects that are named on the command line, or all."""
    missed = 0
    for name in sys.argv[1:] or MUTANTS:
        found = finder(MUTANTS[name])
        missed += not found
        sys.stdout.write(f"{name}: {found or f'NOT FOUND, in {MUTANTS[name].file}'}\n")
        sys.stdout.flush()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
