"""Which experts a model's tokens choose on a text: how often, how alike neighbours are, and what a fixed hot set holds.

    python tests/bench/bench_expert_routes.py --text FILE [--model tests/assets/hybrid_moe] [--tokens 32768] [--json]

Routes are transformers' (fp32, windows of 512 tokens). Hot sets are the likeliest experts of each layer in the first
half of the text; their hits are counted in the second, and so are those of a cache of equal size per layer that evicts
the least recently used expert. The union of m neighbouring tokens is compared with that of m
tokens that choose independently and evenly, n (1 - (1 - k/n)^m). The last line is one JSON document.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW = 512
SHARES = (0.1, 0.25, 0.5)  # of a layer's experts that are hot
PARTS = 32  # of which a split placement names how many are on the GPU
WIDTHS = (1, 2, 4, 8)  # tokens whose union is counted
MODEL = Path(__file__).parents[1] / "assets" / "hybrid_moe"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = statistics(*chosen_experts(arguments.model, arguments.text, arguments.tokens))
    if not arguments.json:
        print(table(found))
    print(json.dumps(found))


@torch.no_grad()
def chosen_experts(folder: Path, text: Path, n_tokens: int) -> tuple[Tensor, int]:
    """Whether each token chose each expert, (layers, tokens, experts), and how many experts a token has."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    content = text.read_text("utf-8")[: 8 * n_tokens].replace("<|endoftext|>", tokenizer.eos_token)
    ids = tokenizer(content)["input_ids"][:n_tokens]
    k, n = model.config.num_experts_per_tok, model.config.num_experts
    parts = []
    for window in torch.tensor(ids).split(WINDOW):
        logits = torch.stack(model(window[None], output_router_logits=True).router_logits)
        chosen = torch.zeros(*logits.shape[:2], n, dtype=torch.bool)
        parts.append(chosen.scatter_(2, logits.topk(k, dim=-1).indices, value=True))
    return torch.cat(parts, dim=1), k


def statistics(chosen: Tensor, k: int) -> dict[str, Any]:
    """Everything that is printed, means over the layers; shares of choices, and unions in experts."""
    n_layers, n_tokens, n = chosen.shape
    frequency = chosen.float().mean(1) / k  # (layers, experts), each layer's sum is 1
    early, late = chosen[:, : n_tokens // 2].sum(1), chosen[:, n_tokens // 2 :].sum(1)
    order = early.argsort(dim=1, descending=True)
    late = (late / late.sum(1, keepdim=True)).gather(1, order)
    ranked = frequency.sort(dim=1, descending=True).values.mean(0)
    return {
        "n_layers": n_layers,
        "n_experts": n,
        "n_active": k,
        "n_tokens": n_tokens,
        "likeliest_over_even": round(float(ranked[0]) * n, 2),
        "least_likely_over_even": round(float(ranked[-1]) * n, 2),
        "overlap": round(float((chosen[:, 1:] & chosen[:, :-1]).sum() / (n_layers * (n_tokens - 1) * k)), 3),
        "overlap_if_independent": round(float((frequency.square().sum(1) * k).mean()), 3),
        "hit_rates": {str(share): round(float(late[:, : round(share * n)].sum(1).mean()), 3) for share in SHARES},
        "hot_curve": [round(float(late[:, : n * i // PARTS].sum(1).mean()), 4) for i in range(1, PARTS + 1)],
        "lru_hit_rates": {str(share): round(lru_hits(chosen, round(share * n)), 3) for share in SHARES},
        "unions": {str(m): round(union(chosen, m), 2) for m in WIDTHS},
        "unions_if_even": {str(m): round(n * (1 - (1 - k / n) ** m), 2) for m in WIDTHS},
    }


def lru_hits(chosen: Tensor, capacity: int) -> float:
    """The share of choices in the second half of the text that find their expert in a layer's cache."""
    n_hits = n_choices = 0
    for layer in chosen:
        cache: dict[int, None] = {}  # the least recently used first
        for number, token in enumerate(layer):
            experts = token.nonzero()[:, 0].tolist()
            if number >= len(layer) // 2:
                n_hits += sum(expert in cache for expert in experts)
                n_choices += len(experts)
            for expert in experts:
                cache.pop(expert, None)
                cache[expert] = None
            while len(cache) > capacity:
                del cache[next(iter(cache))]
    return n_hits / n_choices


def union(chosen: Tensor, m: int) -> float:
    """The mean number of distinct experts of m neighbouring tokens."""
    return float(chosen.unfold(1, m, 1).any(-1).sum(-1).float().mean())


def table(found: dict[str, Any]) -> str:
    n, k = found["n_experts"], found["n_active"]
    lines = [f"{found['n_tokens']} tokens, {found['n_layers']} layers, {k} of {n} experts each"]
    lines.append(
        f"the likeliest expert is chosen {found['likeliest_over_even']} times as often as an even choice would be, the "
        f"least likely {found['least_likely_over_even']} times"
    )
    lines.append(
        f"share of a token's experts that the token before it chose too: {found['overlap']} "
        f"({found['overlap_if_independent']} of independent tokens)"
    )
    lines += [
        f"{float(share):.0%} of experts: {hits:.1%} hits if fixed, {found['lru_hit_rates'][share]:.1%} if the last used"
        for share, hits in found["hit_rates"].items()
    ]
    pairs = zip(found["unions"].items(), found["unions_if_even"].values(), strict=True)
    lines += [f"experts of {m} tokens: {own} measured, {even} if independent and even" for (m, own), even in pairs]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
