"""What CUDA graphs hold inside a quant method's kernel objects is filled where it lies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.processes import Child, ChildError

pytestmark = pytest.mark.timeout(60)

SIZE = 8
KINDS = ["attribute", "moe", "frozen", "slots", "items", "closure", "partial"]


def worker() -> object:
    """Imported in the child only: vLLM must not be loaded where tests run."""
    from tests.harness.vllm_nested import NestedWorker

    return NestedWorker()


@pytest.fixture
def layers() -> Iterator[Child]:
    child = Child(worker, vllm=True)
    yield child
    child.close()


def refit(layers: Child, *args: object) -> object:
    layers.send("refit", *args)
    return layers.receive()


def test_a_rebuilt_kernel_object_computes_with_the_tensor_that_graphs_hold(layers: Child) -> None:
    for value in (1.0, 3.0):
        found = {kind: refit(layers, kind, value) for kind in KINDS}
        assert found == {kind: ([2 * value] * SIZE, True) for kind in KINDS}


@pytest.mark.parametrize(
    ("kind", "trouble", "name"),
    [
        ("tuple", "", r"Module\.quant_method\.kernel\[0\]"),
        ("attribute", "drops the kernel", r"Module\.quant_method\.kernel\.packed is gone"),
        ("attribute", "changes the shape", r"Module\.quant_method\.kernel\.packed changed from"),
        ("attribute", "drops the parameter", r"Module\.weight: processing made no such parameter"),
    ],
)
def test_what_cannot_stay_where_it_lies_is_refused_by_name(
    layers: Child, kind: str, trouble: str, name: str
) -> None:
    with pytest.raises(ChildError, match=rf"EngineStateError: .*{name}"):
        refit(layers, kind, 1.0, trouble)


@pytest.mark.parametrize("kind", ["attribute", "moe", "closure"])
def test_after_processing_failed_halfway_the_next_refit_still_fills_what_graphs_hold(
    layers: Child, kind: str
) -> None:
    refit(layers, kind, 1.0)
    with pytest.raises(ChildError, match="kernel said no"):
        refit(layers, kind, 2.0, "fails")
    assert refit(layers, kind, 3.0) == ([6.0] * SIZE, True)


def test_a_module_that_another_one_refers_to_keeps_its_own_tensors(layers: Child) -> None:
    layers.send("refit_two")
    assert layers.receive() == ([1.0] * SIZE, True)
