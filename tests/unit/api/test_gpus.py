"""Tests of the distribution of GPUs over workers."""

from __future__ import annotations

import pytest

from cellama.api.machine.gpus import GpuError, worker_environments

CUDA = ["CUDA0", "CUDA1", "CUDA2"]


def test_all_gpus_are_used_by_one_worker() -> None:
    assert worker_environments("all", CUDA, {}) == {"worker": {}}


@pytest.mark.parametrize(
    ("choice", "names", "environment", "expected"),
    [
        ("each", ["CUDA0", "CUDA1"], {}, [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
        ("2,0", CUDA, {}, [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "0"}]),
        ("1", ["ROCm0", "ROCm1"], {}, [{"HIP_VISIBLE_DEVICES": "1"}]),
        ("each", ["Vulkan0"], {}, [{"GGML_VK_VISIBLE_DEVICES": "0"}]),
        ("each", ["CUDA0", "CUDA1"], {"CUDA_VISIBLE_DEVICES": "4, GPU-7"},
         [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "GPU-7"}]),
        ("0,1", CUDA, {"CELLAMA_METRICS_PORT": "9470"},
         [{"CUDA_VISIBLE_DEVICES": "0", "CELLAMA_METRICS_PORT": "9470"},
          {"CUDA_VISIBLE_DEVICES": "1", "CELLAMA_METRICS_PORT": "9471"}]),
    ],
)  # fmt: skip
def test_each_worker_sees_one_gpu_and_has_its_own_metrics_port(
    choice: str, names: list[str], environment: dict[str, str], expected: list[dict[str, str]]
) -> None:
    assert list(worker_environments(choice, names, environment).values()) == expected


def test_workers_are_named_after_their_gpus() -> None:
    assert list(worker_environments("2,0", CUDA, {})) == ["worker-gpu2", "worker-gpu0"]


@pytest.mark.parametrize(
    ("choice", "names", "message"),
    [
        ("each", [], "each is not possible, because llama.cpp finds no GPU"),
        ("3", CUDA, "3 is not the index of a GPU; this machine has GPUs 0 to 2"),
        ("0,0", CUDA, "0 is listed twice"),
        ("some", CUDA, "'some' is not valid; use all, each, or a list"),
        ("each", ["MTL0"], "MTL0 can't be selected with an environment variable"),
    ],
)
def test_choice_that_the_machine_cannot_fulfil_is_refused(choice: str, names: list[str], message: str) -> None:
    with pytest.raises(GpuError, match=message):
        worker_environments(choice, names, {})
