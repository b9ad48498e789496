"""The reference executor in plain torch and fp32, against which all others are checked."""

from hetero_ee.costs.kv_types import default_kv_type
from hetero_ee.kv.cache import KvCache
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.torch_ops import TorchOps
from hetero_ee.options.engine import UNQUANTIZED
from hetero_ee.runtime.executors.host import OpsExecutor
from hetero_ee.weights.model_weights import ModelWeights


class ReferenceExecutor(OpsExecutor):
    """Runs a model in plain torch. cache: see HostExecutor."""

    kv_type = default_kv_type(UNQUANTIZED)  # torch would widen anything else each time

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        max_tokens: int,
        ops: TorchOps | None = None,
        *,
        cache: KvCache | None = None,
    ) -> None:
        super().__init__(spec, weights, max_tokens, ops or TorchOps(), cache)
