"""Find the folder of a draft head: a path, or a Hugging Face id that is downloaded at first use."""

import time
from pathlib import Path

from hetero_ee.config import Progress
from hetero_ee.errors import CheckpointError, ModelError
from hetero_ee.hub.download import Download, cached_file, retried
from hetero_ee.hub.errors import hub_error
from hetero_ee.hub.model_files import CONFIG_FILE, SINGLE_FILE
from hetero_ee.hub.model_id import ModelId
from hetero_ee.hub.repository import Repository
from hetero_ee.hub.resolve import silenced

PICKLES = (".bin", ".pt", ".pth")


def resolve_draft_head(
    head: str | Path | None, *, offline: bool = False, progress: Progress | None = None
) -> str | Path | None:
    """Return the folder of a draft head. Anything but an id (org/name) counts as a path and is returned unchanged.

    For an id, config.json and model.safetensors are downloaded into huggingface_hub's cache, unless both are there.

    Raises:
        UsageError, ModelError, CheckpointError: if the head is not found or unusable.
    """
    if not is_head_id(head):
        return head
    assert isinstance(head, str)
    model_id = ModelId(head)
    cached = [cached_file(head, name, model_id.revision) for name in (CONFIG_FILE, SINGLE_FILE)]
    if cached[0] is not None and cached[1] is not None:
        return cached[0].parent
    with silenced():
        from huggingface_hub import is_offline_mode

        if offline or is_offline_mode():
            raise ModelError(f"the draft head {head} is not in the cache, and this is offline; run it once online.")
        try:
            repository = retried(lambda: Repository.of(model_id), time.sleep)
            _check(repository)
            download = Download(repository, progress)
            files = [repository.files[name] for name in (CONFIG_FILE, SINGLE_FILE)]
            download.announce(files)
            found = [download.fetch_one(file) for file in files]
            download.tell_unchecked()
            download.name_revision(model_id.revision)
        except Exception as error:
            raise hub_error(error, model_id) from error
    return found[0].parent


def is_head_id(head: object) -> bool:
    """Return whether `head` is an id on the Hub, org/name: it has one slash and is not an existing folder."""
    if not isinstance(head, str) or head.count("/") != 1 or head.startswith((".", "/", "~")) or head.endswith("/"):
        return False
    try:
        return not Path(head).exists()
    except (OSError, ValueError):  # a name no file can have
        return False


def _check(repository: Repository) -> None:
    """Check that the repository holds a draft head that can be read. Raises ModelError or CheckpointError."""
    names = repository.files.keys()
    if CONFIG_FILE not in names:
        raise ModelError(f"{repository.model} has no {CONFIG_FILE}, so it is not a draft head.")
    if SINGLE_FILE not in names:
        pickled = sorted(name for name in names if name.endswith(PICKLES))
        raise CheckpointError(
            f"{repository.model} has no {SINGLE_FILE}"
            + (
                f", but {pickled[0]}, a pickle, which can run code when opened and is never read; download the folder "
                "and convert it to safetensors with scripts/convert_draft_head.py."
                if pickled
                else ", a draft head's weights."
            )
        )
