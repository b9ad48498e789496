"""Expected seconds of parts, copies and transfers, from a hardware profile and the parts' costs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hetero_ee.costs.head_cost import HeadCost
from hetero_ee.costs.neurons import NeuronRows, NeuronShares
from hetero_ee.costs.product import FLOAT_BYTES, VOCABULARY_LAYOUT, Product, exit_map_products
from hetero_ee.costs.work import SplitWork, Work
from hetero_ee.layers.state import MAX_DECODE_TOKENS
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import Part
from hetero_ee.planning.placement import Placement
from hetero_ee_profiles.hardware import DeviceTimes, HardwareProfile

JUDGE = Product(VOCABULARY_LAYOUT, 64, 12)  # first matrix of the network that judges a token at an exit layer
N_CANDIDATES = 4  # tokens whose logits are enough to judge at an exit layer that takes candidates
N_STREAM_BUFFERS = 2


def reads_on_cpu(parts: Sequence[Part], placements: Sequence[Placement]) -> bool:
    """Return whether the CPU reads the weights of any layer for each token, given the placements of all parts."""
    return any(
        part.layer is not None and placement not in ("gpu", "stream")
        for part, placement in zip(parts, placements, strict=True)
    )


def part_work(spec: ModelSpec, part: Part, m: int, context_tokens: int = 0) -> Work:
    """Return the work of m tokens in a part. context_tokens includes these tokens."""
    shares = NeuronShares.of(spec, is_prompt=m > MAX_DECODE_TOKENS)
    return part.cost.work(part.name, m, context_tokens, shares)


def split_work(spec: ModelSpec, part: Part, placement: Placement, m: int) -> SplitWork:
    """Return the work of m tokens in a part with a split placement."""
    work = part.cost.work(part.name, m, shares=NeuronShares.of(spec, is_prompt=False))
    return work.split(part.n_hot(placement), spec.hot_curve, reads_disk=placement.reads_disk)


@dataclass(frozen=True, slots=True)
class Costs:
    """Expected seconds of one model on one machine."""

    spec: ModelSpec
    profile: HardwareProfile
    threads: int = 0  # of the CPU; 0 for the most that were measured
    _known: dict[object, float] = field(default_factory=dict, compare=False, repr=False)
    _splits: dict[object, tuple[float, float, float]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def cpu(self) -> DeviceTimes:
        return self.profile.cpu_with(self.threads)

    def part_s(self, part: Part, placement: Placement, m: int, context_tokens: int) -> float:
        """Return the seconds of m tokens in the part, without copies of streamed weights (see copy_s).

        Results are cached for parts of the same shape, since a plan needs about ten thousand times of which only
        hundreds differ.

        Args:
            context_tokens: tokens in the cache, including these m.
        """
        key = part.shape, placement, m, context_tokens
        if key not in self._known:
            self._known[key] = self._part_s(part, placement, m, context_tokens)
        return self._known[key]

    def _part_s(self, part: Part, placement: Placement, m: int, context_tokens: int) -> float:
        if placement.is_split:
            first_s, hot_s, cold_s = self.split_s(part, placement, m)
            return first_s + max(hot_s, cold_s)
        work = part_work(self.spec, part, m, context_tokens)
        return self._work_s(work.from_disk() if placement.reads_disk else work, self._device(placement))

    def split_s(self, part: Part, placement: Placement, m: int) -> tuple[float, float, float]:
        """Return the seconds of m tokens in a part with a "hot-N" placement, cached as in `part_s`.

        Returns:
            The GPU's first step; its neurons or experts; and the CPU's, computed meanwhile, with the transfers of input
            and sum.
        """
        key = part.shape, placement, m
        if key not in self._splits:
            self._splits[key] = self._split_s(part, placement, m)
        return self._splits[key]

    def _split_s(self, part: Part, placement: Placement, m: int) -> tuple[float, float, float]:
        gpu, cpu, work = self._device(placement), self.cpu, split_work(self.spec, part, placement, m)
        transfers_s = self._transfer_s(m, work.input_values) + self.transfer_s(m)
        return self._work_s(work.first, gpu), self._work_s(work.hot, gpu), transfers_s + self._work_s(work.cold, cpu)

    def sparse_gain(self, part: Part, placement: Placement) -> tuple[float, float]:
        """Compare one token's time in a sparse FFN with the same FFN stored in tiles.

        Returns:
            The ratio of their seconds, and the largest share of active neurons (in steps of 0.01) at which the sparse
            FFN is not slower.
        """
        times, spec, rows = self._device(placement), self.spec, part.cost.units
        assert isinstance(rows, NeuronRows), "not a sparse FFN"
        first_rows = spec.ffn_size * (2 if spec.gated else 1)
        dense_s = times.matmul_s("int4", first_rows, spec.hidden_size, spec.activation_terms)
        dense_s += times.matmul_s("int4", spec.hidden_size, spec.ffn_size, spec.activation_terms)
        whole_s = sum(product.seconds(times, spec.activation_terms) for product in part.cost.products)
        shares = NeuronShares.of(spec, is_prompt=False)

        def sparse_s(active: float) -> float:
            first = min(1.0, active * shares.first / max(shares.active, 1e-9))
            return whole_s + rows.read_s(times, NeuronShares(active, first), 1, 1)

        even = max((n for n in range(101) if sparse_s(n / 100) <= dense_s), default=0)
        return sparse_s(shares.active) / dense_s, even / 100

    def copy_s(
        self, part: Part, placement: Placement = Placement.STREAM, context_tokens: int = 0, *, beside_cpu: bool = False
    ) -> float:
        """Return the seconds of copying the part's weights from pinned memory to the GPU.

        With the placement "visit", its KV cache is copied too.

        Args:
            beside_cpu: the CPU reads weights of other layers from the same RAM meanwhile.
        """
        link = self.profile.link
        assert link is not None
        n_bytes = part.weight_bytes + (part.kv_bytes(context_tokens) if placement == Placement.VISIT else 0)
        rate = link.beside_cpu_bytes_per_s if beside_cpu else link.to_gpu_bytes_per_s
        return link.latency.value + n_bytes / rate.value

    def transfer_s(self, m: int) -> float:
        """Return the seconds to transfer the hidden states of m tokens between the devices; 0 without a GPU."""
        return self._transfer_s(m, self.spec.hidden_size)

    def logits_transfer_s(self, m: int) -> float:
        """Return the seconds to transfer the logits of m tokens from a head on the GPU to the CPU."""
        return self._transfer_s(m, self.spec.vocab_size)

    def exit_end_s(self, head: Part, placement: Placement, map_rank: int, *, is_partial: bool = False) -> float:
        """Return the seconds of judging one token at an exit layer.

        Args:
            map_rank: rank of the exit map, 0 if there isn't one.
            is_partial: judge by the logits of a few candidates.
        """
        end, times = exit_end(self.spec, head, map_rank), self._device(placement)
        works = end.draft(1) if placement.on_gpu else end.logits(1)
        if placement == Placement.DISK:
            works[-1] = replace(works[-1], disk_bytes=head.weight_bytes)
        if is_partial:
            works = end.candidates(1, N_CANDIDATES)
        return sum(self._work_s(work, times) for work in works)

    def _work_s(self, work: Work, times: DeviceTimes) -> float:
        return work.seconds(times, self.profile.disk_read_bytes_per_s.value, self.spec)

    def _transfer_s(self, m: int, n_values: int) -> float:
        """Return the seconds to transfer m x n_values fp32, based on the measured time of one hidden state."""
        link = self.profile.link
        if link is None:
            return 0.0
        n_more = max(0, m * n_values - self.spec.hidden_size)
        return link.transfer.value + n_more * FLOAT_BYTES / link.to_cpu_bytes_per_s.value

    def _device(self, placement: Placement) -> DeviceTimes:
        if not placement.on_gpu:
            return self.cpu
        assert self.profile.gpu is not None, "a part is on the GPU of a machine that has none"
        return self.profile.gpu


def exit_end(spec: ModelSpec, head: Part, map_rank: int) -> HeadCost:
    """Return the cost of judging tokens at an exit layer: exit map of this rank, head and a small network."""
    return HeadCost(head.cost, exit_map_products(spec.hidden_size, map_rank), judge=JUDGE)
