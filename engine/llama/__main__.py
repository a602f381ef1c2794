"""Describe the llama.cpp build.

`cellama doctor` runs this module in a child process, because the command itself must not import the engine.

`python -m cellama.engine.llama` writes one JSON object to stdout. The object contains the `version` of
llama-cpp-python, the CPU `features` that the build uses, and the chosen `cpu_variant` ("" if the build has only one).
The object also contains `supports_gpu`, and descriptions and names of the `gpus` that llama.cpp found.
"""

from __future__ import annotations

import json
import re

import llama_cpp
import llama_cpp.llama_cpp as lib

from .devices import gpu_names, machine
from .ggml_backends import cpu_variant, initialise

_FEATURE = re.compile(r"(\w+) = 1\b")  # in "CPU : SSE3 = 1 | AVX = 1 | "


def describe_build() -> dict[str, object]:
    """Return the object that `cellama doctor` reads from the child process."""
    initialise()
    return {
        "version": llama_cpp.__version__,
        "features": _FEATURE.findall(lib.llama_print_system_info().decode(errors="replace")),
        "cpu_variant": cpu_variant(),
        "supports_gpu": bool(lib.llama_supports_gpu_offload()),
        "gpus": machine()["gpus"],
        "gpu_names": gpu_names(),
    }


if __name__ == "__main__":
    print(json.dumps(describe_build()))
