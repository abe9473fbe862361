"""Prefill and decode in processes of their own, joined by pages in shared memory.

terms        what two workers must agree on
segment      one hand-off: its bytes, and what is checked of them
shared       segments made and removed
conversion   pages of one kind as pages of another
messages     what is said between processes
worker       the life of a worker process
preload      what workers are forked off
slot         the coordinator's side of one worker
jobs         which request is where; attempts
counters     what was done and what went wrong
coordinator  requests in, tokens out
"""

from quantkit.runtime.handoff.conversion import convert_pages as convert_pages
from quantkit.runtime.handoff.coordinator import Coordinator as Coordinator
from quantkit.runtime.handoff.coordinator import CoordinatorOptions as CoordinatorOptions
from quantkit.runtime.handoff.counters import HandoffReport as HandoffReport
from quantkit.runtime.handoff.terms import Identity as Identity
from quantkit.runtime.handoff.worker import Role as Role
from quantkit.runtime.handoff.worker import WorkerSettings as WorkerSettings
from quantkit.runtime.handoff.worker import compute_pages as compute_pages
