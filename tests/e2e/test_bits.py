"""`hetero-ee convert --bits` and `--size`: bits go where rounding costs most, within the budget, and the store runs."""

from pathlib import Path

import pytest
import torch

from hetero_ee import Engine
from hetero_ee.errors import UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.gguf.folder import gguf_folder
from hetero_ee.layers.tensors import TensorRole, TensorSpec
from hetero_ee.models.blocks import in_layout
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan
from hetero_ee.quality.bits import ERRORS, dealt_layouts, layout_bytes, rounding_costs
from hetero_ee.quality.sizes import BITS, Size, best_size, sizes
from hetero_ee.quality.stores import Rounding, make_rounded_store
from hetero_ee.quality.streamed import StreamedModel, opened
from hetero_ee.weights.quantizers import quantize
from hetero_ee.weights.store.library import make_store
from hetero_ee.weights.store.manifest import Manifest, read_manifest
from hetero_ee.weights.store.reader import open_store
from hetero_ee_profiles.reference import reference_profile
from tests.command_line import Cli, complaint
from tests.families import FAMILIES, random_model, save_checkpoint
from tests.gguf_models import write_gguf

STORY = "Once upon a time there was a little cat. It had a big red ball and a friend. They played all day.\n"
TEXTS = [[1, 17, 130, 3, 99, 42, 42, 7, 12, 77, 101, 5, 64], [5, 9, 11, 4], [11, 8] * 15]


def layer_bits(manifest: Manifest) -> float:
    mine = [each for each in manifest.entries if each.name.startswith("layers.") and each.layout != "fp32"]
    n_weights = sum(each.shape[0] * each.shape[1] for each in mine)
    return 8 * sum(each.data_bytes + each.scales_bytes for each in mine) / n_weights


def matrix(name: str, n_rows: int = 32, n_columns: int = 64) -> TensorSpec:
    return TensorSpec(name, TensorRole.MATRIX, (n_rows, n_columns))


def test_relative_errors_are_those_of_gaussian_weights() -> None:
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    for name, error in ERRORS.items():
        found = quantize(weight, "codebook" if name == "int4" else name).dequantize()
        assert float((found - weight).square().sum() / weight.square().sum()) == pytest.approx(error, rel=0.1)


def test_the_budget_is_spent_on_the_steps_that_save_most_per_byte() -> None:
    costs = {matrix("a"): 1.0, matrix("b", 64): 1.0, matrix("c"): 0.01}
    least = sum(layout_bytes(tensor, "int4") for tensor in costs)
    step = layout_bytes(matrix("a"), "int5") - layout_bytes(matrix("a"), "int4")
    assert dealt_layouts(costs, least) == dict.fromkeys("abc", "int4")
    assert dealt_layouts(costs, least + step) == {"a": "int5", "b": "int4", "c": "int4"}
    assert dealt_layouts(costs, least + 3 * step) == {"a": "int5", "b": "int5", "c": "int4"}
    assert dealt_layouts(costs, 10**6) == dict.fromkeys("abc", "int8")


@pytest.mark.sample(2)
@pytest.mark.few(6)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_costs_add_up_to_the_divergence_of_each_group(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(random_model(family), tmp_path / "model")
    spec, read = opened(folder)
    model = StreamedModel(spec, read, TEXTS, map)
    costs = rounding_costs(model, "codebook", map)
    assert costs and min(costs.values()) > 0
    alone = StreamedModel(spec, read, TEXTS, map)
    for block in alone.layer_blocks():
        alone.pass_block(block, alone.weights([block]))
    for mine, theirs in zip(model.states, alone.states, strict=True):  # the groups' runs have left the model alone
        assert torch.equal(mine, theirs)


def test_the_command_keeps_to_the_bits(cli: Cli, stories260k: Path, tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text(STORY * 15)
    ended = cli("convert", stories260k, "--bits", 5.2, "--text", text, "-o", tmp_path / "store", "-t", 1)
    assert ended.code == 0, ended.err
    manifest = read_manifest(tmp_path / "store")
    assert 5.1 < layer_bits(manifest) <= 5.2 and manifest.quantizer.startswith("codebook-5.1")
    assert len({each.layout for each in manifest.entries if each.name.startswith("layers.")}) > 2
    with Engine.from_pretrained(tmp_path / "store", profile="off", threads=1) as engine:
        assert engine.generate("Once upon", max_new_tokens=3, temperature=0).text
    again = cli("convert", stories260k, "--bits", 5.2, "--text", text, "-o", tmp_path / "store", "-t", 1)
    assert again.code == 0, again.err
    other = cli("convert", stories260k, "--bits", 6, "--text", text, "-o", tmp_path / "store", "-t", 1)
    assert other.code == 2 and "not the store of this model" in other.err


def test_a_gguf_files_codes_are_kept_where_bytes_suffice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    types = {"ffn_down": "F16", "ffn_gate": "Q8_0", "ffn_up": "Q8_0"}
    model = random_model("llama", num_hidden_layers=2, **sizes)
    write_gguf(model, tmp_path / "m.gguf", lambda name: types.get(name.split(".")[-2], "Q4_1"))
    folder = gguf_folder(tmp_path / "m.gguf", configuration_only=True)
    monkeypatch.setattr("hetero_ee.quality.stores._windows", lambda *args: TEXTS)
    for module in ("hetero_ee.quality.stores", "hetero_ee.weights.store.library"):
        monkeypatch.setattr(f"{module}.require_checkpoint", lambda folder: None)
    plain = make_store(folder, cache=tmp_path, output=tmp_path / "plain")
    own = {each.name: each for each in read_manifest(plain).entries}
    for bits, layouts in ((5.0, {"int4", "int4 zeros", "int5"}), (8.5, {"int8", "int4 zeros"})):
        rounding, target = Rounding(calibrates=False, texts=[""], bits=bits), tmp_path / f"{bits}"
        found = read_manifest(make_rounded_store(folder, rounding, cache=tmp_path, output=target))
        assert found.quantizer.startswith("gguf-") and layer_bits(found) <= bits
        mine = [each for each in found.entries if each.name.startswith("layers.") and each.layout != "fp32"]
        assert {each.layout for each in mine} & layouts == layouts
        for each in (each for each in mine if "down" not in each.name):
            assert (each.layout == own[each.name].layout) == (each.sha256 == own[each.name].sha256)
            assert each.data_bytes <= own[each.name].data_bytes
    with pytest.warns(UserWarning, match="the text is not read"):
        rounding = Rounding(calibrates=False, texts=[""], bits=4.5)
        least = read_manifest(make_rounded_store(folder, rounding, cache=tmp_path, output=tmp_path / "least"))
    assert layer_bits(least) == 4.5


def test_the_size_is_that_of_the_weights_and_calibration_goes_with_it(tiny: Path, tmp_path: Path) -> None:
    target, texts = tmp_path / "store", [STORY * 40]
    how = {"cache": tmp_path / "cache", "output": target, "threads": 1}
    with pytest.raises(UsageError, match=r"the weights need \d\.\d+ MiB or more, with 6\.07 bits"):
        make_rounded_store(tiny, Rounding(texts=texts, n_bytes=20_000), **how)
    make_rounded_store(tiny, Rounding(texts=texts, n_bytes=750_000, n_tokens=600), **how)
    manifest = read_manifest(target)
    assert manifest.weights_bytes <= 750_000 and manifest.quantizer.endswith("-calibrated")
    assert layer_bits(manifest) > 6.5
    assert open_store(target, read_spec(tiny)).n_bytes <= 750_000


def test_sizes_are_priced_by_plans_and_the_gpu_is_filled() -> None:
    spec, profile = known_spec("llama-2-7b"), reference_profile("rtx-4060-laptop-8gb")
    found = list(sizes(spec, profile))
    assert [each.bits for each in found] == list(BITS)
    assert found == sorted(found, key=lambda each: -each.tokens_per_s)
    for layout, bits in (("int4", 4.5), ("int5", 5.5), ("int6", 7.0), ("int8", 8.5)):
        made = plan(in_layout(spec, layout), profile, Limits(context_tokens=4096))
        size = next(each for each in found if each.bits == bits)
        assert size.n_bytes == sum(part.weight_bytes for part in made.parts)
        assert size.tokens_per_s == made.prediction.generated_tokens_per_s
    chosen, reason = best_size(found)
    assert chosen.is_on_gpu and not found[found.index(chosen) + 1].is_on_gpu and "whole model" in reason


def test_where_the_cpu_reads_weights_only_bits_that_cost_little_are_added() -> None:
    speeds = {4.5: 10.0, 4.6: 9.8, 4.8: 9.5, 5.0: 9.1}
    found = [Size(bits, 0, speed, is_on_gpu=False) for bits, speed in speeds.items()]
    chosen, reason = best_size(found)
    assert chosen.bits == 4.8 and "5 % of the speed" in reason


@pytest.mark.parametrize(("speed", "bits"), [(0.5, 6.1), (0.99, 8.0)])
def test_the_command_tells_sizes_and_uses_the_best(
    speed: float, bits: float, cli: Cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Size(6.1, 2**29, 10.0, is_on_gpu=False), Size(8.0, 2**30, 10.0 * speed, is_on_gpu=False)]
    monkeypatch.setattr("hetero_ee_cli.commands.profile.profile_for", lambda *args: None)
    monkeypatch.setattr("hetero_ee.quality.sizes.sizes", lambda *args: found)
    (tmp_path / "story.txt").write_text(STORY * 40)
    ended = cli("convert", tiny, "--size", "auto", "--text", tmp_path / "story.txt", "-t", 1)
    assert ended.code == 0, ended.err
    assert "tokens/s expected" in ended.err and "0.50 GiB" in ended.err and f"chose {bits} bits" in ended.err
    assert bits - 0.4 < layer_bits(read_manifest(Path(ended.out.strip()))) <= bits


def test_what_cannot_be_dealt_is_refused(cli: Cli, tiny: Path) -> None:
    assert "leave one out" in complaint(cli("convert", tiny, "--bits", 5, "--size", "6GiB"), 2)
    assert "is for --calibrate" in complaint(cli("convert", tiny, "--quality", "best"), 2)
    assert "expected a number of GiB" in complaint(cli("convert", tiny, "--size", "6 apples"), 2)
    assert "expected a number of GiB" in complaint(cli("convert", tiny, "--size", "9" * 400), 2)
    assert "the size is too small" in complaint(
        cli("convert", tiny, "--size", "0.01MiB"), 2
    )  # before texts are written
    assert "6.07 or more" in complaint(cli("convert", tiny, "--bits", 4.5), 2)
    unmeasured = complaint(cli("convert", tiny, "--size", "auto", "--text", "/none"), 2)  # before sizes are shown
    assert "the text from /none can't be read" in unmeasured and "Measuring" not in unmeasured
    assert "leave out --quantizer" in complaint(cli("convert", tiny, "--bits", 5, "--quantizer", "int6"), 2)
    assert cli("convert", tiny, "--bits", 3).code == 2
