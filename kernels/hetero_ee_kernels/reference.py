"""The kernels' operations in plain torch on the same tensors, as the reference for tests and as the fallback.

Arguments and results are those of the kernels and are described in their files; nothing is checked.
"""

from math import sqrt
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hetero_ee_kernels.activation_reference import activated
from hetero_ee_kernels.pages import PAGE_TOKENS, Pages
from hetero_ee_kernels.tile_matrix import BYTES, SIX, TileMatrix

FP16_LARGEST = 65504.0
TERM_RATIO = 254.0  # of the unit of an activation's first term to that of its second
SMALLEST = 1e-30  # a group of activations, or a head, with all magnitudes below it counts as zeros


def dequantize(weight: TileMatrix, blocks: Any = slice(None)) -> Any:
    """Return the padded weight matrix, fp32 (N padded to 16, K padded to 32), or only some blocks of 16 rows.

    Each value is (scale x 2^exponent) x (entry - zero point).
    """
    tiles, scales = weight.tiles[blocks], weight.scales[blocks]
    n_blocks, n_groups = len(tiles), weight.n_groups
    lines = tiles.view(n_blocks, n_groups, -1, 16, 4).permute(0, 3, 1, 2, 4)  # b r g line c
    if weight.kind == BYTES:
        entries = lines.flatten(3)
    else:
        low, high = lines[:, :, :, :4], lines[:, :, :, 4:]
        codes = torch.stack([low & 15, low >> 4], dim=3).flatten(3).int()
        if high.shape[3]:
            n_bits = high.shape[3]  # one line of single bits, or two of pairs
            places = n_bits * torch.arange(8 // n_bits, device=high.device)[:, None]
            bits = high[:, :, :, :, None].int() >> places & (2**n_bits - 1)
            entries = (codes | bits.flatten(3) << 4) - 16 * n_bits
        else:
            entries = torch.tensor(weight.codebook, device=codes.device)[codes]
    numbers = scales.view(n_blocks, n_groups, -1, 16).permute(0, 3, 1, 2).flatten(0, 1).float()  # row group number
    entries, factors = entries.flatten(0, 1).float(), numbers[..., :1]
    if weight.kind == SIX:
        factors = numbers.repeat_interleave(16, 2)
    elif numbers.shape[2] > 1:
        entries = entries - numbers[..., 1:]
    return (entries * (factors * weight.factor)).flatten(1)


def embed(
    ids: Any,
    weight: TileMatrix,
    n_columns: int,
    out: Any = None,
    *,
    learned: Any = None,
    positions: Any,
    offset: int = 0,
) -> Any:
    ids = ids.long()
    rows = dequantize(weight, ids // 16).view(len(ids), 16, 32 * weight.n_groups)
    x = rows[torch.arange(len(ids), device=ids.device), ids % 16, :n_columns]
    x = x if learned is None else x + learned[positions.long() + offset]
    return x.contiguous() if out is None else out.copy_(x)


def quantize(x: Any, n_terms: int = 1) -> tuple[Any, Any]:
    """Return codes int8 (m, Q, 2, 4, 2, 8) and scales fp32 (m / 2, Q, 2, 4). The row missing from an odd m is 0."""
    codes, scales = quantized(x, n_terms)
    m = len(codes)
    parts = codes.view(m, codes.shape[1] // 4, 2, 2, 2, 4, 4)  # m, quad, group, half, j, column
    pairs = F.pad(scales, (0, 0, 0, m % 2)).view(-(-m // 2), 2, -1, 4)
    return parts.permute(0, 1, 2, 5, 3, 4, 6).flatten(5).contiguous(), pairs.transpose(1, 2).contiguous()


def quantized(x: Any, n_terms: int = 1) -> tuple[Any, Any]:
    """Return codes (m, groups, 32) in natural column order, padded to 1,024 columns, and scales (m, groups).

    With two terms, rows 2 t and 2 t + 1 are those of x[t].
    """
    x = F.pad(x.float(), (0, -x.shape[1] % 1024))
    scaled, scales = _scaled(x.view(len(x), x.shape[1] // 32, 32))
    terms = [(scaled.round(), scales)]
    if n_terms == 2:
        rest = (scaled - scaled.round()) * TERM_RATIO
        terms.append((rest.round(), scales / torch.full_like(scales, TERM_RATIO)))
    codes, scales = (torch.stack(each, 1).flatten(0, 1) for each in zip(*terms, strict=True))
    return codes.nan_to_num(0.0).to(torch.int8), scales


def _int8(x: Any) -> tuple[Any, Any]:
    """Quantize x (..., n): return rounded codes (..., n), as fp32, and scales (...)."""
    scaled, scales = _scaled(x)
    return scaled.round(), scales


def _scaled(x: Any) -> tuple[Any, Any]:
    """Divide x (..., n) by scales (...), so that the largest magnitudes become 127; return both."""
    largest = x.abs().amax(-1)
    is_zero = largest < SMALLEST
    top = torch.full_like(largest, 127.0)  # torch would multiply by a rounded inverse if one operand were a number
    return x * torch.where(is_zero, 0.0, top / largest)[..., None], torch.where(is_zero, 0.0, largest / top)


def matmul(x: Any, weight: TileMatrix, out: Any = None) -> Any:
    """Multiply the quantized activations by the weights in float64; return out, fp32 (m, n_rows)."""
    codes, scales = quantized(x, weight.n_terms)
    terms = (codes.double() * scales.double()[..., None]).unflatten(0, (len(x), weight.n_terms))
    x = terms.sum(1).flatten(1)[:, : 32 * weight.n_groups]
    product = (x @ dequantize(weight).double().T)[:, : weight.n_rows].float()
    return product if out is None else out.copy_(product)


def sliced_head(x: Any, weight: TileMatrix, ids: Any, out: Any = None) -> Any:
    """Return the columns `ids` of the whole product, fp32 (m, c); NaN for ids that don't exist."""
    logits = matmul(x, weight)
    ids = ids.expand(len(logits), ids.shape[-1])
    known = (ids >= 0) & (ids < logits.shape[1])
    chosen = torch.where(known, logits.gather(1, torch.where(known, ids, 0)), torch.nan)
    return chosen if out is None else out.copy_(chosen)


def rms_norm(x: Any, scale: Any, eps: float, out: Any = None, *, delta: Any = None) -> Any:
    return _normed(x, out, delta, F.rms_norm, scale, eps)


def layer_norm(x: Any, scale: Any, bias: Any, eps: float, out: Any = None, *, delta: Any = None) -> Any:
    return _normed(x, out, delta, F.layer_norm, scale, bias, eps)


def _normed(x: Any, out: Any, delta: Any, norm: Any, *parameters: Any) -> Any:
    """Apply a norm row by row, because torch's sums round differently for other batch shapes."""
    out = torch.empty_like(x) if out is None else out
    if delta is not None:
        x += delta
    for row, target in zip(x, out, strict=True):
        target.copy_(norm(row, row.shape, *parameters))
    return out


def rms_norm_heads(x: Any, scale: Any, eps: float, first: int, n_heads: int) -> None:
    n = scale.numel()
    for row in x:
        heads = row[first : first + n_heads * n].view(n_heads, n)
        heads.copy_(F.rms_norm(heads, (n,), scale, eps))


def activate(x: Any, kind: str, out: Any = None, *, gated: bool, threshold: float = 0.0) -> Any:
    """Apply the activation row by row, on aligned clones, so that the bits depend only on the row."""
    n_outputs = x.shape[1] // 2 if gated else x.shape[1]
    out = x.new_empty(len(x), n_outputs) if out is None else out
    for row, target in zip(x, out, strict=True):
        active, up = activated(row[:n_outputs].clone(), kind, threshold), row[n_outputs:]
        up = up.clamp(-threshold, threshold) + 1 if kind == "clamped_silu" else up
        target.copy_(active * up if gated else active)
    return out


def rotated(heads: Any, positions: Any, table: Any) -> Any:
    """Return heads (m, n_heads, head_dim) rotated to positions (m,), as a new tensor.

    table: rope_table(...), fp32 (positions, 2, pairs).
    """
    half = table.shape[2]
    cosine, sine = table[positions.long()][:, :, None].unbind(1)  # (m, 1, half) each
    low, high, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine, rest], -1)


def kv_write(
    x: Any,
    pages: Pages,
    slots: Any,
    positions: Any,
    layer: int,
    first_key: int,
    first_value: int | None,
    *,
    rotary_table: Any = None,
    paths: Any = None,
) -> None:
    n_kv_heads, head_dim = pages.n_kv_heads, pages.head_dim
    width = n_kv_heads * head_dim
    if rotary_table is not None:
        queries = x[:, :first_key]
        queries.copy_(rotated(queries.reshape(len(x), -1, head_dim), positions, rotary_table).flatten(1))
    if first_value is None:
        return
    keys, values = (x[:, at : at + width].reshape(-1, n_kv_heads, head_dim) for at in (first_key, first_value))
    if rotary_table is not None:
        keys = rotated(keys, positions, rotary_table)
    lines = positions.long() if paths is None else torch.stack([_lines(*row)[-1] for row in _rows(positions, paths)])
    page = pages.table[slots.long(), lines // PAGE_TOKENS].long()
    within = lines % PAGE_TOKENS
    for part, codes in enumerate((keys, values)):
        if pages.scales is not None:
            codes, scales = _int8(codes)
            pages.scales[page, layer, part, :, within] = scales
        elif pages.codes.dtype == torch.float16:
            codes = codes.clamp(-FP16_LARGEST, FP16_LARGEST)
        pages.codes[page, layer, part, :, within] = codes.to(pages.codes.dtype)


def attention(
    queries: Any,
    pages: Pages,
    slots: Any,
    positions: Any,
    layer: int,
    window: int | None,
    out: Any,
    *,
    first: int = 0,
    workspace: Any = None,
    scale: float | None = None,
    cap: float = 0.0,
    sinks: Any = None,
    paths: Any = None,
    shared_dim: int | None = None,
) -> Any:
    """Compute attention row by row, each with its whole softmax. The workspace is not used."""
    n_kv_heads, head_dim = pages.n_kv_heads, pages.head_dim
    scale = 1 / sqrt(head_dim) if scale is None else scale
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        low = 0 if window is None else max(0, position + 1 - window)
        lines = None if paths is None else _lines(position, paths[row])[low:]
        keys, values = read(pages, slot, layer, low, position + 1, lines)
        values = values if shared_dim is None else values[..., -shared_dim:]
        n_features = out.shape[1] // values.shape[2] * head_dim
        grouped = queries[row, first : first + n_features].reshape(n_kv_heads, -1, head_dim)
        scores = torch.bmm(grouped, keys.transpose(1, 2)) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(n_kv_heads, -1, 1)], -1)
        out[row] = torch.bmm(torch.softmax(scores, -1)[..., : keys.shape[1]], values).flatten()
    return out


def _rows(positions: Any, paths: Any) -> Any:
    return zip(positions.tolist(), paths, strict=True)


def _lines(position: int, path: Any) -> Any:
    """Return the lines of positions 0 .. `position` of a row in a draft tree."""
    branch = min(int(path[0]), position + 1)
    return torch.cat([torch.arange(branch, device=path.device), path[1 : position + 2 - branch].long()])


def read(pages: Pages, slot: int, layer: int, first: int, end: int, lines: Any = None) -> tuple[Any, Any]:
    """Return a sequence's keys and values at positions first..end-1, fp32 (n_kv_heads, end - first, head_dim).

    lines: where they are, int64 (end - first,); None at their own positions.
    """
    positions = torch.arange(first, end, device=pages.codes.device) if lines is None else lines
    page = pages.table[slot, positions // PAGE_TOKENS].long()
    codes = pages.codes[page, layer, :, :, positions % PAGE_TOKENS].float()  # (positions, 2, heads, features)
    if pages.scales is not None:
        codes = codes * pages.scales[page, layer, :, :, positions % PAGE_TOKENS][..., None]
    stored = codes.permute(1, 2, 0, 3)
    return stored[0].contiguous(), stored[-1].contiguous()


def draft(logits: Any, noise: Any, network: Any = None, ids: Any = None, out: Any = None) -> Any:
    """Draft a token for each row, with float64 noise from NumPy."""
    out = torch.empty((len(logits), 2), dtype=torch.int32, device=logits.device) if out is None else out
    for row, words, target in zip(logits, noise.cpu().numpy(), out, strict=True):
        target[0], target[1:] = -1, torch.tensor([torch.nan]).view(torch.int32)
        if torch.isfinite(row).all():
            index = int(_scores(row, words, ids).argmax())
            confidence = torch.softmax(row, 0)[index] if network is None else judged(row, *network)
            target[0] = index if ids is None else ids[index]
            target[1:] = confidence.reshape(1).view(torch.int32)
    return out


def _scores(row: Any, words: Any, ids: Any) -> Any:
    """Return logits with noise, float64 (n,) on the CPU. The first of the greatest is the draft."""
    scores, inverse = row.double().cpu().numpy(), float(words[4:].view(np.float32)[0])
    if not inverse:
        return scores
    last = len(scores) - 1 if ids is None else int(ids.max())
    key = np.concatenate([words[:2].copy().view(np.uint64), np.zeros(1, np.uint64)])
    counter = np.array([0, 0, *words[2:4]], np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw(last + 1)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    drawn = -np.log(-np.log(uniform))
    return scores * inverse + (drawn if ids is None else drawn[ids.cpu().numpy()])


def judged(logits: Any, first: Any, first_bias: Any, second: Any, second_bias: Any) -> Any:
    """Evaluate the network for the four largest of the logits (n,), and return the confidence."""
    largest = torch.topk(logits, 4).values
    softmax = torch.softmax(largest, 0)
    inner = torch.relu(torch.mv(first, torch.cat([largest, softmax, softmax])) + first_bias)
    return torch.sigmoid(inner @ second + second_bias[0])
