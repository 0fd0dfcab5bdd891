"""The pages of the documentation: every Python block runs, code fits the site, and all names and links exist."""

import re
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt

from gla_core.compat import fla, transformers

ROOT = Path(__file__).parents[2]
PATHS = (
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "gla_core" / "conformance" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "plugins").glob("*/README.md")),
)
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS}
PROSE = {page: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for page, text in PAGES.items()}
COLUMNS = 72
"""The width of code on the site, in a window of 1280 pixels."""
LINKS = {page: re.findall(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]*))?\)", text) for page, text in PROSE.items()}


def blocks(page):
    return re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)


SEPARATE = [page for page in PAGES if not page.startswith("plugins/") and page != "docs/tutorial.md"]


@pytest.fixture
def undone(monkeypatch):
    """Restores functions that a block replaces, and PyTorch's precision of float32."""
    made = []

    def remembering(accelerate):
        def remembered(*names, **options):
            made.append(accelerate(*names, **options))
            return made[-1]

        return remembered

    for library in (fla, transformers):
        monkeypatch.setattr(library, "accelerate", remembering(library.accelerate))
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    for acceleration in made:
        acceleration.undo()


@pytest.mark.parametrize(
    "block", [pytest.param(code, id=f"{page} block {i}") for page in SEPARATE for i, code in enumerate(blocks(page))]
)
def test_blocks_run(block, undone):
    if "accelerate()" in block or "use_gla_core()" in block:
        pytest.importorskip("fla", reason="replaces functions of flash-linear-attention")
    exec(compile(block, "a page", "exec"), {})


def test_the_tutorial_runs_from_start_to_end(capsys):
    session = {"__name__": "__main__"}
    for number, code in enumerate(blocks("docs/tutorial.md")):
        exec(compile(code, f"tutorial block {number}", "exec"), session)
    printed = capsys.readouterr().out
    assert "loss per byte" in printed
    assert "chunk_gla_fwd" in printed


@pytest.mark.parametrize("page", PAGES)
def test_its_code_fits(page):
    lines = [line for token in MarkdownIt().parse(PAGES[page]) for line in code(token).splitlines()]
    assert [line for line in lines if len(line) > COLUMNS] == []


def test_examples_of_docstrings_fit():
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "gla_core").rglob("*.py")}
    examples = [(path.name, line) for path, text in sources.items() for line in re.findall(r"^ +(>>> .*)$", text, re.M)]
    assert [(name, line) for name, line in examples if len(line) > COLUMNS] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_files_it_names_exist(page):
    folders = "gla_core|backends|benchmarks|tests|plugins"
    named = re.findall(rf"(?<![\w/])((?:{folders})/[\w/]+(?:\.py|\.jsonl?|/))", PAGES[page])
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_somewhere(page):
    assert [link for link, _ in LINKS[page] if not target(page, link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_its_links_to_headings_lead_to_one(page):
    anchors = [(target(page, link).relative_to(ROOT).as_posix(), anchor) for link, anchor in LINKS[page] if anchor]
    assert [(to, anchor) for to, anchor in anchors if anchor not in headings(to)] == []


@pytest.mark.parametrize("page", PAGES)
def test_it_offers_nothing_that_an_index_would_have_to_hold(page):
    commands = re.findall(r"pip install[^`#]*?(?=[`#]|\n\n|\Z)", PAGES[page])
    assert [command for command in commands if re.search(r"(?<![\w/])gla[-_]\w+", command)] == []


def code(token):
    return token.content if token.type in ("fence", "code_block") else ""


def target(page, link):
    return ((ROOT / page).parent / link).resolve() if link else ROOT / page


def headings(page):
    """Returns the anchors that the repository's web view gives to a page's headings."""
    titles = re.findall(r"^#+ (.*)$", PROSE[page], re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in titles]
