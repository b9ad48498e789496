"""Find a model's folder: a path, or a model on the Hugging Face Hub, which is downloaded at first use."""

import logging
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetero_ee.config import Progress
from hetero_ee.errors import CheckpointError, DiskFullError, ModelError, UsageError, shown
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.download import N_ATTEMPTS, Download, cached_file, cached_snapshot, retried
from hetero_ee.hub.errors import hub_error, hub_host, is_transient
from hetero_ee.hub.gguf.folder import gguf_folder
from hetero_ee.hub.gguf.published import PublishedGguf, choose
from hetero_ee.hub.model_files import (
    CONFIG_FILE,
    INDEX_FILE,
    QUANTIZE_FILE,
    SINGLE_FILE,
    TOKENIZER_FILES,
    indexed_files,
)
from hetero_ee.hub.model_id import ModelId, is_commit, local_folder
from hetero_ee.hub.remote_header import remote_configuration
from hetero_ee.hub.repository import Repository
from hetero_ee.options.engine import MODEL_OPTIONS


def resolve_model(
    model: str | Path | None,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    configuration_only: bool = False,
) -> Path:
    """Return the folder of a model, downloading or translating the model if necessary.

    Args:
        model: a folder; a GGUF file, which is represented by a folder in the cache; None for the demo model; or an id
            or address that `ModelId.of` reads, such as org/name or org/name:QUANTIZATION. For an id, configuration,
            tokenizer and safetensors, or a GGUF model, are downloaded into the cache of huggingface_hub.
        revision: branch, tag or commit of an id; its main branch by default.
        offline: use only the cache.
        progress: called with (stage, bytes done, total bytes); a total of 0 marks `stage` as a one-line remark.
        configuration_only: download only the configuration of an id, which is enough to plan for the model. Unsupported
            models are still refused. A whole model in the cache remains what offline runs find for the revision.

    Raises:
        UsageError, ModelError, CheckpointError, DiskFullError: if the model is not found or unusable.
    """
    if not isinstance(offline, bool):
        raise UsageError(f"offline is {shown(offline)}; expected True or False.")
    folder = local_folder(model)
    if folder is None:
        with silenced():
            folder = _Hub(ModelId.of(str(model), revision), progress, configuration_only).found(offline)
    elif revision is not None:
        option = MODEL_OPTIONS["revision"]
        raise UsageError(option, f" is {shown(revision)}, but {folder} is a folder; only a Hugging Face id has any.")
    return folder if folder.is_dir() else gguf_folder(folder, configuration_only=configuration_only)


class _Hub:
    """A model on the Hub, together with its copy in the cache."""

    def __init__(self, model: ModelId, progress: Progress | None, configuration_only: bool) -> None:
        self._model, self._progress, self._configuration_only = model, progress, configuration_only

    def found(self, offline: bool) -> Path:
        """Return the model's folder, or the (first) file of a GGUF model, downloading it if necessary."""
        from huggingface_hub import constants, is_offline_mode

        name, revision = self._model.name, self._model.revision
        cached = self._cached()
        if cached and (offline or is_offline_mode() or is_commit(revision)):  # a commit never changes
            return cached
        if offline or is_offline_mode():
            raise ModelError(
                f"{self._model} ({revision}) is not in the cache {constants.HF_HUB_CACHE}, or only in part, and "
                "offline mode is on; run it once without --offline and HF_HUB_OFFLINE, or give a folder."
            )
        if constants.HF_HUB_CACHE.startswith("~"):  # not expanded by huggingface_hub: it would create a folder ~ here
            raise UsageError(f"this user has no home folder to keep {name} in; set HF_HOME to a folder.")
        try:
            repository = retried(lambda: Repository.of(self._model), time.sleep, 1 if cached else N_ATTEMPTS)
        except Exception as error:
            return self._without_answer(error, cached)
        try:
            model = repository.gguf_model(self._model.gguf)
            return self._fetched_gguf(repository, model) if model else self._fetched(repository)
        except Exception as error:
            raise hub_error(error, self._model) from error

    def _cached(self) -> Path | None:
        """Return the cached folder or GGUF file, None if incomplete. Safetensors precede unnamed GGUF models."""
        folder = None
        if self._model.gguf is None:
            folder = self._cached_configuration() if self._configuration_only else self._cached_folder()
        return folder or self._cached_gguf()

    def _cached_gguf(self) -> Path | None:
        """Return the (first) file of the GGUF model if the cache holds it, else None."""
        snapshot = cached_snapshot(self._model.name, self._model.revision)
        if snapshot is None:
            return None
        files = sorted(file for file in snapshot.rglob("*.gguf") if file.is_file())
        models = PublishedGguf.listed(file.relative_to(snapshot).as_posix() for file in files)
        try:
            return snapshot / choose(models, self._model.gguf, self._model.name).files[0] if models else None
        except ModelError:
            return None

    def _cached_configuration(self) -> Path | None:
        """Return the cached folder of the revision if it has a readable configuration, else None."""
        try:
            config = self._cached_file(CONFIG_FILE)
            return config.parent if config and read_spec(config.parent) else None
        except (ModelError, OSError, ValueError):  # from a damaged cache
            return None

    def _cached_folder(self) -> Path | None:
        """Return the cached folder of the revision if it has all weights and a tokenizer, else None."""
        try:
            config, index = self._cached_file(CONFIG_FILE), self._cached_file(INDEX_FILE)
            is_single = self._cached_file(SINGLE_FILE) is not None
            has_weights = is_single or (index is not None and all(map(self._cached_file, indexed_files(index))))
            is_complete = has_weights and any(map(self._cached_file, TOKENIZER_FILES))
        except (CheckpointError, OSError, ValueError):  # a damaged cache counts as empty
            return None
        return config.parent if config and is_complete else None

    def _cached_file(self, name: str) -> Path | None:
        return cached_file(self._model.name, name, self._model.revision)

    def _without_answer(self, error: Exception, cached: Path | None) -> Path:
        """Return the cached model if the Hub does not answer or refuses this login. Otherwise raise the error."""
        from huggingface_hub.errors import RevisionNotFoundError

        if cached is None or isinstance(error, RevisionNotFoundError):
            found = hub_error(error, self._model)
            if is_transient(error):  # it is unknown whether such a model exists
                name = self._model.name
                found = type(found)(f"{name} is neither a folder here nor a converted model, and {found}")
            raise found from error
        if self._progress:
            self._progress(f"{hub_host()} cannot be reached; using {self._model.name} from the cache", 0, 0)
        return cached

    def _fetched(self, repository: Repository) -> Path:
        """Download missing files, the configuration first and the weights last, so that weights imply a whole model."""
        small_files = repository.small_files()
        download = Download(repository, self._progress)
        folder = download.fetch_one(repository.files[CONFIG_FILE]).parent
        if QUANTIZE_FILE in repository.files:
            download.fetch_one(repository.files[QUANTIZE_FILE])
        try:
            read_spec(folder)
        except ModelError as error:
            raise ModelError(f"{self._model.name} cannot be used: {error}") from error
        if not self._configuration_only:
            index = download.fetch_one(repository.files[INDEX_FILE]) if repository.has_index else None
            weight_files = repository.weight_files(index)
            self._require_space(download.missing_bytes([*small_files, *weight_files]))
            download.announce([*small_files, *weight_files])
            download.fetch(small_files)
            download.fetch(weight_files)
        download.tell_unchecked()
        # If a whole model is cached under this revision, offline runs must keep finding that one.
        keeps_name = self._configuration_only and self._cached_folder() is not None
        if not keeps_name and self._cached_file(CONFIG_FILE) != folder / CONFIG_FILE:
            download.name_revision(self._model.revision)
        return folder

    def _fetched_gguf(self, repository: Repository, model: PublishedGguf) -> Path:
        """Download a GGUF model, and return its first file, or the folder if only the configuration is wanted."""
        if self._model.gguf is None:
            self._tell_choice(model, PublishedGguf.listed(repository.files))
        files, download = [repository.files[name] for name in model.files], Download(repository, self._progress)
        if not all(map(download.is_cached, files)):
            configuration = remote_configuration(repository, files)
            if self._configuration_only:
                return configuration
        self._require_space(download.missing_bytes(files) - download.resumed_bytes(files))
        download.announce(files)
        download.fetch(files)
        download.tell_unchecked()
        download.name_revision(self._model.revision, model.files[0])
        return download.fetch_one(files[0])

    def _tell_choice(self, chosen: PublishedGguf, models: list[PublishedGguf]) -> None:
        """Report which of several GGUF models was chosen by default, and how to choose another."""
        name, others = self._model.name, list(dict.fromkeys(each.quantization for each in models if each != chosen))
        if self._progress and others:
            self._progress(f"{name}: using {chosen.files[0]}; for {', '.join(others)} give {name}:{others[0]}", 0, 0)

    def _require_space(self, needed_bytes: int) -> None:
        from huggingface_hub import constants

        cache = Path(constants.HF_HUB_CACHE)
        free_bytes = shutil.disk_usage(next(each for each in (cache, *cache.parents) if each.exists())).free
        if free_bytes < needed_bytes:
            raise DiskFullError(
                f"{cache} has {free_bytes / 2**20:.0f} MiB free, {self._model.name} needs "
                f"{needed_bytes / 2**20:.0f} MiB more; free some space or set HF_HOME to a folder on another disk."
            )


@contextmanager
def silenced() -> Iterator[None]:
    """Silence huggingface_hub's warnings, since relevant ones become this engine's errors.

    A log level that the user has changed stays. Other levels are restored afterwards.
    """
    import huggingface_hub  # noqa: F401 - sets up its own logger, which must happen before

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    if level in (logging.NOTSET, logging.WARNING):
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
