"""Stand-ins that serve quantized checkpoints: fused values and scales, dense and MoE."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from bench.models import Config
from bench.quantized_models import quantize_weights
from tests.harness.standin import Loader, StandinModel, Tensors, Unit, takes
from tests.harness.standin_models import Parts, assemble
from weight_sync.quantize.format import Format, block_of, scale_dtype, scale_suffix


def quantized(cfg: Config, form: Format, rank: int = 0, tp: int = 1) -> StandinModel:
    """A stand-in of a configuration that holds every projection quantized."""
    return assemble(cfg, _QuantizedParts(form, rank, tp))


def load_quantized(
    model: StandinModel, form: Format, weights: Mapping[str, torch.Tensor]
) -> StandinModel:
    """Loads what a quantized checkpoint of these weights holds."""
    return model.load(dict(quantize_weights(weights, form)))


def shuffle(tensors: Tensors) -> Tensors:
    """Kernel layout: everything in reverse order. Done twice, it would be the loaded one again."""
    return {
        name: t.view(torch.uint8).flip(-1).view(t.dtype) if t.dtype.itemsize == 1 else t
        for name, t in tensors.items()
    }


class _QuantizedParts(Parts):
    """Makes units of E4M3 values with their scales; MXFP8 ones are shuffled after loading."""

    def __init__(self, form: Format, rank: int, tp: int) -> None:
        super().__init__(rank, tp, torch.bfloat16)
        self.form = form
        self.suffix = scale_suffix(form)
        self.block = block_of(form)
        self.post_load = shuffle if form is Format.MXFP8 else None

    def _pair(self, name: str, shape: tuple[int, ...], fused: int) -> dict[str, object]:
        """Shapes of a value and of its scale; ``fused`` scales where a matrix has one."""
        scale: tuple[int, ...] = (
            shape[:-2] if fused == 1 and len(shape) > 2 else (*shape[:-2], fused)
        )
        if self.block is not None:
            scale = (
                *shape[:-2],
                *(-(-n // b) for n, b in zip(shape[-2:], self.block, strict=True)),
            )
        dtype = getattr(torch, scale_dtype(self.form))
        return {name: (shape, torch.float8_e4m3fn), name + self.suffix: (scale, dtype)}

    def rows(self, name: str, parts: dict[str, int], width: int, bias: bool) -> None:
        local = {p: n // self.tp for p, n in parts.items()}
        shapes = self._pair("weight", (sum(local.values()), width), len(local))
        if bias:
            shapes["bias"] = ((sum(local.values()),), self.dtype)
        self._add(name, shapes)
        at = 0
        for number, (part, n) in enumerate(local.items()):
            self.read(f"{part}.weight", name, takes("weight", 0, self.rank, self.tp, at, n))
            if bias:
                self.read(f"{part}.bias", name, takes("bias", 0, self.rank, self.tp, at, n))
            scale = self._scale_loader("weight", 0, at, n, number)
            self.read(f"{part}.weight{self.suffix}", name, scale)
            at += n

    def columns(self, name: str, out: int, width: int, **options: object) -> None:
        del options  # The layout after loading is that of quantized units, not the plain one's.
        local = width // self.tp
        self._add(name, self._pair("weight", (out, local), 1))
        self.read(f"{name}.weight", name, takes("weight", 1, self.rank, self.tp))
        self.read(f"{name}.weight{self.suffix}", name, self._scale_loader("weight", 1, 0, local, 0))

    def experts(self, name: str, experts: int, inner: int, hidden: int) -> None:
        mine = inner // self.tp
        self._add(
            name,
            self._pair("w13_weight", (experts, 2 * mine, hidden), 2)
            | self._pair("w2_weight", (experts, hidden, mine), 1),
        )
        for part, attribute, dim, at, number in (
            ("gate", "w13_weight", 0, 0, 0),
            ("up", "w13_weight", 0, mine, 1),
            ("down", "w2_weight", 1, 0, None),
        ):
            value = takes(attribute, dim, self.rank, self.tp, at, mine)
            scale = self._scale_loader(attribute, dim, at, mine, number)
            for e in range(experts):
                source = f"{name}.{e}.{part}_proj.weight"
                self.read(source, name, _of_expert(e, value))
                self.read(source + self.suffix, name, _of_expert(e, scale))

    def _scale_loader(
        self, attribute: str, dim: int, at: int, size: int, number: int | None
    ) -> Loader:
        if self.block is not None:
            step = self.block[dim]
            return takes(
                attribute + self.suffix, dim, self.rank, self.tp, at // step, -(-size // step)
            )

        def load(tensors: Tensors, loaded: torch.Tensor) -> None:
            target = tensors[attribute + self.suffix]
            (target if number is None else target[number]).copy_(loaded)

        return load

    def _add(self, name: str, shapes: dict[str, object]) -> None:
        self.units.append(Unit(name, shapes, post_load=self.post_load))  # type: ignore[arg-type]


def _of_expert(number: int, load: Callable[[Tensors, torch.Tensor], None]) -> Loader:
    def load_one(tensors: Tensors, loaded: torch.Tensor) -> None:
        load({name: tensor[number] for name, tensor in tensors.items()}, loaded)

    return load_one
