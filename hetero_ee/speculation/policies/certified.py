"""The certified policy: a token exits where the predictor is as sure as the certificate asks for."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hetero_ee.decoding.texts import Text
from hetero_ee.runtime.drafted import NO_TOKEN
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.policies.exit_head import ExitHeads


class Certified:
    """heads: of the exit layers where tokens are judged; thresholds: the certificate's, of each."""

    name = "certified"

    def __init__(self, heads: ExitHeads, thresholds: Mapping[int, float]) -> None:
        self._heads, self._thresholds = heads, thresholds

    def judging(self, executor: Executor, sampler: DraftSampler) -> "_Judge":
        return _Judge(executor, sampler, self._heads, self._thresholds)


class _Judge:
    def __init__(
        self, executor: Executor, sampler: DraftSampler, heads: ExitHeads, thresholds: Mapping[int, float]
    ) -> None:
        self._executor, self._sampler, self._heads, self._thresholds = executor, sampler, heads, thresholds

    def exit_layers(self, text: Text) -> Sequence[int]:
        return tuple(self._heads)

    def judge(self, exit_layer: int, hidden: Tensor, texts: Sequence[Text]) -> list[int | None]:
        end, threshold = self._heads[exit_layer].end, self._thresholds[exit_layer]
        rows = [(text, text.token_ids) for text in texts]
        found = self._sampler.drafted(self._executor, hidden, end, rows, is_verified=False)
        return [each.token_id if each.confidence >= threshold and each.token_id != NO_TOKEN else None for each in found]

    def logits(self, exit_layer: int, hidden: Tensor) -> Tensor:
        return self._executor.draft_logits(hidden, self._heads[exit_layer].end)

    def given_out(self, text: Text, depth: int, hidden: Tensor) -> None:
        """Nothing is remembered."""
