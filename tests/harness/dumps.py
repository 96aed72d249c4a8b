"""What the weights of a vLLM worker are, in a form that can be compared bit by bit.

On CPU vLLM packs linear weights into closures, so next to all live tensors the dump holds what
every packed linear makes of one fixed input.
"""

from __future__ import annotations

import hashlib

import torch

"""Name of a tensor or forward -> digest of its bytes."""
Dump = dict[str, str]


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    state = hashlib.blake2b(digest_size=16)
    state.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
    state.update(data.numpy().tobytes())
    return state.hexdigest()


def dump(model: torch.nn.Module, config: object) -> Dump:
    """Digests of all parameters, buffers and packed linears of a worker's model."""
    from vllm.config import set_current_vllm_config

    result: Dump = {}
    # Layers share buffers, and of those of a pipeline stage the first layer's need not be there.
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    for name, tensor in (*parameters, *buffers):
        result[name] = digest(tensor)
    with torch.no_grad(), set_current_vllm_config(config):
        for name, module in model.named_modules():
            if hasattr(module, "cpu_linear"):
                result[f"forward of {name}"] = digest(_forward(module))
    return result


def _forward(module: torch.nn.Module) -> torch.Tensor:
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    width = next(getattr(module, name) for name in names if hasattr(module, name))
    source = torch.Generator().manual_seed(7)
    fixed = torch.randn(16, width, generator=source).to(torch.bfloat16)
    return module.quant_method.apply(module, fixed, getattr(module, "bias", None))


def differences(have: Dump, want: Dump) -> list[str]:
    """Names whose bits differ or that only one side has."""
    return sorted(n for n in have.keys() | want.keys() if have.get(n) != want.get(n))
