"""Expected seconds: a part with a placement, a copy between devices, a transfer. From a profile alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero_ee.models.blocks import BlockKind
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.hot import SPLITS, Half, crossing_values, halves
from hetero_ee.planning.parts import (
    FLOAT_BYTES,
    NeuronShares,
    Part,
    Product,
    exit_map_products,
    kv_bytes_per_token,
)
from hetero_ee_profiles.hardware import DeviceTimes, HardwareProfile

STREAMED = ("stream", "visit")  # weights wait in RAM and are copied at each use
ON_GPU = frozenset(("gpu", *STREAMED, *SPLITS))  # the GPU computes the part, or leads in it
MAX_DECODE_TOKENS = 16  # up to so many, attention takes reading keys and values once, and a little for each more
PREDICTOR_UNITS, PREDICTOR_FEATURES = 64, 12  # of the network that judges a token at an exit layer
N_CANDIDATES = 4  # tokens whose logits alone judge where candidates were taken
PARTIAL_ROWS = 8 * N_CANDIDATES  # of the head, in time: see partial_works in runtime/work.py
N_STREAM_BUFFERS = 2


def reads_on_cpu(parts: Sequence[Part], placements: Sequence[str]) -> bool:
    """Whether the CPU reads weights of a layer for each token, with these placements of all parts."""
    return any(
        part.layer is not None and placement not in ("gpu", "stream")
        for part, placement in zip(parts, placements, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Costs:
    """One model on one machine with this many CPU threads (0 for the most that were measured)."""

    spec: ModelSpec
    profile: HardwareProfile
    threads: int = 0
    _known: dict[object, float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def cpu(self) -> DeviceTimes:
        return self.profile.cpu_with(self.threads)

    def part_s(self, part: Part, placement: str, m: int, context_tokens: int) -> float:
        """Computing m tokens of the part with this placement; the cache holds context_tokens with them.

        "disk" is the CPU reading every weight from the disk. Copies of streamed weights are not in it: see copy_s.
        Parts of one kind and shape share one computation: a plan asks some ten thousand times for some hundred values.
        """
        key = part.shape, placement, m, context_tokens
        if key not in self._known:
            self._known[key] = self._part_s(part, placement, m, context_tokens)
        return self._known[key]

    def split_s(self, part: Part, placement: str, m: int) -> tuple[float, float, float]:
        """m tokens of a split FFN: what the GPU does first, its neurons after that, and meanwhile the CPU's from the
        input on its way until its sum has arrived."""
        spec, gpu, cpu = self.spec, self._device(placement), self.cpu
        assert part.neurons is not None, "not a sparse FFN"
        shares = NeuronShares.of(spec, is_prompt=False)
        whole, hot, cold = halves(part.products, part.neurons, placement, shares, spec.hot_curve)
        n_values = crossing_values(part.neurons, placement, is_predicted=bool(whole))

        def half_s(half: Half, times: DeviceTimes) -> float:
            return self._products_s(half.products, times, m) + half.neurons.read_s(times, half.shares, m)

        overheads_s = [times.layer_overhead_s(spec.hidden_size, spec.ffn_size, m) / 2 for times in (gpu, cpu)]
        ways_s = self._way_s(m, n_values) + self.transfer_s(m)
        first_s = overheads_s[0] + self._products_s(whole, gpu, m)
        return first_s, half_s(hot, gpu), ways_s + overheads_s[1] + half_s(cold, cpu)

    @staticmethod
    def _products_s(products: Sequence[Product], times: DeviceTimes, m: int) -> float:
        return sum(times.matmul_s(p.layout, p.n_rows, p.n_columns, m) for p in products)

    def _part_s(self, part: Part, placement: str, m: int, context_tokens: int) -> float:
        if placement in SPLITS:
            first_s, hot_s, cold_s = self.split_s(part, placement, m)
            return first_s + max(hot_s, cold_s)
        times = self._device(placement)
        seconds = self._products_s(part.products, times, m)
        if part.neurons is not None:
            shares = NeuronShares.of(self.spec, is_prompt=m > MAX_DECODE_TOKENS)
            seconds += part.neurons.read_s(times, shares, m)
        if part.layer is not None:
            seconds += times.layer_overhead_s(self.spec.hidden_size, self.spec.ffn_size, m) / 2
        else:
            seconds += self._outside_s(part, times, m)
        if part.kind is BlockKind.ATTENTION:
            seen = min(context_tokens, part.window_tokens + m - 1) if part.window_tokens else context_tokens
            seconds += self._attention_s(part, times, m, max(seen, m))
        if placement == "disk":
            seconds = max(seconds, part.weight_bytes / self.profile.disk_read_bytes_per_s.value)
        return seconds

    def sparse_gain(self, part: Part, placement: str) -> tuple[float, float]:
        """Of a sparse FFN: its seconds for one token over those of the same FFN in tiles, and the largest share of
        active neurons, in hundredths, with which it takes no longer."""
        times, rows, spec = self._device(placement), part.neurons, self.spec
        assert rows is not None, "not a sparse FFN"
        first_rows = spec.ffn_size * (2 if spec.gated else 1)
        dense_s = times.matmul_s("int4", first_rows, spec.hidden_size, 1)
        dense_s += times.matmul_s("int4", spec.hidden_size, spec.ffn_size, 1)
        whole_s = sum(times.matmul_s(p.layout, p.n_rows, p.n_columns, 1) for p in part.products)
        shares = NeuronShares.of(spec, is_prompt=False)

        def sparse_s(active: float) -> float:
            first = min(1.0, active * shares.first / max(shares.active, 1e-9))
            return whole_s + rows.read_s(times, NeuronShares(active, first), 1)

        even = max((n for n in range(101) if sparse_s(n / 100) <= dense_s), default=0)
        return sparse_s(shares.active) / dense_s, even / 100

    def copy_s(
        self, part: Part, placement: str = "stream", context_tokens: int = 0, *, beside_cpu: bool = False
    ) -> float:
        """Streaming the part's weights to the GPU from pinned memory; of a visiting part keys and values too.

        beside_cpu: the CPU reads weights of other layers for each token, out of the same RAM; while a prompt's parts
        visit, it computes more than it reads.
        """
        link = self.profile.link
        assert link is not None
        n_bytes = part.weight_bytes + (part.kv_bytes(context_tokens) if placement == "visit" else 0)
        is_shared = beside_cpu and placement == "stream"
        rate = link.beside_cpu_bytes_per_s if is_shared else link.to_gpu_bytes_per_s
        return link.latency.value + n_bytes / rate.value

    def transfer_s(self, m: int) -> float:
        """Bringing the hidden states of m tokens from one device to the other; 0 without a GPU."""
        return self._way_s(m, self.spec.hidden_size)

    def exit_end_s(self, head: Part, placement: str, map_rank: int, *, is_partial: bool = False) -> float:
        """Judging one token at an exit layer: the exit map, of rank 0 for none, and the head.

        On a GPU the choice, which reads the logits once, and the predictor too, with half a layer's small kernels.
        is_partial: by the logits of a few candidates.
        """
        spec, times = self.spec, self._device(placement)
        products, seconds = exit_map_products(spec.hidden_size, map_rank), 0.0
        if is_partial:
            products.append(Product("int8", PARTIAL_ROWS, spec.hidden_size))
            seconds = times.layer_overhead_s(spec.hidden_size, spec.ffn_size, 1) / 2
        elif placement in ON_GPU:
            products += [*head.products, Product("int8", spec.vocab_size, FLOAT_BYTES)]
            products.append(Product("int8", PREDICTOR_UNITS, PREDICTOR_FEATURES))
            seconds = times.layer_overhead_s(spec.hidden_size, spec.ffn_size, 1) / 2
        else:
            seconds = self.part_s(head, placement, 1, context_tokens=1)
        return seconds + sum(times.matmul_s(p.layout, p.n_rows, p.n_columns, 1) for p in products)

    def logits_transfer_s(self, m: int) -> float:
        """Bringing the logits of m tokens from the GPU's head to the CPU."""
        return self._way_s(m, self.spec.vocab_size)

    def _way_s(self, m: int, n_values: int) -> float:
        """One token's hidden state was measured."""
        link = self.profile.link
        if link is None:
            return 0.0
        n_more = max(0, m * n_values - self.spec.hidden_size)
        return link.transfer.value + n_more * FLOAT_BYTES / link.to_cpu_bytes_per_s.value

    def _attention_s(self, part: Part, times: DeviceTimes, m: int, context_tokens: int) -> float:
        """Of few tokens, reading in proportion to the bytes of the keys and values, where another type was timed."""
        spec, few = self.spec, m <= MAX_DECODE_TOKENS
        kept_share = part.kv_bytes_per_token / kv_bytes_per_token(spec, times.kv_type)
        return times.attention_s(
            spec.n_heads, spec.n_kv_heads, spec.head_dim, m, context_tokens, few=few, kept_share=kept_share
        )

    def _device(self, placement: str) -> DeviceTimes:
        if placement not in ON_GPU:
            return self.cpu
        assert self.profile.gpu is not None, "a part is on the GPU of a machine that has none"
        return self.profile.gpu

    def _outside_s(self, part: Part, times: DeviceTimes, m: int) -> float:
        """What a pass costs outside of layers and products is charged to the head."""
        if part.kind is not BlockKind.HEAD:
            return 0.0
        return times.pass_overhead_s(self.spec.hidden_size, self.spec.ffn_size, m)
