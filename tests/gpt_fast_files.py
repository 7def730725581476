"""Checkpoints as gpt-fast's own scripts write them: names, dtypes and order of every tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.model.transformer import Transformer

State = dict[str, Tensor]
Pack = Callable[[Tensor, int], Tensor]  # codes int32 [N, K], inner tiles -> the packed weight


def interleave(rows: Tensor, num_heads: int) -> Tensor:
    """Hugging Face's order of the rows of q or k to Meta's: pairs (i, i + D / 2) become neighbours."""
    halves = rows.view(num_heads, 2, -1, rows.shape[-1])
    return halves.transpose(1, 2).reshape(rows.shape)


def meta_state(model: Transformer, fused: bool = True) -> State:
    """The weights as gpt-fast (fused wqkv) or Meta name and order them; a mixture's experts stacked, as gpt-fast."""
    c = model.config
    state = {
        "tok_embeddings.weight": model.embed.tokens.weight,
        "norm.weight": model.head.norm.weight,
        "output.weight": model.head.output.weight,
    }
    for i, layer in enumerate(model.layers):
        q, k, v = layer.wqkv.weight.split((c.q_dim, c.kv_dim, c.kv_dim))
        q, k = interleave(q, c.num_heads), interleave(k, c.num_kv_heads)
        pieces = {
            "attention.wo.weight": layer.wo.weight,
            "attention_norm.weight": layer.attention_norm.weight,
            "ffn_norm.weight": layer.ffn_norm.weight,
        }
        if fused:
            pieces["attention.wqkv.weight"] = torch.cat((q, k, v))
        else:
            pieces |= {"attention.wq.weight": q, "attention.wk.weight": k, "attention.wv.weight": v}
        if c.experts is None:
            w1, w3 = layer.w13.weight.chunk(2)
            pieces |= {"feed_forward.w1.weight": w1, "feed_forward.w2.weight": layer.w2.weight}
            pieces["feed_forward.w3.weight"] = w3
        else:
            pieces["block_sparse_moe.gate.weight"] = layer.router.weight
            number = c.experts.num_experts
            w13, w2 = (linear.weight.unflatten(0, (number, -1)) for linear in (layer.experts_w13, layer.experts_w2))
            w1, w3 = w13.chunk(2, dim=1)
            pieces |= {f"block_sparse_moe.cond_ffn.w{j}": w for j, w in ((1, w1), (2, w2), (3, w3))}
        state |= {f"layers.{i}.{name}": value for name, value in pieces.items()}
    return {name: value.detach().clone() for name, value in state.items()}


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., N, K] and scales float32 [..., N]: the largest magnitude of a row is 127.5 steps."""
    weight = weight.float()
    scales = (weight.abs().amax(-1) / 127.5).clamp(min=torch.finfo(torch.float32).eps)
    return (weight / scales[..., None]).round().clamp(-128, 127).to(torch.int8), scales


def int8_state(state: State) -> State:
    """``quantize.py --mode int8``: every linear layer but routers; scales in bfloat16, those of experts in float32."""
    out: State = {}
    for name, weight in state.items():
        if ".cond_ffn." in name:
            out[name], out[name.replace(".w", ".scales")] = int8_rows(weight)
        elif is_linear(name, weight):
            out[name], scales = int8_rows(weight)
            out[name.replace(".weight", ".scales")] = scales.bfloat16()
        else:
            out[name] = weight.bfloat16()
    return out


def int4_rows(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes int32 [N, K] and scales and zeros bfloat16 [K / G, N, 2]."""
    groups = weight.bfloat16().unflatten(1, (-1, group_size))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = (high - low).clamp(min=1e-6) / 15
    zeros = low + 8 * scales
    codes = (groups - (zeros - 8 * scales)[..., None]).div(scales[..., None]).round().clamp(0, 15)
    return codes.flatten(1).to(torch.int32), torch.stack((scales, zeros), dim=-1).transpose(0, 1).contiguous()


def int4_state(state: State, pack: Pack, group_size: int = 32, inner_tiles: int = 8) -> State:
    """``quantize.py --mode int4``: every linear layer; inputs that do not fill groups and tiles padded to 1024."""
    out: State = {}
    for name, weight in state.items():
        if not is_linear(name, weight):
            out[name] = weight.bfloat16()
            continue
        k = weight.shape[1]
        if k % group_size or k % (16 * inner_tiles):
            weight = F.pad(weight, (0, -k % 1024))
        codes, grids = int4_rows(weight, group_size)
        out[name], out[name.replace(".weight", ".scales_and_zeros")] = pack(codes, inner_tiles), grids
    return out


def is_linear(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and "tok_embeddings" not in name and not name.endswith("gate.weight")


def pack_gpu(codes: Tensor, inner_tiles: int) -> Tensor:
    """matrix_to_m16n8k16_Bint4_layout of PyTorch's int4mm.cu, thread by thread."""
    n, k = codes.shape
    out = torch.zeros(n // 8, k // (16 * inner_tiles), 32, inner_tiles // 2, dtype=torch.int64)
    values = codes.long().view(n // 8, 8, -1, 16 * inner_tiles)
    for thread in range(32):
        for tile in range(0, inner_tiles, 2):
            first = 16 * tile + 2 * (thread % 4)
            inputs = [first + near + far for far in (0, 16) for near in (0, 1, 8, 9)]
            v = [values[:, thread // 4, :, i] for i in inputs]
            for nibble, i in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                out[:, :, thread, tile // 2] |= v[i] << (4 * nibble)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def pack_cpu(codes: Tensor, inner_tiles: int) -> Tensor:
    """What this machine's torch makes, in the shape that torch had before 2.5, which gpt-fast's layers expect."""
    n, k = codes.shape
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, inner_tiles)
    return packed.contiguous().view(torch.int32).view(n // 8, k // (16 * inner_tiles), 32, inner_tiles // 2)


def pack_cpu_bytes(codes: Tensor, inner_tiles: int) -> Tensor:
    """What torch makes since 2.5: uint8 [N, K / 2]."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, inner_tiles)
    return packed
