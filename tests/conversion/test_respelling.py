"""`quantkit convert --respell` fixes what an earlier version wrote without touching a weight, and says what it did."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.checkpoint.digest import GATE_FILE, checkpoint_digest
from quantkit.checkpoint.source import CONFIG_FILE
from quantkit.checkpoint.writer import File
from quantkit.choices import Scheme
from quantkit.conversion import Options
from quantkit.conversion.respelling import respell
from quantkit.engines.check import check_compatibility
from quantkit.errors import OutputError, PlanError
from support.hub.pushing import REPO, Push, assert_refused, gate
from support.program import Runner

EXPERTS = r"re:.*mlp\.experts\..*"


def describe_as_before(folder: Path) -> Path:
    """Give a checkpoint the config, and the manifest, of the version that gave the class `Linear` to 4-bit weights."""
    config, manifest = (json.loads((folder / name).read_text()) for name in (CONFIG_FILE, "quantkit.json"))
    groups = config["quantization_config"]["config_groups"]
    gone = next(key for key, group in groups.items() if group["targets"] == ["Linear"])
    groups.pop(gone)
    next(group for group in groups.values() if group["weights"]["num_bits"] == 4)["targets"] = ["Linear", EXPERTS]
    data = json.dumps(config, indent=2).encode()
    (folder / CONFIG_FILE).write_bytes(data)
    manifest["quantization_config"] = config["quantization_config"]
    manifest["files"][CONFIG_FILE] = asdict(File(len(data), hashlib.sha256(data).hexdigest()))
    (folder / "quantkit.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def old(toy_int4: Path, tmp_path: Path) -> Path:
    """The converted toy as an earlier version described it."""
    return describe_as_before(shutil.copytree(toy_int4, tmp_path / "old"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def broken_rules(folder: Path) -> set[str]:
    return {found.rule for found in check_compatibility(folder).results if found.status == "not ok"}


def test_engines_and_verify_tell_of_it(quantkit: Runner, old: Path) -> None:
    """Both leave with 3, name the first weight that SGLang could not load, and the command that fixes it."""
    for command in ("engines", "verify"):
        code, out, err = quantkit(command, str(old))
        assert code == 3
        assert "merged-blocks" in out + err or "SGLang: model.layers.0.mlp" in out + err
        assert "quantkit convert --respell" in " ".join((out + err).split())
    assert broken_rules(old) == {"merged-blocks"}


@pytest.mark.parametrize("scheme", [Scheme.INT4, Scheme.NVFP4])
def test_the_config_is_that_of_a_conversion_today(scheme: Scheme, toy: Path, tmp_path: Path) -> None:
    """Every file is that of a new conversion, but the manifest, which also holds what config.json was before."""
    today = tmp_path / "today"
    quantkit.convert(toy, today, options=Options(scheme=scheme))
    old = describe_as_before(shutil.copytree(today, tmp_path / "old"))
    before = contents(old)

    manifest = respell(old, tmp_path / "new")

    found, wanted = contents(tmp_path / "new"), contents(today)
    assert json.loads(found.pop(CONFIG_FILE)) == json.loads(wanted.pop(CONFIG_FILE))
    found.pop("quantkit.json"), wanted.pop("quantkit.json")
    assert found == wanted
    assert contents(old) == before
    assert manifest.respelled == (File(len(before[CONFIG_FILE]), hashlib.sha256(before[CONFIG_FILE]).hexdigest()),)
    assert broken_rules(tmp_path / "new") == set()
    assert quantkit.verify(tmp_path / "new", against=toy).passed


def test_a_new_folder_is_made_of_hard_links(old: Path, tmp_path: Path) -> None:
    """No weight is written twice; the config and the manifest are files of their own."""
    (old / "card.md").write_text("x")
    respell(old, tmp_path / "new")

    shared = {path.name for path in (tmp_path / "new").iterdir() if os.path.samefile(path, old / path.name)}
    assert shared == {path.name for path in old.iterdir()} - {CONFIG_FILE, "quantkit.json"}


def test_in_place_only_two_files_change(quantkit: Runner, old: Path, toy: Path) -> None:
    """The command says what came out; the checkpoint verifies, and the second time there is nothing to do."""
    before = contents(old)
    code, out, _ = quantkit("convert", str(old), "--respell", "--in-place", "--json")

    assert code == 0
    assert json.loads(out)["respelled"][0]["nbytes"] == len(before[CONFIG_FILE])
    after = contents(old)
    assert {name for name in before if before[name] != after[name]} == {CONFIG_FILE, "quantkit.json"}
    assert before.keys() == after.keys()
    assert quantkit("verify", str(old), "--against", str(toy))[0] == 0
    code, _, err = quantkit("convert", str(old), "--respell", "--in-place")

    assert code == 1
    assert "nothing to respell" in err


def test_a_run_that_was_killed_between_the_two_files_is_finished(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the new config beside the old manifest the next run writes what the first would have written."""
    whole = shutil.copytree(old, old.with_name("whole"))
    respell(whole)
    shutil.copy(whole / CONFIG_FILE, old / CONFIG_FILE)

    respell(old)
    assert contents(old) == contents(whole)


def test_a_dry_run_writes_nothing(quantkit: Runner, old: Path) -> None:
    """It prints the manifest that would be written."""
    before = contents(old)
    code, out, _ = quantkit("convert", str(old), "--respell", "--dry-run", "--json")

    assert code == 0
    assert json.loads(out)["respelled"]
    assert contents(old) == before


def other_config(folder: Path) -> None:
    (folder / CONFIG_FILE).write_text((folder / CONFIG_FILE).read_text() + "\n")


def no_manifest(folder: Path) -> None:
    (folder / "quantkit.json").unlink()


def interrupted(folder: Path) -> None:
    (folder / ".quantkit").mkdir()
    (folder / ".quantkit" / "x").write_text("")


@pytest.mark.parametrize(
    ("change", "words"),
    [(other_config, "is not as quantkit wrote it"), (no_manifest, "no finished"), (interrupted, "no finished")],
)
def test_what_is_not_quantkits_is_refused(change: Callable[[Path], None], words: str, old: Path) -> None:
    """A config that was edited, a folder without a manifest, one with a run in it: nothing is changed."""
    change(old)
    before = contents(old)

    with pytest.raises(PlanError, match=words) as caught:
        respell(old)
    assert caught.value.hint
    assert contents(old) == before


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """It is named, and stays away."""
    with pytest.raises(PlanError, match="no such folder"):
        respell(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_another_dialect_has_one_spelling(toy: Path, tmp_path: Path) -> None:
    """ModelOpt's config names what is excluded: there is nothing to respell."""
    quantkit.convert(toy, tmp_path / "modelopt", "glm-5.2-nvfp4-modelopt")

    with pytest.raises(PlanError, match="no compressed-tensors checkpoint"):
        respell(tmp_path / "modelopt")


def test_another_disk_is_named(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a hard link cannot be, the two ways out are told, and the old folder stays as it is."""

    def refuse(*paths: Any, **options: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    before = contents(old)
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OutputError, match="cannot be a hard link") as caught:
        respell(old, tmp_path / "new")

    assert "--in-place" in str(caught.value.hint)
    assert contents(old) == before
    assert not (tmp_path / "new" / CONFIG_FILE).exists()


def test_an_interrupted_folder_is_begun_anew(old: Path, tmp_path: Path) -> None:
    """What a killed run left is its own: --overwrite removes it, and the old checkpoint behind its links stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantkit.checkpoint.writer.OutputFolder.seal", lambda *texts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            respell(old, tmp_path / "new")
    before = contents(old)

    with pytest.raises(OutputError, match="interrupted run"):
        respell(old, tmp_path / "new")
    respell(old, tmp_path / "new", overwrite=True)
    assert contents(old) == before
    assert broken_rules(tmp_path / "new") == set()


@pytest.mark.parametrize(
    "options",
    [
        ["--respell"],
        ["--respell", "--in-place", "-o", "x"],
        ["--respell", "--in-place", "--overwrite"],
        ["--respell", "--in-place", "--int4"],
        ["--respell", "--in-place", "--mtp", "keep"],
        ["--in-place"],
    ],
)
def test_options_that_contradict_it_are_refused(quantkit: Runner, old: Path, options: list[str]) -> None:
    """One place to write to, and nothing that would change a weight."""
    code, out, err = quantkit("convert", str(old), *options)

    assert (code, out) == (2, "")
    assert err.startswith("error: ")


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of httpx, by huggingface_hub
def test_the_gates_result_still_speaks_for_it(push: Push, judged: Path) -> None:
    """A result from before the respelling is about the same tensors; one about other tensors is refused as before."""
    describe_as_before(judged)
    (judged / GATE_FILE).write_text(gate(judged).to_json())
    before = checkpoint_digest(judged)
    respell(judged)

    assert checkpoint_digest(judged) != before
    result = push("--dry-run")
    assert result.returncode == 0, result.stderr

    manifest = json.loads((judged / "quantkit.json").read_text())
    (judged / "quantkit.json").write_text(json.dumps(manifest | {"respelled": []}))
    assert_refused(push("--dry-run"), 3, REPO, "other weights")
