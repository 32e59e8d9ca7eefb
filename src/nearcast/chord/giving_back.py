"""What a set had when it was taken over without a copy, and gives to whoever has its topics now, once it is on the ring again.

Record by record, on the condition that nothing is known of the topic there. When all are given, the heirs are told, one after
the other along the range that it had: what is not there then does not exist, and is UNCERTAIN no more.
"""

from __future__ import annotations

from nearcast.chord.commands import Quit, Settled
from nearcast.chord.contacts import Contact
from nearcast.chord.effects import Effect, Finished
from nearcast.chord.identifiers import CIRCLE, packed, unpacked, within
from nearcast.chord.joining import Joining
from nearcast.chord.messages import CONFLICT, DONE, RESTORE, AnyBody, Repay, Repayment, Value, Write
from nearcast.chord.records import Interval

ESTATE_BATCH = 16


class GivingBack(Joining):
    """See the module."""

    _offered_upto = 0
    _repaying = ""
    """The former life whose heirs are told now; and until when that may take."""
    _repaying_until = 0.0

    def forget_offers(self) -> None:
        self._offering: dict[int, int] = {}
        self._repaying = ""

    def give_back(self, now: float) -> None:
        """The next few records; or, when there are none left, the word that there are none."""
        state = self.state
        if not self.has_lease(now) or self._offering:
            return
        if not state.estate:
            self._repay(now)
            return
        # In turn: some may have to wait for others to give something back.
        keys = list(state.estate)
        begin = self._offered_upto % len(keys)
        for key in (keys[begin:] + keys[:begin])[:ESTATE_BATCH]:
            source, record = state.estate[key]
            number = self.seeker.write(Write(record, RESTORE, source=source), now)
            self._offering[number] = key
        self._offered_upto = begin + ESTATE_BATCH

    def take(self) -> list[Effect]:
        """What is to be done. Answers to this set's own requests stay here."""
        settled = []
        rest: list[Effect] = []
        for effect in super().take():
            if not isinstance(effect, Finished):
                rest.append(effect)
                continue
            key = self._offering.pop(effect.number, None)
            if key is not None and isinstance(effect.answer, Value) and effect.answer.outcome in (DONE, CONFLICT):
                settled.append(packed(key))
        if settled:
            self.propose(Settled(tuple(settled)))
            rest += super().take()
        return rest

    # --- nothing more to give back ---------------------------------------------------------------------------------------

    def _repay(self, now: float) -> None:
        debts = self.state.debts
        if not debts or (self._repaying and now < self._repaying_until):
            return
        # The latest first: what it had not known itself is noted anew with it, for those before.
        self._repaying = next(reversed(debts))
        self._repaying_until = now + 4.0 * self.settings.lookup_s
        interval, lost = debts[self._repaying]
        self._tell_heir(interval, lost, interval.low, now)

    def _tell_heir(self, interval: Interval, lost: tuple[Interval, ...], low: bytes, now: float) -> None:
        """Who has the range behind ``low`` now?"""
        source = interval.source

        def found(contacts: tuple[Contact, ...], hops: int, now: float) -> None:
            if contacts and self._repaying == source:
                self._caller.ask(contacts[0], Repay(source, low, interval.high, lost), answered, now)

        def answered(body: AnyBody | None, now: float) -> None:
            if not isinstance(body, Repayment) or not body.done or self._repaying != source:
                return  # once more, later
            if within(unpacked(interval.high), unpacked(low), unpacked(body.upto)):
                self._repaying = ""
                self.propose(Quit(source), None, now)
            else:
                self._tell_heir(interval, lost, body.upto, now)

        self.seeker.lookup((unpacked(low) + 1) % CIRCLE, found, now)
