"""Models whose shapes are known by name."""

import pytest

from hetero_ee import UsageError
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.models.known_shapes import PARAMETERS, known_shapes, known_spec, similar_names


@pytest.mark.parametrize("name", known_shapes())
def test_a_shape_has_the_parameters_of_the_published_model(name: str) -> None:
    n_parameters = sum(tensor.n_elements for tensor in all_tensors(decoder_blocks(known_spec(name))))
    assert n_parameters == known_shapes()[name][PARAMETERS]


def test_the_models_that_people_ask_about_are_known() -> None:
    families = {
        "llama-3.1",
        "llama-3.2",
        "qwen2.5",
        "qwen3",
        "mistral",
        "gemma-3",
        "phi-4",
        "olmo",
        "smollm2",
        "smollm3",
    }
    assert len(known_shapes()) >= 16
    assert all(any(name.startswith(family) for name in known_shapes()) for family in families)
    assert {256, 128, 64} <= {known_spec(name).head_dim for name in known_shapes()}
    windows = known_spec("gemma-3-1b").sliding_windows
    assert windows.count(512) == 22 and windows.count(None) == 4


def test_an_unknown_name_lists_them() -> None:
    with pytest.raises(UsageError) as refused:
        known_spec("gpt-9")
    assert "'gpt-9' is not a model with known shapes" in str(refused.value)
    assert all(name in str(refused.value) for name in known_shapes())


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("gpt-oss:20b", ["gpt-oss-20b"]),
        ("GPT-OSS", ["gpt-oss-20b", "gpt-oss-120b"]),
        ("llama3.2", ["llama-3.2-1b", "llama-3.2-3b"]),
        ("Qwen3.6-35B-A3B", ["qwen3.6-35b-a3b"]),
        ("unheard-of", list(known_shapes())),
    ],
)
def test_names_of_other_programs_find_similar_ones(name: str, names: list[str]) -> None:
    assert similar_names(name) == names
