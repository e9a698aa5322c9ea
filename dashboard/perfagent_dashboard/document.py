"""The HTML document of every page, and the files that it names: one style, one script of ours, one of the component libraries."""

from __future__ import annotations

import base64
import hashlib
import json
import pkgutil
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import plotly  # type: ignore[import-untyped]
from dash.fingerprint import build_fingerprint, check_fingerprint

from perfagent_dashboard.figures.charts import chart_table
from perfagent_dashboard.static_files import LIBRARIES, Assets
from perfagent_dashboard.words import LANGUAGES, STATE_SHAPES, templates

if TYPE_CHECKING:
    from dash import Dash

    from perfagent_dashboard.pages.registry import Page

__all__ = ["FIRST", "Bundles", "add_files", "document", "policy_hash"]

FIRST = "<!--first-->"
"""Where the server puts what a page shows before its script runs."""
_PLOTLY = "package_data/plotly.min.js"
_SCRIPT = re.compile(r'<script src="/?([^"]+)"></script>\n?')


class Bundles:
    """The scripts of component libraries. Those that every page needs are one file; those of tables and charts come only where a
    page has them."""

    def __init__(self, app: Dash) -> None:
        self._prefix = app.config.requests_pathname_prefix
        listed = app._generate_scripts_html()
        sources = [f"/{source}" for source in _SCRIPT.findall(listed)]
        self.grid = [source for source in sources if "/dash_ag_grid/" in source]
        own = [source for source in sources if source not in self.grid and "/dash_table/" not in source]
        joined = b";\n".join(_library(source) for source in own)
        # Dash looks for a script of this name.
        self._name = f"dash-renderer.{hashlib.sha256(joined).hexdigest()[:16]}.js"
        self.joined = {self._name: joined}
        stamp = int((Path(plotly.__file__).parent / _PLOTLY).stat().st_mtime)
        file = build_fingerprint(_PLOTLY, plotly.__version__, stamp)  # type: ignore[no-untyped-call]
        self.charts = [f"{self._prefix}_dash-component-suites/plotly/{file}"]

    def needed(self, listed: str, page: Page | None) -> str:
        """In place of Dash's list of script elements. plotly, where there are charts, is only fetched: it takes a second to
        start, and the page shows its verdict before it asks for that."""
        sources = [f"{self._prefix}_dash-component-suites/{LIBRARIES}/{self._name}"]
        sources += self.grid if page is not None and page.grid else []
        charts = self.charts if page is not None and page.charts else []
        lines = [f'<script src="{source}"></script>' for source in sources]
        lines += [f'<link rel="prefetch" as="script" href="{source}">' for source in charts]
        return "\n".join([*lines, _SCRIPT.sub("", listed)])


def _library(source: str) -> bytes:
    package, _, path = source.partition("/_dash-component-suites/")[2].partition("/")
    file, _version = check_fingerprint(path)  # type: ignore[no-untyped-call]
    return pkgutil.get_data(package, file) or b""


def add_files(assets: Assets, server_url: str, bundles: Bundles, pages: list[Page]) -> None:
    """The style, and in each language the script, with what it must know from its start."""
    assets.add("page.css", assets.style())
    script = assets.script("start.js")
    for language in LANGUAGES:
        config = _config(language, script, server_url, bundles, pages)
        known = json.dumps(config, ensure_ascii=False, separators=(",", ":"))
        assets.add(f"page-{language}.js", f"window.perfagent.config = {known};\n{script}")


def _config(language: str, script: str, server_url: str, bundles: Bundles, pages: list[Page]) -> dict[str, Any]:
    return {
        "server": server_url,
        "words": templates(language, script),
        "language": language,
        "shapes": STATE_SHAPES,
        "bundles": {"grid": bundles.grid, "charts": bundles.charts},
        "pages": [{"path": page.path, "grid": page.grid, "charts": page.charts} for page in pages],
        **chart_table(language),
    }


def document(language: str, assets: Assets) -> str:
    """Dash's index template in one language. The script of the theme stands in it: it runs before the first paint."""
    return f"""<!DOCTYPE html>
<html lang="{language}">
<head>
{{%metas%}}
<title>{{%title%}}</title>
<link rel="icon" type="image/svg+xml" href="{assets.inlined("icon.svg")}">
<link rel="stylesheet" href="{assets.url("page.css")}">
{{%css%}}
<script>{assets.text("theme.js")}</script>
</head>
<body>
{FIRST}
{{%app_entry%}}
<footer>{{%config%}}{{%scripts%}}{{%renderer%}}</footer>
<script type="module" src="{assets.url(f"page-{language}.js")}"></script>
</body>
</html>"""


def policy_hash(script: str) -> str:
    """By which a policy lets a script in the document run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
