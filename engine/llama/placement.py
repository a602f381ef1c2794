"""Translate the options that place a model on devices into llama.cpp's parameters.

A model can use the CPU and several other devices: local GPUs, and devices of llama.cpp's RPC servers. If the options
name no devices, and the process uses no RPC server, llama.cpp chooses the devices. Otherwise, the model gets a list of
the local GPUs, followed by the devices of its own RPC servers. llama.cpp itself would put all RPC devices first,
including those of other models.
"""

from __future__ import annotations

import ctypes
import ipaddress
import re
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import llama_cpp.llama_cpp as lib

from cellama.engine.errors import InvalidRequest, ModelLoadFailed, nearest
from cellama.engine.memory.budget import CPU, DeviceKind
from cellama.engine.options import EngineOptions, SplitMode

from .devices import gpu_kinds, gpu_names, pointer_of
from .ggml_backends import ggml_function, registry_function

SPLIT_MODES: dict[SplitMode, int] = {
    "none": lib.LLAMA_SPLIT_MODE_NONE,
    "layer": lib.LLAMA_SPLIT_MODE_LAYER,
    "row": lib.LLAMA_SPLIT_MODE_ROW,
    "tensor": lib.LLAMA_SPLIT_MODE_TENSOR,
}
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # names of tensors that contain experts (common.h)
MAX_DEVICES = 15  # of a model; llama.cpp aborts the process if there are more (ggml-backend.cpp)
SPLIT_SIZE = 128  # numbers in the array for tensor_split, which llama.cpp reads beyond the number of devices
CONNECT_TIMEOUT_S = 5.0
_INT, _FLOAT, _BOOL, _STR = range(4)  # llama_model_kv_override_type


class _TensorOverride(ctypes.Structure):  # llama_model_tensor_buft_override in llama.h
    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


_cpu_buffer_type = ggml_function("ggml_backend_cpu_buffer_type", ctypes.c_void_p)
_buffer_type_of = ggml_function("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
_register = ggml_function("ggml_backend_register", None, ctypes.c_void_p)
_connecting = threading.Lock()
_servers: dict[str, tuple[str, ...]] = {}  # names of the devices of each RPC server


def chosen_devices(options: EngineOptions) -> list[str]:
    """Return the names of the devices that a model with these options may use in addition to the CPU, in order.

    Connects to the RPC servers in the options. Raises ModelLoadFailed if a device or a server is missing, and
    InvalidRequest if a server's address is public.
    """
    remote = [name for address in options.rpc for name in connect(address, allow_public=options.rpc_public)]
    every_remote = {name for names in _servers.values() for name in names}
    local = {name: kind for name, kind in gpu_kinds().items() if name not in every_remote}
    known = [*local, *remote]
    chosen = [*without_spare(local), *remote] if options.devices is None else list(options.devices)
    if len(chosen) > MAX_DEVICES:
        raise InvalidRequest(f"devices: {len(chosen)} devices are too many; llama.cpp supports {MAX_DEVICES} per model")
    for name in chosen:
        if name not in known:
            found = ", ".join(known) or "none except the CPU"
            raise ModelLoadFailed(
                f"devices: {name!r} is not a device of this machine or of an RPC server in `rpc`; found: {found}"
            )
    return chosen


def without_spare(kinds: Mapping[str, DeviceKind]) -> list[str]:
    """Return the names of these GPUs without integrated GPUs, which llama.cpp uses only if there is no other GPU."""
    return [name for name, kind in kinds.items() if kind == "gpu"] or list(kinds)


def connect_all(options: EngineOptions) -> None:
    """Register the devices of all RPC servers in the options. Raises like `connect`."""
    for address in options.rpc:
        connect(address, allow_public=options.rpc_public)


def connect(address: str, *, allow_public: bool) -> tuple[str, ...]:
    """Register the devices of an RPC server with ggml, unless they are registered, and return their names.

    Raises InvalidRequest for a public address, and ModelLoadFailed if llama.cpp can't connect to the server.
    """
    with _connecting:
        if address not in _servers:
            _check_address(address, allow_public)
            add_server = registry_function("RPC", "ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
            if add_server is None:
                raise ModelLoadFailed(
                    f"rpc: {address} can't be used, because llama.cpp was built without RPC; build llama-cpp-python "
                    "with CMAKE_ARGS=-DGGML_RPC=ON (docs/operations/gpus.md)"
                )
            before = set(gpu_names())
            server = add_server(address.encode())
            if not server:
                raise ModelLoadFailed(f"rpc: {address} has no devices; check its version of llama.cpp")
            _register(server)
            _servers[address] = tuple(name for name in gpu_names() if name not in before)
    return _servers[address]


def _check_address(address: str, allow_public: bool) -> None:
    """Check that an address is private, and that a server answers. Without a server, llama.cpp would abort the process.

    Raises InvalidRequest for a public address, and ModelLoadFailed without an answer. llama.cpp supports only IPv4.
    """
    host, _, port = address.rpartition(":")
    try:
        ip = socket.gethostbyname(host)
        if not (allow_public or _is_private(ip)):
            raise InvalidRequest(
                f"rpc: {address} is a public address ({ip}), and RPC servers execute commands from anyone; use a "
                "private network, or set rpc_public if a firewall protects the server"
            )
        socket.create_connection((ip, int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ModelLoadFailed(f"rpc: can't connect to {address}: {error}; start its RPC server") from None


def _is_private(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    return address.is_private or address.is_loopback or address.is_link_local


def tensor_overrides(options: EngineOptions, devices: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of a regular expression for tensor names, and the device of the matching tensors.

    The first match counts. Raises ModelLoadFailed if a device is missing.
    """
    overrides = [
        (pattern, device) for pattern, _, device in (text.rpartition("=") for text in options.override_tensors)
    ]
    for pattern, device in overrides:
        if device not in (CPU, *devices):
            raise ModelLoadFailed(
                f"override_tensors: {pattern}={device}: the model does not use this device; "
                f"{nearest(device, (CPU, *devices))}"
            )
    if options.n_cpu_moe == -1:
        overrides.append((EXPERTS, CPU))
    return [*overrides, *((rf"blk\.{layer}{EXPERTS}", CPU) for layer in range(options.n_cpu_moe))]


def device_of_tensor(name: str, overrides: Iterable[tuple[str, str]]) -> str | None:
    """Return the device that overrides determine for a tensor, or None."""
    return next((device for pattern, device in overrides if re.search(pattern, name)), None)


class ModelParams:
    """llama.cpp's parameters for loading a model, and the arrays to which they refer."""

    def __init__(self, options: EngineOptions) -> None:
        """Translate the options. Raises ModelLoadFailed and InvalidRequest."""
        self.devices = chosen_devices(options)
        self.overrides = tensor_overrides(options, self.devices)
        self.value = lib.llama_model_default_params()
        self.value.n_gpu_layers = -1 if options.n_gpu_layers is None else options.n_gpu_layers
        self.value.split_mode = SPLIT_MODES[options.split_mode]
        self.value.main_gpu = self._main_gpu(options)
        self.value.load_mode = _load_mode(options)
        self._device_array = (ctypes.c_void_p * (len(self.devices) + 1))(*map(pointer_of, self.devices), None)
        if options.devices is not None or _servers:
            self.value.devices = ctypes.cast(self._device_array, ctypes.c_void_p)
        if options.tensor_split is not None:
            self._check_split(options.tensor_split)
            self._split = (ctypes.c_float * SPLIT_SIZE)(*options.tensor_split)
            self.value.tensor_split = self._split
        if self.overrides:
            self._tensors = (_TensorOverride * (len(self.overrides) + 1))(*map(self._tensor_override, self.overrides))
            self.value.tensor_buft_overrides = ctypes.cast(self._tensors, ctypes.c_void_p)
        if options.kv_overrides:
            values = [_key_override(key, value) for key, value in options.kv_overrides.items()]
            self._keys = (lib.llama_model_kv_override * (len(values) + 1))(*values)  # an empty key ends the list
            self.value.kv_overrides = self._keys

    def _main_gpu(self, options: EngineOptions) -> int:
        if options.main_gpu and options.main_gpu >= len(self.devices):
            raise ModelLoadFailed(
                f"main_gpu: {options.main_gpu} is not an index of a device; the devices are: "
                f"{', '.join(self.devices) or 'none except the CPU'}"
            )
        return options.main_gpu

    def _check_split(self, shares: Sequence[float]) -> None:
        if len(shares) != len(self.devices):
            raise ModelLoadFailed(
                f"tensor_split: {list(shares)} has {len(shares)} shares, but there are {len(self.devices)} devices: "
                f"{', '.join(self.devices) or 'none except the CPU'}"
            )

    def _tensor_override(self, override: tuple[str, str]) -> _TensorOverride:
        pattern, device = override
        buffer_type = _cpu_buffer_type() if device == CPU else _buffer_type_of(pointer_of(device))
        return _TensorOverride(pattern.encode(), buffer_type)


def _load_mode(options: EngineOptions) -> int:
    modes: dict[tuple[bool, bool], int] = {
        (True, False): lib.LLAMA_LOAD_MODE_MMAP,
        (False, False): lib.LLAMA_LOAD_MODE_NONE,
        (True, True): lib.LLAMA_LOAD_MODE_MMAP_MLOCK,
        (False, True): lib.LLAMA_LOAD_MODE_MLOCK,
    }
    return modes[options.use_mmap, options.use_mlock]


def _key_override(key: str, value: int | float | bool | str) -> Any:
    override = lib.llama_model_kv_override(key=key.encode())
    if isinstance(value, bool):
        override.tag, override.value.val_bool = _BOOL, value
    elif isinstance(value, int):
        override.tag, override.value.val_i64 = _INT, value
    elif isinstance(value, float):
        override.tag, override.value.val_f64 = _FLOAT, value
    else:
        override.tag, override.value.val_str = _STR, value.encode()
    return override
