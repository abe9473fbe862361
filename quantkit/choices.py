"""The words of options that several rooms share, so that the command line lists them without what they stand for."""

from enum import StrEnum


class KvLayout(StrEnum):
    """How the KV cache stores a token."""

    BF16 = "bf16"
    FP8 = "fp8"  # plain, with a scale for the whole layer
    FP8_DS_MLA = "fp8_ds_mla"  # latent in FP8 with scales inside, rope part in BF16


class KvDtype(StrEnum):
    """What the pages of the runtime hold."""

    BF16 = "bf16"
    FP8 = "fp8"


class IntegrityLevel(StrEnum):
    """How much is checked before a step of the runtime reads pages.

    off      nothing
    tags     that the pages are those which the requests were given, and nobody else's since
    content  tags, and that the pages hold the bytes which were written to them
    """

    OFF = "off"
    TAGS = "tags"
    CONTENT = "content"


class IndexCache(StrEnum):
    """Which layers of a model with sparse attention get an index cache."""

    INDEXERS = "indexers"  # those that have an indexer: vLLM
    ALL = "all"  # every layer: SGLang


class Dialect(StrEnum):
    """How a checkpoint spells its tensors and describes them in its config."""

    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"  # NVIDIA Model-Optimizer; NVFP4 with a plain rest


class EngineName(StrEnum):
    """The engines whose rules are known."""

    VLLM = "vLLM"
    SGLANG = "SGLang"
    TRANSFORMERS = "transformers"


class ScaleMethod(StrEnum):
    """How the scale of a group is chosen: of INT4, its largest magnitude / a divisor."""

    MINMAX = "minmax"  # INT4: always 7.5. NVFP4: the largest magnitude becomes 6
    SEARCH = "search"  # the candidate that gives the smallest squared error
    SIGNED = "signed"  # INT4: the same, with negative scales where they map the group's largest weight to the code -8

    @property
    def divisors(self) -> tuple[tuple[int, int], ...]:
        """INT4's candidates as (numerator, denominator), all of them safe (`quantkit.kernels.convert.int4_tables`).

        Of the 27 safe divisors in 6..14 with denominators up to 10, the ten that give the smallest squared error on
        Gaussian weights rounded to FP8, with and without signs, over g = 32, 64 and 128; all 27 gain 0.15 % more.
        """
        if self is ScaleMethod.MINMAX:
            return ((15, 2),)
        return ((20, 3), (7, 1), (52, 7), (15, 2), (8, 1), (42, 5), (17, 2), (44, 5), (9, 1), (99, 10))


class Scheme(StrEnum):
    """What happens to a weight."""

    KEEP = "keep"  # its bytes are copied
    BF16 = "bf16"  # quantized weights are decoded to BF16, plain tensors are copied
    FP8_TO_BF16 = "fp8-to-bf16"  # FP8 weights are decoded to BF16, all others are copied
    INT4 = "int4"
    NVFP4 = "nvfp4"


class Mtp(StrEnum):
    """What becomes of the multi-token-prediction layers."""

    QUANTIZE = "quantize"  # they are treated like the main layers
    KEEP = "keep"  # their routed experts are treated like the rest
    DROP = "drop"  # they are left out, and the config's count is set to 0


class Rest(StrEnum):
    """What the weights that stay unquantized are stored as."""

    FP8 = "fp8"  # as published
    BF16 = "bf16"
