"""What the site needs beyond its settings; mkdocs calls these functions (https://www.mkdocs.org/dev-guide/plugins/#events).

Each file outside docs/ that a page links to becomes a page, and the README the first one: so a link such as `../examples/nan.py`
works in the repository, on the site and in the Markdown twins, and the search finds examples, too. A page ends with the questions
that people asked (asked.py). A Chinese page, below zh/, has the theme's words in Chinese, and leads to its English twin. For
programs, `gpu-idle.html` has a twin in Markdown, `gpu-idle.md`, and llms.txt lists all of them (https://llmstxt.org).
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asked
from markdownify import markdownify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_HOMES = {ROOT / "README.md": "index.md", ROOT / "README.zh-CN.md": "zh/index.md"}
_CHINESE = "zh/"
_HOME = {"en": "index.html", "zh": "zh/index.html"}
_PALETTES = {"en": ("Dark", "Light"), "zh": ("深色", "浅色")}
"""What a click on the theme's button leads to."""
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?P<after>\))")
_PERMALINK = re.compile(r'<a [^>]*class="headerlink".*?</a>')
_ARGUMENT = re.compile(r"^(?P<name>\* \**`[^`\n]+`\**)\n(?:  \((?P<type>.*?)\)\n)?  –\n\n  ", re.MULTILINE | re.DOTALL)
_LEXERS = {
    ".py": "python",
    ".sh": "sh",
    ".sbatch": "sh",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".conf": "nginx",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the first pages, and a page for each file that a page links to."""
    docs = Path(config.docs_dir)
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    added = {home for home in _HOMES if home.exists()}
    for home in added:
        files.append(File.generated(config, _HOMES[home], content=_text(home)))
        waiting.append(home)
    while waiting:
        for path in _outside(waiting.pop(), docs):
            if path not in added:
                added.add(path)
                files.append(File.generated(config, _address(path), content=_text(path)))
                if path.suffix == ".md":
                    waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Leads links out of docs/ to the pages that on_files has made, and adds what people asked."""
    docs = Path(config.docs_dir)
    if "symptoms/" in page.file.src_uri:  # who searches has a problem, and these pages explain it
        page.meta["search"] = {"boost": 2}
    here = posixpath.dirname(page.file.src_uri) or "."
    source = _source(page.file, docs)

    def replaced(found: re.Match[str]) -> str:
        path = _linked(source, found["target"])
        if path is None or not path.is_file():
            return found[0]
        address = path.relative_to(docs).as_posix() if path.is_relative_to(docs) else _address(path)
        return f"{found['before']}{posixpath.relpath(address, here)}{found['anchor'] or ''}{found['after']}"

    return _LINK.sub(replaced, markdown) + asked.section(page.file.src_uri.removesuffix(".md"), markdown)


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Keeps the order of the pages for llms.txt, and their addresses for links between twins."""
    config.extra["nav"] = nav
    config.extra["addresses"] = {file.src_uri: file.url for file in files.documentation_pages()}


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, **_: Any) -> dict[str, Any]:
    """Gives a page the words of its language, and the addresses of its twins."""
    address = page.file.src_uri
    config.theme["language"] = own = "zh" if address.startswith(_CHINESE) else "en"
    twins = {"en": address.removeprefix(_CHINESE), "zh": _CHINESE + address.removeprefix(_CHINESE)}
    config.extra["homepage"] = _HOME[own]
    config.extra["alternate"] = [
        {"name": name, "lang": language, "link": config.extra["addresses"].get(twins[language], _HOME[language])}
        for name, language in (("English", "en"), ("中文", "zh"))
    ]
    for palette, name in zip(config.theme["palette"], _PALETTES[own], strict=True):
        palette["toggle"]["name"] = name
    return context


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Writes the page's twin in Markdown."""
    is_from_code = "\n::: " in (page.markdown or "")
    text = _twin(page.content or "") if is_from_code else page.markdown
    twin = Path(config.site_dir, page.file.dest_uri).with_suffix(".md")
    twin.parent.mkdir(parents=True, exist_ok=True)
    twin.write_text(text or "", "utf-8")
    return output


def _twin(content: str) -> str:
    """A page from the code as Markdown, an argument a line."""
    text = markdownify(_PERMALINK.sub("", content), heading_style="ATX", code_language="python")
    return _ARGUMENT.sub(lambda found: f"{found['name']}{_in_brackets(found['type'])}: ", text)


def _in_brackets(kind: str | None) -> str:
    return f" ({' '.join(kind.split())})" if kind else ""


def on_post_build(config: MkDocsConfig) -> None:
    """Writes llms.txt."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in config.extra["nav"].items:
        if isinstance(section, Section):
            lines += [f"## {section.title}", "", *_listed(section, config.site_url or ""), ""]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines), "utf-8")


def _listed(section: Section, site: str) -> Iterator[str]:
    for item in section.children:
        if isinstance(item, Page):
            yield f"- [{item.title}]({site}{item.file.src_uri})"
        elif isinstance(item, Section):
            yield from _listed(item, site)


def _outside(source: Path, docs: Path) -> Iterator[Path]:
    for found in _LINK.finditer(source.read_text("utf-8")):
        path = _linked(source, found["target"])
        if path and path.is_file() and not path.is_relative_to(docs):
            yield path


def _linked(source: Path, target: str) -> Path | None:
    if re.match(r"[a-z][a-z0-9+.-]*:|/", target):
        return None
    path = (source.parent / target).resolve()
    return path if path.is_relative_to(ROOT) else None


def _address(path: Path) -> str:
    """Place of the page of a file: `repository/examples/nan.py.md`, `repository/SKILL.md`."""
    name = path.relative_to(ROOT).as_posix()
    return _HOMES.get(path) or f"repository/{name if path.suffix == '.md' else name + '.md'}"


def _source(file: File, docs: Path) -> Path:
    for home, address in _HOMES.items():
        if file.src_uri == address:
            return home
    if file.src_uri.startswith("repository/"):
        return ROOT / file.src_uri.removeprefix("repository/")
    return docs / file.src_uri


def _text(path: Path) -> str:
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return "\n\n".join(part for cell in json.loads(text)["cells"] for part in _of_cell(cell)) + "\n"
    return f"# {path.relative_to(ROOT)}\n\n````{_LEXERS.get(path.suffix, 'text')}\n{text}````\n"


def _of_cell(cell: dict[str, Any]) -> Iterator[str]:
    """A cell of a notebook, and what it shows."""
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"````python\n{source}\n````"
    for output in cell.get("outputs", []):
        html = output.get("data", {}).get("text/html")
        yield "".join(html) if html else f"````text\n{''.join(output.get('text', []))}````"
