"""Shows an object in a notebook and updates it while later cells run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["show_live"]


_AFTER_END = 2
"""Rounds: the server judges the last steps when it has heard of the end."""


def show_live(shown: Any, has_ended: Callable[[], bool], every_s: float) -> None:
    """Returns at once. The output of this cell is drawn again every `every_s` seconds, until just after the end. shown: has
    `_repr_html_`; outside of a notebook it is printed, once."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        print(shown)  # noqa: T201 - what was asked for
        return
    handle = display(shown, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
    if get_ipython() is None or handle is None:
        return
    main = threading.main_thread()

    def follow() -> None:
        rounds_after_end = 0
        while rounds_after_end < _AFTER_END and main.is_alive():
            time.sleep(every_s)
            rounds_after_end += has_ended()
            handle.update(shown)

    threading.Thread(target=follow, name="perfagent-notebook", daemon=True).start()
