"""vLLM's greedy answers and log-probabilities in float32. Runs in the engines' interpreter, one model a process:
`python -m engine_loaders.vllm_generate CHECKPOINT PROMPTS ANSWERS`.

vLLM runs as it is, but for the kernel of INT4 linears: the CPU's needs AVX-512 and BF16. The one put in its place
decodes the weight when it is loaded, by vLLM's own order of codes, and multiplies in float32.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_ENABLE_V1_MULTIPROCESSING="0")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")  # read when vLLM is imported

import torch
import vllm.model_executor.kernels.linear as linear_kernels
from vllm import LLM, SamplingParams
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.platforms.interface import PlatformEnum

_BIAS = 8  # of a code
_NEW_TOKENS = 12


class ReferenceKernel(MPLinearKernel):
    """Multiplies by the decoded weight."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Every machine has it."""
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Symmetric groups."""
        return not c.zero_points, "zero points"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Decode the weight [out, in]."""
        packed, scale = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        codes = unpack_quantized_values_into_int32(packed.data, self.config.weight_type, packed.packed_dim) - _BIAS
        codes = codes.t() if packed.input_dim == 0 else codes
        steps = (scale.data if scale.output_dim == 0 else scale.data.t()).float()
        layer.decoded = codes * steps.repeat_interleave(codes.shape[1] // steps.shape[1], dim=1)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product with the decoded weight."""
        return torch.nn.functional.linear(x, layer.decoded.to(x.dtype), bias)


def answer(checkpoint: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The token ids of each prompt and its greedy answer, and the log-probability of all but the first."""
    limits: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    model = LLM(checkpoint, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, seed=0, **limits)
    greedy = SamplingParams(
        temperature=0, max_tokens=_NEW_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False
    )
    found = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    return [
        {
            "tokens": [*result.prompt_token_ids, *result.outputs[0].token_ids],
            "logprobs": [
                *(entry[token].logprob for token, entry in _pairs(result.prompt_token_ids, result.prompt_logprobs)),
                *(
                    entry[token].logprob
                    for token, entry in _pairs(result.outputs[0].token_ids, result.outputs[0].logprobs)
                ),
            ],
        }
        for result in found
    ]


def _pairs(tokens: Any, logprobs: Any) -> Any:
    """Each token with the entry that holds its log-probability; the first of a prompt has none."""
    return [(token, entry) for token, entry in zip(tokens, logprobs, strict=True) if entry is not None]


if __name__ == "__main__":
    linear_kernels._POSSIBLE_KERNELS[PlatformEnum.CPU].insert(0, ReferenceKernel)
    asked = json.loads(Path(sys.argv[2]).read_text())
    Path(sys.argv[3]).write_text(json.dumps(answer(sys.argv[1], asked)))
