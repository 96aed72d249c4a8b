"""Names of grouped experts, and how names are listed in errors."""

from __future__ import annotations

import pytest

from generation.naming import _format_refit_key_error, is_grouped_moe_expert_weight_name


@pytest.mark.parametrize(
    ("name", "grouped"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", True),
        ("model.layers.0.mlp.experts.down_proj", True),
        ("model.layers.0.mlp.experts.3.down_proj.weight", False),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", False),
        ("model.layers.0.mlp.down_proj", False),
    ],
)
def test_grouped_expert_names_are_recognised(name: str, grouped: bool) -> None:
    assert is_grouped_moe_expert_weight_name(name) is grouped


def test_few_names_are_listed_sorted() -> None:
    assert _format_refit_key_error("missing", {"b", "a"}) == "missing (2): a, b"


def test_eight_names_are_all_listed() -> None:
    assert not _format_refit_key_error("x", "abcdefgh").endswith("...")


def test_many_names_are_cut_after_eight() -> None:
    assert _format_refit_key_error("x", "jihgfedcba") == "x (10): a, b, c, d, e, f, g, h ..."
