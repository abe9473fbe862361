"""lm-eval's model, watched: which prompts and answers were cut, which answers are empty or no numbers.

It is the harness's own for transformers; with pages under it, only what is computed is another's: tokens, cuts and stop
sequences are the same for both backends.
"""

import math
from collections import defaultdict, deque
from typing import Any

import torch

from quantkit.errors import UsageError
from quantkit.eval.gate.loading import Loaded
from quantkit.eval.gate.paged_model import PagedModel
from quantkit.eval.gate.runs import Fault

Faults = dict[Any, set[Fault]]
_BATCH = 8  # requests that transformers computes together


class _Watch:
    """Faults by request: by its prompt, or by (prompt, continuation) where a likelihood is asked for.

    It stands in the place of the harness's cache, which is told of each answer in the order of their generation.
    """

    def __init__(self) -> None:
        self.faults: Faults = defaultdict(set)
        self._cut: deque[bool] = deque()  # whether each answer was, from its generation until its text is there

    def generated(self, cut: bool) -> None:
        self._cut.append(cut)

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        if kind == "loglikelihood" and math.isnan(answer[0]):
            self.faults[request].add(Fault.NOT_A_NUMBER)
        if kind != "generate_until":
            return
        if self._cut.popleft():
            self.faults[request[0]].add(Fault.ANSWER_CUT)
        if not answer.strip():
            self.faults[request[0]].add(Fault.EMPTY)


def observe(loaded: Loaded) -> tuple[Any, Faults]:
    """A model for the harness, and the faults of its requests, filled as it runs: see `_Watch`."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs

    paged = isinstance(loaded.model, PagedModel)
    watch = _Watch()

    class Observed(HFLM):  # type: ignore[misc]
        def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            for request, context, continuation in requests:
                if len(context) + len(continuation) > self.max_length + 1:
                    watch.faults[request].add(Fault.PROMPT_CUT)
            if paged:
                return _score(loaded.model, requests, self.max_length, watch)
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

        def generate_until(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            for request in requests:
                cap = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
                _check_cap(request.task_name, cap, self.max_length)
                if len(self.tok_encode(request.args[0])) > self.max_length - cap:
                    watch.faults[request.args[0]].add(Fault.PROMPT_CUT)
            return super().generate_until(requests, *args, **kwargs)

        def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
            output = super()._model_generate(context, max_length, stop, **kwargs)
            ends = _end_tokens(loaded)
            for row in output[:, context.shape[1] :].tolist():
                text = self.tok_decode(row, skip_special_tokens=False)
                ended = row[-1] in ends or any(end in text for end in stop)
                watch.generated(not ended and len(row) >= max_length - context.shape[1])
            return output

    both = {"pretrained": loaded.model, "tokenizer": loaded.tokenizer}
    model = Observed(**both, backend="causal", device="cpu", batch_size=1 if paged else _BATCH)
    model.set_cache_hook(watch)
    return model, watch.faults


def _check_cap(task: str, cap: int, max_length: int) -> None:
    if cap >= max_length:
        raise UsageError(
            f"{task}: answers may have {cap} tokens, which leaves no room for a prompt in the model's {max_length}"
        )


def _score(model: PagedModel, requests: Any, max_length: int, watch: _Watch) -> list[tuple[float, bool]]:
    """The log-likelihood of each (request, context, continuation), in tokens, and whether it is the likeliest one.

    As the harness's own, cut from the left to the model's length; equal inputs are computed once.
    """
    asked: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, (_, context, continuation) in enumerate(requests):
        asked[tuple((context + continuation)[-max_length - 1 : -1])].append(number)
    counts = [max(len(requests[number][2]) for number in numbers) for numbers in asked.values()]
    answers: dict[int, tuple[float, bool]] = {}
    for numbers, logits in zip(asked.values(), model.last_logits(list(asked), counts), strict=True):
        likelihoods = logits.log_softmax(dim=-1)
        for number in numbers:
            request, _, continuation = requests[number]
            targets = torch.tensor(continuation, device=logits.device)
            rows = likelihoods[-len(targets) :]
            likelihood = float(rows.gather(1, targets.unsqueeze(1)).sum())
            answers[number] = likelihood, bool((rows.argmax(dim=-1) == targets).all())
            if request is not None:  # of a whole text's parts, which have none
                watch.add_partial("loglikelihood", request, answers[number])
    return [answers[number] for number in range(len(requests))]


def _end_tokens(loaded: Loaded) -> set[int | None]:
    """What an answer that was not cut ends with: a token that ends it, or padding up to a longer answer's end."""
    ends = loaded.model.generation_config.eos_token_id
    return {loaded.tokenizer.pad_token_id, loaded.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
