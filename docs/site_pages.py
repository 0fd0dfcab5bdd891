"""A hook of MkDocs, and an extension of griffe: pages that are not under docs/, links, and examples in docstrings.

A link in a Markdown file is a path relative to that file, as the repository's web view needs it. On the site a link to
a page leads to the page, a picture is copied, and every other file is linked in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "gla_core/conformance/README.md": "conformance.md",
    "plugins/gla_fla/README.md": "plugins/gla_fla.md",
    "plugins/gla_plugin_template/README.md": "plugins/gla_plugin_template.md",
    "plugins/gla_transformers/README.md": "plugins/gla_transformers.md",
    "plugins/gla_vllm/README.md": "plugins/gla_vllm.md",
}
"""Files of the repository that are pages, and where."""
API = (
    "gla_core",
    "gla_core.nn",
    "gla_core.distributed",
    "gla_core.compat.fla",
    "gla_core.compat.mamba_ssm",
    "gla_core.compat.transformers",
    "gla_core.extension",
    "gla_core.dispatch.backend",
    "gla_core.dispatch.composed",
    "gla_core.dispatch.slots",
    "gla_core.dispatch.tensors",
)
"""Modules that have a page made of their docstrings."""
PICTURES = "benchmarks/results"

_LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)")
_sources = {page: source for source, page in PAGES.items()}


class Examples(griffe.Extension):
    """Has griffe read a section `Example:` of a docstring as code: it knows `Examples:` alone."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Renames the section."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages, the API pages and the pictures."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for module in API:
        files.append(File.generated(config, f"api/{module}.md", content=_api_page(module)))
    for path in sorted((ROOT / PICTURES).rglob("*")):
        if path.suffix in (".png", ".svg"):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Returns the page with its links as the site needs them."""
    here = page.file.src_uri
    markdown = markdown.replace("<details>", '<details markdown="1">')  # or what it hides stays text
    return _LINK.sub(lambda link: f"]({_target(here, link[1], config.repo_url)}{link[2] or ''})", markdown)


def _api_page(module: str) -> str:
    """Returns Markdown by which mkdocstrings shows the names in a module's `__all__`, functions first."""
    found = griffe.load(module, search_paths=[str(ROOT)])
    if found.exports is None:
        return f"# {module}\n\n::: {module}\n"
    shown = []
    for name in sorted(map(str, found.exports), key=lambda name: found[name].is_class):
        path = found[name].canonical_path
        if found[name].is_module:  # of a function that has its module's name, the module hides it from griffe
            path += f".{name}"
        if f"{module}.{name}" not in API:
            shown.append(f"::: {path}\n    options: {{show_root_heading: true, heading: {module}.{name}}}\n")
    return "\n".join([f"# {module}\n", *shown])


def _target(page: str, link: str, repository: str) -> str:
    """Returns where a link of a page leads; as it is if it names no file, so that MkDocs complains."""
    source = _sources.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if not (ROOT / path).exists():
        return link
    if path.startswith("docs/") and path.endswith(".md"):
        found = path.removeprefix("docs/")
    elif path.startswith(f"{PICTURES}/") and not path.endswith(".json"):
        found = path
    elif path in PAGES:
        found = PAGES[path]
    else:
        return f"{repository}/blob/main/{path}"
    return posixpath.relpath(found, posixpath.dirname(page) or ".")
