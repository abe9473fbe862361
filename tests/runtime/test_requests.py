"""A request's life in the engine: refused, ended, aborted, forked, exported, streamed."""

from typing import Any

import pytest
import torch

from quantkit.errors import RequestError, UsageError
from quantkit.runtime import Engine, Event, Finish, Sampling
from quantkit.runtime.page_set import PageSet
from support.counting_model import VOCAB, CountingModel, expected, make_pool, make_prompts, options, serve


def test_request_that_never_fits_is_refused() -> None:
    """Of a pool of 8 pages a request for 9 is refused at once, with the sizes; the next one is served."""
    engine = Engine(CountingModel(), make_pool(8, 4), options())
    with pytest.raises(RequestError, match=r"30 tokens of prompt and 4 new ones need 9 pages of 4 tokens.* 8"):
        engine.submit((1,) * 30, 4)

    assert serve(engine, [(1,) * 30], 3) == [expected((1,) * 30, 3)]  # the last token is never computed
    assert engine.counters.refused == 1


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ((), 1, "a prompt of one token or more"),
        ((1,), 0, "one new token or more"),
        ((1, VOCAB), 1, "token 97 is not one of the model's 97"),
        ((-1,), 1, "token -1 is not"),
        ((1,) * 400, 101, "400 tokens of prompt and 101 new ones are more than the model's 500"),
    ],
)
def test_impossible_requests(prompt: tuple[int, ...], count: int, message: str) -> None:
    """What could never be computed is refused, by what is wrong."""
    engine = Engine(CountingModel(), make_pool(1000, 4), options())

    with pytest.raises(RequestError, match=message):
        engine.submit(prompt, count)
    assert not engine.busy


def test_finish_and_abort_in_the_same_step() -> None:
    """Ending twice, in either order, frees pages once and tells one end."""
    engine = Engine(CountingModel(), make_pool(20, 4), options(chunk_size=8))
    first, second = engine.submit((1, 2, 3), 1), engine.submit((4, 5), 5)
    events: list[Event] = list(engine.step())
    engine.abort(first)
    engine.abort(second)
    engine.abort(second)
    while engine.busy:
        events += engine.step()

    ends = [(event.request, event.finish) for event in events if event.finish]
    assert ends == [(first, Finish.LENGTH), (second, Finish.ABORTED)]
    assert not any(engine.pool.allocator.references)


def test_stop_token_ends_a_request() -> None:
    """Generation ends after a stop token, which is the last of the tokens."""
    prompt = (1, 2, 3)
    text = expected(prompt, 8)
    engine = Engine(CountingModel(), make_pool(20, 4), options())
    number = engine.submit(prompt, 8, stop=[text[3]])
    engine.run()

    completion = engine.take(number)
    assert (completion.tokens, completion.finish) == (text[: text.index(text[3]) + 1], Finish.STOP)


def test_unsound_logits_fail_one_request() -> None:
    """A request whose logits are NaN ends with a typed error; another one goes on."""
    engine = Engine(CountingModel(), make_pool(20, 4), options(share_prefixes=False))
    hit, sound = engine.submit((1, 2, 3), 6), engine.submit((4, 5, 6), 6)
    for _ in range(3):
        engine.step()
    page = engine._requests[hit].table.pages[0]
    engine.pool.tensors[0, "value"][page, 1] = torch.nan
    engine.run()

    completion = engine.take(hit)
    assert completion.finish is Finish.FAILED
    assert isinstance(completion.error, RequestError)
    assert "are not numbers" in str(completion.error)
    assert engine.take(sound).tokens == expected((4, 5, 6), 6)
    assert engine.counters.failed == 1


def test_finished_request_cannot_be_forked() -> None:
    """There is nothing to go on from."""
    engine = Engine(CountingModel(), make_pool(4, 4), options())
    number = engine.submit((1,), 1)
    engine.run()

    with pytest.raises(RequestError, match="request 0 is finished"):
        engine.fork(number, Sampling())
    engine.take(number)
    with pytest.raises(RequestError, match="there is no request 0"):
        engine.fork(number, Sampling())


def test_fork_copies_the_half_filled_page_only() -> None:
    """A fork shares its pages until one of the two writes, then only the page that is written to is copied."""
    engine = Engine(CountingModel(), make_pool(20, 4), options(chunk_size=10))
    prompt = tuple(range(10))
    number = engine.submit(prompt, 4)
    engine.step()
    other = engine.fork(number, Sampling())
    assert max(engine.pool.allocator.references) == 2
    engine.step()

    tables = [engine._requests[one].table.pages for one in (number, other)]
    assert [a == b for a, b in zip(*tables, strict=True)] == [True, True, False]
    engine.run()
    assert engine.take(number).tokens == engine.take(other).tokens == expected(prompt, 4)


def test_request_goes_on_in_another_engine() -> None:
    """Pages that one engine exports save another one the prompt; without room for them it is computed."""
    prompt = tuple(range(10))
    first = Engine(CountingModel(), make_pool(20, 4), options(chunk_size=10))
    number = first.submit(prompt, 4)
    first.step()
    pages = first.export(number)
    assert pages.tokens == prompt

    for num_pages, others in ((20, 0), (8, 1)):
        engine = Engine(CountingModel(), make_pool(num_pages, 4), options(chunk_size=10))
        waiting = [engine.submit((50,) * 24, 8) for _ in range(others)]
        for _ in waiting:
            engine.step()
        taken = engine.submit(prompt, 4, pages=pages)
        engine.run()
        assert engine.take(taken).tokens == expected(prompt, 4)
        assert engine.counters.prefill_tokens == (34 if others else 1)


def test_pages_of_other_tokens_are_refused() -> None:
    """Pages serve only a prompt that begins with their tokens."""
    engine = Engine(CountingModel(), make_pool(20, 4), options())
    pages = PageSet(engine.pool.spec, (1, 2, 3))

    with pytest.raises(RequestError, match="other tokens"):
        engine.submit((1, 2), 4, pages=pages)


def test_streaming_tells_each_token_once() -> None:
    """The callback gets the tokens of each request in order, the last with its end."""
    engine = Engine(CountingModel(), make_pool(12, 4), options())
    prompts = make_prompts(5)
    told: dict[int, list[Any]] = {}
    numbers = [engine.submit(prompt, 5) for prompt in prompts]
    engine.run(lambda event: told.setdefault(event.request, []).append((event.token, event.finish)))

    for number, prompt in zip(numbers, prompts, strict=True):
        assert told[number] == [
            *((token, None) for token in expected(prompt, 5)[:-1]),
            (expected(prompt, 5)[-1], Finish.LENGTH),
        ]


def test_pool_held_by_others_is_an_error() -> None:
    """Where pages outside of the engine leave no room, a step says so and does not wait for ever."""
    engine = Engine(CountingModel(), make_pool(4, 4), options())
    for _ in range(3):
        engine.pool.allocator.take()
    engine.submit((1,) * 8, 2)

    with pytest.raises(RequestError, match="held by others"):
        engine.step()


def test_chunks_of_no_tokens_are_refused() -> None:
    """A chunk has at least one token."""
    with pytest.raises(UsageError, match="chunks of 0 tokens"):
        options(chunk_size=0)
