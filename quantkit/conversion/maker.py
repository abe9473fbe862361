"""What comes out of a piece of a weight: the arrays of its output tensors."""

from quantkit.checkpoint.header import StoredTensor, TensorSpec
from quantkit.checkpoint.source import Source
from quantkit.conversion.plan import Step
from quantkit.conversion.steps import Action
from quantkit.weights.encodings import TARGETS
from quantkit.weights.encodings.encoding import Rows
from quantkit.weights.rows import Reader


class Maker:
    """Makes outputs from `source`; safe to use from threads."""

    def __init__(self, source: Source) -> None:
        self.reader = Reader(source)
        self._quantizers = {target: target.quantizer(self.reader) for target in TARGETS}

    def made(self, step: Step, begin: int, end: int) -> Rows:
        """The outputs of the rows `begin` to `end`, a piece of `row_ranges`, of a weight that is not copied.

        Raises SourceError, naming the tensor, for a scale that is not sound.
        """
        if step.target:
            return self._quantizers[step.target](step, begin, end)
        make = {Action.DECODE: self._decode, Action.TRANSPOSE: self._transpose}
        return make[step.action](step, begin, end)

    def copied(self, step: Step, tensor: StoredTensor, target: TensorSpec, begin: int, end: int) -> Rows:
        """The bytes `begin` to `end` of a tensor as `target` holds them: E8M0 as FP32, restated global scales inverted.

        Raises SourceError, naming the tensor, for a NaN and for a scale that is not sound.
        """
        return step.weight.encoding.copy(self.reader, step.weight, tensor, target, begin, end)

    def _decode(self, step: Step, begin: int, end: int) -> Rows:
        """Any encoding to BF16."""
        decoded, bad = step.weight.encoding.bf16_rows(self.reader, step.weight, begin, end)
        return Rows({step.outputs[0].name: decoded}, bad)

    def _transpose(self, step: Step, begin: int, end: int) -> Rows:
        return Rows({step.outputs[0].name: self.reader.fused_rows(step.weight, begin, end)})
