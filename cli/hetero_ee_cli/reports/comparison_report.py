"""Comparison of two models' predictions, as a table and a JSON document."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hetero_ee_cli.reports.eval_report import SHARE, estimate_cell, finite
from hetero_ee_cli.terminal.output import table

if TYPE_CHECKING:
    from hetero_ee.evaluation.comparison import Comparison

LOGARITHMIC, RATIO, PERPLEXITY = "{:.3g}", "{:.4f}", "{:.3f}"


def comparison_table(found: "Comparison", plus_minus: str) -> str:
    """Return a table with one row per metric. `plus_minus`: see eval_table."""
    rows = [
        ("KL divergence, nats per token", estimate_cell(found.kl_nats, LOGARITHMIC, plus_minus)),
        ("  its 99th percentile", LOGARITHMIC.format(found.kl_nats_99)),
        ("same likeliest token", estimate_cell(found.same_top1, SHARE, plus_minus)),
        ("perplexity of A", estimate_cell(found.perplexity_a, PERPLEXITY, plus_minus)),
        ("perplexity of B", estimate_cell(found.perplexity_b, PERPLEXITY, plus_minus)),
        ("  B over A", estimate_cell(found.perplexity_ratio, RATIO, plus_minus)),
    ]
    return table([("", "B from A"), *rows], numbers_from=1)


def comparison_document(a: str, b: str, text: str, found: "Comparison") -> dict[str, Any]:
    """Return the document for JSON, with null instead of infinity."""
    return {"a": a, "b": b, "text": text} | {name: finite(value) for name, value in asdict(found).items()}
