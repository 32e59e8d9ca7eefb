"""Is a node still there? Answered from several sides, because a broken TCP connection is neither proof nor needed.

The link is one witness: what arrives on it, and how long it has been silent. A lost or silent link makes a node *suspect*;
then it is pinged directly, over UDP, and others are asked whether it answers them, as SWIM does, because the fault may be the
path to the asker. Only when nobody hears it is it *failed*; one that answers while its link is down stays, and is looked at
again until the link is back::

            link lost, or silent          no answer, no witness
    ALIVE ─────────────────────► SUSPECT ───────────────────────► FAILED (forgotten; it has to come back by itself)
      ▲                             │
      └── link speaks again ────────┘  (answers, but no link: stays SUSPECT and is asked again)

A lost link is known at once, so the answer is due soon; a silent one may be a slow network, so it takes longer. Pure: it is
told what was heard and says whom to ping; it sends nothing.
"""

from __future__ import annotations

from typing import Final

import msgspec

FOREVER: Final = float("inf")


class DetectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How patient it is."""

    silent_s: float = 3.0
    """A link that says nothing for so long, though it is probed every second, makes its node suspect."""

    lost_verdict_s: float = 1.0
    """How long a node whose link was lost has to answer somebody. Too low takes a restart for a death; too high leaves
    clients at a dead broker, unless their gateways notice first."""

    silent_verdict_s: float = 4.0
    """The same for a node whose link is silent: long enough for others to ping it ten times."""

    ping_interval_s: float = 0.2
    """Seconds between pings while a node is suspect."""

    recheck_s: float = 1.0
    """How long a suspect that answered is left alone before it has to answer again."""


class Decisions(msgspec.Struct):
    """What to do now: whom to ping, whom to ask others about; and what changed."""

    ping: list[str] = msgspec.field(default_factory=list)
    ask: list[str] = msgspec.field(default_factory=list)
    suspected: list[str] = msgspec.field(default_factory=list)
    cleared: list[str] = msgspec.field(default_factory=list)
    failed: list[str] = msgspec.field(default_factory=list)


class _Watched:
    def __init__(self, now: float) -> None:
        self.spoke_at = now
        self.heard_at = now
        self.linked = True
        self.suspect = False
        self.begun_at = now
        self.verdict_at = FOREVER
        self.ping_at = FOREVER
        self.recheck_at = FOREVER


class Detector:
    """See the module."""

    def __init__(self, settings: DetectorSettings | None = None) -> None:
        self.settings = settings if settings is not None else DetectorSettings()
        self._nodes: dict[str, _Watched] = {}

    def watch(self, name: str, now: float) -> None:
        """A node registered: it is there, and so is its link."""
        node = self._nodes.get(name)
        if node is None:
            self._nodes[name] = _Watched(now)
        else:
            node.linked = True
            node.spoke_at = now

    def forget(self, name: str) -> None:
        """It left, or was found dead."""
        self._nodes.pop(name, None)

    def spoke(self, name: str, at: float) -> None:
        """Something arrived on its link, last ``at`` this time."""
        node = self._nodes.get(name)
        if node is not None:
            node.spoke_at = max(node.spoke_at, at)

    def link_lost(self, name: str, now: float) -> None:
        """Its link is gone."""
        node = self._nodes.get(name)
        if node is not None and node.linked:
            node.linked = False
            node.recheck_at = now  # whatever it answered before

    def heard(self, name: str, now: float) -> None:
        """It answered a ping, or another node's."""
        node = self._nodes.get(name)
        if node is not None:
            node.heard_at = now

    def tick(self, now: float) -> Decisions:
        """What is to be done."""
        decisions = Decisions()
        settings = self.settings
        # When most fall silent at once it is the listener who is cut off: nobody is given up for that, nor later, when
        # their links are closed for it, as long as nobody at all is heard.
        silent = sum(not self._is_heard(node, now) for node in self._nodes.values())
        deaf = silent > 1 and 2 * silent > len(self._nodes)
        alone = deaf and silent == len(self._nodes)
        for name, node in self._nodes.items():
            if node.linked and now - node.spoke_at < settings.silent_s:
                if node.suspect:
                    node.suspect = False
                    decisions.cleared.append(name)
                continue
            if not node.suspect:
                decisions.suspected.append(name)
            if not node.suspect or node.recheck_at <= now:
                node.suspect = True
                node.begun_at = now
                node.verdict_at = now + (settings.silent_verdict_s if node.linked else settings.lost_verdict_s)
                node.ping_at = now
                node.recheck_at = FOREVER
                decisions.ask.append(name)
            if node.verdict_at < FOREVER and node.heard_at > node.begun_at:
                node.verdict_at = node.ping_at = FOREVER
                node.recheck_at = now + settings.recheck_s
            elif node.verdict_at <= now:
                if alone or (deaf and node.linked):
                    node.verdict_at = now + settings.silent_verdict_s
                else:
                    decisions.failed.append(name)
            elif node.ping_at <= now:
                node.ping_at = now + settings.ping_interval_s
                decisions.ping.append(name)
        return decisions

    def _is_heard(self, node: _Watched, now: float) -> bool:
        settings = self.settings
        return (node.linked and now - node.spoke_at < settings.silent_s) or now - node.heard_at < settings.silent_s

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next."""
        deadline = FOREVER
        for node in self._nodes.values():
            if node.suspect:
                deadline = min(deadline, node.verdict_at, node.ping_at, node.recheck_at)
            else:
                deadline = min(deadline, node.spoke_at + self.settings.silent_s if node.linked else 0.0)
        return deadline
