"""All that can happen to pools of two and three pages: nobody reads a cell that is not its own, and nobody is hit.

Two pages are explored to the end: no event leads to a state that was not tried. Elsewhere depths count events. States
that differ in nothing that can be read are one (`page_world`).
"""

import pytest

from quantkit.runtime.integrity import Cause
from support.page_world import SIZE, World, explore
from support.tiers import quick_if

SAME, OTHER = (1, 1, 1), (2,)
WORLDS = {
    "two pages, two equal requests, to the end": (2, (SAME, SAME), None, 13_000),
    "three pages, two equal requests": (3, (SAME, SAME), 14, 4_000),
    "three pages, three requests": (3, (SAME, SAME, OTHER), 9, 5_000),
}


@pytest.mark.parametrize("name", quick_if("three pages, three requests".__eq__, WORLDS))
def test_every_order_of_events_is_sound(name: str) -> None:
    """In all interleavings of allocating, writing, freeing, reusing, sharing, forking, aborting and handing over, each
    read is the request's own, without a false alarm; late writers were refused on the way.
    """
    num_pages, prompts, depth, fewest = WORLDS[name]
    world = World(num_pages, prompts)
    states, transitions, _ = explore(world, depth)

    assert states > fewest
    assert transitions > 2 * states
    assert world.detected == 0
    late = world.tracker.counters.faults[Cause.LATE_WRITE]
    assert late > 0
    assert sum(world.tracker.counters.faults.values()) == late


def test_every_state_survives_every_fault() -> None:
    """From each state of a small pool, each fault of the bookkeeping, then all that can happen in two more events: a
    read is the request's own or it is detected.
    """
    world = World(3, (SAME, OTHER))
    _, _, states = explore(world, 7)
    for state in states:
        for spoil in FAULTS:
            world.load(state)
            if spoil(world):
                explore_from(world, 2)

    assert world.detected > 100


def explore_from(world: World, depth: int) -> None:
    """All that can happen from here in `depth` events, without a look at the bookkeeping, which is faulty."""
    state = world.dump()
    for place in range(len(list(world.actions()))):
        world.load(state)
        name, act = list(world.actions())[place]
        act()
        if depth > 1 and not name.startswith("begin"):
            explore_from(world, depth - 1)


def spoil_table(world: World) -> bool:
    """A request's first page is named as another one."""
    for request in world.requests:
        if request and request.computed:
            request.table.pages[0] = (request.table.pages[0] + 1) % world.num_pages
            return True
    return False


def spoil_order(world: World) -> bool:
    """Two pages of a request change places."""
    for request in world.requests:
        if request and request.computed > SIZE:
            request.table.pages.reverse()
            return True
    return False


def spoil_free_list(world: World) -> bool:
    """A page in use is called free, and will be the next one given."""
    for request in world.requests:
        if request and request.computed:
            world.allocator._free.appendleft(request.table.pages[0])
            world.allocator.take()
            world.cells[request.table.pages[0]] = [(99,)] * SIZE
            return True
    return False


def spoil_tag(world: World) -> bool:
    """A bit of a tag in use."""
    for request in world.requests:
        if request and request.computed:
            world.allocator.ledger.tags[request.table.pages[0]] ^= 1 << 40
            return True
    return False


def spoil_references(world: World) -> bool:
    """A page is given back by somebody who does not have it, and given to another."""
    for request in world.requests:
        if request and request.computed and world.passing is None:
            page = request.table.pages[0]
            while world.allocator.references[page]:
                world.allocator.release(page)
            world.allocator.distrust(page)
            world.allocator._free.remove(page)
            world.allocator._free.appendleft(page)
            world.allocator.take()
            world.cells[page] = [(99,)] * SIZE
            return True
    return False


FAULTS = (spoil_table, spoil_order, spoil_free_list, spoil_tag, spoil_references)
