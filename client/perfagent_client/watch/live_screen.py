"""A screen that a feed keeps up to date, and from which people act on alerts: what the table of runs and a run share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ClassVar

from textual import work
from textual.binding import Binding, BindingType
from textual.screen import Screen

from perfagent.errors import PerfagentError
from perfagent.wire import Alert
from perfagent_client.watch.acts import to_acknowledge, to_mute
from perfagent_client.watch.feed import Feed, Link
from perfagent_client.watch.parts import Ask, Head, Help
from perfagent_client.watch.session import Session
from perfagent_client.watch.words import clean

__all__ = ["LiveScreen"]


class LiveScreen(Screen[None]):
    """Says of itself what it subscribes to, how it fetches, and which alerts are meant by a key."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "acknowledge", "ack"),
        Binding("m", "mute", "mute"),
        Binding("u", "undo", "undo"),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "app.quit", "quit"),
    ]

    def __init__(self, session: Session, subscription: dict[str, Any]) -> None:
        super().__init__()
        self.session = session
        self.is_fetching = self._is_wanted = False
        self._feed = Feed(session.client, subscription, refresh=self.fetch, on_message=self.take, on_link=self._tell)

    async def fetch(self) -> None:
        """Everything that is shown, anew."""
        raise NotImplementedError

    def take(self, message: dict[str, Any]) -> None:
        """What the WebSocket tells."""
        raise NotImplementedError

    def firing(self) -> Iterable[Alert]:
        """The alerts that the keys are about."""
        raise NotImplementedError

    def on_mount(self) -> None:
        self.start(self._feed.run)

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Beside what goes on, until the screen is closed."""
        self.run_worker(self.session.run(work))

    def _tell(self, link: Link) -> None:
        self.query_one(Head).tell(link)

    async def again(self) -> None:
        """Fetches; when that is under way, once more after it. A server that is away is the feed's business."""
        self._is_wanted = True
        if self.is_fetching:
            return
        self.is_fetching = True
        try:
            while self._is_wanted:
                self._is_wanted = False
                await self.fetch()
        except PerfagentError as error:
            self.log(error)
        finally:
            self.is_fetching = False

    # ------------------------------------------------------------------------------------------------------------ acts

    def action_help(self) -> None:
        self.app.push_screen(Help())

    @work
    async def action_acknowledge(self) -> None:
        alert = to_acknowledge(self.firing())
        if alert is None:
            self._say("no open alert here that nobody has acknowledged")
            return
        question = Ask(f"Acknowledge: {alert.title or alert.message}", "a note for the others, or none")
        note = await self.app.push_screen_wait(question)
        if note is not None:
            await self._act(self.session.acts.acknowledge(alert, note), "acknowledged")

    @work
    async def action_mute(self) -> None:
        alert = to_mute(self.firing())
        if alert is None:
            self._say("no open alert here to mute")
        else:
            await self._act(
                self.session.acts.mute(alert), "no longer muted" if alert.muted_until else "muted for an hour"
            )

    @work
    async def action_undo(self) -> None:
        if self.session.acts.undo_of is None:
            self._say("nothing to undo")
        else:
            await self._act(self.session.acts.undo(), "undone")

    async def _act(self, act: Any, done: str) -> None:
        try:
            alert = await act
        except PerfagentError as error:
            self._say(str(error), failed=True)
            return
        if alert is not None:
            self._say(f"{done}: {alert.title or alert.message}")
            await self.again()

    def _say(self, text: str, *, failed: bool = False) -> None:
        self.app.notify(clean(text), severity="error" if failed else "information", timeout=6, markup=False)
