"""EAGLE-3 heads of every dialect: what they compute against the formulas written once more, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_ee.errors import CheckpointError, HeteroError
from hetero_ee.models import draft_head
from hetero_ee.planning.placement import Placement
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_costs import HeadCosts
from hetero_ee.speculation.sources.draft_head_file import DraftHeadFacts, draft_head_facts, read_draft_head
from hetero_ee.speculation.sources.draft_head_opening import draft_vocabulary
from hetero_ee.speculation.sources.eagle3 import HEAD_ROWS, LAYER_IDS, default_layers
from hetero_ee_profiles.reference import reference_profile
from tests.draft_heads import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MODEL, VOCAB, BareTarget, draft_head_layer
from tests.draft_sources import taken_ids
from tests.eagle3_heads import DIALECTS, Dialect, draft_ids, eagle3_tensors, save_eagle3
from tests.emulation import LAPTOP

N_TOKENS, N_DRAFTS, EPS = 9, 4, 1e-5


def text_of(dialect: Dialect, n_tokens: int = N_TOKENS) -> tuple[list[int], Tensor, list[Tensor]]:
    """Tokens, their final states, which no such head looks at, and those captured."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCAB, (n_tokens,), generator=generator).tolist()
    states = torch.randn(1 + len(dialect.captured), n_tokens, HIDDEN, generator=generator)
    return tokens, states[0], [5 * each for each in states[1:]]


def source_of(folder: Path, target: Any) -> DraftHeadSource:
    head = read_draft_head(folder, MODEL)
    rows = head.weights.matrices.get(HEAD_ROWS)
    layer = draft_head_layer(head, max_tokens=64)
    vocabulary = None if head.draft_token_ids is None else draft_vocabulary(target, head.draft_token_ids, rows)
    return DraftHeadSource(lambda: layer, target, vocabulary)


def normed(x: Tensor, scale: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], scale, EPS)


def outputs(
    tensors: dict[str, Tensor], dialect: Dialect, embedded: Tensor, state: Tensor, *, norms_residual: bool
) -> Tensor:
    """The layer over a whole text, written down once more: (n, hidden), before the last norm."""
    w = {name.removeprefix("layers.0.").removesuffix(".weight"): values for name, values in tensors.items()}
    inner = normed(state, w["hidden_norm"])
    x = torch.cat([normed(embedded, w["input_layernorm"]), inner], -1)
    queries, keys, values = (
        F.linear(x, w[f"self_attn.{part}_proj"]).view(len(x), n, HEAD_DIM).transpose(0, 1)
        for part, n in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turned = []
    for part in (queries, keys):
        numbers = torch.complex(*part.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        turned.append(torch.cat([numbers.real, numbers.imag], -1))
    mixed = F.scaled_dot_product_attention(
        turned[0][None], turned[1][None], values[None], is_causal=True, enable_gqa=True
    )
    h = (inner if norms_residual else state) + F.linear(mixed[0].transpose(0, 1).flatten(1), w["self_attn.o_proj"])
    fed = normed(h, w["post_attention_layernorm"])
    gate, up = F.linear(fed, w["mlp.gate_proj"]), F.linear(fed, w["mlp.up_proj"])
    return h + F.linear(F.silu(gate) * up, w["mlp.down_proj"])


def expected_drafts(dialect: Dialect, target: BareTarget, newest: int) -> list[int]:
    tensors, (tokens, _, captured) = eagle3_tensors(dialect), text_of(dialect)
    flags = dialect.flags
    if flags.get("fc_norm"):
        captured = [normed(each, tensors[f"fc_norm.{number}.weight"]) for number, each in enumerate(captured)]
    seen = torch.cat(captured, -1)
    if flags.get("norm_before_fc"):
        seen = normed(seen, tensors["input_norm.weight"])
    state, following, found = (
        F.linear(seen, tensors["fc.weight"], tensors.get("fc.bias")),
        [*tokens[1:], newest],
        list[int](),
    )
    table = tensors.get("embed_tokens.weight", target.embedding)
    rows = tensors.get("lm_head.weight", target.head)
    ids = draft_ids(dialect.n_draft_tokens) if "d2t" in tensors else torch.arange(VOCAB)
    for _ in range(N_DRAFTS):
        norms_residual = flags.get("norm_before_residual", False)
        last = outputs(tensors, dialect, table[following], state, norms_residual=norms_residual)[-1:]
        last_normed = normed(last, tensors["norm.weight"])
        found.append(int(ids[int((last_normed @ rows.T).argmax())]))
        following.append(found[-1])
        state = torch.cat([state, last_normed if flags.get("norm_output") else last])
    return found


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("is_prompt", [False, True])
def test_every_dialect_drafts_what_the_formulas_say(tmp_path: Path, name: str, is_prompt: bool) -> None:
    dialect, target = DIALECTS[name], BareTarget()
    source = source_of(save_eagle3(tmp_path, dialect), target)
    tokens, final, captured = text_of(dialect)
    half = N_TOKENS // 2
    observe = source.read_prompt if is_prompt else source.observe
    observe(0, 0, tokens[:half], final[:half], *(each[:half] for each in captured))
    source.observe(0, half, tokens[half:], final[half:], *(each[half:] for each in captured))
    assert taken_ids(source, [*tokens, 5], N_DRAFTS) == expected_drafts(dialect, target, 5)


@pytest.mark.parametrize("name", DIALECTS)
def test_what_a_config_says_is_known_without_the_weights(tmp_path: Path, name: str) -> None:
    dialect = DIALECTS[name]
    facts = draft_head_facts(save_eagle3(tmp_path, dialect), MODEL)
    assert facts.dialect.captured == dialect.captured
    assert facts.n_draft_tokens == dialect.n_draft_tokens and facts.has_rows == dialect.has_head
    assert facts.has_embedding == ("embed_tokens.weight" in dialect.more)


def test_rows_of_a_vocabulary_out_of_order_are_sorted(tmp_path: Path) -> None:
    dialect = DIALECTS["SafeAILab"]
    tensors, ids = eagle3_tensors(dialect), draft_ids(dialect.n_draft_tokens)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    mixed = tensors | {"lm_head.weight": tensors["lm_head.weight"][order], "d2t": ids[order] - torch.arange(len(ids))}
    head = read_draft_head(save_eagle3(tmp_path, dialect, mixed), MODEL)
    assert head.draft_token_ids is not None and torch.equal(head.draft_token_ids, ids)
    assert torch.equal(head.weights.matrices[HEAD_ROWS].dequantize(), tensors["lm_head.weight"])


def test_layers_where_a_config_names_none() -> None:
    assert default_layers(32) == (2, 16, 29) and default_layers(36) == (2, 18, 33)
    assert default_layers(3) == (0, 1, 2) and default_layers(1) == (0,)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("SafeAILab", {"draft_vocab_size": VOCAB + 1}, "draft_vocab_size is 62"),
        ("SafeAILab", {"draft_vocab_size": "many"}, "draft_vocab_size is 'many'"),
        ("SafeAILab", {"target_hidden_size": 96}, "is for hidden size 96 and 61 tokens, this model has 48 and 61"),
        ("AngelSlim", {"hidden_size": 96, "num_attention_heads": 12}, "is for hidden size 96"),
        ("AngelSlim", {LAYER_IDS: [0, 1, 3]}, "expected an ascending list"),
        ("AngelSlim", {LAYER_IDS: [1, 0]}, "expected an ascending list"),
        ("AngelSlim", {LAYER_IDS: "0,1"}, "expected an ascending list"),
        ("AngelSlim", {LAYER_IDS: []}, "expected an ascending list"),
        ("AngelSlim", {LAYER_IDS: [0, True]}, "expected an ascending list"),
        ("SpecForge", {"eagle_config": {LAYER_IDS: [1, 2]}}, "expected an ascending list"),
        ("SpecForge", {"eagle_config": 3}, "eagle_config is 3"),
        ("speculators", {"transformer_layer_config": None}, "transformer_layer_config is None"),
        ("speculators", {"norm_before_residual": "yes"}, "norm_before_residual is 'yes'"),
        ("EAGLE-3.1", {"norm_before_fc": True}, "both true"),
    ],
)
def test_configs_that_make_no_sense_are_refused(tmp_path: Path, name: str, changes: dict[str, Any], words: str) -> None:
    folder = save_eagle3(tmp_path, DIALECTS[name], **changes)
    for read in (read_draft_head, draft_head_facts):
        with pytest.raises(HeteroError, match=words) as caught:
            read(folder, MODEL)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def _set(name: str, values: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: values})


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("SafeAILab", lambda tensors: tensors.pop("d2t"), "lacks tensor d2t"),
        ("SafeAILab", lambda tensors: tensors.pop("lm_head.weight"), "lacks tensor lm_head.weight"),
        ("SafeAILab", _set("d2t", torch.full((20,), VOCAB)), "names tokens from 61"),
        ("SafeAILab", _set("d2t", -torch.arange(20)), "some of them twice"),
        ("SafeAILab", _set("d2t", torch.zeros(20)), "type F32"),
        ("SafeAILab", _set("fc.weight", torch.zeros(HIDDEN, 2 * HIDDEN)), r"\[48, 96\]"),
        ("SafeAILab", _set("layers.0.self_attn.q_proj.weight", torch.zeros(48, 48)), r"\[48, 48\]"),
        ("SafeAILab", _set("norm.weight", torch.full((HIDDEN,), float("nan"))), "no numbers"),
        ("SafeAILab", _set("model.norm.weight", torch.ones(HIDDEN)), "under two names"),
        ("SafeAILab", _set("fc.bias", torch.ones(7)), "fc.bias"),
        ("speculators", lambda tensors: tensors.pop("input_norm.weight"), "lacks tensor input_norm"),
        ("EAGLE-3.1", lambda tensors: tensors.pop("fc_norm.1.weight"), "lacks tensor fc_norm.1"),
        ("EAGLE-3.1", _set("layers.1.mlp.up_proj.weight", torch.ones(2, 2)), "layers.1.mlp"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, name: str, change: Any, words: str) -> None:
    dialect = DIALECTS[name]
    tensors = eagle3_tensors(dialect)
    change(tensors)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_draft_head(save_eagle3(tmp_path, dialect, tensors), MODEL)
    assert str(caught.value).isprintable()


def test_a_config_of_eagle_1_beside_weights_of_eagle_3(tmp_path: Path) -> None:
    folder = save_eagle3(tmp_path, Dialect({"architectures": ["LlamaForCausalLM"]}, n_draft_tokens=VOCAB))
    with pytest.raises(HeteroError, match=r"holds an EAGLE-3 head, and its config\.json has no draft_vocab_size"):
        read_draft_head(folder, MODEL)


def test_states_that_were_not_captured(tmp_path: Path) -> None:
    dialect = DIALECTS["SafeAILab"]
    source = source_of(save_eagle3(tmp_path, dialect), BareTarget())
    tokens, final, captured = text_of(dialect)
    with pytest.raises(ValueError, match="1 states were captured for a head that sees 3"):
        source.observe(0, 0, tokens, final, captured[0])


def test_the_planner_charges_fc_and_what_crosses() -> None:
    """Of a model of 32 layers with the first 20 on the GPU: of the states before layers 2, 16 and 29 the last is far
    from a head on the GPU, the others from one on the CPU; both ways they cross together."""
    model = replace(MODEL, n_layers=32, sliding_windows=(None,) * 32)
    spec, profile = replace(MODEL, n_layers=1, sliding_windows=(None,)), reference_profile(LAPTOP)
    facts = DraftHeadFacts(spec, VOCAB, False, (0.8,), draft_head.Dialect(default_layers(32), has_norms=True))
    costs = HeadCosts(facts, model, profile, 1)
    split = [Placement(each) for each in ("cpu", *["gpu"] * 40, *["cpu"] * 24, "gpu")]
    rates, link = costs.rates("a head"), profile.link
    assert rates.by_gpu is not None and link is not None
    for m in (1, 4):
        for on_gpu, drafts, n_far in ((True, rates.by_gpu, 1), (False, rates, 2)):
            near = [Placement("gpu" if on_gpu else "cpu")] * len(split)
            fc_s = drafts.after_verification_s(near, m)
            more_bytes = (n_far * m - 1) * 4 * HIDDEN
            crossing_s = link.transfer.value + more_bytes / link.to_cpu_bytes_per_s.value
            assert fc_s > 0
            assert drafts.after_verification_s(split, m) == pytest.approx(fc_s + crossing_s), (m, on_gpu)
    eagle1 = HeadCosts(replace(facts, dialect=draft_head.EAGLE_1), model, profile, 1)
    assert eagle1.rates("a head").after_verification_s(split, 4) == 0.0
    for on_gpu in (True, False):  # fc and qkv are wider, beside which EAGLE-1 has nothing
        assert costs.memory_bytes(512, on_gpu=on_gpu) > eagle1.memory_bytes(512, on_gpu=on_gpu)
    assert costs.reading_s(64, 64, on_gpu=False) > eagle1.reading_s(64, 64, on_gpu=False)
