"""Case B09: a text trainer and a multimodal engine; unwanted names are listed, not skipped."""

from __future__ import annotations

import pytest
import torch

from tests.harness.contract import connecting
from tests.harness.standin import StandinModel, Unit, copies
from weight_sync.errors import CoverageError

pytestmark = pytest.mark.timeout(30)

TEXT = ("q_proj", "mlp", "norm")
VISION = {"visual.patch": (4,), "visual.merger.mlp": (4,)}
NOT_TRAINED = ("visual.*",)


def rename(name: str) -> str:
    """The engine's own table: checkpoint name -> engine name."""
    for old, new in (
        ("model.language_model.", "language_model.model."),
        ("model.visual.merger.0.", "visual.merger.mlp."),
        ("model.visual.", "visual."),
        ("model.", "language_model.model."),
    ):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def engine(extra: tuple[str, ...] = ()) -> StandinModel:
    units, loaders, checkpoint = [], {}, {}
    text = [f"language_model.model.layers.0.{n}" for n in (*TEXT, *extra)]
    for name in (*text, *VISION):
        units.append(Unit(name, {"weight": ((4,), torch.float32)}))
        loaders[f"{name}.weight"] = [(name, copies("weight"))]
        checkpoint[f"{name}.weight"] = torch.full((4,), -1.0)
    return StandinModel(units, loaders, rename).load(checkpoint)


def trainer(prefix: str, *more: str) -> dict[str, torch.Tensor]:
    names = [f"{prefix}layers.0.{n}.weight" for n in TEXT]
    return {n: torch.full((4,), float(i)) for i, n in enumerate((*names, *more))}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_b09_text_tensors_land_under_the_engines_own_names(prefix: str) -> None:
    model = engine()
    with connecting("ipc") as connect:
        setup = connect([trainer(prefix)], [model], not_trained=NOT_TRAINED)
        setup.sync(1)
        for i, name in enumerate(TEXT):
            value = setup.value(f"language_model.model.layers.0.{name}")
            assert value.tolist() == [float(i)] * 4


def test_b09_the_vision_tower_that_is_declared_untrained_keeps_its_bytes() -> None:
    with connecting("ipc") as connect:
        setup = connect([trainer("model.")], [engine()], not_trained=NOT_TRAINED)
        setup.sync(1)
        for name in VISION:
            assert setup.value(name).tolist() == [-1.0] * 4


def test_b09_a_vision_tensor_in_a_differently_named_module_lands_when_it_is_sent() -> None:
    with connecting("ipc") as connect:
        source = trainer("model.", "model.visual.merger.0.weight")
        setup = connect([source], [engine()], not_trained=("visual.patch*",))
        setup.sync(1)
        assert setup.value("visual.merger.mlp").tolist() == [3.0] * 4


def test_b09_undeclared_engine_tensors_are_listed_before_anything_changes() -> None:
    with connecting("ipc") as connect:
        setup = connect([trainer("model.")], [engine(extra=("k_proj",))])
        with pytest.raises(CoverageError) as refused:
            setup.sync(1)
        missing = {line.split()[0] for line in refused.value.unwritten}
        assert missing == {
            "language_model.model.layers.0.k_proj.weight",
            "visual.patch.weight",
            "visual.merger.mlp.weight",
        }
        tensors = setup.shard.models[0].tensors()
        assert all(t.unique().tolist() == [-1.0] for t in tensors.values())


def test_b09_trainer_names_that_no_loader_knows_are_listed_before_anything_changes() -> None:
    with connecting("ipc") as connect:
        source = trainer("model.", "head.weight", "model.layers.1.mlp.weight")
        setup = connect([source], [engine()], not_trained=NOT_TRAINED)
        with pytest.raises(CoverageError) as refused:
            setup.sync(1)
        assert refused.value.unconsumed == ("head.weight", "model.layers.1.mlp.weight")
        tensors = setup.shard.models[0].tensors()
        assert all(t.unique().tolist() == [-1.0] for t in tensors.values())


def test_b09_a_shape_that_the_engine_refuses_is_listed_with_both_sides() -> None:
    with connecting("ipc") as connect:
        source = trainer("model.") | {"model.layers.0.mlp.weight": torch.zeros(5)}
        setup = connect([source], [engine()], not_trained=NOT_TRAINED)
        with pytest.raises(CoverageError, match=r"model\.layers\.0\.mlp\.weight.*\[5\]"):
            setup.sync(1)
