"""Shapes of test models whose memory can't be truncated to an arbitrary length. Write the models as F32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import gguf

from .synthetic import Shape, Tensor


@dataclass(frozen=True)
class WindowShape(Shape):
    """The shape of Gemma 2, in which every other layer only attends to a sliding window."""

    architecture: ClassVar[str] = "gemma2"
    window: int = 32

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_sliding_window(self.window)
        writer.add_key_length(self.n_embd // self.n_head)
        writer.add_value_length(self.n_embd // self.n_head)

    def tensors(self) -> Iterator[Tensor]:
        for name, dims in super().tensors():
            if name != "output.weight":
                yield name, dims

    def attention(self, i: int) -> Iterator[Tensor]:
        yield from super().attention(i)
        yield f"blk.{i}.post_attention_norm.weight", (self.n_embd,)

    def feed_forward(self, i: int) -> Iterator[Tensor]:
        yield from super().feed_forward(i)
        yield f"blk.{i}.post_ffw_norm.weight", (self.n_embd,)


@dataclass(frozen=True)
class RecurrentShape(Shape):
    """The shape of Mamba, which has a fixed-size state instead of cells."""

    architecture: ClassVar[str] = "mamba"
    d_state: int = 8
    d_conv: int = 4
    dt_rank: int = 4

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_ssm_conv_kernel(self.d_conv)
        writer.add_ssm_inner_size(2 * self.n_embd)
        writer.add_ssm_state_size(self.d_state)
        writer.add_ssm_time_step_rank(self.dt_rank)

    def attention(self, i: int) -> Iterator[Tensor]:
        inner = 2 * self.n_embd
        yield f"blk.{i}.ssm_in.weight", (2 * inner, self.n_embd)
        yield f"blk.{i}.ssm_conv1d.weight", (inner, self.d_conv)
        yield f"blk.{i}.ssm_conv1d.bias", (inner,)
        yield f"blk.{i}.ssm_x.weight", (self.dt_rank + 2 * self.d_state, inner)
        yield f"blk.{i}.ssm_dt.weight", (inner, self.dt_rank)
        yield f"blk.{i}.ssm_dt.bias", (inner,)
        yield f"blk.{i}.ssm_a", (inner, self.d_state)
        yield f"blk.{i}.ssm_d", (inner,)
        yield f"blk.{i}.ssm_out.weight", (self.n_embd, inner)

    def feed_forward(self, i: int) -> Iterator[Tensor]:
        return iter(())


@dataclass(frozen=True)
class HybridShape(Shape):
    """The shape of LFM2, in which attention layers alternate with short-convolution layers."""

    architecture: ClassVar[str] = "lfm2"
    l_cache: int = 3

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_shortconv_l_cache(self.l_cache)
        key = gguf.Keys.Attention.HEAD_COUNT_KV.format(arch=self.architecture)
        del writer.kv_data[0][key]
        writer.add_head_count_kv([0 if i % 2 else self.n_head_kv for i in range(self.n_layer)])

    def tensors(self) -> Iterator[Tensor]:
        for name, dims in super().tensors():
            yield ("token_embd_norm.weight" if name == "output_norm.weight" else name), dims

    def attention(self, i: int) -> Iterator[Tensor]:
        if i % 2:
            yield f"blk.{i}.shortconv.conv.weight", (self.n_embd, self.l_cache)
            yield f"blk.{i}.shortconv.in_proj.weight", (3 * self.n_embd, self.n_embd)
            yield f"blk.{i}.shortconv.out_proj.weight", (self.n_embd, self.n_embd)
        else:
            yield from super().attention(i)
            yield f"blk.{i}.attn_q_norm.weight", (self.n_embd // self.n_head,)
            yield f"blk.{i}.attn_k_norm.weight", (self.n_embd // self.n_head,)
