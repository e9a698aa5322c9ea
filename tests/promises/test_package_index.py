"""What a package index shows: the README without the repository around it, so no link or picture in it may be
relative."""

from __future__ import annotations

import functools
import io
import pathlib
import re
import sys
import tomllib
from email import message_from_string
from email.message import Message

import pytest
from documents import ROOT
from hatchling.metadata.core import ProjectMetadata
from hatchling.metadata.spec import construct_metadata_file_2_4
from hatchling.plugin.manager import PluginManager
from readme_renderer import markdown

EXAMPLE = "https://example.org/perfagent"


@functools.cache
def built(repository: str) -> Message:
    """The metadata that a wheel carries when `repository` in pyproject.toml is that."""
    project = ProjectMetadata(str(ROOT), PluginManager())
    project.hatch.config["metadata"]["hooks"]["custom"]["repository"] = repository
    return message_from_string(construct_metadata_file_2_4(project))


def test_with_an_address_links_are_absolute_and_lead_to_files() -> None:
    trouble = io.StringIO()
    html = markdown.render(
        str(built(EXAMPLE).get_payload()), stream=trouble
    )  # as an index does, which refuses what it cannot
    assert html, trouble.getvalue()
    # but for the link to itself that the index gives each heading
    targets = re.findall(r"(?:href|src)=\"(?!#user-content-)([^\"]*)\"", html)
    assert [target for target in targets if not re.match(r"https?://", target)] == []
    ours = [target.removeprefix(EXAMPLE) for target in targets if target.startswith(EXAMPLE)]
    assert {"/raw/HEAD/docs/images/nan.gif", "/blob/HEAD/docs/quickstart.md"} <= set(ours)
    paths = [re.sub(r"^/(raw|blob)/HEAD/", "", target).partition("#")[0] for target in ours]
    assert [path for path in paths if path and not (ROOT / path).exists()] == []
    links = dict(str(link).split(", ") for link in built(EXAMPLE).get_all("Project-URL", []))
    page = f"{EXAMPLE}/blob/HEAD"
    documents = {"Documentation": f"{page}/docs/quickstart.md", "Changelog": f"{page}/CHANGELOG.md"}
    assert links == {"Repository": EXAMPLE, **documents}


def test_without_an_address_the_readme_stays_as_it_is() -> None:
    assert built("").get_all("Project-URL") is None
    assert str(built("").get_payload()).strip() == (ROOT / "README.md").read_text().strip()
    assert ProjectMetadata(str(ROOT), PluginManager()).hatch.config["metadata"]["hooks"]["custom"]["repository"] == ""


@pytest.mark.parametrize(
    ("written", "becomes"),
    [
        ("[a](docs/a.md)", f"[a]({EXAMPLE}/blob/HEAD/docs/a.md)"),
        ("[a](docs/a.md#part)", f"[a]({EXAMPLE}/blob/HEAD/docs/a.md#part)"),
        ("[a](#part)", f"[a]({EXAMPLE}#part)"),
        ('![p](./p.png "title")', f'![p]({EXAMPLE}/raw/HEAD/p.png "title")'),
        ('<img alt="p" src="docs/p.svg">', f'<img alt="p" src="{EXAMPLE}/raw/HEAD/docs/p.svg">'),
        ("[a]: docs/a.md", f"[a]: {EXAMPLE}/blob/HEAD/docs/a.md"),
        ("[![p](p.png)](docs/a.md)", f"[![p]({EXAMPLE}/raw/HEAD/p.png)]({EXAMPLE}/blob/HEAD/docs/a.md)"),
        ("[a](https://example.com/a.md)", "[a](https://example.com/a.md)"),
        ("```\n[a](docs/a.md)\n```\n", "```\n[a](docs/a.md)\n```\n"),
    ],
)
def test_links_of_every_form_become_absolute_and_code_stays(written: str, becomes: str) -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from hatch_build import absolute
    finally:
        sys.path.remove(str(ROOT))
    assert absolute(written, EXAMPLE) == becomes


def test_image_of_the_server_is_built_with_what_the_build_reads() -> None:
    copied = " ".join(re.findall(r"^COPY (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)).split()
    assert [name for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE") if name not in copied] == []
    assert all(pathlib.Path(ROOT, name).exists() for name in copied if not name.startswith((".", "/", "--")))


def test_the_image_has_every_extra_that_a_server_can_use() -> None:
    installed = re.search(r"'\.\[([a-z,]+)\]'", (ROOT / "Dockerfile").read_text())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    elsewhere = {"data", "diagnose", "history", "mcp", "tensorboard"}  # a job's, an agent's, a reader's of old runs
    assert installed is not None
    assert {*installed[1].split(","), "cli"} == set(extras) - elsewhere - {"all"}, "`server` brings `cli`"


def test_nothing_tells_to_install_perfagent_from_an_index() -> None:
    places = [ROOT / name for name in ("README.md", "Dockerfile", "docker-compose.yml")]
    places += [*(ROOT / "docs").glob("*.md"), *(path for path in (ROOT / "deploy").rglob("*") if path.is_file())]
    places += sources()
    from_index = re.compile(r"pip install [^\n`]*['\" ]perfagent\b")
    assert [path.name for path in places if from_index.search(path.read_text())] == []


def sources() -> list[pathlib.Path]:
    return [path for part in ("agent", "server", "client", "dashboard") for path in (ROOT / part).rglob("*.py")]


def test_one_function_tells_how_to_install_extras_that_are_there() -> None:
    texts = {path: path.read_text() for path in sources()}
    assert [path.name for path, text in texts.items() if "pip install '.[" in text] == ["errors.py"]
    named = re.findall(r"how_to_install\(([^)]*)\)", "\n".join(texts.values()))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    words = {word for call in named for word in re.findall(r"""["']([a-z]+)["']""", call)}
    assert {"server", "clickhouse"} <= words <= set(extras)
