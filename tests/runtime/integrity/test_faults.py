"""Every fault is found before anything computed from it is used, at the levels that the README says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.choices import IntegrityLevel
from quantkit.errors import IntegrityError
from quantkit.models import Decoder, load
from quantkit.runtime import Engine, EngineOptions, Finish
from quantkit.runtime.integrity import Cause
from support import integrity_faults as faults
from support.counting_model import CountingModel, make_pool
from support.paths import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")

LEVELS = (IntegrityLevel.TAGS, IntegrityLevel.CONTENT)
README = ROOT / "README.md"


@pytest.fixture(scope="module")
def decoder(glm_tiny: Path) -> Decoder:
    """The trained model: MLA with an indexer."""
    return load(glm_tiny, torch.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", faults.DETECTED)
def test_fault_is_found_where_it_can_be(name: str, level: IntegrityLevel) -> None:
    """What a level covers hits one request with a typed error or a retry; of what it does not, it says nothing."""
    if level in faults.DETECTED[name][1]:
        faults.check_detected(name, level)
    else:
        assert not faults.serve(level, faults.DETECTED[name][0]).found


def test_readme_says_which_level_finds_what() -> None:
    """The table of faults in the README is that of the tests."""
    text = README.read_text()
    for name, (_, levels, cause) in faults.DETECTED.items():
        marks = ["yes" if level in levels else "no" for level in ("tags", "content")]
        assert f"| {name} | {' | '.join(marks)} | `{cause}` |" in text


@pytest.mark.parametrize(
    "proof",
    [
        faults.check_cached_page,
        faults.check_replayed_cached_page,
        faults.check_stale_prefix,
        faults.check_wrong_hand_off,
        faults.check_spoiled_hand_off,
        faults.check_stale_export,
        faults.check_copy_of_stale_page,
        faults.check_no_storm,
        faults.check_late_write,
    ],
)
def test_fault_between_requests(proof: Callable[[], None]) -> None:
    """What passes through the prefix cache, hand-offs, forks and late writers is not taken for what it is not."""
    proof()


@pytest.mark.parametrize(
    ("place", "part"),
    [((1, "latent"), "latent"), ((3, "latent"), "rope"), ((0, "index"), "index")],
    ids=["latent", "rope", "index"],
)
def test_bit_of_every_part_is_found(decoder: Decoder, place: tuple[int, str], part: str) -> None:
    """A bit of the latent, of the rope part or of an index key, in a full page and in the one that is being filled."""
    _, sound = faults.serve_trained(decoder, None)
    number = decoder.config.attention.kv_rank if part == "rope" else 5  # type: ignore[union-attr]
    for position, row in ((0, 7), (2, 1)):
        engine, ended = faults.serve_trained(
            decoder, lambda pool, pages, at=position, row=row: faults.flip(pool, place, pages[at], row, number, bit=3)
        )
        error = ended[0].error
        assert isinstance(error, IntegrityError)
        assert (error.cause, error.position) == (Cause.CONTENT, position)
        assert ended[0].tokens == sound[0].tokens[: len(ended[0].tokens)]
        assert ended[1] == sound[1]
        assert engine.tracker is not None
        assert engine.tracker.counters.faults[Cause.CONTENT] == 1


def test_bit_of_a_scale_is_found(decoder: Decoder) -> None:
    """As `check_scale` says."""
    faults.check_scale(decoder)


def test_abort_while_a_step_computes() -> None:
    """A request that is aborted from within a step keeps its pages out of use until the step has retired."""

    class Aborting(CountingModel):
        """Aborts a request in the middle of a pass."""

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            if self.victim is not None:
                engine.abort(self.victim)
                self.victim = None
                allocator = engine.pool.allocator
                self.held = len(allocator._held)
                allocator.check()
            return super().logits(hidden)

        victim: int | None = None
        held = 0

    model = Aborting()
    engine = Engine(model, make_pool(16, 4), EngineOptions(4, batched=True))
    numbers = [engine.submit(prompt, faults.COUNT) for prompt in faults.PROMPTS]
    for _ in range(faults.STEPS):
        engine.step()
    model.victim = numbers[faults.VICTIM]
    engine.run()

    ended = [engine.take(number) for number in numbers]
    assert model.held > 0
    assert ended[faults.VICTIM].finish is Finish.ABORTED
    for place, wanted in enumerate(faults.texts()):
        assert ended[place].tokens == wanted[: len(ended[place].tokens)]
    assert not any(engine.pool.allocator.references)
    engine.pool.allocator.check()
