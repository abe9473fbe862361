"""The statistics equal published examples, obey the equations that define them, and keep their rates in simulation."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from quantkit.eval.gate import paired

RUNS = 4000
Z = NormalDist().inv_cdf(0.95)


def draw(items: int, discordant: float, drop: float, seed: int) -> dict[tuple[int, int], float]:
    """How often each pair of lost and gained items comes, as a share of RUNS simulated comparisons."""
    shares = [(discordant + drop) / 2, (discordant - drop) / 2, 1 - discordant]
    outcomes = np.random.default_rng(seed).multinomial(items, shares, RUNS)[:, :2]
    tables, counts = np.unique(outcomes, axis=0, return_counts=True)
    return {
        (lost, gained): count / RUNS for (lost, gained), count in zip(tables.tolist(), counts.tolist(), strict=True)
    }


def noise(rate: float) -> float:
    """Three standard errors of a simulated rate."""
    return 3 * math.sqrt(rate * (1 - rate) / RUNS)


@pytest.mark.parametrize(
    ("lost", "gained", "p_value"),
    [
        (0, 0, 1.0),
        (3, 3, 1.0),
        (6, 0, 2 / 64),
        (1, 7, 18 / 256),
        (16, 6, 0.0525),  # https://en.wikipedia.org/wiki/McNemar%27s_test
        (25, 9, 0.009),
    ],
)
def test_mcnemar_equals_known_values(lost: int, gained: int, p_value: float) -> None:
    """The exact p-value is that of hand counts and published tables, whichever model is the better one."""
    assert paired.mcnemar(lost, gained) == pytest.approx(p_value, rel=0.01)
    assert paired.mcnemar(gained, lost) == paired.mcnemar(lost, gained)


def test_mcnemar_takes_large_counts() -> None:
    """Thousands of discordant items neither overflow nor lose the tail."""
    normal = math.erfc((1000 - 1) / math.sqrt(5000) / math.sqrt(2))

    assert paired.mcnemar(3000, 2000) == pytest.approx(normal, rel=0.1)
    assert paired.mcnemar(50_000, 0) == 0.0


def test_holm_equals_a_worked_example() -> None:
    """Adjusted p-values come in the order of the tests, never fall with rank, and stop at 1."""
    assert paired.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert paired.holm([0.6, 0.7]) == [1.0, 1.0]
    assert paired.holm([0.04]) == [0.04]


@pytest.mark.parametrize(
    ("items", "lost", "gained", "level", "lower", "upper"),
    [
        (32, 3, 9, 0.975, -0.027, 0.390),  # Tango 1998, section 6.2
        (21, 7, 1, 0.975, -0.517, -0.026),  # Bentur et al. 2009, in Fagerland, Lydersen and Laake 2017, chapter 8
        (618, 25, 28, 0.95, -0.0148, 0.0247),  # R: PropCIs::scoreci.mp(25, 28, 618, 0.9)
    ],
)
def test_bounds_equal_published_ones(
    items: int, lost: int, gained: int, level: float, lower: float, upper: float
) -> None:
    """Tango's bounds are those of the paper, of a textbook and of R, to the digits that these print."""
    digits = 4 if items == 618 else 3

    assert round(paired.lower_bound(items, lost, gained, level), digits) == lower
    assert round(-paired.lower_bound(items, gained, lost, level), digits) == upper


def test_score_equals_the_published_one() -> None:
    """Tango's example of 44 pairs, one of them discordant, gives 1.709 for a margin of a tenth."""
    assert paired.score(44, 1, 0, -0.1) == pytest.approx(1.709, abs=0.0005)


@pytest.mark.parametrize("difference", [-0.2, -0.008, 0.0, 0.03])
@pytest.mark.parametrize(("items", "lost", "gained"), [(100, 7, 2), (100, 2, 7), (50, 0, 3), (1319, 24, 13)])
def test_score_maximizes_the_likelihood(items: int, lost: int, gained: int, difference: float) -> None:
    """The statistic's variance is that of the most likely shares with the given difference, found by search."""
    shares = np.linspace(max(0.0, -difference), (1 - difference) / 2, 200_001)[1:-1]  # of lost items
    with np.errstate(invalid="ignore"):
        likelihood = (
            lost * np.log(shares)
            + gained * np.log(shares + difference)
            + (items - lost - gained) * np.log(1 - 2 * shares - difference)
        )
    share = shares[np.argmax(likelihood)]
    expected = (gained - lost - items * difference) / math.sqrt(items * (2 * share + difference - difference**2))

    assert paired.score(items, lost, gained, difference) == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("items", "lost", "gained"), [(1, 0, 1), (5, 5, 0), (20, 0, 0), (220, 25, 9), (1319, 80, 81), (14042, 600, 500)]
)
def test_bounds_solve_their_equation(items: int, lost: int, gained: int) -> None:
    """The score statistic is the normal quantile at the lower bound and minus it at the upper one."""
    lower, upper = paired.lower_bound(items, lost, gained), -paired.lower_bound(items, gained, lost)

    assert -1 <= lower <= (gained - lost) / items <= upper <= 1
    if lost < items:
        assert paired.score(items, lost, gained, lower) == pytest.approx(Z, abs=1e-6)
    if gained < items:
        assert paired.score(items, lost, gained, upper) == pytest.approx(-Z, abs=1e-6)


def test_bounds_do_not_collapse() -> None:
    """Without a discordant item the bounds are z^2 / (n + z^2) from 0: within 0.8 points from 336 items on."""
    for items in (1, 50, 335, 336, 10_000):
        assert paired.lower_bound(items, 0, 0) == pytest.approx(-(Z**2) / (items + Z**2), abs=1e-9)

    assert paired.fewest_to_pass(0.008) == 336
    assert paired.lower_bound(335, 0, 0) < -0.008 < paired.lower_bound(336, 0, 0)


@pytest.mark.parametrize("discordant", [0.0, 0.01, 0.03, 0.06, 0.1, 0.15])
@pytest.mark.parametrize("items", [100, 300, 1319, 2000])
def test_bounds_cover(items: int, discordant: float) -> None:
    """Each one-sided bound misses the true difference about once in twenty times, at any share of discordant items."""
    for drop in {0.0, min(0.008, discordant), discordant}:
        scores = {
            table: (paired.score(items, *table, -drop), share)
            for table, share in draw(items, discordant, drop, items).items()
        }
        too_high = sum(share for value, share in scores.values() if value > Z)
        too_low = sum(share for value, share in scores.values() if value < -Z)

        assert max(too_high, too_low) <= 0.07 + noise(0.07)


@pytest.mark.parametrize(("items", "discordant"), [(1319, 0.03), (1319, 0.1), (5000, 0.06), (50, 0.04), (246, 0.01)])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 61])
def test_detectable_drop_is_detected(items: int, discordant: float, alpha: float) -> None:
    """McNemar's test finds a drop of the stated size in at least 80 % of all cases, and hardly more if many differ."""
    drop = paired.detectable_drop(items, discordant, alpha)
    tables = draw(items, max(discordant, drop), drop, items)
    power = sum(share for (lost, gained), share in tables.items() if paired.mcnemar(lost, gained) <= alpha)

    assert power >= 0.8 - noise(0.8)
    if items * discordant > 100:
        assert power <= 0.83 + noise(0.83)


def test_undetectable_drop_is_one() -> None:
    """So few items that not even the loss of all is significant detect nothing."""
    assert paired.detectable_drop(3, 0.5, 0.05) == 1.0


@pytest.mark.parametrize("max_drop", [0.008, 0.03])
@pytest.mark.parametrize("discordant", [0.01, 0.03, 0.1])
def test_items_to_decide_decide(discordant: float, max_drop: float) -> None:
    """The fewest items with power pass in about 80 % of all cases, and `can_pass` starts with them."""
    items = math.ceil(paired.items_to_decide(0.0, discordant, max_drop, paired.LEVEL, 10_000_000))
    tables = draw(items, discordant, 0.0, items)
    passed = sum(share for table, share in tables.items() if paired.score(items, *table, -max_drop) > Z)

    assert passed == pytest.approx(0.8, abs=0.05)
    assert paired.can_pass(items, discordant, max_drop)
    assert not paired.can_pass(items - 1, discordant, max_drop)


def test_no_number_of_items_decides_at_the_margin() -> None:
    """A difference at the margin, or so near that it takes more than the most allowed, has no number of items."""
    for difference in (-0.008, -0.00801):
        assert paired.items_to_decide(difference, 0.1, 0.008, paired.LEVEL, 10_000_000) == math.inf
