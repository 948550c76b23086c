"""The attention of video.py: a function that takes [B, tokens, heads, head_dim] and lengths, or a package's."""

import torch

try:
    import flash_attn

    FLASH_ATTN_AVAILABLE = True
except ModuleNotFoundError:
    FLASH_ATTN_AVAILABLE = False


def flash_attention(q, k, v, k_lens=None, dtype=torch.bfloat16):
    assert q.shape[-1] <= 256
    return flash_attn.flash_attn_varlen_func(q.flatten(0, 1).to(dtype), k.flatten(0, 1), v.flatten(0, 1)).view_as(q)


def attention(q, k, v, k_lens=None, dtype=torch.bfloat16):
    if FLASH_ATTN_AVAILABLE:
        return flash_attention(q, k, v, k_lens, dtype)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None
    if k_lens is not None:
        mask = (torch.arange(k.shape[2]) < k_lens[:, None])[:, None, None]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=False)
    return out.transpose(1, 2).contiguous()
