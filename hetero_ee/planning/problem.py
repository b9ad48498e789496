"""Problem: the planner's inputs, with the user's limits as numbers and the cost of every possible placement."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.errors import UsageError, shown
from hetero_ee.layers.moe import MoeSpec
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.models.context_limit import check_context
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import PLAN_OPTIONS, RUN_OPTIONS
from hetero_ee.planning.chain import Option, PartOptions
from hetero_ee.planning.limits import OVERRIDE, Limits
from hetero_ee.planning.llama_overrides import Overrides, translated
from hetero_ee.planning.parts import Part, model_parts, parts_by_state
from hetero_ee.planning.placement import SPLITS, Placement
from hetero_ee.planning.statistics import DepthStatistics, Statistics
from hetero_ee.planning.times.costs import Costs
from hetero_ee.planning.times.early_exits import Passes
from hetero_ee.planning.times.memory import WorkingSizes, part_gpu_bytes
from hetero_ee.planning.times.threads import fastest_threads
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.units import GIB

NO_EXPERTS = SPLITS[0]  # a mixture's router and shared expert are on the GPU, its experts on the CPU


@dataclass(frozen=True, slots=True)
class Problem:
    """The planner's inputs: model, machine, limits and statistics."""

    spec: ModelSpec
    costs: Costs
    limits: Limits
    statistics: Statistics
    parts: tuple[Part, ...]
    sizes: WorkingSizes
    kv_type: str  # of the keys and values among their bytes
    context_tokens: int  # prompt and text together; the longest possible one if the limits set none
    vram_budget_bytes: int
    ram_budget_bytes: int
    overrides: Overrides  # those of the limits

    @property
    def has_gpu(self) -> bool:
        return self.vram_budget_bytes > 0

    @property
    def layers(self) -> list[Part]:
        """Parts that belong to layers, without the embedding and the head."""
        return [part for part in self.parts if part.layer is not None]

    @property
    def head(self) -> Part:
        return self.parts[-1]

    @property
    def depths(self) -> list[DepthStatistics]:
        """Statistics of the requested early-exit mode; empty in other modes."""
        return [each for each in self.statistics.depths if each.mode == self.limits.mode]

    def kv_bytes(self, part: Part) -> int:
        """Return the bytes of the part's KV cache or other state, of all sequences."""
        return part.kv_bytes(self.context_tokens, self.limits.n_sequences)

    def layer_options(self, context_tokens: int, passes: Passes | None = None) -> list[PartOptions]:
        """Return each layer part's possible placements, with the seconds per token and the VRAM of each.

        A streamed part needs the longer of copying and computing, since copies run ahead.

        Args:
            passes: how often early-exit tokens pass each layer; None if each token passes each layer once.
        """
        known: dict[object, PartOptions] = {}  # the same for parts of one shape
        found = []
        for part in self.layers:
            assert part.layer is not None, "a part of a layer"
            pinned, batches = self.pinned(part), (1.0,) if passes is None else passes.behind(part.layer)
            key = part.shape, pinned, batches, part.name in self.overrides.cpu_experts
            if key not in known:
                known[key] = self._options(part, pinned, batches, context_tokens)
            found.append(known[key])
        return found

    def _options(
        self, part: Part, pinned: Placement | None, batches: Sequence[float], context_tokens: int
    ) -> PartOptions:
        """Return one part's possible placements. batches[m - 1] is a token's average number of passes of m tokens."""
        found: dict[Placement, Option] = {}
        for placement in self._allowed(part, pinned):
            least_s = 0.0
            if placement == Placement.STREAM:
                least_s = self.costs.copy_s(part, beside_cpu=True)  # as if the CPU computed other layers
            seconds = sum(
                n_passes * max(least_s, self.costs.part_s(part, placement, m, context_tokens))
                for m, n_passes in enumerate(batches, 1)
            )
            n_bytes = part_gpu_bytes(part, placement, self.kv_bytes(part))
            found[placement] = Option(seconds, n_bytes, on_gpu=placement.on_gpu)
        if not found:
            raise UsageError(
                f"{part.name} is pinned to {pinned}, and this machine or budget has no GPU; drop that pin."
            )
        return found

    def _allowed(self, part: Part, pinned: Placement | None) -> list[Placement]:
        """Return the part's possible placements. Splits of neurons need a pin or statistics of their use."""
        found = [Placement.CPU]
        if self.has_gpu:
            found = [Placement.GPU, Placement.STREAM, Placement.CPU]
            if part.has_experts or self.spec.hot_curve or (pinned is not None and pinned.is_split):
                found += part.splits(every=pinned is not None)
        if part.name in self.overrides.cpu_experts:
            found = [placement for placement in found if placement in (Placement.CPU, NO_EXPERTS)]
        return [placement for placement in found if pinned in (None, placement)]

    def pinned(self, part: Part) -> Placement | None:
        """Return the placement that the user requires for the part, None if the planner decides."""
        pinned = self.overrides.pinned(part.name)
        if pinned is not None:
            return Placement(pinned)
        if self.limits.gpu_layers is not None and part.layer is not None:
            assert part.state_layer is not None, "a part of a layer"
            is_first = part.state_layer < self.limits.gpu_layers
            on_gpu = NO_EXPERTS if part.name in self.overrides.cpu_experts else Placement.GPU
            return on_gpu if is_first else Placement.CPU
        return None


def resolve(spec: ModelSpec, profile: HardwareProfile, limits: Limits, known: Statistics) -> Problem:
    """Check the planner's inputs and turn them into a Problem.

    Raises:
        UsageError: if the model or the machine can't meet a request.
    """
    _check_statistics(known, spec)
    if profile.gpu is None:  # its layers are the CPU's, as in llama.cpp
        limits = replace(limits, gpu_layers=None)
    check_experts(limits, spec)
    if limits.mode == "exact" and known.exits is None and known.drafts is None:
        raise UsageError(
            "exact mode needs a model whose drafts were measured; run hetero-ee calibrate, give a ",
            RUN_OPTIONS["draft_head"],
            " or ",
            RUN_OPTIONS["draft_model"],
            ", or drop mode exact.",
        )
    context = limits.context_tokens or spec.max_context_tokens
    check_context(spec, context)
    kv_type = limits.kv_type or KV_TYPE
    parts = tuple(model_parts(spec, kv_type))
    found = Problem(
        spec=spec,
        costs=Costs(spec, profile, limits.threads or fastest_threads(spec, profile)),
        limits=limits,
        statistics=known,
        parts=parts,
        sizes=WorkingSizes.of(spec),
        kv_type=kv_type,
        context_tokens=context,
        vram_budget_bytes=_vram_budget(profile, limits),
        ram_budget_bytes=_ram_budget(profile, limits),
        overrides=_checked_overrides(limits, parts),
    )
    _check_shared_state(found)
    return found


def _check_statistics(known: Statistics, spec: ModelSpec) -> None:
    """Check that the exit and depth statistics fit the model's number of layers."""
    for each in known.depths:
        if each.exit_layers[-1] >= spec.n_layers:
            raise UsageError(
                f"the depth statistics of mode {each.mode} know an exit after layer {each.exit_layers[-1]}, this model "
                f"has {spec.n_layers}; calibrate this model."
            )
    if known.exits is not None and known.exits.n_layers != spec.n_layers:
        raise UsageError(
            f"the exit statistics are of a model with {known.exits.n_layers} layers, this one has {spec.n_layers}; "
            "calibrate this model."
        )


def _vram_budget(profile: HardwareProfile, limits: Limits) -> int:
    if profile.gpu is None:
        if limits.vram_budget_bytes:
            option = PLAN_OPTIONS["vram_budget"]
            raise UsageError(f"{profile.name} has no GPU; drop ", option, ", or plan for another machine.")
        return 0
    if limits.gpu_layers == 0:
        return 0
    if limits.vram_budget_bytes is None:
        return _readable(max(0, profile.gpu.free_bytes - limits.vram_margin_bytes))
    return _within("VRAM", limits.vram_budget_bytes, profile.gpu.free_bytes, "that are free")


def _ram_budget(profile: HardwareProfile, limits: Limits) -> int:
    if limits.ram_budget_bytes is None:
        return _readable(profile.cpu[-1].free_bytes)
    return _within("RAM", limits.ram_budget_bytes, profile.machine.ram_bytes, "there are")


def _within(memory: str, asked_bytes: int, most_bytes: int, which: str) -> int:
    """Return the requested budget. Raises: UsageError: if it exceeds `most_bytes`."""
    if asked_bytes > most_bytes:
        asked, most = asked_bytes / GIB, most_bytes / GIB
        sentence = f"a {memory} budget of {asked:.2f} GiB is more than the {most:.2f} GiB {which}; lower "
        raise UsageError(sentence, PLAN_OPTIONS[f"{memory.lower()}_budget"], ".")
    return asked_bytes


def _readable(n_bytes: int) -> int:
    """Round a budget of 1 GiB or more down to hundredths of a GiB, so that its printed value is exact."""
    if n_bytes < GIB:
        return n_bytes
    hundredths = (n_bytes + 1) * 100 // GIB
    return min(n_bytes, int(hundredths / 100 * GIB))


def check_experts(limits: Limits, spec: ModelSpec) -> None:
    """Check that a model whose experts shall stay in RAM has experts. Raises: UsageError: if it has none."""
    has_experts = any(isinstance(block.mixer, MoeSpec) for block in decoder_blocks(spec))
    if limits.n_cpu_moe is not None and not has_experts:
        raise UsageError(PLAN_OPTIONS["n_cpu_moe"], " keeps experts in RAM, and this model has none; leave it out.")


def _checked_overrides(limits: Limits, parts: Sequence[Part]) -> Overrides:
    """Return the overrides by names of parts. Check that each matches a part that can have that placement."""
    overrides = translated(limits.overrides, limits.n_cpu_moe, parts)
    for pattern, placement in overrides.pins:
        names = [part.name for part in parts if re.fullmatch(pattern, part.name)]
        if not names:
            raise UsageError(
                OVERRIDE,
                f" {shown(pattern)} matches no part; there are layers.0.attention, layers.0.ffn, ... and head.",
            )
        outer = next((name for name in ("embedding", "head") if name in names), None)
        if placement in SPLITS:
            _check_split(pattern, placement, [part for part in parts if part.name in names])
        if placement == "stream" and outer is not None:
            raise UsageError(f"the {outer} can't be streamed; pin it to gpu or cpu, or let the override leave it out.")
    return overrides


def _check_shared_state(problem: Problem) -> None:
    """Check that layers that read the same keys and values are not pinned to different devices."""
    for indices in parts_by_state(problem.layers):
        pins = {problem.layers[index].name: problem.pinned(problem.layers[index]) for index in indices}
        pinned = {name: placement for name, placement in pins.items() if placement is not None}
        if len({placement.on_gpu for placement in pinned.values()}) > 1:
            first, *_, last = pinned
            raise UsageError(
                f"{first} and {last} read the same keys and values, so they can't be on different devices; drop an ",
                OVERRIDE,
                " of one of them.",
            )


def _check_split(pattern: str, placement: str, parts: Sequence[Part]) -> None:
    asked = f" {shown(f'{pattern}={placement}')} divides"
    for part in parts:
        units, known = part.cost.units, part.splits(every=True)
        if units is None:
            raise UsageError(
                OVERRIDE,
                f"{asked} {part.name}, which has no experts and is not a sparse FFN; let it name only parts that do.",
            )
        if placement not in known:
            most = f"at most {known[-1]} does" if known else "which is too small; leave it out"
            kind = "experts" if part.has_experts else "neurons"
            raise UsageError(OVERRIDE, f"{asked} the {units.n_units:,} {kind} of {part.name}, {most}.")
