"""Which of two weight formats is better in which phase, by the roofline, and whether two pools are worth it.

Prefill waits for FLOPs, and INT4 weights are decoded to BF16, so that they lose the GPU's FP8 units. Decode waits for
bytes, of which INT4 weights have fewer. Two pools are worth it if each phase has a format of its own that leads by at
least `WORTHWHILE`; else the format with the larger lead serves both. No number here is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

from quantkit.errors import UsageError
from quantkit.planning.deployment import Candidate

PHASES = PREFILL, DECODE = "prefill", "decode"
WORTHWHILE = 0.05  # of a phase's speed
_REQUESTS = (1, 8, 16, 32, 64)  # whose decode rates are compared, with those of all that fit


@dataclass(frozen=True)
class Weighed:
    """A phase: the index of its better format, by how much that leads, as a share, in each setting and in their mean.

    lead  the geometric mean; infinite where only one format fits, and 0 where only one is given
    """

    phase: str
    best: int
    lead: float
    leads: dict[str, float]


@dataclass(frozen=True)
class Choice:
    """The indices of the formats for prefill and decode, or of the one for both, and why."""

    chosen: tuple[int, ...]
    reasons: tuple[str, ...]
    leads: dict[str, float]


def choose(candidates: Sequence[Candidate]) -> Choice:
    """The choice between one or two formats; UsageError where none fits a phase."""
    weighed = [weigh(candidates, phase) for phase in PHASES]
    leads = {setting: lead for entry in weighed for setting, lead in entry.leads.items()}
    if len(candidates) == 1:
        return Choice((0,), ("one pool: one format is given; --int4, --recipe or a second checkpoint adds one",), leads)
    reasons = tuple(_reason(candidates, entry) for entry in weighed)
    prefill, decode = weighed
    weakest, strongest = sorted(weighed, key=lambda entry: entry.lead)
    if prefill.best == decode.best:
        text = f"one pool: {candidates[prefill.best].name} is better in both phases"
        return Choice((prefill.best,), (*reasons, text), leads)
    if weakest.lead < WORTHWHILE:
        text = f"one pool, {candidates[strongest.best].name}: it loses only {weakest.lead:.1%} in {weakest.phase}"
        return Choice((strongest.best,), (*reasons, text), leads)
    losses = (_loss(candidates[other.best].name, entry) for entry, other in ((decode, prefill), (prefill, decode)))
    return Choice((prefill.best, decode.best), (*reasons, f"two pools: {', '.join(losses)}"), leads)


def _loss(name: str, weighed: Weighed) -> str:
    if weighed.lead == inf:
        return f"{name} for both would not fit in {weighed.phase}"
    return f"{name} for both would be {1 - 1 / (1 + weighed.lead):.1%} slower in {weighed.phase}"


def weigh(candidates: Sequence[Candidate], phase: str) -> Weighed:
    """The better of one or two formats in a phase."""
    found = [rates(entry, phase) for entry in candidates]
    fitting = [index for index, entry in enumerate(found) if entry]
    if not fitting:
        report = candidates[0].prefill if phase == PREFILL else candidates[0].decode
        raise UsageError(
            f"{phase}: no format of {report.model} fits on {report.gpus} x {report.gpu}",
            hint="More GPUs, a smaller --context, --kv fp8 or --int4; quantkit plan without --phases has the sizes.",
        )
    if len(fitting) == 1:
        return Weighed(phase, fitting[0], inf if len(candidates) > 1 else 0.0, {})
    ratios = {setting: rate / found[1][setting] for setting, rate in found[0].items() if setting in found[1]}
    mean = prod(ratios.values()) ** (1 / len(ratios))
    best = 0 if mean >= 1 else 1
    leads = {setting: (ratio if best == 0 else 1 / ratio) - 1 for setting, ratio in ratios.items()}
    return Weighed(phase, best, max(mean, 1 / mean) - 1, leads)


def rates(candidate: Candidate, phase: str) -> dict[str, float]:
    """The rooflines of a format in tokens per second by setting; none where no request fits."""
    report = candidate.prefill if phase == PREFILL else candidate.decode
    if not report.decode:
        return {}
    if phase == PREFILL:
        return {PREFILL: report.prefill.tokens_per_second}
    few = {_setting(rate.requests): rate.tokens_per_second for rate in report.decode if rate.requests in _REQUESTS}
    return few | {f"{DECODE}, all that fit": report.decode[-1].tokens_per_second}


def _setting(requests: int) -> str:
    return f"{DECODE}, {requests} request{'s' if requests > 1 else ''}"


def _reason(candidates: Sequence[Candidate], weighed: Weighed) -> str:
    winner, loser = candidates[weighed.best], candidates[1 - weighed.best]
    if weighed.lead == inf:
        return f"{weighed.phase}: only {winner.name} fits"
    if weighed.phase == PREFILL:
        bound = winner.prefill.prefill.bound
        why = (
            "4-bit weights are decoded to BF16 and lose the FP8 units" if bound == "FLOPs" else "fewer weights to read"
        )
        return f"prefill waits for {bound} ({why}): {winner.name} leads by {weighed.lead:.1%}"
    first, other = winner.decode.decode[0], loser.decode.decode[0]
    read = f"{first.weight_bytes / 1e9:.1f} GB of weights for one request, not {other.weight_bytes / 1e9:.1f}"
    leads = ", ".join(f"{lead:+.1%} ({setting.partition(', ')[2]})" for setting, lead in weighed.leads.items())
    return f"decode waits for {first.bound} ({winner.name} reads {read}): it leads by {leads}"
