"""The page of a run, `/run/<id>`: is it well, why not, what now; below it tabs with all that is known."""

from perfagent_dashboard.pages.run.page import page

__all__ = ["page"]
