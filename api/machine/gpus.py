"""Distribute the GPUs of this machine over workers: `cellama worker --gpus each`.

Each driver has an environment variable that hides GPUs from a process. A GPU that is hidden has no index, so a worker
that uses only the second GPU sees it as the first one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

# Environment variables that choose the visible GPUs, by the prefix of llama.cpp's names for devices
VISIBLE = {"CUDA": "CUDA_VISIBLE_DEVICES", "ROCm": "HIP_VISIBLE_DEVICES", "Vulkan": "GGML_VK_VISIBLE_DEVICES"}
GPUS_HELP = (
    "GPUs to use: `all` starts one worker that uses all GPUs, `each` starts one worker per GPU, and a list such as "
    "`0,2` starts one worker for each of these GPUs."
)


class GpuError(Exception):
    """A choice of GPUs that this machine can't fulfil. The error message contains the value and a remedy."""


def visible_gpus() -> list[str]:
    """Return llama.cpp's names of the GPUs, as reported by a child process, because `api` never imports the engine.

    Raises GpuError if llama.cpp does not start.
    """
    done = subprocess.run([sys.executable, "-m", "cellama.engine.llama"], capture_output=True, text=True, check=False)
    if done.returncode:
        cause = next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        raise GpuError(f"--gpus: llama.cpp can't list the GPUs: {cause}; run `cellama doctor`")
    names: list[str] = json.loads(done.stdout.splitlines()[-1])["gpu_names"]
    return names


def worker_environments(choice: str, names: Sequence[str], environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the environment variables of each worker, keyed by the name of the worker's log.

    `choice` is the value of `--gpus`. `names` are llama.cpp's names of the visible GPUs, such as CUDA0. Raises GpuError
    if a GPU does not exist, or can't be selected with an environment variable.
    """
    if choice == "all":
        return {"worker": {}}
    if not names:
        raise GpuError(
            f"--gpus: {choice} is not possible, because llama.cpp finds no GPU; run `cellama doctor` for the reason, "
            "or omit --gpus"
        )
    indices = range(len(names)) if choice == "each" else _indices(choice, len(names))
    found = {index: _variables(names[index], index, environment) for index in indices}
    port = environment.get("CELLAMA_METRICS_PORT")
    for number, variables in enumerate(found.values()):
        if port and port.isdigit():
            variables["CELLAMA_METRICS_PORT"] = str(int(port) + number)
    return {f"worker-gpu{index}": variables for index, variables in found.items()}


def _indices(choice: str, num_gpus: int) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", choice):
        raise GpuError(f"--gpus: {choice!r} is not valid; use all, each, or a list of indices such as 0,1")
    indices = [int(index) for index in choice.split(",")]
    for index in indices:
        if index >= num_gpus:
            raise GpuError(f"--gpus: {index} is not the index of a GPU; this machine has GPUs 0 to {num_gpus - 1}")
        if indices.count(index) > 1:
            raise GpuError(f"--gpus: {index} is listed twice; list each GPU once")
    return indices


def _variables(name: str, index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that shows only one of the visible GPUs."""
    variable = next((variable for prefix, variable in VISIBLE.items() if name.startswith(prefix)), None)
    if variable is None:
        raise GpuError(
            f"--gpus: {name} can't be selected with an environment variable; use `--gpus all`, and the setting "
            "`devices` of each model"
        )
    visible = [gpu.strip() for gpu in environment.get(variable, "").split(",") if gpu.strip()]
    return {variable: visible[index] if index < len(visible) else str(index)}
