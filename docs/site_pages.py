"""A hook of MkDocs, and an extension of griffe: pages that are not under docs/, links, and the pages of the API.

A link in a Markdown file is a path relative to that file, as the repository's web view needs it. On the site a link to
a page leads to the page, a picture is copied, and every other file is linked in the repository.

A page of the API shows the names in a module's `__all__` under their public paths, such as `gla_core.chunk_gla`. These
paths are its anchors, and the names in objects.inv, by which other projects' pages link to them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import posixpath
import re
from collections.abc import Iterable, Mapping
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
API: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gla_core": {
        "Gated linear attention": (
            "chunk_gla",
            "ChunkGla",
            "ChunkGlaWithCheckpoints",
            "linear_attention",
            "LinearAttention",
            "chunk_ssd",
        ),
        "Decoding and serving": (
            "recurrent_gla_step",
            "RecurrentGlaStep",
            "recurrent_gla_layer_step",
            "recurrent_ssd_step",
            "chunk_gla_pool",
            "recurrent_gla_steps",
            "recurrent_gla_replay",
        ),
        "Parts of a sequence": (
            "chunk_gla_summary",
            "ChunkGlaSummary",
            "chunk_gla_gradient_summary",
            "ChunkGlaGradientSummary",
        ),
        "Delta rules": (
            "chunk_delta",
            "chunk_delta_pool",
            "recurrent_delta_step",
            "recurrent_delta_steps",
            "recurrent_delta_replay",
            "chunk_delta_summary",
            "ChunkDeltaSummary",
            "chunk_delta_gradient_summary",
            "ChunkDeltaGradientSummary",
        ),
        "Softmax": ("softmax_attention", "SoftmaxAttention", "merge_attention", "online_softmax"),
        "Choice of a backend": ("explain", "Explanation", "use_backend", "batch_invariant", "reload_environment"),
        "Backends": ("backends", "BackendInfo", "register", "Registration"),
        "Errors": ("BackendError", "NoBackendError", "UnknownBackendError", "UnknownOpError"),
    },
    "gla_core.nn": {
        "Layers": (
            "GatedLinearAttention",
            "SimpleGatedLinearAttention",
            "Retention",
            "HGRN2",
            "Mamba2",
            "KimiDeltaAttention",
            "GatedDeltaNet",
            "DeltaNet",
        ),
        "States": ("GLAState",),
    },
    "gla_core.distributed": {
        "Tokens over ranks": ("chunk_gla", "chunk_delta", "shard", "Shard"),
        "Heads over ranks": ("tensor_parallel_plan",),
    },
    "gla_core.compat.fla": {"Models": ("accelerate", "Acceleration"), "States": ("state_from_fla", "state_to_fla")},
    "gla_core.compat.mamba_ssm": {},
    "gla_core.compat.transformers": {},
    "gla_core.extension": {},
    "gla_core.dispatch.backend": {},
    "gla_core.dispatch.lowering": {},
    "gla_core.dispatch.slots": {},
    "gla_core.dispatch.tensors": {},
    "gla_core.dispatch.transitions": {},
}
"""Modules that have a page made of their docstrings, and the groups of their names, in the order of the page. The other
names of a module follow in a group of their own."""
SEARCH = {"what_was_tried/": 1e-4, "results.md": 1e-3, "changelog.md": 1e-3}
"""The boost of a page in the search, by the beginning of its path; 1 for all other pages."""
PICTURES = "benchmarks/results"

_LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)")
_sources = {page: source for source, page in PAGES.items()}


class PublicNames(griffe.Extension):
    """Shows griffe the public names, and the section `Example:` of a docstring, of which it knows `Examples:` alone."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Renames the section."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Exports the functions that have their module's name. For griffe, the module hides such a function."""
        for module in filter(lambda path: path.startswith(pkg.path), API):
            exporting = pkg.modules_collection[module]
            for name in _exports(exporting):
                if name in exporting.members and exporting[name].is_module and name in exporting[name].members:
                    exporting.set_member(name, griffe.Alias(name, exporting[name][name], parent=exporting))


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages, the API pages and the pictures."""
    _package.cache_clear()
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for module, groups in API.items():
        files.append(File.generated(config, f"api/{module}.md", content=_api_page(module, groups)))
    for path in sorted((ROOT / PICTURES).rglob("*")):
        if path.suffix in (".png", ".svg"):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    inventory = _inventory(config)
    inventory.version = importlib.metadata.version("gla-core")
    for module in API:
        inventory.register(module, domain="py", role="module", uri=f"api/{module}/")
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Returns the page with its links as the site needs them."""
    here = page.file.src_uri
    page.meta["search"] = {"boost": next((boost for start, boost in SEARCH.items() if here.startswith(start)), 1)}
    markdown = markdown.replace("<details>", '<details markdown="1">')  # or what it hides stays text
    return _LINK.sub(lambda link: f"]({_target(here, link[1], config.repo_url)}{link[2] or ''})", markdown)


def on_post_build(*, config: Any) -> None:
    """Warns about public names to which other projects' pages cannot link. `mkdocs build --strict` then fails."""
    listed = {item.name: item.role for item in _inventory(config).values()}
    for module in API:
        for path in (f"{module}.{name}" for name in _exports(_package()[module])):
            if path not in listed or (listed[path] == "module" and path not in API):
                logging.getLogger(f"mkdocs.hooks.{__name__}").warning("objects.inv has no %s", path)


@functools.cache
def _package() -> griffe.ModulesCollection:
    """Returns the modules of gla_core, read and not imported."""
    loader = griffe.GriffeLoader(search_paths=[str(ROOT)], extensions=griffe.load_extensions(PublicNames))
    loader.load("gla_core")
    return loader.modules_collection


def _inventory(config: Any) -> Any:
    """Returns the inventory that mkdocstrings writes into objects.inv."""
    return config.plugins["mkdocstrings"].handlers.inventory


def _exports(module: griffe.Module | griffe.Alias) -> list[str]:
    """Returns the names in a module's `__all__`, functions first; none if it has no `__all__`."""
    return sorted(map(str, module.exports or ()), key=lambda name: name in module.members and module[name].is_class)


def _api_page(module: str, groups: Mapping[str, Iterable[str]]) -> str:
    """Returns Markdown: a table of the names in a module's `__all__`, and by mkdocstrings their docstrings."""
    names = [name for name in _exports(_package()[module]) if f"{module}.{name}" not in API]
    if not names:
        return f"# {module}\n\n::: {module}\n"
    placed = {name for members in groups.values() for name in members}
    others = [name for name in names if name not in placed]
    table, shown = ["| name | |", "| --- | --- |"], []
    for heading, members in {**groups, **({"Functions": others} if others else {})}.items():
        shown.append(f"## {heading}\n")
        table.append(f"| **{heading}** | |")
        for name in members:
            docstring = _package()[module][name].docstring
            summary = docstring.value.split("\n\n")[0].replace("\n", " ") if docstring else ""
            table.append(f"| [`{name}`][{module}.{name}] | {summary} |")
            shown.append(f"::: {module}.{name}\n    options: {{show_root_heading: true, heading_level: 3}}\n")
    return "\n".join([f"# {module}\n", *table, "", *shown])


def _target(page: str, link: str, repository: str) -> str:
    """Returns where a link of a page leads; as it is if it names no file, so that MkDocs complains."""
    source = _sources.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if not (ROOT / path).exists():
        return link
    if path.startswith("docs/") and path.endswith((".md", ".svg")):
        target = path.removeprefix("docs/")
    elif path.startswith(f"{PICTURES}/") and path.endswith((".png", ".svg")):
        target = path
    elif path in PAGES:
        target = PAGES[path]
    else:
        return f"{repository}/blob/main/{path}"
    return posixpath.relpath(target, posixpath.dirname(page) or ".")
