"""An EAGLE-3 head as a torch module that can be trained: no state is to be met, tokens alone (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from draft_head_module import LAYER, NAMES, TrainingHead
from torch import Tensor, nn

from hetero_ee.models.spec import ModelSpec

EAGLE_3_NAMES = NAMES | {
    "embedding_norm": f"{LAYER}input_layernorm.weight",
    "hidden_norm": f"{LAYER}hidden_norm.weight",
    "head_norm": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}


class Eagle3TrainingHead(TrainingHead):
    """fc of the captured states, a layer whose attention sees embedding and state side by side, a norm and a head.

    n_captured: states that it sees. head_rows: fp32 (k, hidden), what its head starts from; token_ids: (k,) that they
    are of, None for all.
    """

    names = EAGLE_3_NAMES

    def __init__(
        self, spec: ModelSpec, embedding: Tensor, n_captured: int, head_rows: Tensor, token_ids: list[int] | None
    ) -> None:
        super().__init__(spec, embedding)
        size = spec.hidden_size
        self.token_ids = None if token_ids is None else torch.tensor(token_ids)
        self.fc = nn.Linear(n_captured * size, size, bias=False)
        self.q_proj = nn.Linear(2 * size, spec.query_size, bias=False)
        self.k_proj = nn.Linear(2 * size, spec.kv_size, bias=False)
        self.v_proj = nn.Linear(2 * size, spec.kv_size, bias=False)
        self.embedding_norm, self.hidden_norm, self.head_norm = (nn.Parameter(torch.ones(size)) for _ in range(3))
        self.lm_head = nn.Linear(size, len(head_rows), bias=False)
        self.lm_head.weight.data.copy_(head_rows)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """See TrainingHead.tensors; with d2t, what is to be added to a draft's number to have the token's."""
        found = super().tensors(dtype)
        if self.token_ids is not None:
            found["d2t"] = self.token_ids - torch.arange(len(self.token_ids))
        return found

    def unrolled(self, embedded: Tensor, states: Tensor, n_guesses: int) -> Iterator[Tensor]:
        """See TrainingHead.unrolled. states: (b, n, captured x hidden); what is learned passes from guess to guess."""
        held: list[tuple[Tensor, Tensor]] = []
        state, entered = self.fc(states), self.normed(embedded, self.embedding_norm)
        for _ in range(n_guesses):
            x = torch.cat([entered, self.normed(state, self.hidden_norm)], -1)
            guessed = self.fed_forward(state + self.o_proj(self._attended(x, held).flatten(2)))
            yield guessed
            state = torch.cat([state[:, :1], guessed[:, :-1]], 1)

    def scores(self, guesses: Tensor, head: Tensor) -> Tensor:
        """Logits of its own tokens, by its own head."""
        found: Tensor = self.lm_head(self.normed(guesses, self.head_norm))
        return found
