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
