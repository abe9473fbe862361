"""What the process holds that workers are forked off: modules, and compiled loops made ready; no threads, no weights.

It is imported by that process alone, and saves each worker seconds.
"""

import torch

from quantkit.ops import linear
from quantkit.runtime.handoff import worker as worker

linear.plain(torch.zeros(1, 16), torch.zeros(16, 16, dtype=torch.bfloat16))
