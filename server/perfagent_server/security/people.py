"""How a user logs in: name and password compared, guesses slowed down."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable

from starlette.requests import HTTPConnection
from starlette.responses import Response

from perfagent_server.database import Database
from perfagent_server.refusal import RefusalError
from perfagent_server.security.access import address_of, is_over_https
from perfagent_server.security.accounts import Account, Accounts, folded
from perfagent_server.security.login_limits import Bucket, LoginLimits, of_address, of_device, of_name
from perfagent_server.security.passwords import Passwords
from perfagent_server.security.signed_cookies import SignedCookies

__all__ = ["People"]

_DEVICE = "perfagent_device"
_DEVICE_S = 365 * 86400


class People:
    def __init__(self, database: Database, cookies: SignedCookies, *, clock: Callable[[], float] = time.time) -> None:
        self._cookies = cookies
        self.accounts = Accounts(database)
        self.passwords = Passwords()
        self.limits = LoginLimits(database, clock=clock)

    async def check(self, name: str, password: str, connection: HTTPConnection) -> Account:
        """The user of this name and password. Raises RefusalError, in the same words and after the same time whether there
        is such a user or not; while guesses are slowed down without a look at the password."""
        known = await asyncio.to_thread(self.accounts.find, name)
        buckets = self._buckets(name, known, connection)
        wait = await asyncio.to_thread(self.limits.begin, buckets)
        if wait > 0:
            raise _slowed_down(wait)
        hashed = known.password if known is not None and known.disabled is None else None
        if not await self.passwords.check_soon(password, hashed) or known is None:
            raise RefusalError("unauthorized", "the name or the password is wrong, or this user was disabled")
        await asyncio.to_thread(self.limits.succeeded, buckets)
        return known

    def remember_device(self, response: Response, user: Account, connection: HTTPConnection) -> None:
        """This user has logged in from this browser: who guesses at the name elsewhere does not slow them down here."""
        value = self._cookies.sign("device", [user.id, secrets.token_hex(8)])
        response.set_cookie(
            _DEVICE, value, max_age=_DEVICE_S, path="/", httponly=True, samesite="lax",
            secure=is_over_https(connection),
        )  # fmt: skip

    def _buckets(self, name: str, known: Account | None, connection: HTTPConnection) -> list[Bucket]:
        """The counts that a wrong password goes to. A browser in which this user has logged in has its own count. So nobody
        else can lock the user out there, neither by guesses at the name nor from the same address."""
        device = self._cookies.read("device", connection.cookies.get(_DEVICE), max_age_s=_DEVICE_S)
        if known is not None and isinstance(device, list) and device[0] == known.id:
            return [of_device(str(device[1]))]
        return [of_address(address_of(connection)), of_name(folded(name))]


def _slowed_down(wait_s: float) -> RefusalError:
    seconds = math.ceil(wait_s)
    return RefusalError(
        "too_many_failures",
        f"too many wrong passwords for this name, or from this address; try again in {seconds} s",
        retry_after_s=seconds,
    )
