"""The page on which runs stand beside each other, `/compare?runs=a,b`."""

from perfagent_dashboard.pages.compare.page import MOST_COMPARED, page

__all__ = ["MOST_COMPARED", "page"]
