"""Lean torch decoders that run a checkpoint on its weights as they are stored.

weight_loader  the weights of a checkpoint, taken one by one until none is left
reading        from a file into tensors
linear         projections: x times a stored weight
rope           rotary positions: plain, llama3, yarn
norm           RMS and layer norm
cache          what attention keeps of every token: an interface, and the plain implementation
gqa            grouped-query attention (Llama, GLM-4.x)
mla            multi-head latent attention (DeepSeek, Kimi, GLM-5.x), absorbed
dsa            the indexer of sparse attention (GLM-5.x, DeepSeek-V3.2)
moe            dense and routed MLPs
folding        which tensors of attention take which powers of two
decoder        the layers in order
loading        from a folder to a decoder
"""

from quantkit.families.config import ModelConfig as ModelConfig
from quantkit.families.config import read_config as read_config
from quantkit.models.cache import Cache as Cache
from quantkit.models.cache import PlainCache as PlainCache
from quantkit.models.decoder import Decoder as Decoder
from quantkit.models.loading import load as load
