"""Page integrity: no step uses a page that is not its request's, or that does not hold what was written to it.

causes    what can be wrong
tags      the tracker of generations, for any pool: allocate, free, expect, check, write
digests   a page's bytes in 64 bits
prefixes  the tokens that digests are bound to
content   what pages ought to hold
retries   how often a request that was hit is computed again
counters  what was found, as Prometheus text and JSON
steps     what the engine asks
"""

from quantkit.choices import IntegrityLevel as IntegrityLevel
from quantkit.runtime.integrity.causes import Cause as Cause
from quantkit.runtime.integrity.counters import IntegrityCounters as IntegrityCounters
from quantkit.runtime.integrity.counters import IntegrityReport as IntegrityReport
from quantkit.runtime.integrity.retries import RetryBudget as RetryBudget
from quantkit.runtime.integrity.steps import StepTracker as StepTracker
from quantkit.runtime.integrity.tags import PageTracker as PageTracker
from quantkit.runtime.integrity.tags import TagTracker as TagTracker
