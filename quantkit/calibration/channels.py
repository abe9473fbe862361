"""A power of two for each channel of a latent, or each rotated pair: chosen one by one, then measured together.

A channel's error is taken as independent of the others', so that moments of queries and rows give it for every scale:

    K         mean(q^2) var(stored - row)
    K and Q   mean(cast^2) var(stored) - 2 mean(cast q) cov(stored, row) + mean(q^2) var(row)
    values    mean((stored - row)^2) metric_jj
"""

from collections.abc import Sequence

import torch

from quantkit.calibration.choosing import TOLERANCE, Sample, needed_exponent, stored


def choose_channels(
    samples: Sequence[Sample],
    place: int,
    weights: torch.Tensor | None,
    exponents: Sequence[int],
    common: int,
    amaxes: torch.Tensor,
    groups: torch.Tensor,
) -> torch.Tensor:
    """Scales float32 [d] for the part `place` of the samples; `common` stays where it is within the tolerance.

    weights  the values' metric, its diagonal [d]; None for a part that is no value
    amaxes   [d] and groups int64 [d]: the channels of a group share a scale, and it leaves the group's headroom
    """
    errors = sum(
        (torch.stack([_channel_errors(sample, place, weights, 2.0**e) for e in exponents]) for sample in samples),
        torch.zeros(()),
    )
    count = int(groups.max()) + 1
    grouped = torch.zeros(len(exponents), count, dtype=torch.float64).index_add_(1, groups, errors)
    largest = torch.zeros(count).scatter_reduce(0, groups, amaxes, "amax")
    needed = torch.tensor([needed_exponent(float(amax)) for amax in largest])
    grid = torch.tensor(exponents)[:, None]
    grouped = grouped.masked_fill(grid < needed, torch.inf)
    kept = grouped[exponents.index(common)] <= TOLERANCE * grouped.amin(0)
    chosen = torch.where(kept, torch.tensor(common), torch.tensor(exponents)[grouped.argmin(0)])
    return torch.exp2(chosen.float())[groups]


def _channel_errors(sample: Sample, place: int, weights: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Each channel's error under a scale, float64 [d], in parts of the sample's logits and of its values."""
    part = sample.parts[place]
    query, row = part.query.flatten(0, 1).double(), part.key.flatten(0, 1).double()
    cast, kept = stored(part.query, 1 / scale).flatten(0, 1).double(), stored(part.key, scale).flatten(0, 1).double()
    centred, change = row - row.mean(0), kept - kept.mean(0)
    keys = query.square().mean(0) * (change - centred).square().mean(0)
    both = (
        cast.square().mean(0) * change.square().mean(0)
        - 2 * (cast * query).mean(0) * (change * centred).mean(0)
        + query.square().mean(0) * centred.square().mean(0)
    )
    logits = sum((one.query @ one.key.mT for one in sample.parts), torch.zeros(())).double()
    error: torch.Tensor = (keys + both) / logits.var().clamp(min=1e-30)
    if weights is not None:
        exact = float((row.square().mean(0) * weights).sum())
        error = error + 2 * (kept - row).square().mean(0) * weights / max(exact, 1e-30)
    return error
