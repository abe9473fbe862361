"""A reference runtime: continuous batching over paged caches, small enough to read, right in every detail.

scales       the scales of an FP8 cache
allocator    which pages are free, in use or kept for their prefix
pages        the pool: what a page means, and its bytes
tables       a request's pages; sharing, copying on write
batch_table  the tables of a step as one tensor
paged_cache  a forward pass over pages
page_set     pages outside of a pool, for another one
sampling     from logits to a token
requests     what is asked, how far it is, how it ended
scheduler    who computes what next; preemption
integrity    whether pages are still what they must be
computing    a step: check, compute, read the verdict
engine       requests in, tokens out
tokenizer    text to tokens and back
generation   `quantkit generate`
"""

from quantkit.runtime.engine import Engine as Engine
from quantkit.runtime.engine import EngineOptions as EngineOptions
from quantkit.runtime.pages import PagePool as PagePool
from quantkit.runtime.pages import cache_spec as cache_spec
from quantkit.runtime.pages import open_pool as open_pool
from quantkit.runtime.requests import Completion as Completion
from quantkit.runtime.requests import Event as Event
from quantkit.runtime.requests import Finish as Finish
from quantkit.runtime.sampling import GREEDY as GREEDY
from quantkit.runtime.sampling import Sampling as Sampling
from quantkit.runtime.scales import KvScales as KvScales
from quantkit.runtime.scales import uniform_scales as uniform_scales
from quantkit.runtime.scales import unscaled as unscaled
