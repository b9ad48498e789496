"""What no module of the packages may do, whatever it reads: run data as code, or check it with an assert."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    file
    for folder in ("hetero_ee", "kernels", "cpu_ops", "profiles", "cli", "scripts")
    for file in (ROOT / folder).rglob("*.py")
)
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "imp",
    "telnetlib",
}
POSIX = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    ("torch", "load"),
    ("np", "load"),
    ("numpy", "load"),
    ("torch", "hub"),
    ("os", "system"),
    ("os", "popen"),
    ("ctypes", "CDLL"),
}
KEYWORDS = {("trust_remote_code", True), ("shell", True), ("allow_pickle", True), ("weights_only", False)}
# (file, name): a use that reads nothing from outside, or builds tensors and nothing else.
ALLOWED = {
    ("scripts/training_run.py", "torch.load"),  # its own state, weights alone, to go on after an interruption
    ("scripts/train_draft_head.py", "torch.load"),  # its own traces, weights alone, to train on them again
    ("scripts/convert_draft_head.py", "torch.load"),  # a published head, weights alone
    ("cpu_ops/hetero_ee_cpu_ops/jit/kernel_files.py", "pickle"),  # compiled by this user, after its digest
    ("cpu_ops/hetero_ee_cpu_ops/read_ahead.py", "ctypes.CDLL"),  # the C library that is loaded already
}


def banned(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each banned import, call and argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((node.lineno, name) for name in names if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
            yield node.lineno, node.func.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in METHODS:
                yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.keyword) and (node.arg, getattr(node.value, "value", None)) in KEYWORDS:
            yield node.value.lineno, f"{node.arg}={ast.unparse(node.value)}"


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_module_runs_data_as_code(file: Path) -> None:
    name = str(file.relative_to(ROOT))
    found = [(line, what) for line, what in banned(ast.parse(file.read_text())) if (name, what) not in ALLOWED]
    assert found == []


def test_no_module_needs_what_windows_lacks_when_it_is_imported() -> None:
    for file in SOURCES:
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert not POSIX & set(names), f"{file}:{node.lineno}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml.loader",
        "eval('1')",
        "exec(text)",
        "torch.load(file)",
        "load = torch.load",
        "np.load(file, allow_pickle=True)",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=True)",
        "subprocess.run(command, shell=True)",
    ],
)
def test_the_ban_finds_it(source: str) -> None:
    assert list(banned(ast.parse(source)))


@pytest.mark.parametrize("source", ["re.compile('a')", "model.eval()", "f(trust_remote_code=False)", "json.load(file)"])
def test_the_ban_knows_the_harmless(source: str) -> None:
    assert list(banned(ast.parse(source))) == []


@pytest.mark.parametrize("room", ["models", "weights", "config"])
def test_what_reads_files_asserts_at_most_what_its_types_say(room: str) -> None:
    """python -O leaves asserts out. `is not None` and isinstance are for the type checker, which can't follow."""
    for file in sorted((ROOT / "hetero_ee" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assert):
                text = ast.unparse(node.test)
                assert text.endswith("is not None") or text.startswith("isinstance("), f"{file}:{node.lineno}"
