"""HardwareProfile: how long a machine's operations take, measured or derived from data sheets."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hetero_ee_profiles.measurement import Measurement

PROFILE_VERSION = 4
# Layouts that need the same time per byte as int4, and their bytes relative to int4.
BYTES_OF_INT4 = {"int4 zeros": 5.0 / 4.5, "int5": 5.5 / 4.5, "int5 zeros": 6.0 / 4.5, "int6": 7.0 / 4.5}
KV_TYPES = ("fp32", "fp16", "int8")
MEASURED, DERIVED = "measured", "derived"


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that a profile is valid for. A new processor, GPU, driver or software version makes it invalid."""

    cpu_model: str
    n_cores: int
    instruction_set: str
    ram_bytes: int
    gpu_model: str | None
    vram_bytes: int
    driver: str | None
    versions: str


@dataclass(frozen=True, slots=True)
class MatmulTime:
    """Seconds of one matrix product y[m, n_rows] = x[m, n_columns] W^T."""

    layout: str  # of W: "int4" or "int8"
    n_rows: int
    n_columns: int
    m: int
    cycle_bytes: int  # weights multiplied alternately; with few, caches would hold them
    time: Measurement

    def __post_init__(self) -> None:
        _positive(n_rows=self.n_rows, n_columns=self.n_columns, m=self.m, cycle_bytes=self.cycle_bytes)


@dataclass(frozen=True, slots=True)
class RowsTime:
    """Seconds of a sparse FFN's up and down products for m tokens, each with random active neurons."""

    n_rows: int  # of both: two per neuron with a gate, else one
    n_columns: int
    m: int
    active_share: float  # of the neurons, for each token
    time: Measurement

    def __post_init__(self) -> None:
        _positive(n_rows=self.n_rows, n_columns=self.n_columns, m=self.m)
        if not 0 < self.active_share <= 1:
            raise ValueError(f"active_share is {self.active_share}, expected a share above 0")


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Seconds of one layer's attention for m tokens. context_tokens includes these tokens."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    m: int
    context_tokens: int
    kv_type: str  # one of KV_TYPES
    time: Measurement

    def __post_init__(self) -> None:
        _positive(n_heads=self.n_heads, n_kv_heads=self.n_kv_heads, head_dim=self.head_dim, m=self.m)
        _positive(context_tokens=self.context_tokens)
        if self.kv_type not in KV_TYPES:
            raise ValueError(f"kv_type is {self.kv_type[:40]!r}, expected one of {', '.join(KV_TYPES)}")


@dataclass(frozen=True, slots=True)
class OverheadTime:
    """Seconds of everything but matmul and attention for m tokens, per layer and per pass outside the layers."""

    hidden_size: int
    ffn_size: int
    m: int
    layer: Measurement
    whole_pass: Measurement

    def __post_init__(self) -> None:
        _positive(hidden_size=self.hidden_size, ffn_size=self.ffn_size, m=self.m)


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Measured times of one device, from which those of other sizes are estimated."""

    threads: int  # of the CPU, 0 for a GPU
    free_bytes: int  # available memory
    read_bytes_per_s: Measurement  # memory bandwidth: measured by reading, or rated if derived
    call: Measurement  # of a product of one tile: the least time of any product or attention
    matmuls: tuple[MatmulTime, ...]
    attentions: tuple[AttentionTime, ...]
    overheads: tuple[OverheadTime, ...]
    rows: tuple[RowsTime, ...] = ()  # empty if sparse FFNs were not measured

    ADDED_FIELDS: ClassVar = ("rows",)  # may be missing from a file of the profile's version

    def __post_init__(self) -> None:
        if self.threads < 0 or self.free_bytes < 0:
            raise ValueError(f"threads {self.threads} and free_bytes {self.free_bytes} must be 0 or more")
        for name in ("matmuls", "attentions", "overheads"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty")
        if len({row.kv_type for row in self.attentions}) > 1:
            raise ValueError("attentions hold times of several kv_types, expected one")

    @property
    def kv_type(self) -> str:
        """Type of keys and values for which attention was measured."""
        return self.attentions[0].kv_type

    def matmul_s(self, layout: str, n_rows: int, n_columns: int, m: float, share: float = 1.0) -> float:
        """Estimate the seconds of a matrix product.

        The time of the most similar measured shape is scaled by size, except for the constant time of a call, and
        interpolated linearly in m. Layouts of BYTES_OF_INT4 need the same time per byte as int4.

        Args:
            m: tokens; an average for experts.
            share: share of the matrix that is multiplied; 0 needs no time.

        Raises:
            KeyError: if the layout was not measured.
        """
        if layout in BYTES_OF_INT4:
            return self.matmul_s("int4", n_rows, n_columns, m, share * BYTES_OF_INT4[layout])
        size = n_rows * n_columns
        rows = [row for row in self.matmuls if row.layout == layout]
        if not rows:
            raise KeyError(layout)
        if not share:
            return 0.0
        nearest = min(rows, key=lambda row: _distance(row.n_rows * row.n_columns, size) + _distance(row.n_rows, n_rows))
        shape = nearest.n_rows, nearest.n_columns
        points = [(row.m, row.time.value) for row in rows if (row.n_rows, row.n_columns) == shape]
        return self._scaled(interpolated(points, m), share * size / (shape[0] * shape[1]))

    def rows_s(self, n_rows: int, n_columns: int, m: int, active_share: float) -> float:
        """Estimate the seconds of a sparse FFN's up and down products (n_rows in total) for m tokens.

        Measured times are interpolated linearly in share and tokens, and scaled by size. Without them, it is the time
        of int4 tiles for the share of rows that any of the m tokens needs.

        Args:
            active_share: share of the neurons that each token needs.
        """
        if not self.rows:
            return self.matmul_s("int4", n_rows, n_columns, m, needed_share(active_share, m))
        size = n_rows * n_columns
        nearest = min(self.rows, key=lambda row: _distance(row.n_rows * row.n_columns, size))
        shape = nearest.n_rows, nearest.n_columns
        by_share: dict[int, list[tuple[float, float]]] = {}
        for row in self.rows:
            if (row.n_rows, row.n_columns) == shape:
                by_share.setdefault(row.m, []).append((row.active_share, row.time.value))
        seconds = interpolated([(at, interpolated(found, active_share)) for at, found in by_share.items()], m)
        return self._scaled(seconds, size / (shape[0] * shape[1]))

    def attention_s(
        self,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        m: int,
        n_positions: float,
        *,
        few: bool,
        kept_share: float = 1.0,
    ) -> float:
        """Estimate the seconds of one layer's attention, linearly between measured contexts.

        If heads of another size were measured, the time is scaled, except for the constant time of a call. A decode
        batch reads keys and values once: the time of the first token scales with their size, that of further tokens
        with the queries. It is interpolated between measured numbers of tokens. Prompt chunks scale only with the
        queries: a token costs as much as in the measured chunk of the most similar size, at equal positions.

        Args:
            m: tokens in the batch.
            n_positions: positions that a decode batch reads, or that a token of a prompt chunk sees on average.
            few: whether this is a decode batch instead of a prompt chunk.
            kept_share: bytes of a cached value relative to the measured type; scales the first token's time.
        """
        width = n_heads * head_dim
        nearest = min(self.attentions, key=lambda row: _distance(row.n_heads * row.head_dim, width))
        rows = [row for row in self.attentions if _shape(row) == _shape(nearest)]
        queries_share = width / (nearest.n_heads * nearest.head_dim)
        if not few:
            return self._scaled(_chunk_s(rows, m, n_positions), queries_share)
        by_m = _at_context(rows, n_positions)
        seconds = interpolated(by_m, m)
        share = n_kv_heads * head_dim / (nearest.n_kv_heads * nearest.head_dim)
        one_s = min(seconds, interpolated(by_m, 1))
        return self._scaled(one_s, share * kept_share) + (seconds - one_s) * queries_share

    def _scaled(self, seconds: float, share: float) -> float:
        """Scale a time to another size, except for the constant time of a call, which counts as at most half of it."""
        call_s = min(self.call.value, seconds / 2)
        return call_s + (seconds - call_s) * share

    def layer_overhead_s(self, hidden_size: int, ffn_size: int, m: int) -> float:
        """Estimate the seconds of one layer's norms, rotations, activations and bookkeeping for m tokens."""
        return interpolated([(row.m, row.layer.value) for row in self._overheads(hidden_size, ffn_size)], m)

    def pass_overhead_s(self, hidden_size: int, ffn_size: int, m: int) -> float:
        """Estimate the seconds of embedding, final norm, choosing a token and bookkeeping in a pass of m tokens."""
        return interpolated([(row.m, row.whole_pass.value) for row in self._overheads(hidden_size, ffn_size)], m)

    def _overheads(self, hidden_size: int, ffn_size: int) -> list[OverheadTime]:
        size = hidden_size + ffn_size
        nearest = min(self.overheads, key=lambda row: _distance(row.hidden_size + row.ffn_size, size))
        shape = nearest.hidden_size, nearest.ffn_size
        return [row for row in self.overheads if (row.hidden_size, row.ffn_size) == shape]


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Rates and delays between CPU and GPU. Rates are for pinned memory unless named pageable."""

    to_gpu_bytes_per_s: Measurement
    beside_cpu_bytes_per_s: Measurement  # to the GPU while the CPU reads weights at full speed
    to_cpu_bytes_per_s: Measurement
    pageable_to_gpu_bytes_per_s: Measurement
    pageable_to_cpu_bytes_per_s: Measurement
    both_ways_bytes_per_s: Measurement  # sum of both directions at once
    latency: Measurement  # of a small copy that the CPU waits for
    launch: Measurement  # CPU time of launching one kernel
    synchronize: Measurement  # of one kernel that the CPU waits for
    transfer: Measurement  # from a hidden state computed on one device to its use on the other, one token


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """Times of all devices of one machine, and of the link between them."""

    version: int
    name: str
    kind: str  # MEASURED or DERIVED
    machine: Machine
    cpu: tuple[DeviceTimes, ...]  # one per measured number of threads, ascending
    gpu: DeviceTimes | None
    link: LinkTimes | None  # None without a GPU
    disk_read_bytes_per_s: Measurement
    warnings: tuple[str, ...]
    doubts: tuple[str, ...] = ()  # signs of other programs during the measurement; any makes it provisional

    ADDED_FIELDS: ClassVar = ("doubts",)  # added without a new version, so files of this version may lack them

    def __post_init__(self) -> None:
        self.check_version(self.version)
        if self.kind not in (MEASURED, DERIVED):
            raise ValueError(f"kind is {self.kind[:40]!r}, expected {MEASURED} or {DERIVED}")
        threads = [times.threads for times in self.cpu]
        if not threads or threads != sorted(set(threads)) or threads[0] < 1:
            raise ValueError("cpu must have times for ascending numbers of threads")
        if (self.gpu is None) != (self.link is None):
            raise ValueError("gpu and link must be given together")

    def __repr__(self) -> str:
        gpu = "no GPU" if self.gpu is None else f"{self.machine.gpu_model}, {self.machine.vram_bytes / 2**30:.1f} GiB"
        date = self.disk_read_bytes_per_s.origin.date
        return f"<HardwareProfile {self.name}: {self.machine.cpu_model}, {gpu}, {self.kind} {date}>"

    @staticmethod
    def check_version(version: int) -> None:
        """Raise ValueError if this engine does not read profiles of this version."""
        if version != PROFILE_VERSION:
            raise ValueError(f"it has profile version {version}, this engine reads version {PROFILE_VERSION}")

    def cpu_with(self, threads: int) -> DeviceTimes:
        """Return the CPU's times for the measured thread count nearest to `threads`; 0 means the largest."""
        return min(self.cpu, key=lambda times: abs(times.threads - threads)) if threads else self.cpu[-1]


def needed_share(active_share: float, m: float) -> float:
    """Return the share of neurons that at least one of m tokens needs, if each needs active_share at random.

    This is an upper bound, since consecutive tokens tend to need the same neurons.
    """
    return float(1 - (1 - active_share) ** m)


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate linearly between points (x, y).

    The last slope continues beyond the last point, but never below the last two values. Before the first point, its
    value is returned. A single point is extended in proportion to x.
    """
    ordered = sorted(points)
    if at <= ordered[0][0]:
        return ordered[0][1]
    if len(ordered) == 1:
        return ordered[0][1] * at / ordered[0][0]
    right = min(max(1, bisect_left(ordered, (at, 0.0))), len(ordered) - 1)
    (x0, y0), (x1, y1) = ordered[right - 1], ordered[right]
    return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), min(y0, y1))


def _at_context(rows: Sequence[AttentionTime], context_tokens: float) -> list[tuple[float, float]]:
    """Return (m, seconds) at this context length for each measured m.

    If an m was measured at one context only, its growth with the context is interpolated from other m. Time is
    proportional neither to m nor to the context, because tokens of a sequence share what they read.
    """
    points: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        points.setdefault(row.m, []).append((row.context_tokens, row.time.value))
    several = {m: found for m, found in points.items() if len(found) > 1}
    seconds: list[tuple[float, float]] = []
    for m, found in points.items():
        if len(found) > 1 or not several:
            seconds.append((m, interpolated(found, context_tokens)))
            continue
        [(alone_tokens, alone_s)] = found
        growth = [
            (other, interpolated(of, context_tokens) - interpolated(of, alone_tokens)) for other, of in several.items()
        ]
        grown_s = growth[0][1] if len(growth) == 1 else interpolated(growth, m)
        seconds.append((m, alone_s + max(0.0, grown_s)))
    return seconds


def mean_positions(m: int, context_tokens: int) -> float:
    """Return the mean number of positions that the last m tokens of a context attend to, their own included."""
    return max(context_tokens, m) - (m - 1) / 2


def _chunk_s(rows: Sequence[AttentionTime], m: int, n_positions: float) -> float:
    """Estimate the seconds of attention for a chunk of m prompt tokens.

    Args:
        rows: measured chunks; those of the most similar size are used, at several context lengths.
        n_positions: positions that a token sees on average.
    """
    by_m: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        point = mean_positions(row.m, row.context_tokens), row.time.value / row.m
        by_m.setdefault(row.m, []).append(point)
    n_contexts = min(2, max(map(len, by_m.values())))
    sizes = [size for size, found in by_m.items() if len(found) >= n_contexts]
    nearest = min(sizes, key=lambda size: _distance(size, m))
    return m * interpolated(by_m[nearest], n_positions)


def _distance(a: int, b: int) -> float:
    return max(a, b) / min(a, b)


def _shape(row: AttentionTime) -> tuple[int, int, int]:
    return row.n_heads, row.n_kv_heads, row.head_dim


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, expected 1 or more")
