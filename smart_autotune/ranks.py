"""One tuner for each key among the ranks of ``torch.distributed``: the first to meet a key tunes it for all.

Only the group's key-value store is used: nothing collective, no barrier, so ranks may meet different keys, or none.
What the store holds for a key is one of three words and whose it is:

    tuning OWNER    OWNER tunes and shows that it is alive by counting up; one that stops counting is superseded
    done OWNER      OWNER's entry counts, for good: the first that was published, also where two tuned
    free OWNER      OWNER gave up: the next may claim
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
import time
import uuid
import weakref
from datetime import timedelta
from types import TracebackType
from typing import Any

from smart_autotune import settings
from smart_autotune.errors import one_line
from smart_autotune.once import warn_once

log = logging.getLogger("smart_autotune")

BEAT_SECS = 1.0  # how often a tuner shows that it is alive
DEAD_SECS = 20.0  # without a sign for so long it is not: above what a compiler pass may hold the interpreter lock
STORE_SECS = 30.0  # one request to the store
_FIRST_POLL_SECS, _LONGEST_POLL_SECS = 0.02, 0.5
# What torch raises for a store that is gone, slow or of a kind that cannot do this; or our reading of what it holds.
_STORE_ERRORS = (RuntimeError, ValueError, OSError, AttributeError, ImportError)

_connections: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by the group's store; None: broken
_connecting = threading.Lock()
_signs: dict[str, tuple[int, float]] = {}  # of other tuners: the count last seen, and since when it stands still


class Claim:
    """What became of meeting a key. ``mine``: tune it, then ``publish``; else ``result`` is another rank's entry.

    Neither: another rank is still at it; serve without tuning. Leaving its scope unpublished abandons a claim.
    """

    def __init__(self, mine: bool, result: dict[str, Any] | None = None, board: Board | None = None) -> None:
        self.mine = mine
        self.result = result
        self._board = board  # None: nobody listens
        self._stop = threading.Event()
        self._beating: threading.Thread | None = None
        if board is not None:
            self._beating = threading.Thread(target=self._beat, args=(board,), name="smart-autotune-claim", daemon=True)
            self._beating.start()

    def publish(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Makes ``entry`` the key's for every rank. Returns the one that counts: another's, if it was first."""
        board, self._board = self._board, None
        if board is None:
            return entry
        try:
            return board.publish(entry)
        except _STORE_ERRORS as error:
            _give_up(error)
            return entry
        finally:
            self._end()

    def abandon(self) -> None:
        """Lets another rank claim the key; nothing when it was published."""
        board, self._board = self._board, None
        if board is None:
            return
        try:
            board.swap(board.tuning, f"free {board.me}")
        except _STORE_ERRORS as error:
            _give_up(error)
        finally:
            self._end()

    def _beat(self, board: Board) -> None:
        while not self._stop.wait(BEAT_SECS):
            try:
                board.count(board.me, 1)
            except _STORE_ERRORS as error:
                log.debug("a claim shows no more signs: %s", one_line(error))
                return

    def _end(self) -> None:
        self._stop.set()
        if self._beating is not None:
            self._beating.join(STORE_SECS)

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()


class Board:
    """One key's place in the store."""

    def __init__(self, store: Any, key_text: str) -> None:
        self._store = store
        self._key = hashlib.sha256(key_text.encode()).hexdigest()[:40]
        self.me = uuid.uuid4().hex
        self.tuning = f"tuning {self.me}"

    def swap(self, expected: str, wanted: str) -> str:
        """The word that stands after ``wanted`` was put in place of ``expected`` (``""``: of none at all)."""
        word: bytes = self._store.compare_set(f"{self._key}/word", expected, wanted)
        return word.decode()

    def count(self, owner: str, by: int) -> int:
        return int(self._store.add(f"{self._key}/count/{owner}", by))

    def entry(self, owner: str) -> dict[str, Any]:
        found = json.loads(self._store.get(f"{self._key}/entry/{owner}"))
        if not isinstance(found, dict):
            raise ValueError(f"an entry that is a {type(found).__name__}")
        return found

    def publish(self, entry: dict[str, Any]) -> dict[str, Any]:
        self._store.set(f"{self._key}/entry/{self.me}", json.dumps(entry, allow_nan=False))
        wanted = f"done {self.me}"
        word = self.swap(self.tuning, wanted)
        while word != wanted:  # superseded meanwhile, by one that is done or that will find ours in its place
            if word.startswith("done "):
                return self.entry(word.partition(" ")[2])
            word = self.swap(word, wanted)
        return entry

    def is_dead(self, owner: str) -> bool:
        """Whether ``owner`` showed no sign for DEAD_SECS; looks at it once and remembers from call to call."""
        seen, now = self.count(owner, 0), time.monotonic()
        last, since = _signs.get(owner, (-1, now))
        if seen != last:
            since = now
        _signs[owner] = (seen, since)
        return now - since > DEAD_SECS


def is_available() -> bool:
    """Whether ranks are to share tunings (``SMART_AUTOTUNE_SHARE=ranks``) and there is a group of them."""
    distributed = sys.modules.get("torch.distributed")
    if settings.current().share != "ranks" or distributed is None or not distributed.is_available():
        return False
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)


def through_ranks(key_text: str, wait_secs: float) -> Claim:
    """Claims ``key_text``, or waits at most ``wait_secs`` for the rank that did. Without a group it is ours."""
    if not is_available():
        return Claim(mine=True)
    try:
        store = _connection()
        return Claim(mine=True) if store is None else _settle(Board(store, key_text), wait_secs)
    except _STORE_ERRORS as error:
        _give_up(error)
        return Claim(mine=True)


def _settle(board: Board, wait_secs: float) -> Claim:
    deadline = time.monotonic() + min(max(wait_secs, 0.0), threading.TIMEOUT_MAX)
    pause = _FIRST_POLL_SECS
    word = board.swap("", board.tuning)
    while word != board.tuning:
        state, _, owner = word.partition(" ")
        if state == "done":
            _signs.pop(owner, None)
            return Claim(mine=False, result=board.entry(owner))
        if state == "free" or board.is_dead(owner):
            _signs.pop(owner, None)
            log.debug("%s: claimed after it", word)
            word = board.swap(word, board.tuning)
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            return Claim(mine=False)
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, _LONGEST_POLL_SECS)
        word = board.swap("", board.tuning)
    return Claim(mine=True, board=board)


def _connection() -> Any:
    """Our own connection to the default group's store; None where it failed before.

    Its own, because another thread may sit in a request on the group's, and so that our time limit is not theirs.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    with _connecting:
        if store not in _connections:
            _connections[store] = None
            _connections[store] = _connected(store)
        return _connections[store]


def _connected(store: Any) -> Any:
    from torch.distributed.distributed_c10d import PrefixStore

    found: list[Any] = []

    def connect() -> None:  # to a server that is gone it takes the group's own time limit, often half an hour
        try:
            clone = store.clone()
            clone.set_timeout(timedelta(seconds=STORE_SECS))
            found.append(PrefixStore("smart_autotune", clone))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=connect, name="smart-autotune-connect", daemon=True)
    thread.start()
    thread.join(STORE_SECS)
    if not found or isinstance(found[0], Exception):
        raise RuntimeError(one_line(found[0]) if found else "no connection to the group's store")
    return found[0]


def _give_up(error: BaseException) -> None:
    """Ranks no longer share in this group: each goes on for itself, and says so once."""
    for store in list(_connections):
        _connections[store] = None
    warn_once("ranks", "ranks do not share tunings any more, each tunes for itself: %s", one_line(error))
