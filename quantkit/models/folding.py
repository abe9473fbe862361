"""Which weights take the powers of two of a fold, so that the cache holds value / scale and the model says the same.

    MLA   kv_a_layernorm[j] / c_j   kv_b[:, j] * c_j   rope rows of kv_a / r   rope rows of q_b * r
    GQA   k_norm / k and q_norm * k, or where there are none k_proj and q_proj; v_proj / v and o_proj * v

c is one number for the latent or one for each channel, r one for the rope part or one for each rotated pair. MLA leaves
two powers of two free, a and b, which change nothing either and let storages with coarse scales take the rest:

    q_b * a on the rows without rope, K rows of kv_b / a       V rows of kv_b / b, o_proj * b

With a = b = r and one c, every weight but kv_a is multiplied as a whole: q_b * r, kv_b * c/r, o_proj * r.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from quantkit.families.config import MlaConfig, ModelConfig
from quantkit.weights.rescale import Powers


@dataclass(frozen=True)
class LayerFold:
    """Exponents of the powers of two that a layer's cache is divided by.

    latent, rope   of the parts of MLA's row: one, or one for each channel as the row has them
    key, value     of GQA
    query, output  MLA's free ones, a and b
    """

    latent: tuple[int, ...] = (0,)
    rope: tuple[int, ...] = (0,)
    key: int = 0
    value: int = 0
    query: int = 0
    output: int = 0

    @property
    def is_one(self) -> bool:
        """Whether nothing is divided."""
        return not any((*self.latent, *self.rope, self.key, self.value))

    def gauges(self) -> tuple["LayerFold", ...]:
        """The same fold with each choice of its free exponents; the first edits the fewest weights."""
        usual = Counter(self.rope).most_common(1)[0][0]
        free = dict.fromkeys(((0, 0), (usual, 0), (usual, usual)))
        return tuple(replace(self, query=query, output=output) for query, output in free)


def fold_digest(layers: Mapping[int, LayerFold]) -> str | None:
    """The sha256 of what the caches of these layers are divided by; None if by nothing.

    It depends neither on the free exponents, nor on whether equal numbers are given as one, nor on layers divided by 1.
    """
    numbers = {
        layer: [_short(fold.latent), _short(fold.rope), fold.key, fold.value]
        for layer, fold in sorted(layers.items())
        if not fold.is_one
    }
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest() if numbers else None


def as_record(fold: LayerFold) -> dict[str, object]:
    """A layer's fold for a manifest."""
    return {**asdict(fold), "latent": list(_short(fold.latent)), "rope": list(_short(fold.rope))}


def from_record(record: Mapping[str, object]) -> LayerFold:
    """What `as_record` wrote. Raises KeyError, TypeError or ValueError if it did not."""
    latent, rope = (tuple(map(_whole, _list(record[name]))) for name in ("latent", "rope"))
    return LayerFold(latent, rope, *(_whole(record[name]) for name in ("key", "value", "query", "output")))


def attention_prefix(config: ModelConfig, layer: int) -> str:
    """What the names of a layer's attention tensors begin with."""
    return f"{config.prefix}model.layers.{layer}.self_attn"


def layer_powers(config: ModelConfig, layer: int, fold: LayerFold) -> dict[str, Powers]:
    """What each tensor of a layer is multiplied with, by name; biases are named whether there are some or not."""
    prefix, attention = attention_prefix(config, layer), config.attention
    if isinstance(attention, MlaConfig):
        powers = _mla(attention, fold)
    elif attention.qk_norm:
        powers = {"k_norm": Powers.of([-fold.key]), "q_norm": Powers.of([fold.key]), **_values(fold)}
    else:
        powers = {"k_proj": Powers.of([-fold.key]), "q_proj": Powers.of([fold.key]), **_values(fold)}
    weights = {f"{prefix}.{module}.weight": power for module, power in powers.items()}
    biases = {f"{prefix}.{module}.bias": Powers(power.rows, power.columns[:1] * 0) for module, power in powers.items()}
    return {name: power for name, power in (weights | biases).items() if not power.is_one}


def _mla(config: MlaConfig, fold: LayerFold) -> dict[str, Powers]:
    rope = fold.rope * (config.rope if len(fold.rope) == 1 else 1)
    query = [*[fold.query] * config.nope, *rope] * config.heads
    key_value = [*[-fold.query] * config.nope, *[-fold.output] * config.value] * config.heads
    return {
        "kv_a_layernorm": Powers.of(-exponent for exponent in fold.latent),
        "kv_a_proj_with_mqa": Powers.of([*[0] * config.kv_rank, *(-exponent for exponent in rope)]),
        "q_proj" if config.q_rank is None else "q_b_proj": Powers.of(query),
        "kv_b_proj": Powers.of(key_value, fold.latent),
        "o_proj": Powers.of(columns=[fold.output]),
    }


def _values(fold: LayerFold) -> dict[str, Powers]:
    return {"v_proj": Powers.of([-fold.value]), "o_proj": Powers.of(columns=[fold.value])}


def _short(exponents: Sequence[int]) -> tuple[int, ...]:
    return tuple(exponents[:1] if len(set(exponents)) == 1 else exponents)


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value
