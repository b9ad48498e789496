"""What the tests of certificates share: one of random judgements, and parts of one."""

import numpy as np

from hetero_ee.speculation.exits.certificate import Certificate, level_confidence, levels_of

KEY = "cd" * 32


def some_certificate(n_prompts: int = 300, n_exit_layers: int = 3, seed: int = 0, most_tokens: int = 64) -> Certificate:
    """Prompts of different difficulty; deeper exits are surer, and right as often as they are sure."""
    random = np.random.default_rng(seed)
    n_tokens = random.integers(most_tokens // 2, most_tokens + 1, n_prompts)
    ease = np.repeat(random.normal(2.0, 1.0, n_prompts), n_tokens)[:, None] + np.linspace(0.0, 2.0, n_exit_layers)
    chance = 1 / (1 + np.exp(-ease - random.normal(0.0, 1.5, ease.shape)))
    right = random.random(chance.shape) < chance
    judgements = 2 * levels_of(chance) + right.astype(np.uint8)
    lengths = random.integers(4, 33, n_prompts).astype(np.uint16)
    layers = tuple(range(1, n_exit_layers + 1))
    return Certificate(KEY, "", "fp16", "random prompts", layers, lengths, n_tokens.astype(np.uint16), judgements)


def part_of(whole: Certificate, prompts: np.ndarray) -> Certificate:
    """These prompts alone. prompts: their numbers."""
    ends = whole.n_tokens.astype(np.int64).cumsum()
    rows = [whole.judgements[ends[each] - whole.n_tokens[each] : ends[each]] for each in prompts]
    lengths = whole.prompt_lengths[prompts], whole.n_tokens[prompts]
    known = whole.key, whole.exits_digest, whole.kv_type, whole.text, whole.exit_layers
    return Certificate(*known, *lengths, np.concatenate(rows))


def mean_loss(whole: Certificate, exit_layers: tuple[int, ...], threshold: float) -> float:
    """The slow reference: token by token, what exits at the first of these layers and is wrong; the prompts' mean."""
    losses, row = [], 0
    for n_tokens in whole.n_tokens.tolist():
        n_wrong = 0
        for judged in whole.judgements[row : row + n_tokens].tolist():
            for exit_layer in exit_layers:
                level, right = divmod(judged[whole.exit_layers.index(exit_layer)], 2)
                if level and level_confidence(level) >= threshold:
                    n_wrong += not right
                    break
        losses.append(n_wrong / n_tokens if n_tokens else 0.0)
        row += n_tokens
    return float(np.mean(losses))
