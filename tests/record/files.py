"""The recorded files: one for each source, and one for the texts of all quantization_configs."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from record.cases import NAMED, Record

OUTPUTS = Path(__file__).parent / "outputs"
CONFIGS = OUTPUTS / "quantization_configs.txt"
_KEY = "  quantization_config: "


def path_of(name: str) -> Path:
    """The file of a source."""
    return OUTPUTS / f"{name.replace(' ', '-')}.txt"


def write(records: Mapping[str, Record]) -> None:
    """Write down what was made of these sources; every configuration once, in the order of its first source."""
    configs: dict[str, Sequence[str]] = dict(read_configs())
    OUTPUTS.mkdir(exist_ok=True)
    for name, record in records.items():
        path_of(name).write_text("\n".join(record.lines) + "\n")
        configs |= record.configs
    for path in set(OUTPUTS.iterdir()) - {path_of(name) for name in NAMED}:
        path.unlink()
    used = [digest for name in NAMED for digest in digests(read_lines(name))]
    lines = [line for digest in dict.fromkeys(used) for line in (digest, *(f"  {line}" for line in configs[digest]))]
    CONFIGS.write_text("\n".join(lines) + "\n")


def read(name: str) -> Record:
    """What is written down of a source; nothing, if nothing is."""
    return Record(read_lines(name), read_configs())


def read_lines(name: str) -> list[str]:
    """The lines of a source."""
    return path_of(name).read_text().splitlines() if path_of(name).exists() else []


def read_configs() -> dict[str, list[str]]:
    """The texts of the configurations, by digest."""
    configs: dict[str, list[str]] = {}
    for line in CONFIGS.read_text().splitlines() if CONFIGS.exists() else []:
        if line.startswith("  "):
            configs[list(configs)[-1]].append(line.strip())
        else:
            configs[line] = []
    return configs


def digests(lines: Iterable[str]) -> list[str]:
    """The configurations that lines give only the digests of."""
    ours = (line.removeprefix(_KEY) for line in lines if line.startswith(_KEY))
    return [text.split()[0] for text in ours if not text.startswith("{")]


def told(record: Record) -> list[str]:
    """The lines of a source, each configuration's text below its digest."""
    found = []
    for line in record.lines:
        texts = (text for digest in digests([line]) for text in record.configs.get(digest, ()))
        found += [line, *(f"    {text}" for text in texts)]
    return found
