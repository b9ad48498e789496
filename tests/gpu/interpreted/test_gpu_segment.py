"""A segment of layers on the GPU kernels: near the CPU's executor on the same int4 weights, exact among itself, and
right when its launches are recorded once and replayed while contexts grow."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.devices import gpu_cache
from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee.models.blocks import Block, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.arena import MAX_ROWS
from hetero_ee.ops.device_weights import DeviceWeights
from hetero_ee.ops.gpu_operations import GpuOperations, gpu_operations
from hetero_ee.ops.registry import Registry
from hetero_ee.ops.token_inputs import TokenInputs
from hetero_ee.ops.torch_ops import BatchedTorchOps, TorchOps
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.runtime.gpu import segment as gpu_segment
from hetero_ee.runtime.gpu.segment import GpuResources, GpuSegment, recorder_for
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import ModelWeights, is_quantized
from hetero_ee.weights.quantizers import quantize
from tests.families import random_model, save_checkpoint
from tests.gpu_support import DEVICE, assert_same_bits
from tests.kv_contents import read_back

INT8_ACTIVATIONS = 2e-3  # normalised squared error, as for the CPU's kernels
FAMILIES = {"llama-tied": "codebook", "qwen2-window": "rtn", "qwen3": "codebook", "opt": "int8", "phi3-partial": "rtn"}
FAMILIES |= {"gemma2": "codebook", "olmo2": "rtn", "smollm3-window": "codebook"}
FAMILIES |= {"gemma4": "codebook", "ministral3": "rtn"}
PROMPT = [1, 17, 130, 3, 99, 42, 42, 7, 12, 77, 101, 5, 64]
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
MAX_TOKENS = 160
Model = tuple[ModelSpec, ModelWeights]


def model_of(family: str, folder: Path, **changes: int) -> Model:
    """Two layers, matrices by the family's quantizer, on the CPU."""
    save_checkpoint(random_model(family, **({"num_hidden_layers": 2} | changes)), folder)
    spec, weights = read_spec(folder), ModelWeights({}, {})
    checkpoint = Checkpoint(folder, spec)
    for tensor in checkpoint.tensors():
        values = checkpoint.tensor(tensor.name)
        if is_quantized(tensor.role):
            weights.matrices[tensor.name] = quantize(values, FAMILIES.get(family, "codebook"))
        else:
            weights.vectors[tensor.name] = values
    return spec, weights


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of("llama-tied", tmp_path_factory.mktemp("llama"), **SMALL)


def operations(matmul: str) -> GpuOperations:
    """matmul: which multiplies; in the interpreter, Triton's would take a minute for every test."""
    preferred = gpu_operations(Registry(), "cuda")
    if matmul == "triton":
        return preferred
    other = gpu_operations(Registry(lambda package: package == matmul), "cuda")
    return replace(preferred, matmul_int4=other.matmul_int4, matmul_int8=other.matmul_int8, is_capturable=False)


def segment(model: Model, layers: range = range(2), ops: Any = None, recorder: Any = None, **cache: Any) -> GpuSegment:
    spec, weights = model
    sizes = {"kind": "fp16", "n_slots": 16} | cache
    held = gpu_cache(spec, MAX_TOKENS, device=torch.device(DEVICE), layers=layers, **sizes)
    resources = GpuResources(held, ops or operations("torch"), recorder)
    return GpuSegment(spec, weights, blocks_of(spec, layers), resources)


def blocks_of(spec: ModelSpec, layers: range) -> list[Block]:
    return [block for block in decoder_blocks(spec) if block.layer in layers]


def embedded(model: Model, batch: Batch) -> torch.Tensor:
    return ReferenceExecutor(*model, MAX_TOKENS).embed(batch).to(DEVICE)


def run(part: GpuSegment, model: Model, batch: Batch) -> torch.Tensor:
    return advance(part, embedded(model, batch), batch)


def advance(part: GpuSegment, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    part.cache.admit(batch)
    return part.run(hidden, batch)


def squared_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu() - expected).square().sum() / expected.square().sum())


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_a_trees_rows_have_the_bits_of_chains_and_an_accepted_path_stays(llama: Model, kind: str) -> None:
    part, (root, *tree) = segment(llama, kind=kind), (17, 3, 99, 42, 7)
    for sequence in (0, 1, 2):
        part.cache.open(sequence)
        run(part, llama, Batch.of_sequence(sequence, 0, PROMPT))
    n = len(PROMPT)
    slots, paths = (n, n + 1, n + 2, n + 1, n + 2), ((), (), (), (n + 3,), (n + 3, n + 4))
    found = run(part, llama, Batch((root, *tree), (0,) * 5, slots, paths=paths))
    first = run(part, llama, Batch.of_sequence(1, n, [root, *tree[:2]]))
    second = run(part, llama, Batch.of_sequence(2, n, [root, *tree[2:]]))
    assert_same_bits(found[:3], first)
    assert_same_bits(found[[0, 3, 4]], second)
    part.cache.keep_path(0, n, [n, n + 3, n + 4])
    assert part.cache.length(0) == n + 3
    for layer in range(2):
        pairs = zip(*(read_back(part.cache, layer, each, 0, n + 3) for each in (0, 2)), strict=True)
        for mine, theirs in pairs:
            assert_same_bits(mine, theirs)


@pytest.mark.sample(1)
def test_hidden_states_are_those_of_the_executor_but_for_int8_activations(model: Model) -> None:
    part, executor = segment(model), ReferenceExecutor(*model, MAX_TOKENS, BatchedTorchOps())
    for owner in (part, executor):
        owner.cache.open(0)
    for first, tokens in ((0, PROMPT[:5]), (5, PROMPT[5:6])):
        batch = Batch.of_sequence(0, first, tokens)
        assert squared_error(run(part, model, batch), executor.hidden(batch)) <= INT8_ACTIVATIONS
    for layer in range(2):
        both = (read_back(owner.cache, layer, 0, 0, 6) for owner in (part, executor))
        for found, expected in zip(*both, strict=True):
            assert squared_error(found, expected) <= INT8_ACTIVATIONS


@pytest.mark.sample(0)
def test_layers_that_share_keys_and_values_and_read_tokens(tmp_path: Path) -> None:
    spec, weights = model = model_of("gemma4-e", tmp_path, num_hidden_layers=6)
    cache = gpu_cache(spec, MAX_TOKENS, "fp16", torch.device(DEVICE), n_slots=4)
    blocks, host = [block for block in decoder_blocks(spec) if block.layer is not None], TorchOps()
    inputs = TokenInputs(spec, host, DeviceWeights(host, weights, decoder_blocks(spec)[:2]))
    part = GpuSegment(spec, weights, blocks, GpuResources(cache, operations("torch"), inputs=inputs))
    executor = ReferenceExecutor(*model, MAX_TOKENS, BatchedTorchOps())
    for owner in (part, executor):
        owner.cache.open(0)
    batch, rows = Batch.of_sequence(0, 0, PROMPT), []
    found = run(part, model, batch)
    assert squared_error(found, executor.hidden(batch)) <= 8 * INT8_ACTIVATIONS  # 0.012, also on the CPU's kernels
    part.cache.open(1)
    for position, token in enumerate(PROMPT):
        rows.append(run(part, model, Batch.of_sequence(1, position, [token])))
    assert_same_bits(torch.cat(rows), found)


@pytest.mark.few(2)
@pytest.mark.sample(1)
def test_a_row_has_the_same_bits_whatever_m_and_the_other_rows_are(model: Model) -> None:
    """A ragged batch of three sequences, and one row after the other."""
    prompts = [PROMPT[:2], PROMPT[:1], PROMPT[3:5]]
    together, alone = segment(model), segment(model, kind="fp16", n_slots=5)
    for part in (together, alone):
        for sequence in range(3):
            part.cache.open(sequence)
    alone.cache.close(0)
    alone.cache.open(0)  # in another slot, and so other pages
    whole = run(together, model, Batch.joined([Batch.of_sequence(s, 0, prompt) for s, prompt in enumerate(prompts)]))
    place = 0
    for sequence, prompt in enumerate(prompts):
        for position, token in enumerate(prompt):
            row = run(alone, model, Batch.of_sequence(sequence, position, [token]))
            assert_same_bits(row[0], whole[place])
            place += 1


def test_with_the_triton_matmul(tmp_path: Path) -> None:
    """Near the executor, and with the same bits at m = 1 and m = 2."""
    small = model_of("llama-tied", tmp_path, **SMALL | {"num_hidden_layers": 1})
    together, alone = (segment(small, range(1), ops=operations("triton")) for _ in range(2))
    executor = ReferenceExecutor(*small, MAX_TOKENS, BatchedTorchOps())
    for owner in (together, alone, executor):
        owner.cache.open(0)
    batch = Batch.of_sequence(0, 0, PROMPT[:2])
    whole = run(together, small, batch)
    assert squared_error(whole, executor.hidden(batch)) <= INT8_ACTIVATIONS
    for position, token in enumerate(PROMPT[:2]):
        assert_same_bits(run(alone, small, Batch.of_sequence(0, position, [token]))[0], whole[position])


@pytest.mark.sample(0)
def test_more_rows_than_a_pass_takes_run_in_turns(llama: Model) -> None:
    at_once, in_parts = segment(llama, range(1)), segment(llama, range(1))
    for part in (at_once, in_parts):
        part.cache.open(0)
    tokens = (PROMPT + PROMPT)[: MAX_ROWS + 1]
    whole = run(at_once, llama, Batch.of_sequence(0, 0, tokens))
    parts = [Batch.of_sequence(0, 0, tokens[:10]), Batch.of_sequence(0, 10, tokens[10:])]
    assert_same_bits(torch.cat([run(in_parts, llama, rows) for rows in parts]), whole)


def test_two_segments_make_the_whole(llama: Model) -> None:
    batch = Batch.of_sequence(0, 0, PROMPT[:4])
    whole, first, second = segment(llama), segment(llama, range(1)), segment(llama, range(1, 2))
    for part in (whole, first, second):
        part.cache.open(0)
    assert_same_bits(advance(second, advance(first, embedded(llama, batch), batch), batch), run(whole, llama, batch))


def test_truncating_rolls_back_exactly(llama: Model) -> None:
    part = segment(llama)
    part.cache.open(0)
    run(part, llama, Batch.of_sequence(0, 0, PROMPT[:5]))
    expected = run(part, llama, Batch.of_sequence(0, 5, [9]))
    run(part, llama, Batch.of_sequence(0, 6, [8, 7]))
    part.cache.truncate(0, 5)
    assert_same_bits(run(part, llama, Batch.of_sequence(0, 5, [9])), expected)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.sample(1)
def test_other_kinds_of_cache(llama: Model, kind: str) -> None:
    part, half = segment(llama, kind=kind), segment(llama)
    for one in (part, half):
        one.cache.open(0)
    batch = Batch.of_sequence(0, 0, PROMPT[:4])
    assert squared_error(run(part, llama, batch), run(half, llama, batch).cpu()) <= INT8_ACTIVATIONS


class Tape:
    """Records as a CUDA graph does: calls with the tensors and numbers of that moment, which a replay makes again."""

    def __init__(self, ops: GpuOperations) -> None:
        self.n_recorded, self.n_replayed = 0, 0
        self._calls: list[Callable[[], Any]] | None = None
        others = ("prepare_int4", "prepare_int8", "is_capturable")
        names = [field.name for field in fields(ops) if field.name not in others]
        self.operations = replace(ops, **{name: self._taped(getattr(ops, name)) for name in names})

    def _taped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._calls is None:
                return function(*arguments, **options)
            self._calls.append(lambda: function(*arguments, **options))
            return None

        return call

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self._calls = calls = []
        work()
        self._calls = None
        self.n_recorded += 1

        def replay() -> None:
            self.n_replayed += 1
            for call in calls:
                call()

        return replay


@pytest.mark.sample(0)
def test_what_was_recorded_once_is_right_while_contexts_grow(llama: Model) -> None:
    tape = Tape(operations("torch"))
    taped, plain = segment(llama, ops=tape.operations, recorder=tape), segment(llama)
    for part in (taped, plain):
        for sequence in range(3):
            part.cache.open(sequence)
    steps = [Batch.of_sequence(0, 0, PROMPT[:2]), Batch.of_sequence(1, 0, PROMPT[:2])]
    steps += [Batch((position, 5), (0, 1), (position, position)) for position in range(2, 4)]
    steps += [Batch.of_sequence(2, 0, [4]), Batch.of_sequence(2, 1, [4, 4, 4]), Batch.of_sequence(1, 4, [9])]
    for rows in steps:
        assert_same_bits(run(taped, llama, rows), run(plain, llama, rows))
    assert (tape.n_recorded, tape.n_replayed) == (3, len(steps) - 3)  # one recording for each of m = 1, 2 and 3


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_cuda_graphs_give_the_same_bits(llama: Model) -> None:
    ops = operations("triton")
    recorder = recorder_for(torch.device(DEVICE), ops)
    assert recorder is not None
    graphs, plain = segment(llama, ops=ops, recorder=recorder), segment(llama, ops=ops)
    for part in (graphs, plain):
        part.cache.open(0)
    for position in range(80):
        batch = Batch.of_sequence(0, position, [position])
        assert_same_bits(run(graphs, llama, batch), run(plain, llama, batch))


def test_everything_is_launched_and_recorded_inside_its_device(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    @contextmanager
    def enter(device: Any) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            assert entered == [torch.device(DEVICE)]
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(gpu_segment, "entered", enter)
    ops = operations("torch")
    tape = Tape(replace(ops, **{name: checked(getattr(ops, name)) for name in ("rms_norm", "attention", "add")}))
    part = segment(llama, ops=tape.operations, recorder=checked(tape))
    part.cache.open(0)
    for position in range(2):
        run(part, llama, Batch.of_sequence(0, position, [4]))
    assert entered == [] and tape.n_replayed == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a second GPU")
def test_a_segment_on_another_gpu_than_the_current(llama: Model) -> None:
    ops, found = operations("triton"), []
    for device in (torch.device("cuda", 0), torch.device("cuda", 1)):
        spec, weights = llama
        cache = GpuKvCache((2, spec.n_kv_heads, spec.head_dim), MAX_TOKENS, device, pool_tokens=1000, kind="fp16")
        part = GpuSegment(spec, weights, blocks_of(spec, range(2)), GpuResources(cache, ops, recorder_for(device, ops)))
        cache.open(0)
        found.append([run(part, llama, Batch.of_sequence(0, position, [position])).cpu() for position in range(3)])
    for first, second in zip(*found, strict=True):
        assert_same_bits(first, second)


def test_what_does_not_fit_is_refused_and_changes_nothing(llama: Model) -> None:
    part = segment(llama)
    part.cache.open(0)
    batch = Batch.of_sequence(0, 0, [1, 2])
    with pytest.raises(ValueError, match="hidden states are"):
        part.run(embedded(llama, batch)[:1], batch)
    with pytest.raises(ValueError, match="can't follow"):
        run(part, llama, Batch.of_sequence(0, 3, [1]))
    assert part.cache.length(0) == 0
    with pytest.raises(TypeError, match="multiply tiles"):
        from hetero_ee.weights.model_weights import expanded

        segment((llama[0], expanded(llama[1])))


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3.5", {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("nemotron-h", {"layers_block_type": ["linear_attention", "full_attention"]}),
    ],
)
def test_recurrent_layers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A recurrent layer and an attention: near the executor, and with the same bits however a prompt is cut."""
    hybrid = model_of(family, tmp_path, **changes)
    whole, cut, executor = segment(hybrid), segment(hybrid), ReferenceExecutor(*hybrid, MAX_TOKENS, BatchedTorchOps())
    for owner in (whole, cut, executor):
        owner.cache.open(0)
    batch = Batch.of_sequence(0, 0, PROMPT[:4])
    expected = run(whole, hybrid, batch)
    assert squared_error(expected, executor.hidden(batch)) <= 5 * INT8_ACTIVATIONS
    run(cut, hybrid, Batch.of_sequence(0, 0, [*PROMPT[:2], 9]))
    cut.cache.cut(0, 2)
    assert_same_bits(run(cut, hybrid, Batch.of_sequence(0, 2, PROMPT[2:4])), expected[2:])
