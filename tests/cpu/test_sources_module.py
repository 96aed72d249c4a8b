"""What a module source offers of a plain module: names, casts, buffers, aliases, views."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from weight_sync.errors import ConfigError, LayoutError
from weight_sync.layout import Box
from weight_sync.manifest import TensorSpec
from weight_sync.sources.casts import wire_dtype
from weight_sync.sources.module import ModuleSource


class Router(nn.Module):
    """A gate with an fp32 bias, a scalar, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)
        self.correction = nn.Parameter(torch.arange(8.0) + 0.05)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros(8, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_parameter("absent", None)


def specs(module: nn.Module, **options: object) -> dict[str, TensorSpec]:
    manifest = ModuleSource(module, **options).manifest(0, "host", "cpu")  # type: ignore[arg-type]
    return {spec.name: spec for spec in manifest.tensors}


def test_parameters_and_persistent_buffers_are_offered() -> None:
    assert set(specs(Router())) == {"gate.weight", "correction", "temperature", "seen"}


def test_a_scalar_is_one_region_of_rank_zero() -> None:
    source = ModuleSource(Router())
    regions = source.manifest(0, "host", "cpu").regions()
    number = [spec.name for spec, _ in regions].index("temperature")
    assert regions[number][1] == Box((), ())
    assert source.region(number).shape == ()


def test_an_empty_tensor_has_a_region() -> None:
    module = nn.Module()
    module.none = nn.Parameter(torch.empty(0, 64))
    ((spec, box),) = ModuleSource(module).manifest(0, "host", "cpu").regions()
    assert (spec.shape, box.size) == ((0, 64), (0, 64))


def test_regions_are_the_parameters_themselves() -> None:
    module = Router()
    source = ModuleSource(module)
    source.manifest(0, "host", "cpu")
    region = source.region(0)
    assert region.data_ptr() == next(module.parameters()).data_ptr()
    assert not region.requires_grad


def test_nothing_is_cast_unless_declared() -> None:
    found = specs(Router())
    assert found["correction"].dtype == "float32"
    assert found["gate.weight"].dtype == "bfloat16"


def test_a_wildcard_cast_leaves_integers_and_longer_rules_alone() -> None:
    found = specs(Router(), cast={"*": "float16", "corr*": "float32"})
    assert found["gate.weight"].dtype == "float16"
    assert found["correction"].dtype == "float32"
    assert found["seen"].dtype == "int64"


def test_an_exact_name_wins_over_a_longer_prefix() -> None:
    assert wire_dtype("a.b", "float32", {"a.b": "float16", "a.b*": "bfloat16"}) == "float16"


def test_a_cast_keeps_the_region_in_the_trainers_dtype() -> None:
    source = ModuleSource(Router(), cast={"correction": "bfloat16"})
    regions = source.manifest(0, "host", "cpu").regions()
    number = [spec.name for spec, _ in regions].index("correction")
    assert regions[number][0].dtype == "bfloat16"
    assert source.region(number).dtype == torch.float32


def test_a_cast_to_an_integer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"correction -> int8"):
        ModuleSource(Router(), cast={"correction": "int8"})


def test_a_cast_of_an_integer_by_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="seen is int64"):
        specs(Router(), cast={"seen": "bfloat16"})


def test_a_dtype_that_changed_after_the_manifest_is_refused() -> None:
    module = Router()
    source = ModuleSource(module)
    manifest = source.manifest(0, "host", "cpu")
    number = [spec.name for spec, _ in manifest.regions()].index("gate.weight")
    module.gate.to(torch.float32)
    with pytest.raises(LayoutError, match=r"gate\.weight is torch\.float32 .*torch\.bfloat16"):
        source.region(number)


def test_a_parameter_removed_after_the_manifest_is_refused() -> None:
    module = Router()
    source = ModuleSource(module)
    manifest = source.manifest(0, "host", "cpu")
    number = [spec.name for spec, _ in manifest.regions()].index("correction")
    module.correction = None
    with pytest.raises(LayoutError, match="correction is no longer in the module"):
        source.region(number)


def test_tied_names_share_one_region_of_memory() -> None:
    module = nn.Module()
    module.embed, module.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    module.head.weight = module.embed.weight
    source = ModuleSource(module)
    manifest = source.manifest(0, "host", "cpu")
    assert [spec.alias_of for spec in manifest.tensors] == ["", "embed.weight"]
    assert source.region(0).data_ptr() == source.region(1).data_ptr()


def test_renamed_ties_refer_to_renamed_tensors() -> None:
    module = nn.Module()
    module.a, module.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    module.b.weight = module.a.weight
    found = specs(module, rename=lambda name: f"language_model.{name}")
    assert found["language_model.b.weight"].alias_of == "language_model.a.weight"


def test_names_that_collide_after_renaming_are_refused() -> None:
    with pytest.raises(LayoutError, match="names must be unique"):
        specs(Router(), rename=lambda name: "same")


def test_wrappers_do_not_show_in_names() -> None:
    module = nn.Module()
    module.layer = torch.compile(nn.Linear(2, 2, bias=False))
    assert set(specs(module)) == {"layer.weight"}


def test_storage_that_moved_raises_the_generation() -> None:
    module = Router()
    source = ModuleSource(module)
    assert source.manifest(0, "host", "cpu").generation == 0
    assert source.manifest(0, "host", "cpu").generation == 0
    module.correction.data = module.correction.data.clone()
    assert source.manifest(0, "host", "cpu").generation == 1


def test_wrapper_tensors_without_a_storage_of_their_own_are_refused() -> None:
    module = nn.Module()
    module.w = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    with pytest.raises(LayoutError, match="w is a TwoTensor"):
        specs(module)
