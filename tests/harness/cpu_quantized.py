"""Real vLLM CPU engines that serve quantized checkpoints.

vLLM has no MXFP8 kernel for CPUs, and its FP8 block kernels need newer CPUs than tests may have.
Kernels are a seam of vLLM's own, so two plain ones are added here; checkpoint formats, parameters,
loaders and life cycle are vLLM's. One kernel keeps the loading layout, the other repacks values and
scales as the kernels of GPUs do.
"""

from __future__ import annotations

import torch

from tests.harness.engines import EngineRank
from weight_sync.quantize.format import Format
from weight_sync.quantize.reference import decode


def register_kernels() -> None:
    """Makes vLLM choose the kernels below on CPUs."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear import Mxfp8LinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.utils import replace_parameter
    from vllm.platforms.interface import PlatformEnum

    class RepackingMxfp8(Mxfp8LinearKernel):
        """Keeps values transposed and scales in reverse order."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, c: object) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            replace_parameter(layer, "weight", layer.weight.data.t().contiguous())
            replace_parameter(layer, "weight_scale", layer.weight_scale.data.flip(0).contiguous())

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            value, scale = layer.weight.t().contiguous(), layer.weight_scale.flip(0)
            weight = decode(Format.MXFP8, value, scale.contiguous())
            return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    class PlainBlockFp8(Fp8BlockScaledMMLinearKernel):
        """Computes with the checkpoint's layout."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_weights(
            self,
            layer: torch.nn.Module,
            x: torch.Tensor,
            bias: torch.Tensor | None = None,
            **kwargs: object,
        ) -> torch.Tensor:
            weight = decode(Format.FP8_BLOCK, layer.weight, layer.weight_scale_inv)
            return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            raise AssertionError("apply_weights() does all of it")

    linear.register_linear_kernel(RepackingMxfp8, PlatformEnum.CPU, "mxfp8")
    # vLLM's own first choices refuse CPUs without AMX, whatever the machine of the test has.
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [PlainBlockFp8]


class QuantizedRank(EngineRank):
    """An engine worker with those kernels."""

    def __init__(self, folder: str, rank: int, tp: int, port: int) -> None:
        register_kernels()
        super().__init__(folder, rank, tp, port)


class OnlineRank(EngineRank):
    """An engine worker that reads a bf16 checkpoint and quantizes it to MXFP8 by itself."""

    def __init__(self, folder: str, rank: int, tp: int, port: int) -> None:
        register_kernels()
        super().__init__(folder, rank, tp, port, quantization="mxfp8")
