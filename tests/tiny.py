"""Tiny random models shared by the model-level tests, and how two runs are compared.

Beside tests/families, which sweeps every family of transformers: here are the few whose features a test names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sage_patch import applied
from sage_patch.evaluation.calls import capturing
from sage_patch.kernels import ops
from sage_patch.policy import Policy

EVERYTHING = Policy(quantize_fp32=True, min_q_len=1, min_kv_len=1)  # quantize whatever a recipe can
EXACT = Policy(recipe="exact")


def text_config(kind: str = "llama", **overrides: Any) -> Any:
    """A small decoder configuration of the named transformers family."""
    from transformers import AutoConfig

    values = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=99,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return AutoConfig.for_model(kind, **{**values, **overrides})


def text_model(
    kind: str = "llama", attn_implementation: str | None = None, seed: int = 0, **overrides: Any
) -> nn.Module:
    """A causal LM with weights large enough that attention is peaked and its errors reach the logits."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = text_config(kind, **overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.25 if "embed" not in name else 1.0)
    return model.eval()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 99, (batch, length), generator=generator)


def logits(model: nn.Module, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **inputs).logits


def scaled_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over the largest magnitude of `b`."""
    return float((a - b).abs().max() / b.abs().max())


def relative_l1(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().sum() / b.abs().sum())


def captured(model: nn.Module, run: Callable[[], Any], **options: Any) -> list[ops.ObservedCall]:
    """Q, K and V of the attention calls while `run` uses the model exact. options: those of `calls.capturing`."""
    with applied(model, EXACT), capturing("a test", **options) as kept:
        run()
    return kept.calls
