"""Statistics of two models' answers to the same items: tests, bounds and power for paired right-or-wrong answers.

Of n items, b are lost (only the baseline is right) and c gained (only the candidate is). These b + c are the discordant
items; the difference is d = (c - b) / n. All are shares: 0.01 is one point. Counts may be expected ones, so not whole.

    McNemar's exact test (McNemar 1947)   without a difference, b of b + c is binomial with probability 1/2
    score statistic (Tango 1998)          T(D) = (c - b - n D) / sqrt(n (2 q + D (1 - D))), about standard normal if the
                                          true difference is D; q is the share of lost items that is most likely then.
                                          T falls with D; T(0) is McNemar's (c - b) / sqrt(b + c)
    score bounds (Tango 1998)             the D at which T(D) = z and -z. With b = c = 0 they are -+ z^2 / (n + z^2),
                                          where Wald's collapse to zero
    step-down procedure (Holm 1979)       holds the chance of any false rejection in a family of tests, dependent or not
    power of McNemar's test (Connor 1987) by the normal distribution, with Edwards's (1948) continuity correction, which
                                          stands for the exact test's discreteness
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

LEVEL = 0.95  # of each one-sided bound
POWER = 0.8  # the share of all cases in which a test is expected to find what it looks for

_quantile = NormalDist().inv_cdf


def mcnemar(lost: int, gained: int) -> float:
    """The two-sided p-value of the exact McNemar test, 1 if no item is discordant; exact but for the last rounding."""
    discordant = lost + gained
    term = tail = 1  # whole numbers: the binomial coefficients up to the rarer outcome
    for count in range(1, min(lost, gained) + 1):
        term = term * (discordant - count + 1) // count
        tail += term
    return min(1.0, 2 * tail / (1 << discordant))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for each other; those at most alpha may be called significant together."""
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def score(items: float, lost: float, gained: float, difference: float) -> float:
    """Tango's statistic for the hypothesis that the true difference is `difference`: positive if more was observed."""
    linear = lost + gained - (2 * items + lost - gained) * difference
    constant = 8 * items * lost * difference * (1 - difference)
    share = (linear + math.sqrt(max(0.0, linear**2 + constant))) / (4 * items)  # lost items under the hypothesis
    variance = items * (2 * share + difference * (1 - difference))
    excess = gained - lost - items * difference
    if variance <= 0:  # only at the ends of [-1, 1], or for no discordant item at 0
        return math.copysign(math.inf, excess) if excess else 0.0
    return excess / math.sqrt(variance)


def lower_bound(items: int, lost: int, gained: int, level: float = LEVEL) -> float:
    """Tango's one-sided lower bound of the difference; the upper one is minus that with lost and gained swapped."""
    z = _quantile(level)
    return _bisect(lambda difference: score(items, lost, gained, difference) > z, -1.0, (gained - lost) / items)


def exceeds_drop(items: int, lost: int, gained: int, drop: float) -> float:
    """The one-sided p-value, by Tango's statistic, of the hypothesis that the true drop is at most `drop`."""
    return NormalDist().cdf(score(items, lost, gained, -drop))


def discordance(items: int, lost: int, gained: int) -> float:
    """The share of discordant items, shrunk towards one half by four made-up items so that it is never 0 nor 1."""
    return (lost + gained + 2) / (items + 4)


def can_pass(items: int, discordant_share: float, max_drop: float) -> bool:
    """Whether, without a true difference, the lower bound is above -`max_drop` in about 80 % of all cases."""
    return _unlucky_score(items, discordant_share, 0.0, -max_drop) > _quantile(LEVEL)


def fewest_to_pass(max_drop: float) -> int:
    """So many items have a lower bound above -`max_drop` if all answers are equal; fewer never do."""
    return math.floor(_quantile(LEVEL) ** 2 * (1 - max_drop) / max_drop) + 1


def detectable_drop(items: int, discordant_share: float, alpha: float) -> float:
    """The smallest true drop that McNemar's test finds at two-sided `alpha` in 80 % of all cases; 1 if there is none.

    With few discordant items it is rather too large: it is then found in up to 97 %. The discordant items that a drop
    itself takes may be more than `discordant_share`.
    """
    z, z_power = _quantile(1 - alpha / 2), _quantile(POWER)

    def missed(drop: float) -> bool:
        share = max(discordant_share, drop)
        least_loss = items * drop - z_power * math.sqrt(items * (share - drop**2))  # in 80 % of all cases
        return least_loss - 1 < z * math.sqrt(items * share)

    return 1.0 if missed(1.0) else _bisect(missed, 0.0, 1.0)


def items_to_decide(difference: float, discordant_share: float, max_drop: float, level: float, most: int) -> float:
    """So many items bound the difference on its side of -`max_drop` in 80 % of all cases; infinity if over `most`.

    difference, discordant_share  the true ones
    """

    def undecided(items: float) -> bool:
        return _unlucky_score(items, discordant_share, difference, -max_drop) <= _quantile(level)

    return math.inf if undecided(most) else _bisect(undecided, 1.0, most)


def _unlucky_score(items: float, discordant_share: float, difference: float, hypothesis: float) -> float:
    """How far Tango's statistic for `hypothesis` is from 0, on the true difference's side, in 80 % of all cases."""
    side = math.copysign(1.0, difference - hypothesis)
    share = max(discordant_share, abs(difference))
    excess = items * difference - side * _quantile(POWER) * math.sqrt(items * (share - difference**2))
    discordant = max(items * share, abs(excess))
    return side * score(items, (discordant - excess) / 2, (discordant + excess) / 2, hypothesis)


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Where `holds` turns false between `low`, where it is true, and `high`, to 12 digits."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2
