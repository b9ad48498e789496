"""What vulture finds no use of in the packages, and why it stays. Vulture reads a name here as a use of it."""
# ruff: noqa: B018, F821

# Called or read by a framework.
__getattr__  # Python's, for a package whose names are imported at first use
__dir__
__call__  # of a Protocol, whose callers call the object
_.align  # llvmlite's, of a load or store
_Model, _type_of, _constant  # numba's, registered by their decorators
(
    arguments_address,
    offset_8,
    offset_128,
    offsets_32,
    offsets_halves,
)  # numba's, operands, which code takes as a list
_.CACHE_DIR, _._cache, load_overload, save_overload  # numba's: its setting, and what it asks of a cache
_._finalized, _._compiler, add_overload, _compile_core, _finalize_final_module, _optimize_final_module  # compiler
_.no_compile, _.no_cpython_wrapper, _.no_cfunc_wrapper  # of its flags
_.tags, _.parse  # jinja2's, of an extension
_.normalizer, _.pre_tokenizer, _.post_processor  # tokenizers', of a tokenizer in the making
update_transfer, set_postfix_str, set_transfer_postfix_str  # huggingface_hub's progress bar

HeteroEE, _.max_length, _.eot_token_id, _.prefix_token_id, _.tokenizer_name, _.tok_encode  # lm_eval's, of a model
_.chat_template, _.apply_chat_template, _._loglikelihood_tokens, _.loglikelihood_rolling, _.generate_until, disable_tqdm

_.format_options  # typer's, of a command's help
_.__signature__, _.__annotations__  # typer's, of a command whose options come from dataclasses

MATRIX_5, MATRIX_5_ZEROS, MATRIX_6  # roles, found by their values

# Of an annotation in quotes, imported for type checkers alone.
BaseFileLock

# Python callers'.
_.count_tokens, _.astream, _.measure

# Loaded by name: strings in hetero_ee/ops/registry.py.
bitsandbytes_matrix
tile_matrix
vram_budget, vram_margin, ram_budget, snapshot_budget, cpu_moe, emulate  # keywords of Engine.from_pretrained
option_names  # scripts/flag_table.py
drafted_agreement  # scripts/measure_exits.py
exit_predictor  # of the GPU: for exits that are judged there


# The typing context that Numba passes to an intrinsic, whether it needs it or not.
typing

# Part of a record that is compared or written as a whole.
plan_hash, nested_dtype, mtime_ns, sample_sha256
speedup, tokens_before_divergence, first_divergences, scored_mean_depth, cpu_passes_per_token, perplexity
n_activation_tokens  # in calibrations of earlier versions
vram_bytes  # of a profile's machine: another card's memory makes the profile foreign

# For sparsity, which follows.
