"""Every specialization of every GPU kernel that the product launches, for compiling it without a GPU."""

from collections.abc import Iterator
from typing import Any

from hetero_ee_kernels import (
    activate,
    attention,
    draft,
    embed,
    expert_pairs,
    experts,
    gated_delta,
    kv_write,
    masked_linear,
    matmul,
    noise,
    norm,
    quantize,
    route,
    row_products,
    short_conv,
    sliced_head,
    sparse_ffn,
)
from hetero_ee_kernels.delta_state import DeltaShape
from hetero_ee_kernels.pages import PAGE_TOKENS, PART_TOKENS
from hetero_ee_kernels.tile_group import SLOTS
from hetero_ee_kernels.tile_matrix import BYTES, CODEBOOK, FIVE, FIVE_ZEROS, GCN, LINEAR, PLAIN, PTX, SIX, ZEROS
from tests.gpu_compilation import Compilation

VOCABULARY_KINDS = ((LINEAR, "linear"), (CODEBOOK, "codebook"), (BYTES, "int8"))
KINDS = (*VOCABULARY_KINDS, (ZEROS, "zeros"))
WIDE_KINDS = ((FIVE, "int5"), (FIVE_ZEROS, "int5_zeros"), (SIX, "int6"))
TERMS = {1: "", 2: "_2_terms"}  # of activations, in a name
MATRIX = {"words_ptr": "*i32", "scales_ptr": "*i32", "table_ptr": "*i32"}  # in rows
LISTS = {"neurons_ptr": "*i32", "counts_ptr": "*i32"}
PRODUCTS = MATRIX | LISTS | {"codes_ptr": "*i32", "code_scales_ptr": "*fp32", "factor": "fp32"}
PRODUCTS |= dict.fromkeys(("n_neurons", "n_units", "n_quads", "n_blocks", "one"), "i32")
MATMUL = {"words_ptr": "*i32", "scales_ptr": "*fp16", "table_ptr": "*i32", "codes_ptr": "*i32"}
MATMUL |= {"code_scales_ptr": "*fp32", "out_ptr": "*fp32", "factor": "fp32"}
MATMUL |= dict.fromkeys(("m", "n_rows", "n_groups", "n_experts", "one"), "i32")
QUANTIZE = {"codes_ptr": "*i8", "scales_ptr": "*fp32", "n_columns": "i32", "n_groups": "i32"}
PRODUCTS_SIZE = {"NEURONS": row_products.NEURONS, "UNROLLED": row_products.UNROLLED}


def every_compilation() -> Iterator[Compilation]:
    """Of all files, in alphabetical order."""
    first = (_activate, _attention, _draft, _embed, _experts, _gated_delta, _kv_write, _masked_linear)
    for listed in (*first, _matmul, _norm, _quantize, _route, _short_conv, _sliced_head, _sparse_ffn):
        yield from listed()


def _activate() -> list[Compilation]:
    """Every kind, of 11008 outputs."""
    arguments = {"x_ptr": "*fp32", "out_ptr": "*fp32", "threshold": "fp32"}
    return [
        Compilation(
            f"activate_{kind}",
            activate.activate_kernel,
            arguments,
            {"F": 11008, "KIND": kind, "GATED": gated, "BLOCK": activate.BLOCK},
            activate.N_WARPS,
            is_memory_bound=True,
        )
        for kind, gated in (
            ("silu", True),
            ("gelu", True),
            ("gelu_tanh", True),
            ("relu", False),
            ("fatrelu", True),
            ("softcap", False),
            ("clamped_silu", True),
        )
    ]


def _attention() -> list[Compilation]:
    """Heads of 128 in groups of 1 to 8 over 4096 positions: a part a program, and whole rows. Latent heads of 576."""
    pointers = {"queries_ptr": "*fp32", "table_ptr": "*i32", "slots_ptr": "*i32", "positions_ptr": "*i32"}
    pointers |= {"out_ptr": "*fp32", "factor": "fp32", "cap": "fp32", "layer": "i32", "m": "i32"}
    common = {"WINDOW": 0, "N_PARTS": 16, "PART": PART_TOKENS}
    layout = {"N_LAYERS": 16, "N_KV_HEADS": 8, "FEATURES": 6144, "FIRST": 0, "PAGES_PER_SLOT": 64, "PAGE": PAGE_TOKENS}
    records = []
    types = {"fp32": "*fp32", "fp16": "*fp16", "int8": "*i8"}
    cases = [("fp16", group, whole, "", PTX) for whole in (False, True) for group in (1, 2, 4, 8)]
    cases += [("fp16", 2, whole, "_capped", PTX) for whole in (False, True)]
    cases += [("int8", 1, whole, "", PTX) for whole in (False, True)]
    cases += [("fp16", 8, True, "_sinks", PTX), ("fp16", 4, False, "_tree", PTX)]
    cases += [(kind, 1, whole, "", PLAIN) for kind in types for whole in (False, True)]
    cases += [("fp16", group, False, "", PLAIN) for group in (2, 4)]
    cases += [("fp16", 20, whole, "_latent", PTX) for whole in (False, True)]
    cases += [("int8", 20, True, "_latent", PTX), ("fp32", 20, True, "_latent", PLAIN)]
    for kind, group, whole, more, isa in cases:
        signature = pointers | {"codes_ptr": types[kind]}
        sizes = (576, isa == PTX, 512) if more == "_latent" else (128, isa == PTX)
        constants = layout | common | attention._sizes(group, *sizes) | {"N_STORED": 2}
        constants |= {"N_STORED": 1, "N_KV_HEADS": 1, "FEATURES": 12096} if more == "_latent" else {}
        optional: dict[str, Any] = {
            "scales_ptr": kind == "int8",
            "states_ptr": not whole,
            "sinks_ptr": more == "_sinks",
        }
        signature |= {name: "*fp32" for name, is_there in optional.items() if is_there}
        constants |= {name: None for name, is_there in optional.items() if not is_there}
        constants |= {"PATH_NUMBERS": 17 if more == "_tree" else 0}
        (signature if more == "_tree" else constants)["paths_ptr"] = "*i32" if more == "_tree" else None
        constants |= {"IS_CAPPED": more == "_capped"}
        name = f"attention_{kind}_group_{group}{'_whole' if whole else ''}{more}{'' if isa == PTX else '_lanes'}"
        records.append(
            Compilation(
                name,
                attention.attention_kernel,
                signature,
                constants,
                attention._n_warps(constants),
                True,
                isa,
                None if kind == "fp32" else isa == PTX,
            )
        )
    arguments = {"sums_ptr": "*fp32", "states_ptr": "*fp32", "positions_ptr": "*i32", "out_ptr": "*fp32"}
    shape = common | {"N_HEADS": 32, "VALUE_DIM": 128, "DIM_BLOCK": 128, "sinks_ptr": None}
    records.append(
        Compilation(
            "attention_combine",
            attention.combine_kernel,
            arguments,
            shape,
            attention.COMBINE_WARPS,
            is_memory_bound=True,
        )
    )
    return records


def _draft() -> list[Compilation]:
    """Both launches for a vocabulary of 128,000: with a network of 64 hidden units, and without, of chosen tokens."""
    shared = {"logits_ptr": "*fp32", "best_ptr": "*i64", "sums_ptr": "*fp32", "n": "i32"}
    pieces, rows = shared | {"noise_ptr": "*i32"}, shared | {"out_ptr": "*i32", "n_pieces": "i32"}
    network = dict.fromkeys(("first_ptr", "first_bias_ptr", "second_ptr", "second_bias_ptr"), "*fp32")
    size = {"N_WORDS": noise.N_WORDS, "PIECE": draft.PIECE}
    some, every, sizes = {"ids_ptr": "*i32"}, {"ids_ptr": None}, draft._sizes(250, 64)
    none = dict.fromkeys(network)
    n_warps, row_warps = draft.N_WARPS, draft.ROW_WARPS
    return [
        Compilation("draft_pieces", draft.pieces_kernel, pieces, every | size, n_warps, isa=PTX),
        Compilation("draft_pieces_of_ids", draft.pieces_kernel, pieces | some, size, n_warps, isa=PTX),
        Compilation("draft_pieces_of_ids_amd", draft.pieces_kernel, pieces | some, size, n_warps, isa=GCN),
        Compilation("draft_rows", draft.rows_kernel, rows | network, every | sizes, row_warps),
        Compilation("draft_rows_of_ids", draft.rows_kernel, rows | some, none | sizes, row_warps),
    ]


def _embed() -> list[Compilation]:
    """Rows of 4096 from int8 and int4 tiles, and with learned positions."""
    arguments = {
        "tiles_ptr": "*i8",
        "scales_ptr": "*fp16",
        "codebook_ptr": "*i8",
        "ids_ptr": "*i32",
        "out_ptr": "*fp32",
    }
    arguments |= {"positions_ptr": "*i32", "factor": "fp32", "n_columns": "i32", "n_groups": "i32"}
    size = {"OFFSET": 2, "BLOCK": embed.BLOCK}
    int8, int4, learned = size | {"IS_INT8": True}, size | {"IS_INT8": False}, {"learned_ptr": "*fp32"}
    return [
        Compilation("embed_int8", embed.embed_kernel, arguments, int8 | {"learned_ptr": None}, embed.N_WARPS),
        Compilation(
            "embed_int4",
            embed.embed_kernel,
            arguments | {"tiles_ptr": "*u8"},
            int4 | {"learned_ptr": None},
            embed.N_WARPS,
        ),
        Compilation("embed_int8_learned", embed.embed_kernel, arguments | learned, int8, embed.N_WARPS),
    ]


def _experts() -> list[Compilation]:
    """The product of pairs with 4-bit tiles, of a decode pass and of prompts; and the sum for 8 experts per token."""
    signature = MATMUL | dict.fromkeys(("experts_ptr", "bias_ptr"), "*fp32")
    sums = dict.fromkeys(("outputs_ptr", "routes_ptr", "sums_ptr", "out_ptr"), "*fp32")
    sums |= {"start": "i32", "n_experts": "i32"}
    sizes = {"N_ACTIVE": 8, "N": 2048, "WIDTH": experts.WIDTH}
    most, pairs = expert_pairs.MOST_PER_PROGRAM, {"pairs_ptr": "*i32"}
    cases = [(KINDS[0], 1, 1, PTX), (KINDS[1], 1, 1, PTX), (KINDS[0], 8, 1, PTX), (KINDS[0], 16, 1, PTX)]
    cases += [(KINDS[1], most, matmul.MAX_PAIRS, PTX), (KINDS[1], 1, 1, GCN)]
    return [
        *(
            Compilation(
                f"experts_{name}_{n_tokens}{'_prompt' if n_pairs > 1 else ''}{'' if isa == PTX else '_amd'}",
                matmul.matmul_kernel,
                signature | (pairs if n_tokens > 1 else {}),
                {"TOKENS": n_tokens, "TERMS": 1, "PAIRS": n_pairs, "KIND": kind}
                | ({} if n_tokens > 1 else dict.fromkeys(pairs)),
                SLOTS.value,
                is_memory_bound=True,
                isa=isa,
            )
            for (kind, name), n_tokens, n_pairs, isa in cases
        ),
        Compilation("experts_add", experts.add_kernel, sums, sizes, experts.N_WARPS, is_memory_bound=True),
    ]


def _gated_delta() -> list[Compilation]:
    """The three launches for the heads of Qwen3.6-27B, and for Mamba-2 with those of Nemotron-3-Nano."""
    delta = DeltaShape(n_key_heads=16, n_value_heads=48, key_dim=128, value_dim=128, n_taps=4)
    mamba = DeltaShape(n_key_heads=8, n_value_heads=64, key_dim=128, value_dim=64, n_taps=4)
    return _recurrence("delta", delta, 48) + _recurrence("mamba", mamba, 23)


def _recurrence(name: str, shape: DeltaShape, n_layers: int) -> list[Compilation]:
    is_mamba = name == "mamba"
    of_conv, of_scan, of_finish = gated_delta._constants(shape, n_layers, is_tiled=False, is_mamba=is_mamba)
    pointers, rows = ("x_ptr", "mixed_ptr", "factors_ptr"), ("slots_ptr", "positions_ptr")
    given = ("bias_ptr",) if is_mamba else ("gates_ptr",)
    of_conv |= {"gates_ptr": None} if is_mamba else {"bias_ptr": None}
    conv = (*pointers, *given, "taps_ptr", "rates_ptr", "dt_bias_ptr", "inputs_ptr", "eps", "query_scale")
    scan = ("mixed_ptr", "factors_ptr", "states_ptr", "keys_ptr", "deltas_ptr", "decays_ptr", "out_ptr")
    if is_mamba:
        scan += ("skips_ptr",)
    else:
        of_scan |= {"skips_ptr": None}
    finish = (*pointers, "norm_ptr", "inputs_ptr", "keys_ptr", "decays_ptr", "out_ptr", "eps")

    def signature(floats: tuple[str, ...], *integers: str) -> dict[str, str]:
        found = {name: "*fp32" if name.endswith("_ptr") else "fp32" for name in floats}
        return found | dict.fromkeys(rows, "*i32") | {name: "*i32" if "_ptr" in name else "i32" for name in integers}

    n_warps = gated_delta.N_WARPS
    return [
        Compilation(f"{name}_conv", gated_delta.conv_kernel, signature(conv, "earlier_ptr", "layer"), of_conv, n_warps),
        Compilation(
            f"{name}_scan",
            gated_delta.scan_kernel,
            signature(scan, "bases_ptr", "earlier_ptr", "layer", "n_bases", "m"),
            of_scan,
            n_warps,
            is_memory_bound=True,
        ),
        Compilation(
            f"{name}_finish",
            gated_delta.finish_kernel,
            signature(finish, "bases_ptr", "layer", "n_bases"),
            of_finish,
            gated_delta.norm_warps(of_finish["BLOCK"]),
            is_memory_bound=True,
        ),
    ]


def _short_conv() -> list[Compilation]:
    """Both launches for LFM2-1.2B's channels."""
    sizes = {"N_LAYERS": 10, "N_CHANNELS": 2048, "TAPS": 3, "N_INPUTS": 26, "BLOCK": short_conv.BLOCK}
    floats, rows = (
        dict.fromkeys(("x_ptr", "inputs_ptr"), "*fp32"),
        dict.fromkeys(("slots_ptr", "positions_ptr"), "*i32"),
    )
    conv = floats | rows | {"taps_ptr": "*fp32", "out_ptr": "*fp32", "earlier_ptr": "*i32", "layer": "i32"}
    keep = floats | rows | {"bases_ptr": "*i32", "layer": "i32", "n_bases": "i32"}
    return [
        Compilation("short_conv", short_conv.conv_kernel, conv, sizes, short_conv.N_WARPS),
        Compilation("short_conv_keep", short_conv.keep_kernel, keep, sizes, short_conv.N_WARPS),
    ]


def _kv_write() -> list[Compilation]:
    """32 + 8 heads of 128: each kind of cache, turning; and fp16 without a turn."""
    pointers = {"x_ptr": "*fp32", "table_ptr": "*i32", "slots_ptr": "*i32", "positions_ptr": "*i32", "layer": "i32"}
    layout = {"FEATURES": 6144, "FIRST_KEY": 4096, "FIRST_VALUE": 5120, "N_STORED": 2, "PAGES_PER_SLOT": 64}
    records = []
    for kind, code, turns, is_tree in (
        ("fp16", "*fp16", True, False),
        ("fp32", "*fp32", True, False),
        ("int8", "*i8", True, False),
        ("fp16", "*fp16", False, False),
        ("fp16", "*fp16", True, True),
    ):
        signature, constants = (
            pointers | {"codes_ptr": code},
            layout | kv_write._sizes(16, 32 if turns else 0, 8, 128, 64),
        )
        optional = (
            ("rotary_ptr", turns, "*fp32"),
            ("scales_ptr", kind == "int8", "*fp32"),
            ("paths_ptr", is_tree, "*i32"),
        )
        constants["PATH_NUMBERS"] = 17 if is_tree else 0
        for name, there, pointer in optional:
            if there:
                signature[name] = pointer
            else:
                constants[name] = None
        name = f"kv_write_{kind}" + ("_with_rope" if turns else "") + ("_tree" if is_tree else "")
        records.append(Compilation(name, kv_write.kv_write_kernel, signature, constants, kv_write.N_WARPS))
    return records


def _masked_linear() -> list[Compilation]:
    """The two launches for 11008 neurons: of tokens that may skip some and of others, with and without a bias."""
    lists, skipping = (
        LISTS | {"out_ptr": "*fp32"},
        {"scores_ptr": "*fp32", "may_skip_ptr": "*i32", "n_used_ptr": "*i64"},
    )
    products, size = PRODUCTS | {"out_ptr": "*fp32"}, PRODUCTS_SIZE | {"hidden_ptr": None}
    choose, multiply, bias = masked_linear.choose_kernel, row_products.products_kernel, {"bias_ptr": "*fp32"}
    plain = size | dict.fromkeys(bias)
    return [
        Compilation("masked_choose", choose, lists | skipping, {"N": 11008}, 1),
        Compilation("masked_choose_all", choose, lists, {"N": 11008} | dict.fromkeys(skipping), 1),
        Compilation("masked_products", multiply, products, plain, 1, True, PTX),
        Compilation("masked_products_with_bias", multiply, products | bias, size, 1, True, PTX),
        Compilation("masked_products_amd", multiply, products, plain, 1, True, GCN),
    ]


def _matmul() -> list[Compilation]:
    """Every kind of tile, one also for two terms, and every number of tokens, with more row blocks for prompts."""
    whole = dict.fromkeys(("experts_ptr", "pairs_ptr", "bias_ptr"))
    most = 8 * matmul.MAX_EIGHTS
    widths = [(1, 1, PTX), *((n_tokens, 1, PTX) for n_tokens in (8, 16, 32) if n_tokens <= most)]
    prompt, amd = (most, matmul.MAX_PAIRS, PTX), (1, 1, GCN)
    cases = [(kind, 1, width) for kind in KINDS for width in (*widths, prompt, amd)]
    for kind in WIDE_KINDS:
        last = widths[-1] if kind[0] in matmul.ONE_PAIR else prompt
        cases += [(kind, 1, width) for width in (*widths[:2], last, amd)]
    cases += [(KINDS[3], 2, width) for width in ((8, 1, PTX), prompt, amd)]
    return [
        Compilation(
            f"matmul_{name}_{n_tokens}{'_prompt' if n_pairs > 1 else ''}{'' if isa == PTX else '_amd'}{TERMS[n_terms]}",
            matmul.matmul_kernel,
            MATMUL,
            whole | {"TOKENS": n_tokens, "TERMS": n_terms, "PAIRS": n_pairs, "KIND": kind},
            SLOTS.value,
            is_memory_bound=True,
            isa=isa,
        )
        for (kind, name), n_terms, (n_tokens, n_pairs, isa) in cases
    ]


def _norm() -> list[Compilation]:
    """The norms of a 4096 wide model, and of its heads."""
    pointers = dict.fromkeys(("x_ptr", "delta_ptr", "scale_ptr", "bias_ptr", "out_ptr"), "*fp32")
    wide = {"N": 4096, "BLOCK": 4096}
    heads = {"FEATURES": 6144, "FIRST": 0, "N": 128, "BLOCK": 128}
    all_heads = heads | {"N": 4096, "BLOCK": 4096}
    rms = {name: kind for name, kind in pointers.items() if name != "bias_ptr"} | {"eps": "fp32"}
    head_arguments = {"x_ptr": "*fp32", "scale_ptr": "*fp32", "eps": "fp32"}
    return [
        Compilation(
            "rms_norm", norm.norm_kernel, rms, wide | {"CENTERED": False, "bias_ptr": None}, 8, is_memory_bound=True
        ),
        Compilation(
            "layer_norm",
            norm.norm_kernel,
            pointers | {"eps": "fp32"},
            wide | {"CENTERED": True},
            8,
            is_memory_bound=True,
        ),
        Compilation("rms_norm_heads", norm.heads_kernel, head_arguments, heads, 1, is_memory_bound=True),
        Compilation("rms_norm_all_heads", norm.heads_kernel, head_arguments, all_heads, 16, is_memory_bound=True),
    ]


def _quantize() -> list[Compilation]:
    """From either type of activation, to one and to two terms."""
    return [
        Compilation(
            f"quantize_{dtype}{TERMS[n_terms]}",
            quantize.quantize_kernel,
            QUANTIZE | {"x_ptr": f"*{dtype}"},
            {"GROUPS": quantize.GROUPS, "TERMS": n_terms, "sources_ptr": None, "n_shared": 1},
            quantize.N_WARPS,
        )
        for dtype, n_terms in (("fp32", 1), ("fp16", 1), ("fp32", 2))
    ]


def _route() -> list[Compilation]:
    """Logits of 256 experts for few and for many tokens, and the choice of 8 by each kind of score."""
    pointers = dict.fromkeys(("x_ptr", "weights_ptr", "out_ptr"), "*fp32") | {"m": "i32", "n_experts": "i32"}
    choice = dict.fromkeys(("logits_ptr", "out_ptr"), "*fp32") | {"scale": "fp32", "added": "fp32", "n_experts": "i32"}
    biases: dict[str, Any] = dict.fromkeys(("bias_ptr", "choice_bias_ptr", "factors_ptr"))
    sizes = {"N_ACTIVE": 8, "E": 256, "K": 16, "RENORMALIZES": True}
    return [
        *(
            Compilation(
                f"route_logits_{name}",
                route.logits_kernel,
                pointers,
                {"WIDTH": 2048, "TOKENS": n_tokens, "EXPERTS": n_experts},
                n_warps,
                is_memory_bound=name == "few",
            )
            for name, (n_tokens, n_experts, n_warps) in (("few", route.FEW), ("many", route.MANY))
        ),
        *(
            Compilation(f"route_{kind}", route.choose_kernel, choice, biases | sizes | groups | {"KIND": kind}, 1)
            for kind in route.KINDS
            for groups in [{"N_GROUPS": 8, "N_CHOSEN": 4 if kind == "sigmoid" else 8, "N_BEST": 2}]
        ),
    ]


def _sliced_head() -> list[Compilation]:
    """Every kind of tile that a head may have."""
    signature = {"words_ptr": "*i32", "scales_ptr": "*fp16", "table_ptr": "*i32", "codes_ptr": "*i32"}
    signature |= {"code_scales_ptr": "*fp32", "ids_ptr": "*i64", "out_ptr": "*fp32", "factor": "fp32"}
    signature |= dict.fromkeys(("n_candidates", "ids_stride", "n_rows", "n_groups", "one"), "i32")
    return [
        Compilation(
            f"sliced_head_{name}{'' if isa == PTX else '_amd'}{TERMS[n_terms]}",
            sliced_head.sliced_kernel,
            signature,
            {"TERMS": n_terms, "KIND": kind},
            sliced_head.N_WARPS,
            isa=isa,
        )
        for kind, name in VOCABULARY_KINDS
        for isa, n_terms in ((PTX, 1), (GCN, 1), (PTX, 2))
    ]


def _sparse_ffn() -> list[Compilation]:
    """The four launches for an FFN of 11008 neurons; the first with and without what a threshold needs."""
    listing = {"active_ptr": "*fp32", "neurons_ptr": "*i32", "hidden_ptr": "*fp32", "counts_ptr": "*i32"}
    skipping = {"least_ptr": "*fp32", "may_skip_ptr": "*i32", "n_used_ptr": "*i64"}
    hidden = PRODUCTS | {"hidden_ptr": "*fp32"}
    of_hidden = PRODUCTS_SIZE | dict.fromkeys(("bias_ptr", "out_ptr"))
    sections = MATRIX | LISTS | {"hidden_ptr": "*fp32", "sums_ptr": "*fp32"}
    sections |= dict.fromkeys(("m", "n_units", "n_blocks", "n_sections", "n_section_blocks", "one"), "i32")
    fold = {"sums_ptr": "*fp32", "out_ptr": "*fp32", "factor": "fp32"}
    fold |= dict.fromkeys(("m", "n_columns", "n_padded", "n_sections"), "i32")
    size, n_neurons = {"UNITS": sparse_ffn.UNITS, "ROWS": sparse_ffn.ROWS}, {"N": 11008}
    n_warps, folded = sparse_ffn.N_WARPS, {"FOLDED": sparse_ffn.FOLDED}
    return [
        Compilation("sparse_list", sparse_ffn.list_kernel, listing, n_neurons | dict.fromkeys(skipping), 1),
        Compilation("sparse_list_by_thresholds", sparse_ffn.list_kernel, listing | skipping, n_neurons, 1),
        *(
            compilation
            for isa, ending in ((PTX, ""), (GCN, "_amd"))
            for compilation in (
                Compilation(f"sparse_hidden{ending}", row_products.products_kernel, hidden, of_hidden, 1, True, isa),
                Compilation(f"sparse_sections{ending}", sparse_ffn.sections_kernel, sections, size, n_warps, True, isa),
            )
        ),
        Compilation("sparse_fold", sparse_ffn.fold_kernel, fold, folded | {"rest_ptr": None}, 2),
        Compilation("sparse_fold_onto", sparse_ffn.fold_kernel, fold | {"rest_ptr": "*fp32"}, folded, 2),
    ]
