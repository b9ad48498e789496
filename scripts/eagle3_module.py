"""An EAGLE-3 head as a torch module that can be trained: no state is to be met, tokens alone (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from draft_head_module import LAYER, NAMES, TrainingHead
from torch import Tensor, nn

from hetero_ee.models.spec import ModelSpec
from hetero_ee.speculation.sources.eagle3 import MAX_CAPTURED

EAGLE_3_NAMES = NAMES | {
    "embedding_norm": f"{LAYER}input_layernorm.weight",
    "hidden_norm": f"{LAYER}hidden_norm.weight",
    "head_norm": "norm.weight",
    **{f"fc_norm.{number}": f"fc_norm.{number}.weight" for number in range(MAX_CAPTURED)},
}


class Eagle3TrainingHead(TrainingHead):
    """fc of the captured states, each normed, a layer whose attention sees embedding and state, a norm and a head.

    n_captured: states that it sees. head_rows: fp32 (k, hidden), rows of the model's lm_head; token_ids: (k,) that they
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
        self.rows = head_rows
        self.fc_norm = nn.ParameterList(torch.ones(size) for _ in range(n_captured))

    @torch.no_grad()
    def begin_with(self, ffn: dict[str, Tensor], final_scale: Tensor, magnitude: float) -> None:
        """Begin with the model's last FFN and final norm, which the lm_head fits, and with the last captured state.

        magnitude: root mean square of the last captured state's values, which fc sees normed.
        """
        for name, values in ffn.items():
            self.get_parameter(name).copy_(values)
        self.head_norm.copy_(final_scale)
        size = self.spec.hidden_size
        self.fc.weight.mul_(0.1 * magnitude)[:, -size:].fill_diagonal_(magnitude)

    def unrolled(self, embedded: Tensor, states: Tensor, n_guesses: int) -> Iterator[Tensor]:
        """See TrainingHead.unrolled. states: (b, n, captured x hidden); what is learned passes from guess to guess."""
        held: list[tuple[Tensor, Tensor]] = []
        seen = zip(states.split(self.spec.hidden_size, -1), self.fc_norm, strict=True)
        state = self.fc(torch.cat([self.normed(each, scale) for each, scale in seen], -1))
        entered = self.normed(embedded, self.embedding_norm)
        for _ in range(n_guesses):
            x = torch.cat([entered, self.normed(state, self.hidden_norm)], -1)
            guessed = self.fed_forward(state + self.o_proj(self._attended(x, held).flatten(2)))
            yield guessed
            state = torch.cat([state[:, :1], guessed[:, :-1]], 1)

    def scores(self, guesses: Tensor, head: Tensor) -> Tensor:
        """Return the logits of the draft vocabulary, by the model's lm_head, which stays as it is."""
        return F.linear(self.normed(guesses, self.head_norm), self.rows)
