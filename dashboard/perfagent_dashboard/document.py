"""The HTML document of every page, and which scripts of the component libraries it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import plotly  # type: ignore[import-untyped]
from dash.fingerprint import build_fingerprint

from perfagent_dashboard import ids
from perfagent_dashboard.figures import chart_table, patterns
from perfagent_dashboard.theme import THEMES
from perfagent_dashboard.words import LANGUAGES, STATE_SHAPES

if TYPE_CHECKING:
    from dash import Dash

    from perfagent_dashboard.pages.registry import Page
    from perfagent_dashboard.static_files import Assets

__all__ = ["Bundles", "document"]

_PLOTLY = "package_data/plotly.min.js"
_STYLES = ("icons.css", "10-style.css", "20-run.css", "30-charts.css", "40-compare.css")
_START = "start.js"
_HEAD_SCRIPT = "theme.js"  # before the first paint


class Bundles:
    """The scripts of component libraries: those of tables and charts only where a page has them."""

    def __init__(self, app: Dash) -> None:
        listed = app._generate_scripts_html()
        self.grid = _sources(listed, "/dash_ag_grid/")
        self._unused = _sources(listed, "/dash_table/")
        stamp = int((Path(plotly.__file__).parent / _PLOTLY).stat().st_mtime)
        file = build_fingerprint(_PLOTLY, plotly.__version__, stamp)  # type: ignore[no-untyped-call]
        self.charts = [f"{app.config.requests_pathname_prefix}_dash-component-suites/plotly/{file}"]

    def needed(self, listed: str, page: Page | None) -> str:
        """Of Dash's list of script elements those that a page uses. plotly, where there are charts, is only fetched: it takes
        a second to start, and the page shows its verdict before it asks for that."""
        left = [*self._unused, *([] if page is not None and page.grid else self.grid)]
        lines = [line for line in listed.splitlines() if not any(source in line for source in left)]
        charts = self.charts if page is not None and page.charts else []
        return "\n".join([*lines, *(f'<link rel="prefetch" as="script" href="{source}">' for source in charts)])


def _sources(listed: str, within: str) -> list[str]:
    return [source for source in re.findall(r'src="([^"]+)"', listed) if within in source]


def document(language: str, server_url: str, title: str, assets: Assets, bundles: Bundles, pages: list[Page]) -> str:
    """Dash's index template in one language. `<` is escaped in the data block, so that no text in it can end the block."""
    config = json.dumps(
        {
            "server": server_url,
            "title": title,
            "words": LANGUAGES[language],
            "language": language,
            "shapes": STATE_SHAPES,
            "themes": {name: theme.properties() for name, theme in THEMES.items()},
            "series": {name: theme.series for name, theme in THEMES.items()},
            "figures": {name: patterns(theme) for name, theme in THEMES.items()},
            "bundles": {"grid": bundles.grid, "charts": bundles.charts},
            "pages": [{"path": page.path, "grid": page.grid, "charts": page.charts} for page in pages],
            **chart_table(language),
        },
        ensure_ascii=True,
        separators=(",", ":"),
    ).replace("<", "\\u003c")
    # All at once: else each would be found in the one before it.
    early = "\n".join(f'<link rel="modulepreload" href="{assets.url(module)}">' for module in assets.modules)
    styles = "\n".join(f'<link rel="stylesheet" href="{assets.url(style)}">' for style in _STYLES)
    return f"""<!DOCTYPE html>
<html lang="{language}">
<head>
{{%metas%}}
<title>{{%title%}}</title>
<link rel="icon" type="image/svg+xml" href="{assets.url("icon.svg")}">
{styles}
{{%css%}}
<script id="{ids.CONFIG}" type="application/json">{config}</script>
<script src="{assets.url(_HEAD_SCRIPT)}"></script>
{early}
</head>
<body>
{{%app_entry%}}
<footer>{{%config%}}{{%scripts%}}{{%renderer%}}</footer>
<script type="module" src="{assets.url(_START)}"></script>
</body>
</html>"""
