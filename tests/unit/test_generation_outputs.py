"""Engine outputs as batch columns, and the arguments an engine is asked with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from generation.capture import VersionSpan
from generation.config import VllmConfig, VllmSpecificArgs
from generation.engine_args import engine_arguments, max_tokens, sampling_arguments
from generation.errors import EngineOutputError, InvalidRolloutError
from generation.outputs import (
    Completion,
    check_result,
    combine,
    completion_of,
    no_room,
    version_spans,
)


def config(**changes: object) -> VllmConfig:
    engine = VllmSpecificArgs(1, 0.5, 64, **changes.pop("engine", {}))  # type: ignore[arg-type]
    return VllmConfig("model", 16, engine, **changes)  # type: ignore[arg-type]


def done(prompt: list[int], tokens: list[int], reason: str | None = "stop") -> Completion:
    return Completion(prompt, tokens, [-float(t) for t in tokens], "", reason, [])


def test_generated_tokens_follow_the_unpadded_prompt_and_rows_are_padded():
    batch = combine([done([1, 2], [7, 8, 9]), done([3], [5], "length")], 4, 99)
    assert batch["output_ids"].tolist() == [[1, 2, 7, 8, 9, 99, 99], [3, 5] + [99] * 5]
    assert batch["logprobs"].tolist() == [[0, 0, -7, -8, -9, 0, 0], [0, -5, 0, 0, 0, 0, 0]]
    assert batch["generation_lengths"].tolist() == [3, 1]
    assert batch["unpadded_sequence_lengths"].tolist() == [5, 2]
    assert batch["truncated"].tolist() == [False, True]


def test_no_samples_give_zero_sized_columns_of_the_right_dtypes():
    batch = combine([], 4, 0)
    assert batch["output_ids"].shape == (0, 4)
    assert (batch["output_ids"].dtype, batch["logprobs"].dtype) == (torch.int64, torch.float32)
    check_result(batch)


def test_a_prompt_without_room_is_returned_without_tokens_as_truncated():
    batch = combine([no_room([4, 5])], 2, 0)
    assert batch["output_ids"].tolist() == [[4, 5]]
    assert batch["truncated"].tolist() == [True]


@pytest.mark.parametrize(
    "column", ["output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs"]
)
def test_a_result_without_a_needed_column_is_refused(column: str):
    batch = combine([done([1], [2])], 1, 0)
    del batch[column]
    with pytest.raises(EngineOutputError, match=column):
        check_result(batch)


def engine_output(**changes: object) -> SimpleNamespace:
    fields = {
        "index": 0,
        "token_ids": [5, 6],
        "text": "",
        "finish_reason": "stop",
        "logprobs": [
            {4: SimpleNamespace(logprob=-0.1), 5: SimpleNamespace(logprob=-1.5)},
            {6: SimpleNamespace(logprob=-2.5)},
        ],
        "weight_versions": [SimpleNamespace(version="3", start=0, end=2)],
    }
    return SimpleNamespace(**{**fields, **changes})


def test_the_sampled_tokens_logprob_is_taken_not_the_first():
    request = SimpleNamespace(request_id="r", prompt_token_ids=[1], outputs=[engine_output()])
    completion = completion_of(request, 9)
    assert completion.logprobs == [-1.5, -2.5]
    assert completion.spans == [VersionSpan(0, 2, 3)]


def test_an_output_without_prompt_ids_is_refused():
    request = SimpleNamespace(request_id="r", prompt_token_ids=None, outputs=[engine_output()])
    with pytest.raises(EngineOutputError, match="prompt_token_ids"):
        completion_of(request, 9)


def test_an_engine_without_spans_gives_one_of_the_known_version():
    output = engine_output(weight_versions=None)
    assert version_spans(output, 2, 9) == [VersionSpan(0, 2, 9)]
    assert version_spans(output, 0, 9) == []


def test_a_version_that_somebody_else_set_is_refused():
    output = engine_output(weight_versions=[SimpleNamespace(version="default", start=0, end=2)])
    with pytest.raises(EngineOutputError, match="update_weight_version"):
        version_spans(output, 2, 9)


def test_greedy_takes_the_most_likely_token_whatever_is_configured():
    found = sampling_arguments(
        config(temperature=0.7, top_p=0.5, top_k=9), greedy=True, stop_strings=None, prompt_tokens=1
    )
    assert (found["temperature"], found["top_p"], found["top_k"]) == (0.0, 1.0, 1)


def test_sampling_uses_the_config_and_no_top_k_means_all_tokens():
    found = sampling_arguments(
        config(temperature=0.7), greedy=False, stop_strings=None, prompt_tokens=1
    )
    assert (found["temperature"], found["top_k"], found["logprobs"]) == (0.7, -1, 0)
    assert (found["stop"], found["include_stop_str_in_output"]) == (None, False)


def test_stop_strings_of_sample_and_config_are_united():
    found = sampling_arguments(
        config(stop_strings=("a",)), greedy=False, stop_strings=["b", "a"], prompt_tokens=1
    )
    assert found["stop"] == ["a", "b"]
    assert found["include_stop_str_in_output"] is True


def test_stop_strings_without_a_tokenizer_are_refused():
    bare = config(engine={"skip_tokenizer_init": True})
    with pytest.raises(InvalidRolloutError, match="tokenizer"):
        sampling_arguments(bare, greedy=False, stop_strings=["b"], prompt_tokens=1)


@pytest.mark.parametrize(("prompt", "tokens"), [(10, 16), (60, 4), (64, 0), (80, 0)])
def test_a_response_never_exceeds_the_model_length(prompt: int, tokens: int):
    assert max_tokens(config(), prompt) == tokens


@pytest.mark.parametrize(("asked", "tokens"), [(3, 3), (99, 16), (None, 16)])
def test_a_samples_own_limit_only_lowers_the_configured_one(asked: int | None, tokens: int):
    found = sampling_arguments(
        config(), greedy=False, stop_strings=None, prompt_tokens=1, max_new_tokens=asked
    )
    assert found["max_tokens"] == tokens


def test_a_samples_own_limit_below_one_is_refused():
    with pytest.raises(InvalidRolloutError, match="at least 1, got 0"):
        max_tokens(config(), 1, 0)


def test_shards_have_different_seeds_and_the_refit_extension():
    seeded = config(vllm_kwargs={"seed": 40, "worker_extension_cls": "other"})
    found = [engine_arguments(seeded, shard, sleep_mode=False) for shard in (0, 1)]
    assert [f["seed"] for f in found] == [40, 41]
    assert {f["worker_extension_cls"].rpartition(".")[2] for f in found} == {"WeightSyncExtension"}


def test_engine_settings_become_engine_arguments():
    found = engine_arguments(
        VllmConfig(
            "model",
            16,
            VllmSpecificArgs(2, 0.5, 64, precision="fp8", expert_parallel_size=2),
            vllm_kwargs={"max_num_seqs": 3},
        ),
        0,
        sleep_mode=True,
    )
    expected = {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "quantization": "fp8",
        "dtype": "bfloat16",
        "distributed_executor_backend": "mp",
        "enable_sleep_mode": True,
        "max_num_seqs": 3,
        "load_format": "auto",
    }
    assert {name: found[name] for name in expected} == expected
