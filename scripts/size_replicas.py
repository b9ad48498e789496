"""How many replicas a load wants, by calculation from a profile: python -m scripts.size_replicas --requests-per-s 2.

A replica's requests share passes: with n texts it makes n tokens in the time of one pass of n tokens, and reads prompts
in between. A part of the time is left free, for requests that come in bunches. Nothing is measured but what the profile
holds.
"""

import argparse
from dataclasses import dataclass
from math import ceil

from hetero_ee.models.known_shapes import known_spec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.parts import model_parts
from hetero_ee.planning.planner import plan
from hetero_ee.planning.times.costs import Costs
from hetero_ee.planning.times.lanes import pass_time
from hetero_ee_profiles.reference import reference_profile

TEXTS = (1, 2, 4, 8, 16)
BUSY_SHARE = 0.7  # of the time, at most; beyond it queues grow fast


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of all clients together."""

    requests_per_s: float
    prompt_tokens: int
    reply_tokens: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of one replica with `n_texts` requests at a time."""

    n_texts: int
    pass_s: float  # of a token of each text
    requests_per_s: float  # that keep it busy all the time
    tokens_per_s: float  # of one text, between the others' prompts

    def n_replicas(self, load: Load) -> int:
        return ceil(load.requests_per_s / (BUSY_SHARE * self.requests_per_s))


def capacities(model: str, hardware: str, load: Load) -> list[Capacity]:
    """With the plan for a context that holds all texts at once."""
    spec, profile, found = known_spec(model), reference_profile(hardware), []
    for n_texts in TEXTS:
        context_tokens = n_texts * (load.prompt_tokens + load.reply_tokens)
        if context_tokens > spec.max_context_tokens:
            break
        made = plan(spec, profile, Limits(mode="full", context_tokens=context_tokens))
        costs, parts = Costs(spec, profile, made.threads), model_parts(spec, made.kv_type)
        half = load.prompt_tokens + load.reply_tokens // 2
        pass_s = pass_time(costs, parts, made.decode_placements, n_texts, half).seconds
        prompt_s = load.prompt_tokens / made.prediction.prompt_tokens_per_s
        request_s = prompt_s + load.reply_tokens * pass_s / n_texts  # of the replica's time
        found.append(Capacity(n_texts, pass_s, 1 / request_s, load.reply_tokens / (n_texts * request_s)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-2-7b")
    parser.add_argument("--hardware", default="rtx-4060-laptop-8gb")
    parser.add_argument("--requests-per-s", type=float, default=1.0)
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--reply", type=int, default=200, help="tokens")
    given = parser.parse_args()
    load = Load(given.requests_per_s, given.prompt, given.reply)
    print("| texts at a time | a pass, ms | tokens/s of one text | requests/s of a replica | replicas |")
    print("|---|---|---|---|---|")
    for each in capacities(given.model, given.hardware, load):
        shown = f"{each.n_texts} | {1000 * each.pass_s:.1f} | {each.tokens_per_s:.1f} | {each.requests_per_s:.2f}"
        print(f"| {shown} | {each.n_replicas(load)} |")


if __name__ == "__main__":
    main()
