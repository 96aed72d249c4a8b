"""Reads from a DTensor which region of the global tensor this rank holds, and its local bytes.

Only metadata and the local tensor are touched: no redistribution, no gather, no communication.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import placement_types as torch_placements
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weight_sync.errors import LayoutError
from weight_sync.layout import Box, Placement, Replicate, Shard, StridedShard, full_box, shard_box


def placement(name: str, torch_placement: torch_placements.Placement) -> Placement:
    """Translates one torch placement.

    Raises:
        LayoutError: If the placement does not say which values a rank holds.
    """
    if isinstance(torch_placement, torch_placements._StridedShard):
        return StridedShard(torch_placement.dim, int(torch_placement.split_factor))
    # The exact class: subclasses cut differently.
    if type(torch_placement) is torch_placements.Shard:
        return Shard(torch_placement.dim)
    if isinstance(torch_placement, torch_placements.Replicate):
        return Replicate()
    raise LayoutError(
        f"{name} has placement {torch_placement}, so no rank holds its values; redistribute it to "
        "Shard or Replicate before the refit"
    )


def region_of(name: str, tensor: torch.Tensor) -> Box | None:
    """The region of the global tensor that this rank holds.

    Args:
        name: For errors.
        tensor: A DTensor, or a plain tensor, which every rank holds whole.

    Returns:
        None if this rank is outside the tensor's device mesh.

    Raises:
        LayoutError: If placements are partial or contradict the local shape.
    """
    if not isinstance(tensor, DTensor):
        local_tensor(name, tensor)
        return full_box(tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    placements = [placement(name, p) for p in tensor.placements]
    order = _cutting_order(tensor)
    try:
        box = shard_box(
            tensor.shape,
            [mesh.shape[i] for i in order],
            [placements[i] for i in order],
            [coordinate[i] for i in order],
        )
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from error
    have = tuple(local_tensor(name, tensor).shape)
    # Empty shards come in several shapes, all of them without elements.
    if have != box.size and (box.elements or 0 not in have):
        raise LayoutError(
            f"{name} has local shape {have} but {tuple(tensor.placements)} on mesh "
            f"{tuple(mesh.shape)} of global shape {tuple(tensor.shape)} gives {box.size} at "
            f"{tuple(coordinate)}; check how the DTensor was built"
        )
    return box


def _cutting_order(tensor: DTensor) -> list[int]:
    """Mesh dimensions in the order in which they cut; newer torch lets a DTensor say so."""
    entries = getattr(tensor._spec, "shard_order", None) or ()
    cutting = [i for entry in entries for i in entry.mesh_dims]
    return cutting + [i for i in range(tensor.device_mesh.ndim) if i not in cutting]


def local_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's bytes of a tensor, without a copy and outside autograd.

    Raises:
        LayoutError: If the tensor is a wrapper that holds its bytes in another form.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if is_traceable_wrapper_subclass(local):
        raise LayoutError(
            f"{name} is a {type(local).__name__}, whose values are not in its own storage; offer "
            "the plain tensor it was made from"
        )
    return local.detach()
