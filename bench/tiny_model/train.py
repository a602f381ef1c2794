"""Train the bundled model on the CPU and write its GGUF file.

    python -m cellama.bench.tiny_model.train --out engine/bundled/tiny.gguf

This program requires PyTorch, `tokenizers` and `gguf`, which are not dependencies of the project (see README.md).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor, nn

from .corpus import Document, documents
from .export import LONG_WINDOW, TinyShape, write_gguf
from .tokenizer import encode_document, train_tokenizer

PROMPT_WEIGHT = 0.05  # weight of the loss on prompt tokens, which the model need not write
TOKENS_PER_STEP = 4096
SHORT_WINDOW = 512
LONG_FROM = 0.65  # part of the steps after which windows are long
PEAK_LR, FINAL_LR, WARMUP_STEPS = 4e-3, 1e-4, 60


class Block(nn.Module):  # type: ignore[misc]  # torch is no dependency
    """Grouped-query attention with rotary positions, followed by SwiGLU. Layers have llama.cpp's tensor names."""

    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        self.shape, self.d_head = shape, shape.n_embd // shape.n_head
        kv = self.d_head * shape.n_head_kv
        self.attn_norm = nn.RMSNorm(shape.n_embd, eps=shape.eps)
        self.attn_q = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.attn_k = nn.Linear(shape.n_embd, kv, bias=False)
        self.attn_v = nn.Linear(shape.n_embd, kv, bias=False)
        self.attn_output = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.n_embd, eps=shape.eps)
        self.ffn_gate = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.ffn_up = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.ffn_down = nn.Linear(shape.n_ff, shape.n_embd, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.attn_norm(x)
        q = self.attn_q(h).view(batch, length, self.shape.n_head, self.d_head).transpose(1, 2)
        k = self.attn_k(h).view(batch, length, self.shape.n_head_kv, self.d_head).transpose(1, 2)
        v = self.attn_v(h).view(batch, length, self.shape.n_head_kv, self.d_head).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        repeat = self.shape.n_head // self.shape.n_head_kv
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_output(a.transpose(1, 2).reshape(batch, length, -1))
        h = self.ffn_norm(x)
        down: Tensor = self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))
        return x + down


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs of values, as llama.cpp expects for this architecture."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class TinyLlama(nn.Module):  # type: ignore[misc]
    """A Llama model with tied embeddings."""

    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.n_vocab, shape.n_embd)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.output_norm = nn.RMSNorm(shape.n_embd, eps=shape.eps)
        d_head = shape.n_embd // shape.n_head
        inverse = shape.rope_base ** (-torch.arange(0, d_head, 2).float() / d_head)
        angles = torch.outer(torch.arange(shape.n_ctx).float(), inverse)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.02 / math.sqrt(2 * shape.n_layer) if "output" in name or "down" in name else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, length, vocabulary] of token ids [batch, length]."""
        length = tokens.shape[1]
        x = self.token_embd(tokens)
        for block in self.blk:
            x = block(x, self.cos[:length], self.sin[:length])
        return F.linear(self.output_norm(x), self.token_embd.weight)


def windows(
    tokenizer: Tokenizer, seed: int, length: int, change: Callable[[Document], Document] = lambda document: document
) -> Iterator[tuple[list[int], list[float]]]:
    """Yield windows of `length` + 1 tokens, with the loss weight of each token. `change` edits each document first."""
    ids: list[int] = []
    weights: list[float] = []
    for document in documents(seed):
        new, targets = encode_document(tokenizer, change(document))
        ids += new
        weights += [1.0 if target else PROMPT_WEIGHT for target in targets]
        while len(ids) > length:
            yield ids[: length + 1], weights[: length + 1]
            del ids[: length + 1], weights[: length + 1]


def learning_rate(step: int, progress: float) -> float:
    """Return the learning rate, which follows a warm-up and then a cosine over all steps."""
    cosine = FINAL_LR + (PEAK_LR - FINAL_LR) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return min(1.0, (step + 1) / WARMUP_STEPS) * cosine


def loss_of(model: nn.Module, batch: list[tuple[list[int], list[float]]]) -> Tensor:
    ids = torch.tensor([ids for ids, _ in batch])
    weights = torch.tensor([weights for _, weights in batch])[:, 1:]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids[:, :-1])
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def train(model: TinyLlama, tokenizer: Tokenizer, steps: int, seed: int) -> None:
    """Train for `steps` steps of TOKENS_PER_STEP tokens each."""
    decay = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98))
    streams = {length: windows(tokenizer, seed + length, length) for length in (SHORT_WINDOW, LONG_WINDOW)}
    started, average = time.monotonic(), 0.0
    for step in range(steps):
        length = LONG_WINDOW if step > LONG_FROM * steps else SHORT_WINDOW
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, step / steps)
        loss = loss_of(model, [next(streams[length]) for _ in range(TOKENS_PER_STEP // length)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average = loss.item() if step == 0 else 0.98 * average + 0.02 * loss.item()
        if (step + 1) % 25 == 0:
            seconds = time.monotonic() - started
            rate = (step + 1) * TOKENS_PER_STEP / seconds
            print(f"step {step + 1}/{steps}  loss {average:.4f}  {rate:.0f} tokens/s  {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=2800, help="number of training steps of 4096 tokens each (default: 2800)"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="path of the GGUF file")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer = train_tokenizer()
    model = TinyLlama(TinyShape(tokenizer.get_vocab_size()))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters", flush=True)
    train(model, tokenizer, args.steps, args.seed)
    tensors = {name: p.detach().numpy().astype(np.float32) for name, p in model.named_parameters()}
    write_gguf(args.out, model.shape, tensors, tokenizer)
    print(f"wrote {args.out}, {args.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
