"""A recipe of one's own: SFT under the focal loss, which tokens that are known well hardly move.

Chosen by `imports: [examples.focal_sft]` and `algorithm: {kind: focal_sft}`, as in focal_sft.yaml.
Source of the loss: Focal Loss for Dense Object Detection, arXiv 1708.02002.
"""

from typing import ClassVar

from algorithms.base import TrainingBatch
from algorithms.registry import register_algorithm
from algorithms.sft import SFT, SFTConfig


class FocalSFTConfig(SFTConfig):  # inherits extra="forbid" + all SFT knobs
    """What focal SFT can be told."""

    gamma: float = 2.0  # focal-loss focusing parameter


@register_algorithm("focal_sft")
class FocalSFT(SFT):
    """Supervised fine-tuning under the focal loss, the mean over all tokens of a batch."""

    name: ClassVar[str] = "focal_sft"
    Config: ClassVar[type] = FocalSFTConfig

    async def build_batch(self, step_idx: int) -> TrainingBatch:
        """The batch of SFT under another loss."""
        batch = await super().build_batch(step_idx)  # reuse SFT's slicing

        def focal_loss(model_output, meta):  # a LossCallable
            import torch  # noqa: F401  (for losses that need more than the tensors' methods)

            logp = model_output.logprobs  # per-token target logprob
            p = logp.exp()
            return -((1 - p) ** self.cfg.gamma * logp).mean()

        batch.loss_fn = focal_loss  # client-side custom loss
        return batch
