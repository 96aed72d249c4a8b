"""Small models of vLLM-style layers in a process of their own, installed by the real vLLM side.

The layers do after loading what made public engines lose weights: they derive copies, repack,
compute, share and keep state. vLLM's own bookkeeping and this library's ``VllmModel`` handle them
as they would in a worker; a second instance loaded from the same checkpoint is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from tests.harness.dumps import Dump, digest
from weight_sync.vllm.model import VllmModel
from weight_sync.vllm.process import VllmUnitInstall
from weight_sync.worker.agent import WorkerAgent

Checkpoint = dict[str, torch.Tensor]


class Method(QuantizeMethodBase):
    """A quant method made of one function."""

    def __init__(self, process: Callable[[Any], None]) -> None:
        self._process = process

    def create_weights(self, layer: torch.nn.Module, *args: object, **kwargs: object) -> None:
        raise AssertionError("these layers make their own weights")

    def apply(self, layer: torch.nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
        raise AssertionError("these layers compute their own outputs")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self._process(layer)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def interleave(scale: torch.Tensor) -> torch.Tensor:
    """First and second half of the scales, alternating."""
    return scale.reshape(2, -1).t().reshape(-1).clone()


class Scaled(torch.nn.Module):
    """Case B16: the kernel reads ``interleaved``, a copy of ``scale`` in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(8, 8)
        self.scale = parameter(8)
        self.quant_method = Method(_interleave)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight * self.interleaved


def _interleave(layer: Any) -> None:
    layer.interleaved = interleave(layer.scale.data)


class Latent(torch.nn.Module):
    """Case B16, second form: attention that absorbed its projection into two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Module()
        self.kv_b_proj.weight = parameter(16, 8)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        k, v = self.kv_b_proj.weight.data.reshape(2, 8, 8)
        self.W_UK_T, self.W_UV = k.t().contiguous(), v.contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.W_UK_T @ self.W_UV


EXPERTS, WIDTH = 8, 64


class Blocked(torch.nn.Module):
    """Case B20: post-processing turns ``[8, 64, 64]`` into ``[8, 4, 64, 16]`` without a loader."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = parameter(EXPERTS, WIDTH, WIDTH)
        self.w13.weight_loader = _load_expert
        self.quant_method = Method(_block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...i,ebij->...ebj", x, self.w13)


def _load_expert(param: torch.Tensor, loaded: torch.Tensor, expert: int, half: int) -> None:
    rows = WIDTH // 2
    param.data[expert, half * rows : (half + 1) * rows].copy_(loaded)


def _block(layer: Any) -> None:
    full = layer.w13.data
    blocked = full.reshape(EXPERTS, WIDTH, 4, 16).transpose(1, 2).contiguous()
    layer.w13 = torch.nn.Parameter(blocked, requires_grad=False)


class Recurrent(torch.nn.Module):
    """Case B22: a parameter that is computed while loading, beside plain ones and runtime state."""

    ROOT = 0.018798828125

    def __init__(self) -> None:
        super().__init__()
        self.A = parameter(8)
        self.A.weight_loader = _load_negative_exp
        self.D = parameter(8)
        self.dt_bias = parameter(8)
        self.register_buffer("root_size", torch.tensor(self.ROOT), persistent=False)


def _load_negative_exp(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(-torch.exp(loaded))


class Sharing(torch.nn.Module):
    """Case B22, third form: one bias that router and experts both hold, sent once."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Module()
        self.gate.weight = parameter(64, 4)
        self.gate.bias = parameter(64)
        self.experts = torch.nn.Module()
        self.experts.weight = parameter(64, 4)
        self.experts.bias = self.gate.bias
        self.experts.quant_method = Method(_flip)


def _flip(layer: Any) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.data.flip(0).contiguous(), requires_grad=False)


class Router(torch.nn.Module):
    """Case B13: a correction bias that decides which experts are chosen."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = torch.nn.Module()
        self.gate.weight = parameter(8, 4, dtype=torch.bfloat16)
        self.gate.e_score_correction_bias = parameter(8, dtype=dtype)


class Model(torch.nn.Module):
    """Loads by parameter name, experts by their number and half."""

    def __init__(self, **layers: torch.nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, loaded in weights:
            if name.endswith((".gate", ".up")):
                prefix, _, number, half = name.rsplit(".", 3)
                target = parameters[f"{prefix}.w13"]
                target.weight_loader(target, loaded, int(number), ["gate", "up"].index(half))
            elif name.endswith("A_log"):
                target = parameters[name.replace("A_log", "A")]
                target.weight_loader(target, loaded)
            elif name in parameters:
                default = default_weight_loader
                getattr(parameters[name], "weight_loader", default)(parameters[name], loaded)


MODELS: dict[str, Callable[[], Model]] = {
    "scaled": lambda: Model(layer=Scaled()),
    "latent": lambda: Model(layer=Latent()),
    "blocked": lambda: Model(layer=Blocked(), norm=_norm()),
    "recurrent": lambda: Model(layer=Recurrent()),
    "sharing": lambda: Model(layer=Sharing()),
    "router": lambda: Model(layer=Router(torch.float32)),
    "router-bf16": lambda: Model(layer=Router(torch.bfloat16)),
}


def _norm() -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = parameter(4)
    return module


def started(kind: str, checkpoint: Checkpoint) -> Model:
    """A fresh model as an engine starts it."""
    model = MODELS[kind]()
    record_metadata_for_reloading(model)
    model.load_weights(checkpoint.items())
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), Method):
            module.quant_method.process_weights_after_loading(module)
        elif isinstance(module, Latent):
            module.process_weights_after_loading(torch.float32)
    return model


class _Dtype:
    dtype = torch.float32


class LayersWorker:
    """One worker with such a model, inside its process."""

    def __init__(self, kind: str, checkpoint: Checkpoint) -> None:
        self._kind = kind
        self._config = VllmConfig()
        self._config.model_config = _Dtype()  # Only its dtype is asked for.
        with set_current_vllm_config(self._config):
            self.model = started(kind, checkpoint)
        self._vllm = VllmModel(self.model, self._config, torch.device("cpu"))
        self._agent = WorkerAgent(self._vllm)
        self.finished: list[str] = []
        usual = VllmUnitInstall.finish

        def finish(unit: VllmUnitInstall) -> None:
            self.finished.append(type(unit._module).__name__)
            usual(unit)

        VllmUnitInstall.finish = finish  # type: ignore[method-assign]

    def rpc(self, request: bytes) -> bytes:
        return self._agent.handle(request)

    def dump(self) -> Dump:
        return dump(self.model)

    def fresh(self, checkpoint: Checkpoint) -> Dump:
        with set_current_vllm_config(self._config):
            return dump(started(self._kind, checkpoint))

    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in tensors(self.model).items()}

    def value(self, name: str) -> list[float]:
        return tensors(self.model)[name].float().flatten().tolist()

    def dtype(self, name: str) -> str:
        return str(tensors(self.model)[name].dtype)

    def process_again(self, times: int) -> None:
        """Runs the library's post-load on every layer, on unchanged weights."""
        for _ in range(times):
            for name, module in self.model.named_modules():
                if isinstance(getattr(module, "quant_method", None), Method):
                    self._vllm.begin(name).finish()
            self._vllm.refresh_derived([n for n, _ in self.model.named_modules()])

    def finishes(self) -> list[str]:
        return self.finished


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and tensors in plain attributes, by qualified name."""
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, module in model.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}
        found |= {f"{name}.{k}": v for k, v in plain.items()}
    return found


def dump(model: Model) -> Dump:
    """Digests of all tensors and of what the layers compute."""
    result = {name: digest(tensor) for name, tensor in tensors(model).items()}
    for name, module in model.named_children():
        if isinstance(module, Scaled | Latent | Blocked):
            width = WIDTH if isinstance(module, Blocked) else 8
            fixed = torch.linspace(-1, 1, 2 * width).reshape(2, width)
            result[f"forward of {name}"] = digest(module(fixed))
    return result
