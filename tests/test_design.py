"""docs/design.md beside the tree: the files of a new op and of a new family, compute capabilities, who imports what."""

import ast
import functools
import re
from pathlib import Path

from gla_core.ops import gla

ROOT = Path(__file__).parents[1]
PACKAGE = ("gla_core", "gla_tools", "backends/gla_reference")
OP = "softmax_attention"
"""An op that nothing else in the package is built on: a file that names it treats it as an op."""
TREE = ("backends", "benchmarks", "examples", "gla_core", "gla_tools", "plugins", "tests")
FAMILY, OP_OF_FAMILY = "gla", "chunk_gla_pool"


def section(title):
    """Returns the text below a heading of docs/design.md, up to the next heading."""
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    return re.split(r"^#+ ", page.split(f"# {title}\n")[1], flags=re.MULTILINE)[0]


def listed(title="An abstract op"):
    """Returns the files and folders in the table below a heading, for an op and a family that exist."""
    rows = [line.split("|")[1] for line in section(title).splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    return {name.replace("<op>", OP).replace("<family>", FAMILY) for name in names}


def files_with(pattern, *folders):
    """Returns the source and data files below folders that contain a pattern."""
    files = (
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".json", ".toml")
    )
    return {str(path.relative_to(ROOT)) for path in files if re.search(pattern, path.read_text(encoding="utf-8"))}


def test_the_table_of_a_new_op_names_every_file_of_the_package_that_names_an_op():
    named = files_with(rf"\b(\w+_)?{OP}\b", *PACKAGE)
    assert {name for name in listed() if name.startswith(PACKAGE)} == named


def test_what_else_the_table_names_is_there_and_names_the_op():
    others = sorted(name for name in listed() if not name.startswith(PACKAGE))
    assert others
    assert [name for name in others if OP not in (ROOT / name).read_text(encoding="utf-8")] == []


def names_in_code(path):
    """Returns the names and texts in a file of Python, one a line, without docstrings and comments; else all of it."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    tree = ast.parse(text)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    fields = (node.__dict__.values() for node in ast.walk(tree) if id(node) not in docs)
    return "\n".join(value for values in fields for value in values if isinstance(value, str))


def test_the_table_of_a_family_leads_to_every_file_that_names_an_op_of_one():
    entries = tuple(listed("A family of ops"))
    pattern = rf"\b{OP_OF_FAMILY}\b"
    named = [name for name in sorted(files_with(pattern, *TREE)) if re.search(pattern, names_in_code(ROOT / name))]
    assert len(named) > 20
    assert [name for name in named if not name.startswith(entries)] == []


def test_what_the_table_of_a_family_names_is_there_and_names_an_op_of_one():
    ops = "|".join({name for spec in gla.SPECS for name in (spec.name, spec.public)})
    for entry in sorted(listed("A family of ops")):
        place = ROOT / entry
        files = [path for path in place.rglob("*") if path.suffix == ".py"] if place.is_dir() else [place]
        texts = [path.read_text(encoding="utf-8") for path in files]
        assert any(re.search(rf"\b({ops}|{FAMILY}\.(SPECS|ops))\b", text) for text in texts), entry


def test_the_files_that_know_compute_capabilities_are_named():
    text = section("A kernel for another GPU")
    known = files_with(r"compute_capability|architecture_of\(", "backends")
    unnamed = {name.removesuffix("/__init__.py") for name in known if name not in text}
    assert unnamed == {"backends/gla_triton_fused", "backends/gla_parallel_scan"}
    assert all(f"`{folder}`" in text for folder in unnamed)


@functools.cache
def imports(path):
    """Returns the full names that a file imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return names


def private_imports(folder):
    """Returns the imports of private modules, in files below a folder that are outside the modules' package."""
    private_names = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        inside = ".".join(path.relative_to(ROOT).parent.parts)
        for name in imports(path):
            package, private, _ = name.partition("._")
            if private and name.startswith("gla_core.") and not f"{inside}.".startswith(f"{package}."):
                private_names.append(f"{path.relative_to(ROOT)}: {name}")
    return private_names


def test_private_modules_are_imported_inside_their_package_alone():
    assert [each for folder in ("gla_core", "gla_tools") for each in private_imports(folder)] == []


def test_an_import_of_a_private_module_would_be_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    folder = tmp_path / "gla_core" / "nn"
    folder.mkdir(parents=True)
    (folder / "layer.py").write_text("from gla_core.ops import _run\nfrom gla_core.nn._typed_call import x\n")
    assert private_imports("gla_core") == ["gla_core/nn/layer.py: gla_core.ops._run"]


def modules():
    """Returns the file of every module of the package, the backends and the plugins, by its full name."""
    files = {}
    others = (ROOT / "backends", *sorted((ROOT / "plugins").glob("*/src")))
    for folder in (ROOT / "gla_core", ROOT / "gla_tools", *others):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder if folder in others else ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def circles(files):
    """Returns the groups of modules that import each other, also inside functions or for type checkers alone."""
    above: dict[str, set[str]] = {name: set() for name in files}  # the modules that a module reaches by its imports
    for name, path in files.items():
        known = (each if each in files else each.rpartition(".")[0] for each in imports(path))
        above[name] = {each for each in known if each in files and each != name}
    for middle in files:
        for reached in above.values():
            if middle in reached:
                reached |= above[middle]
    groups = {frozenset(other for other in reached if name in above[other]) for name, reached in above.items()}
    return sorted(sorted(group) for group in groups if group)


def test_no_modules_import_each_other_in_a_circle():
    files = modules()
    assert len(files) > 200
    assert circles(files) == []


def test_a_circle_would_be_found(tmp_path):
    files = {name: tmp_path / f"{name}.py" for name in ("below", "first", "second")}
    files["below"].write_text("import os\n")
    files["first"].write_text("import below\nfrom second import x\n")
    files["second"].write_text("def f():\n    import first\n")
    assert circles(files) == [["first", "second"]]
