"""lm-eval's transformers model, watched: which prompts and answers were cut, which answers are empty or no numbers."""

import math
from collections import defaultdict, deque
from typing import Any

from quantkit.errors import UsageError
from quantkit.eval.loading import Loaded
from quantkit.eval.runs import Fault

Faults = dict[Any, set[Fault]]


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


def observe(loaded: Loaded, batch_size: int) -> tuple[Any, Faults]:
    """A model for the harness, and the faults of its requests, filled as it runs: see `_Watch`."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs

    watch = _Watch()

    class Observed(HFLM):  # type: ignore[misc]
        def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            for request, context, continuation in requests:
                if len(context) + len(continuation) > self.max_length + 1:
                    watch.faults[request].add(Fault.PROMPT_CUT)
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

        def generate_until(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            for request in requests:
                cap = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
                if cap >= self.max_length:
                    raise UsageError(
                        f"{request.task_name}: answers may have {cap} tokens, which leaves no room for a prompt in the "
                        f"model's {self.max_length}"
                    )
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

    model = Observed(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size, device="cpu")
    model.set_cache_hook(watch)
    return model, watch.faults


def _end_tokens(loaded: Loaded) -> set[int | None]:
    """What an answer that was not cut ends with: a token that ends it, or padding up to a longer answer's end."""
    ends = loaded.model.generation_config.eos_token_id
    return {loaded.tokenizer.pad_token_id, loaded.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
