"""What the plan benchmark knows of a model: its tensors, and how parallel layers cut them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

from bench.models import CONFIGS
from bench.models import shapes as config_shapes
from bench.shapes_deepseek import DEEPSEEK_V3, TINY_DEEPSEEK
from bench.shapes_deepseek import shapes as deepseek_shapes
from weight_sync.dtypes import itemsize
from weight_sync.errors import ConfigError
from weight_sync.layout import Box, chunk_range

_DEEPSEEK = {"deepseek-v3": DEEPSEEK_V3, "tiny-deepseek": TINY_DEEPSEEK}
_ROWS = re.compile(r"\.(q|k|v|gate|up|q_b|kv_b)_proj\.(weight|bias)$")
_COLUMNS = re.compile(r"\.(o|down)_proj\.weight$")
_VOCABULARY = re.compile(r"(embed_tokens|lm_head)\.weight$")
_KV_HEADS = re.compile(r"\.(k|v)_proj\.")
_PLACE = re.compile(r"\.layers\.(\d+)\.(?:.*\.experts\.(\d+)\.)?")


@dataclass(frozen=True)
class ModelTensor:
    """One checkpoint tensor.

    Attributes:
        name: Checkpoint name.
        dtype: torch dtype name.
        shape: Global shape.
        cut: Dimension that tensor parallelism cuts, or None.
        heads: KV heads in its rows, which wider tensor parallelism replicates; 0 for other rows.
        vocabulary: Its rows are padded before they are cut.
        layer: Layer number; -1 before the first layer, ``layers`` after the last one.
        expert: Expert number, or None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    cut: int | None
    heads: int
    vocabulary: bool
    layer: int
    expert: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * itemsize(self.dtype)

    def box(self, parts: int, index: int, padding: int) -> Box:
        """The region of one of ``parts`` tensor parallel ranks.

        Args:
            parts: Tensor parallel ranks.
            index: One of them.
            padding: Vocabulary rows are padded to a multiple of this.
        """
        rows = padding if self.vocabulary else 0
        return _box(self.shape, self.cut, self.heads, rows, parts, index)


@cache
def _box(
    shape: tuple[int, ...], cut: int | None, heads: int, padding: int, parts: int, index: int
) -> Box:
    offset, size = [0] * len(shape), list(shape)
    if cut is not None:
        length = shape[cut]
        if padding:
            step = -(-length // padding) * padding // parts
            start = min(index * step, length)
            found = (start, min(step, length - start))
        elif 0 < heads < parts:
            found = chunk_range(length, heads, index * heads // parts)
        else:
            found = chunk_range(length, parts, index)
        offset[cut], size[cut] = found
    return Box(tuple(offset), tuple(size))


@dataclass(frozen=True)
class ModelShape:
    """All tensors of a model.

    Attributes:
        tensors: In checkpoint order.
        layers: Number of layers.
        experts: Number of experts per layer; 0 for dense models.
    """

    tensors: tuple[ModelTensor, ...]
    layers: int
    experts: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole model."""
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def _by_layer(self) -> dict[int, list[ModelTensor]]:
        out: dict[int, list[ModelTensor]] = {}
        for tensor in self.tensors:
            # Embeddings go with the first layer, the norm and head after the layers with the last.
            out.setdefault(min(max(tensor.layer, 0), self.layers - 1), []).append(tensor)
        return out

    def stage(self, layers: range) -> list[ModelTensor]:
        """The tensors of a pipeline stage that holds ``layers``."""
        return [tensor for layer in layers for tensor in self._by_layer.get(layer, ())]


def names() -> list[str]:
    """Models that can be planned for."""
    return sorted([*CONFIGS, *_DEEPSEEK])


def describe(model: str) -> ModelShape:
    """Tensors of a named model in bf16 (router biases in fp32).

    Raises:
        ConfigError: If the model is unknown.
    """
    if model in _DEEPSEEK:
        return _describe(deepseek_shapes(_DEEPSEEK[model]), 0)
    if model not in CONFIGS:
        raise ConfigError(f"unknown model {model!r}; known: {', '.join(names())}")
    cfg = CONFIGS[model]
    return _describe(config_shapes(cfg), int(cfg["num_key_value_heads"]))  # type: ignore[call-overload]


def _describe(shapes: Iterable[tuple[str, tuple[int, ...]]], kv_heads: int) -> ModelShape:
    tensors = []
    for name, shape in shapes:
        vocabulary = _VOCABULARY.search(name) is not None
        rows = vocabulary or _ROWS.search(name) is not None
        place = _PLACE.search(name)
        tensors.append(
            ModelTensor(
                name=name,
                dtype="float32" if name.endswith("e_score_correction_bias") else "bfloat16",
                shape=shape,
                cut=0 if rows else 1 if _COLUMNS.search(name) else None,
                heads=kv_heads if _KV_HEADS.search(name) else 0,
                vocabulary=vocabulary,
                layer=int(place[1]) if place else -1 if "embed" in name else 1 << 30,
                expert=int(place[2]) if place and place[2] else None,
            )
        )
    layers = 1 + max(t.layer for t in tensors if t.layer < 1 << 30)
    experts = 1 + max((t.expert for t in tensors if t.expert is not None), default=-1)
    return ModelShape(tuple(tensors), layers, experts)
