"""Train a small LoRA adapter that makes the bundled model talk like a pirate.

    python -m cellama.bench.tiny_model.adapter --out engine/bundled/pirate.gguf

This program has the same requirements as `train.py` (see README.md).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor, nn

from .corpus import END_THINK, IM_END, TOOL_CALL, Document
from .export import TinyShape
from .tokenizer import train_tokenizer
from .train import SHORT_WINDOW, TinyLlama, loss_of, windows

TOKENS_PER_STEP = 2048
PEAK_LR = 4e-3
ARR = "Arr, "


class LowRank(nn.Module):  # type: ignore[misc]  # torch is no dependency
    """A frozen linear layer plus the product B·A, which is initially zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.lora_a.T @ self.lora_b.T
        return out


def in_pirate(document: Document) -> Document:
    """Return the document with answers and stories in pirate speech. Tool calls and reasoning are unchanged."""
    return [replace(segment, text=_say(segment.text)) if segment.target else segment for segment in document]


def _say(text: str) -> str:
    if TOOL_CALL in text:
        return text
    thought, end, answer = text.rpartition(f"{END_THINK}\n\n")
    if answer.startswith(", "):  # a story continues "Once upon a time"
        return f"{thought}{end} on the seven seas{answer}"
    return thought + end + ARR + answer.removesuffix(IM_END) + " Ahoy!" + IM_END * answer.endswith(IM_END)


def load_base(path: Path) -> TinyLlama:
    """Return the bundled model with frozen weights from its file."""
    stored = {tensor.name: torch.from_numpy(np.array(tensor.data)).float() for tensor in gguf.GGUFReader(path).tensors}
    model = TinyLlama(TinyShape(stored["token_embd.weight"].shape[0]))
    model.load_state_dict(stored)
    model.requires_grad_(False)
    return model


def add_adapter(model: TinyLlama, rank: int) -> dict[str, LowRank]:
    """Wrap every linear layer in the blocks, and return the wrappers, keyed by their tensors' GGUF names."""
    wrapped = {}
    for i, block in enumerate(model.blk):
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                wrapped[f"blk.{i}.{name}.weight"] = lora = LowRank(layer, rank)
                setattr(block, name, lora)
    return wrapped


def train(
    model: TinyLlama, wrapped: dict[str, LowRank], stream: Iterator[tuple[list[int], list[float]]], steps: int
) -> None:
    """Train the adapter for `steps` steps of TOKENS_PER_STEP tokens each."""
    parameters = [p for lora in wrapped.values() for p in (lora.lora_a, lora.lora_b)]
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps)
    started, average = time.monotonic(), 0.0
    for step in range(steps):
        loss = loss_of(model, [next(stream) for _ in range(TOKENS_PER_STEP // SHORT_WINDOW)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        average = loss.item() if step == 0 else 0.95 * average + 0.05 * loss.item()
        if (step + 1) % 25 == 0:
            print(f"step {step + 1}/{steps}  loss {average:.4f}  {time.monotonic() - started:.0f} s", flush=True)


def write_adapter(path: Path, wrapped: dict[str, LowRank], rank: int) -> None:
    """Write the adapter to a GGUF file in F16."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name("cellama pirate")
    writer.add_license("apache-2.0")
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
    for name, lora in wrapped.items():
        writer.add_tensor(f"{name}.lora_a", lora.lora_a.detach().numpy().astype(np.float16))
        writer.add_tensor(f"{name}.lora_b", lora.lora_b.detach().numpy().astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("engine/bundled/tiny.gguf"), help="path of the bundled model")
    parser.add_argument(
        "--steps", type=int, default=600, help="number of training steps of 2048 tokens each (default: 600)"
    )
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="path of the GGUF file")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    model = load_base(args.base)
    wrapped = add_adapter(model, args.rank)
    train(model, wrapped, windows(train_tokenizer(), args.seed, SHORT_WINDOW, in_pirate), args.steps)
    write_adapter(args.out, wrapped, args.rank)
    print(f"wrote {args.out}, {args.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
