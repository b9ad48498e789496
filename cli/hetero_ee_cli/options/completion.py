"""Completion of options' values by Tab. It runs at every press of the key, so nothing heavy is imported."""

from hetero_ee.config import cache_folder
from hetero_ee.errors import HeteroError
from hetero_ee.weights.store.names import MANIFEST_FILE, STORES_FOLDER
from hetero_ee_cli.options.flags import one_of


def model_names(incomplete: str) -> list[str]:
    """Complete to converted models in the cache folder."""
    try:
        found = sorted(file.parent.name for file in (cache_folder() / STORES_FOLDER).glob(f"*/{MANIFEST_FILE}"))
    except (HeteroError, OSError):  # completion never complains
        return []
    return one_of(found)(incomplete)


def hardware_names(incomplete: str) -> list[str]:
    """Complete to shipped profiles."""
    from hetero_ee_profiles.reference import reference_names

    return one_of(reference_names())(incomplete)


def shape_names(incomplete: str) -> list[str]:
    """Complete to models with known shapes."""
    from hetero_ee.models.known_shapes import SHAPES

    return one_of(tuple(SHAPES))(incomplete)
