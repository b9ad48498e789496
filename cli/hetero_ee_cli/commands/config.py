"""`hetero-ee config show`: prints the value of each setting and its source."""

from pathlib import Path

from hetero_ee.config import cache_folder, data_folder
from hetero_ee.config.settings import Settings, read_settings
from hetero_ee.config.toml_file import is_in_sight
from hetero_ee.options.engine import SETTINGS
from hetero_ee_cli.options.engine import ModelOptions
from hetero_ee_cli.options.flags import Json, with_options
from hetero_ee_cli.terminal.output import print_document, printable, table


@with_options(without={"revision": "it is not a setting", "sparsity": "it is not a setting"})
def show(engine: ModelOptions, as_json: Json = False) -> None:
    """Show every setting with its source, and where files are kept.

    An option overrides a HETERO_EE_ variable, which overrides the configuration file, which overrides the default. The
    options of the other commands given here show which value would apply.
    """
    flags = engine.given | {"model": engine.given.get("model_flag")}
    settings = read_settings()
    resolved = [settings.resolve(key, flags.get(setting.name)) for key, setting in SETTINGS.items()]
    paths = {name: path and str(path) for name, path in _paths(settings).items()}
    if as_json:
        values = {
            found.setting.setting: {
                "value": str(found.value) if isinstance(found.value, Path) else found.value,
                "source": found.source,
            }
            for found in resolved
        }
        print_document({"settings": values, "paths": paths})
        return
    rows = [("setting", "value", "source")]
    for found in resolved:
        text = str(found.value).lower() if isinstance(found.value, bool) else printable(str(found.value))
        shown = found.setting.default_text if found.value is None else text
        rows.append((found.setting.setting, shown, found.source))
    rows += [("", "", ""), ("path", "", "")]
    missing = {} if is_in_sight(settings.file) else {"config_file": "no such file"}
    rows += [(name, printable(path or ""), missing.get(name, "")) for name, path in paths.items()]
    print(table(rows))


def _paths(settings: Settings) -> dict[str, Path | None]:
    """Return the paths by name. A path is None for a user without a home folder."""
    from huggingface_hub import constants

    from hetero_ee.runtime.kernel_cache import kernel_cache_folder

    cache = cache_folder(settings)
    return {
        "config_file": settings.file,
        "cache": cache,
        "stores": cache / "stores",
        "kernels": kernel_cache_folder(cache),
        "profiles": data_folder(settings) / "profiles",
        "hugging_face_cache": Path(constants.HF_HUB_CACHE),
    }
